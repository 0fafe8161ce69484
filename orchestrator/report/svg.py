"""Makes a drawing fit to stand inside a page: no styles, no ids of others, nothing to load. Knows no matplotlib.

The page's content-security policy allows no style attribute. What matplotlib writes there are all properties that SVG
also has as attributes, so they are moved; the font is the page's.
"""

import re
from html import escape

PROLOGUE = re.compile(r"^.*?(?=<svg)", re.DOTALL)
NOISE = (
    re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL),
    re.compile(r"<style type=\"text/css\">.*?</style>\s*", re.DOTALL),
    re.compile(r"<defs>\s*</defs>\s*"),
    re.compile(r"<!--.*?-->\s*", re.DOTALL),
    re.compile(r' id="[A-Za-z0-9.]+_\d+"'),  # of figures, axes, ticks: nothing refers to them
    re.compile(r" transform=\"rotate\(-0 [^\"]*\)\""),
)
STYLE = re.compile(r"\sstyle=\"([^\"]*)\"")
LONG_FRACTION = re.compile(r"(?<=\d\.)(\d\d)\d+")
SPACE = re.compile(r"\s*\n\s*")


def embed(svg: str, name: str, title: str) -> str:
    """The `<svg>` element for a page that has several: ids begin with `name`, `title` says in words what it shows."""
    svg = PROLOGUE.sub("", svg, count=1)
    for noise in NOISE:
        svg = noise.sub("", svg)
    svg = STYLE.sub(lambda match: _attributes(match[1]), svg)
    svg = re.sub(r' id="([^"]+)"', rf' id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = SPACE.sub("\n", LONG_FRACTION.sub(r"\1", svg))
    svg = svg.replace("<svg ", f'<svg role="img" aria-labelledby="{name}-title" stroke-linejoin="round" ', 1)
    end = svg.index(">") + 1
    return f'{svg[:end]}<title id="{name}-title">{escape(title)}</title>{svg[end:]}'.strip()


def _attributes(style: str) -> str:
    found = ""
    for part in filter(None, (part.strip() for part in style.split(";"))):
        key, _, value = (piece.strip() for piece in part.partition(":"))
        if key == "font":  # older versions write the shorthand, for which SVG has no attribute
            found += "".join(f' font-size="{word}"' for word in value.split() if word.endswith("px"))
        elif key != "font-family":
            found += f' {key}="{value}"'
    return found

"""Writes a report as one HTML page that loads nothing. Knows templates, computes nothing.

Everything a model or a dataset wrote passes jinja2's escaping; the page's content-security policy allows the one style
sheet and the one script it holds, by their hashes, and nothing from elsewhere.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from orchestrator.report import words
from orchestrator.report.section import Section

TEMPLATES = Path(__file__).with_name("templates")
FILTERS = (
    "signed",
    "number",
    "percent",
    "whole",
    "between",
    "p_value",
    "size",
    "magnitude",
    "layers",
    "counted",
    "hours",
)
CONTENTS = (
    ("verdict", "Verdict"),
    ("results", "Complete results"),
    ("gates", "Validity"),
    ("pictures", "Pictures"),
    ("explanations", "Why it is as fast as it is"),
    ("breaks", "Where it breaks"),
    ("earlier", "An earlier experiment"),
    ("provenance", "Provenance"),
    ("missing", "What is missing"),
)


def render(sections: Sequence[Section], *, title: str, folders: Sequence[str]) -> str:
    css, js = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    compared = any(section.earlier is not None for section in sections)
    contents = [entry for entry in CONTENTS if entry[0] != "earlier" or compared]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            sections=sections,
            title=title,
            folders=folders,
            contents=contents,
            css=css,
            js=js,
            policy=_policy(css, js),
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("orchestrator.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(words, name) for name in FILTERS}
    return environment


def _policy(css: str, js: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(css)}'; script-src '{_hash(js)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

"""How every picture looks: marks that differ in shape and not in colour alone, one font, no dates. Draws no data.

Colours are Okabe and Ito's; k is told by marker and line, the subset of layers by how the marker is filled.
"""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from orchestrator.analysis.intervals import Estimate
from orchestrator.report.svg import embed

INK, QUIET, FAINT = "#1a1a1a", "#5f6368", "#c4c7cc"
COLOURS = {1: "#4d4d4d", 2: "#0072b2", 3: "#d55e00", 4: "#009e73", 5: "#cc79a7"}
OTHER_COLOUR = "#117733"
MARKERS = {1: "o", 2: "s", 3: "^", 4: "D", 5: "P"}
FILLS = {"first": "full", "middle": "left", "last": "none"}
DPI = 200
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "reuse-sweep",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": "#e4e6e9",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
    "axes.unicode_minus": True,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A finished figure: `svg` for the page, the files' own bytes for papers."""

    name: str  # of its files, and of its ids in the page
    title: str
    caption: str
    svg: str
    svg_file: bytes
    png_file: bytes


@contextmanager
def style() -> Iterator[None]:
    """All figures are made inside this, so that nobody's own settings change them."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, that needs no screen."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish(figure: Figure, *, name: str, title: str, caption: str) -> Picture:
    """The figure as files and as part of a page. The same data gives the same bytes."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # places found so far stay: finding them again would take most of the time
    text, image = io.StringIO(), io.BytesIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
    figure.dpi = DPI
    FigureCanvasAgg(figure).print_png(image, metadata={"Software": None})
    return Picture(
        name=name,
        title=title,
        caption=caption,
        svg=embed(text.getvalue(), name, title),
        svg_file=text.getvalue().encode(),
        png_file=image.getvalue(),
    )


def mark(k: int | None, subset: str | None) -> dict[str, Any]:
    """A marker of this policy: colour and shape by k, filling by the subset."""
    colour = colour_of(k)
    return {
        "marker": MARKERS.get(k or 0, "X"),
        "fillstyle": FILLS.get(subset or "first", "full"),
        "color": colour,
        "markerfacecoloralt": "white",
        "markeredgecolor": colour,
        "markeredgewidth": 1.1,
    }


def colour_of(k: int | None) -> str:
    return COLOURS.get(k or 0, OTHER_COLOUR)


def ends_of(estimate: Estimate) -> list[float]:
    """What an axis has to reach; one document has a value, and an interval without ends."""
    return [end for end in (estimate.low, estimate.value, estimate.high) if math.isfinite(end)]


def arms_of(estimate: Estimate) -> list[list[float]]:
    """Below and above the value, as error bars want them; none where there is no end."""
    arms = estimate.value - estimate.low, estimate.high - estimate.value
    return [[arm if math.isfinite(arm) else 0.0] for arm in arms]

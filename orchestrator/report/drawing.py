"""How every picture looks: marks that differ in shape and not in colour alone, one font, no dates. Draws no data.

Colours are Okabe and Ito's; k is told by marker and line, the subset of layers by how the marker is filled.
"""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

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


OFFSETS = ((7, 5), (7, -11), (-7, 5), (-7, -11), (0, 10), (0, -17), (14, 14), (14, -20), (-14, 14), (-14, -20))
RADIUS_PIXELS = 6  # pixels around a point that a name keeps free
LEADER = {"arrowstyle": "-", "linewidth": 0.5, "color": "#5f6368", "shrinkA": 1, "shrinkB": 3}


Place = tuple[float, float]


def place(
    axes: Axes, points: Sequence[Place], names: Sequence[str | None], lines: Sequence[tuple[Place, Place]] = ()
) -> None:
    """Writes each name at the first of some offsets that covers nothing; else at the one that covers least."""
    figure: Any = axes.figure
    figure.draw_without_rendering()  # limits and sizes are known after this
    renderer = figure.canvas.get_renderer()
    pixels: Any = axes.transData.transform(list(points)) if points else []
    r = RADIUS_PIXELS
    taken = [Bbox.from_bounds(x - r, y - r, 2 * r, 2 * r) for x, y in pixels]
    for ends in lines:
        (x0, y0), (x1, y1) = axes.transData.transform(ends)
        taken.append(Bbox([[min(x0, x1) - 1, min(y0, y1) - 1], [max(x0, x1) + 1, max(y0, y1) + 1]]))
    frame = axes.get_window_extent(renderer)
    for point, name in zip(points, names, strict=True):
        if name is None:
            continue
        tries = []
        for number, (dx, dy) in enumerate(OFFSETS):
            note = _note(axes, name, point, dx, dy, leader=number >= 6)
            box = note.get_window_extent(renderer)
            note.remove()
            outside = not (frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
            tries.append((sum(_overlap(box, other) for other in taken) + 1e4 * outside, number, box))
        _, number, box = min(tries, key=lambda one: one[:2])
        _note(axes, name, point, *OFFSETS[number], leader=number >= 6)
        taken.append(box)


def _note(axes: Axes, name: str, point: tuple[float, float], dx: int, dy: int, *, leader: bool) -> Annotation:
    side = "left" if dx > 0 else "right" if dx < 0 else "center"
    return axes.annotate(
        name,
        point,
        xytext=(dx, dy),
        textcoords="offset points",
        ha=side,
        fontsize=8,
        bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.4},
        arrowprops=LEADER if leader else None,
        annotation_clip=False,
    )


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))

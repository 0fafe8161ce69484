"""The style that all figures share: colors, markers, rendering to SVG and PNG, and the placement of labels.

Colors are those of Okabe and Ito, which color-blind readers can tell apart. The marker's shape also shows k, and its
fill shows the subset of layers, so that no information is in color alone.
"""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from orchestrator.analysis.intervals import Estimate
from orchestrator.core.untrusted import printable

BLACK, GRAY, LIGHT_GRAY = "#1a1a1a", "#5f6368", "#c4c7cc"
COLORS = {1: "#4d4d4d", 2: "#0072b2", 3: "#d55e00", 4: "#009e73", 5: "#cc79a7"}
OTHER_COLOR = "#117733"
MARKERS = {1: "o", 2: "s", 3: "^", 4: "D", 5: "P"}
FILLS = {"first": "full", "middle": "left", "last": "none"}
PNG_DPI = 200
PNG_COMPRESSION = 3  # of 9: a third of the time that 6 takes, and a few percent more bytes
RC_PARAMS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "reuse-sweep",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Geneva"],
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": BLACK,
    "axes.edgecolor": GRAY,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "xtick.labelcolor": BLACK,
    "ytick.labelcolor": BLACK,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": "#e4e6e9",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
    "axes.unicode_minus": True,
    "text.parse_math": False,  # a dollar sign in a name is not a formula
}
# Label placement
OFFSETS_POINTS = ((7, 5), (7, -11), (-7, 5), (-7, -11), (0, 10), (0, -17), (14, 14), (14, -20), (-14, 14), (-14, -20))
FIRST_DISTANT_OFFSET = 6  # from this offset on, a line connects the label with its point
POINT_RADIUS_PIXELS = 6  # around each point, kept free of labels
LEADER = {"arrowstyle": "-", "linewidth": 0.5, "color": GRAY, "shrinkA": 1, "shrinkB": 3}

XY = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedFigure:
    """A rendered figure."""

    name: str  # file name without suffix
    title: str
    caption: str
    svg: bytes = field(repr=False)
    png: bytes = field(repr=False)

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return self.svg.decode()


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw figures inside this context: it overrides the user's matplotlib settings."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC_PARAMS)
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; sizes in inches. Needs no display."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def render(figure: Figure, *, name: str, title: str, caption: str) -> RenderedFigure:
    """The same data gives the same bytes."""
    _lay_out(figure)
    figure.set_layout_engine("none")  # keep the layout: computing it again would take most of the time
    svg, png = io.StringIO(), io.BytesIO()
    FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None, "Creator": None})
    figure.dpi = PNG_DPI
    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None}, pil_kwargs={"compress_level": PNG_COMPRESSION})
    return RenderedFigure(
        name=name, title=title, caption=caption, svg=printable(svg.getvalue()).encode(), png=png.getvalue()
    )


def _lay_out(figure: Figure) -> None:
    """Computes positions and sizes, without drawing."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)


def marker_style(k: int | None, subset: str | None, *, hollow: bool = False) -> dict[str, Any]:
    color = color_for(k)
    return {
        "marker": MARKERS.get(k or 0, "X"),
        "fillstyle": "none" if hollow else FILLS.get(subset or "first", "full"),
        "color": color,
        "markerfacecoloralt": "white",
        "markeredgecolor": color,
        "markeredgewidth": 1.1,
    }


def color_for(k: int | None) -> str:
    return COLORS.get(k or 0, OTHER_COLOR)


def finite_ends(estimate: Estimate) -> list[float]:
    """Low end, value and high end, without those that are not finite (one document has no interval)."""
    return [end for end in (estimate.low, estimate.value, estimate.high) if math.isfinite(end)]


def error_bars(estimate: Estimate) -> list[list[float]]:
    """Lengths below and above the value, in the form matplotlib expects; 0 where an end is not finite."""
    lengths = estimate.value - estimate.low, estimate.high - estimate.value
    return [[length if math.isfinite(length) else 0.0] for length in lengths]


def place_labels(
    axes: Axes, points: Sequence[XY], labels: Sequence[str | None], lines: Sequence[tuple[XY, XY]] = ()
) -> None:
    """Write each label next to its point, at the offset that covers the least of points, lines and other labels."""
    figure: Any = axes.figure
    _lay_out(figure)
    renderer = figure.canvas.get_renderer()
    pixels: Any = axes.transData.transform(list(points)) if points else []
    radius = POINT_RADIUS_PIXELS
    occupied = [Bbox.from_bounds(x - radius, y - radius, 2 * radius, 2 * radius) for x, y in pixels]
    for ends in lines:
        (x0, y0), (x1, y1) = axes.transData.transform(ends)
        occupied.append(Bbox([[min(x0, x1) - 1, min(y0, y1) - 1], [max(x0, x1) + 1, max(y0, y1) + 1]]))
    frame = axes.get_window_extent(renderer)
    for point, label in zip(points, labels, strict=True):
        if label is None:
            continue
        candidates = []
        for number in range(len(OFFSETS_POINTS)):
            annotation = _annotate(axes, label, point, number)
            box = annotation.get_window_extent(renderer)
            annotation.remove()
            outside = not (frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
            candidates.append((sum(_overlap(box, other) for other in occupied) + 1e4 * outside, number, box))
        _, number, box = min(candidates, key=lambda candidate: candidate[:2])
        _annotate(axes, label, point, number)
        occupied.append(box)


def _annotate(axes: Axes, label: str, point: XY, offset_number: int) -> Annotation:
    dx, dy = OFFSETS_POINTS[offset_number]
    return axes.annotate(
        label,
        point,
        xytext=(dx, dy),
        textcoords="offset points",
        ha="left" if dx > 0 else "right" if dx < 0 else "center",
        fontsize=8,
        bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.4},
        arrowprops=LEADER if offset_number >= FIRST_DISTANT_OFFSET else None,
        annotation_clip=False,
    )


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))

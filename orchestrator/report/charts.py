"""The style that all figures share, and figures other than scatter plots: heatmaps, histograms and speed over time.

Colors are those of Okabe and Ito, which color-blind readers can tell apart; so are the color maps of heatmaps. No
information is in color alone: a marker's shape also shows k, its fill shows the subset of layers, and heatmap cells
show their number.
"""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from orchestrator.analysis.runs import Histogram
from orchestrator.core.evidence import RaceRules
from orchestrator.core.race import Look
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
DARK_LUMINANCE = 0.19  # below this, white text is easier to read than black text
HISTOGRAM_HEIGHT = 0.85  # of its row
MAX_ACTORS = 12
MAX_POINTS_PER_ACTOR = 240  # more are summarized by medians
SINGLE_POINTS = 12  # an actor's first trials, never summarized: they show a cold start
LOADING: dict[str, Any] = {"facecolor": "#ececec", "hatch": "...."}
WARM_UP: dict[str, Any] = {"facecolor": "#f3dfc1", "hatch": "////"}
Labeled = tuple[str, int | None, Histogram]  # label, k


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedFigure:
    """A figure as SVG and PNG, with its title and caption."""

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
    """Render as SVG and PNG; the same data gives the same bytes."""
    lay_out(figure)
    figure.set_layout_engine("none")  # keep the layout: computing it again would take most of the time
    svg, png = io.StringIO(), io.BytesIO()
    FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None, "Creator": None})
    figure.dpi = PNG_DPI
    FigureCanvasAgg(figure).print_png(png, metadata={"Software": None}, pil_kwargs={"compress_level": PNG_COMPRESSION})
    return RenderedFigure(
        name=name, title=title, caption=caption, svg=printable(svg.getvalue()).encode(), png=png.getvalue()
    )


def lay_out(figure: Figure) -> None:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Heatmap:
    """Rows × columns of values, NaN where there is none; `texts` are written into the cells."""

    title: str = ""
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    texts: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ActorTimeline:
    """An actor's trials in order of time, one entry in each array; times are in seconds since the sweep started."""

    actor: str
    start: np.ndarray
    k: np.ndarray  # NaN for policies without a period
    speed: np.ndarray  # tokens/s
    calibration: np.ndarray  # tokens/s
    loading: tuple[float, float] | None = None  # start and end
    warm_up: tuple[float, float] | None = None


def plot_heatmap_row(heatmaps: Sequence[Heatmap], *, x_label: str, y_label: str) -> Figure:
    """Small heatmaps next to each other."""
    height = 0.95 + 0.42 * max(len(heatmap.rows) for heatmap in heatmaps)
    width = max(2.3 * len(heatmaps), 0.75 * sum(len(heatmap.columns) for heatmap in heatmaps))
    figure = new_figure(width, height)
    for axes, heatmap in zip(figure.subplots(1, len(heatmaps), squeeze=False)[0], heatmaps, strict=True):
        _draw_heatmap(axes, heatmap)
        axes.set_title(heatmap.title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
    return figure


def plot_tall_heatmap(heatmap: Heatmap, *, note: str) -> Figure:
    """One heatmap with many rows and column names on top."""
    longest = max(len(name) for name in heatmap.columns)
    slanted = longest > 9 or len(heatmap.columns) > 7
    width = 2.4 + 0.62 * len(heatmap.columns) + 0.045 * max(len(name) for name in heatmap.rows)
    figure = new_figure(max(5.0, width), 0.8 + 0.215 * len(heatmap.rows) + (0.04 * longest if slanted else 0))
    axes = figure.subplots()
    _draw_heatmap(axes, heatmap)
    axes.xaxis.tick_top()
    rotation, align = (35, "left") if slanted else (0, "center")
    axes.set_xticks(range(len(heatmap.columns)), heatmap.columns, rotation=rotation, ha=align)
    axes.set_xlabel(note, color=GRAY)
    return figure


def _draw_heatmap(axes: Axes, heatmap: Heatmap) -> None:
    values = np.ma.masked_invalid(np.array(heatmap.values, dtype=float))
    color_map = matplotlib.colormaps["cividis"]  # sequential: darker is less, also without colors
    norm = _norm(values)
    edges_x, edges_y = np.arange(len(heatmap.columns) + 1) - 0.5, np.arange(len(heatmap.rows) + 1) - 0.5
    axes.pcolormesh(edges_x, edges_y, values, cmap=color_map, norm=norm, edgecolors="white", linewidth=1.2)
    for row, texts in enumerate(heatmap.texts):
        for column, text in enumerate(texts):
            value = float(heatmap.values[row][column])
            dark = math.isfinite(value) and _luminance(color_map(norm(value))) < DARK_LUMINANCE
            shown = axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else BLACK)
            shown.set_in_layout(False)  # it is inside its cell: nothing to measure
    axes.set_xticks(range(len(heatmap.columns)), heatmap.columns)
    axes.set_yticks(range(len(heatmap.rows)), heatmap.rows)
    axes.set_ylim(len(heatmap.rows) - 0.5, -0.5)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _norm(values: "np.ma.MaskedArray[tuple[int, ...], np.dtype[np.float64]]") -> Normalize:
    finite = values.compressed()
    low, high = float(finite.min(initial=math.inf)), float(finite.max(initial=-math.inf))
    if not low < high:
        low, high = (low - 1, high + 1) if math.isfinite(low) else (0, 1)
    return Normalize(low, high)


def _luminance(color: tuple[float, float, float, float]) -> float:
    """Relative luminance as defined by WCAG."""
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def plot_histograms(columns: Sequence[tuple[str, Sequence[Labeled]]]) -> Figure:
    """One column of histograms per quantity. The outline drawn over each histogram is that of the first one, k=1."""
    rows = max(len(histograms) for _, histograms in columns)
    figure = new_figure(7.2, 0.9 + 0.36 * rows)
    all_axes = figure.subplots(1, len(columns), squeeze=False)[0]
    for number, (axes, (title, histograms)) in enumerate(zip(all_axes, columns, strict=True)):
        for row, one in enumerate(histograms):
            _draw_histogram(axes, row, one, histograms[0][2])
        axes.set_title(title)
        axes.set_ylim(rows - 1 + 0.35, -1)
        axes.set_yticks(range(len(histograms)), [label if number == 0 else "" for label, _, _ in histograms])
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(True, axis="x")
        axes.set_xlim(*_histogram_limits(histograms))
    return figure


def _draw_histogram(axes: Axes, row: int, one: Labeled, baseline: Histogram) -> None:
    _, k, histogram = one
    color, (centers, heights) = color_for(k), _heights(histogram)
    axes.fill_between(centers, row - heights, row, step="mid", color=color, alpha=0.45, linewidth=0, zorder=2)
    if row:
        base_centers, base_heights = _heights(baseline)
        axes.step(base_centers, row - base_heights, where="mid", color=BLACK, linewidth=0.7, zorder=3)
    axes.plot([centers[0], centers[-1]], [row, row], color=GRAY, linewidth=0.5, zorder=1)
    axes.plot([histogram.p50] * 2, [row, row - 0.5], color=color, linewidth=1.6, zorder=4)
    axes.plot(histogram.mean, row, marker="^", markersize=4, color=color, clip_on=False, zorder=4)


def _heights(histogram: Histogram) -> tuple[np.ndarray, np.ndarray]:
    edges, counts = np.array(histogram.edges), np.array(histogram.counts, dtype=float)
    return (edges[:-1] + edges[1:]) / 2, HISTOGRAM_HEIGHT * counts / max(1.0, counts.max(initial=0))


def _histogram_limits(histograms: Sequence[Labeled]) -> tuple[float, float]:
    """Limits that show 99.9 % of the values."""
    edges = np.array(histograms[0][2].edges)
    total = np.sum([histogram.counts for _, _, histogram in histograms], axis=0)
    last = np.searchsorted(np.cumsum(total), 0.999 * total.sum()) + 1
    return float(edges[0]), float(edges[min(last, len(edges) - 1)])


def plot_speed_over_time(timelines: Sequence[ActorTimeline]) -> Figure:
    """One row per actor. Slow first trials show a cold start; calibrations show whether the machine itself changed."""
    shown = list(timelines)[:MAX_ACTORS]
    figure = new_figure(7.2, 0.95 + 1.05 * len(shown))
    unit, scale = _unit_of(max(float(timeline.start.max()) for timeline in shown))
    rows = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, timeline in zip(rows, shown, strict=True):
        _draw_timeline(axes, timeline, scale)
        axes.set_title(timeline.actor, fontsize=8.5, fontweight="normal", pad=3)
        axes.grid(True)
    fastest = max(float(np.maximum(timeline.speed, timeline.calibration).max()) for timeline in shown)
    rows[0].set_ylim(0, 1.1 * fastest)
    rows[-1].set_xlabel(f"{unit} since the sweep started")
    figure.supylabel("tokens/s", fontsize=8.5)
    _time_legend(figure, shown)
    return figure


def plot_shard_ratios(
    lines: Sequence[tuple[str, int | None, Sequence[tuple[float, float]]]], *, speedup: float
) -> Figure:
    """Speed-up of each shard over time, one row per configuration: (label, k, (seconds since the start, ratio))."""
    figure = new_figure(7.2, 0.9 + 0.62 * len(lines))
    rows = figure.subplots(len(lines), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    last = max((at for _, _, points in lines for at, _ in points), default=0.0)
    unit, scale = _unit_of(last)
    for axes, (label, k, points) in zip(rows, lines, strict=True):
        starts, ratios = np.array([at for at, _ in points]) / scale, np.array([ratio for _, ratio in points])
        axes.axhline(1, color=GRAY, linewidth=0.6)
        axes.axhline(speedup, color=GRAY, linewidth=0.8, linestyle=(0, (4, 2)))
        axes.plot(*_summarized(starts, ratios), **marker_style(k, "first"), markersize=3, linestyle="none")
        axes.set_ylabel(label, rotation=0, ha="right", va="center")
        axes.grid(True)
    rows[0].set_yscale("log")
    rows[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    rows[0].yaxis.set_minor_formatter(lambda *_: "")
    rows[-1].set_xlabel(f"{unit} since the first trial")
    return figure


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidencePath:
    """A configuration's evidence in a race after each shard."""

    label: str
    k: int | None
    path: Sequence[Look]
    rules: RaceRules


def plot_evidence(lines: Sequence[EvidencePath]) -> Figure:
    """Evidence on accuracy and bounds of the speed-up over documents, one row per configuration."""
    timed = any(look.speedup is not None for line in lines for look in line.path)
    figure = new_figure(7.2, 0.9 + 0.75 * len(lines))
    rows = figure.subplots(len(lines), 1 + timed, sharex=True, sharey="col", squeeze=False)
    for axes, line in zip(rows, lines, strict=True):
        documents, color = [look.documents for look in line.path], color_for(line.k)
        for log_e, needed, style in (
            ([look.log_e_plus for look in line.path], line.rules.log_e_confirm, "-"),
            ([look.log_e_minus for look in line.path], line.rules.log_e_reject, "--"),
        ):
            axes[0].plot(documents, np.clip(np.array(log_e) / needed, -0.5, 1.5), color=color, linestyle=style)
        axes[0].axhline(1, color=GRAY, linewidth=0.8)
        axes[0].set_ylim(-0.6, 1.6)
        axes[0].set_ylabel(line.label, rotation=0, ha="right", va="center")
        if timed:
            known = [look for look in line.path if look.speedup is not None]
            x, low, high = (
                [getattr(look, name) for look in known] for name in ("documents", "speedup_low", "speedup_high")
            )
            axes[1].fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)
            axes[1].plot(x, [look.speedup for look in known], color=color, linewidth=1.0)
            axes[1].axhline(line.rules.speedup, color=GRAY, linewidth=0.8, linestyle=(0, (4, 2)))
            axes[1].set_ylim(0.5, 2.5)
            axes[1].yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    for axes in rows[-1]:
        axes.set_xlabel("documents")
    return figure


def _unit_of(seconds: float) -> tuple[str, float]:
    return ("hours", 3600.0) if seconds > 2.5 * 3600 else ("minutes", 60.0) if seconds > 150 else ("seconds", 1.0)


def _draw_timeline(axes: Axes, timeline: ActorTimeline, scale: float) -> None:
    for span, look in ((timeline.loading, LOADING), (timeline.warm_up, WARM_UP)):
        if span is not None:
            axes.axvspan(span[0] / scale, span[1] / scale, edgecolor=GRAY, linewidth=0.4, zorder=0.5, **look)
    line = _summarized(timeline.start / scale, timeline.calibration)
    axes.plot(*line, color=GRAY, linewidth=0.8, marker="|", markersize=4, zorder=1.5)
    for k in _distinct_k([timeline]):
        own = np.isnan(timeline.k) if k is None else timeline.k == k
        points = _summarized(timeline.start[own] / scale, timeline.speed[own])
        axes.plot(*points, **marker_style(k, "first"), markersize=3.6, linestyle="none", zorder=2)


def _distinct_k(timelines: Sequence[ActorTimeline]) -> list[int | None]:
    """None, for policies without a period, is last."""
    found = np.unique(np.concatenate([timeline.k for timeline in timelines]))  # NaN is last
    return [None if np.isnan(k) else int(k) for k in found]


def _summarized(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The points, or medians of consecutive points if there are too many to tell apart."""
    if len(x) <= MAX_POINTS_PER_ACTOR:
        return x, y
    parts = np.array_split(np.arange(SINGLE_POINTS, len(x)), MAX_POINTS_PER_ACTOR - SINGLE_POINTS)
    medians = [(float(np.median(x[part])), float(np.median(y[part]))) for part in parts]
    points = np.array([*zip(x[:SINGLE_POINTS], y[:SINGLE_POINTS], strict=True), *medians])
    return points[:, 0], points[:, 1]


def _time_legend(figure: Figure, timelines: Sequence[ActorTimeline]) -> None:
    entries: list[Line2D | Patch] = [
        Line2D([], [], **marker_style(k, "first"), linestyle="none", label="other" if k is None else f"k={k}")
        for k in _distinct_k(timelines)
    ]
    entries.append(Line2D([], [], color=GRAY, linewidth=0.8, marker="|", label="calibration (k=1)"))
    if any(timeline.loading for timeline in timelines):
        entries.append(Patch(edgecolor=GRAY, linewidth=0.4, label="loading", **LOADING))
    if any(timeline.warm_up for timeline in timelines):
        entries.append(Patch(edgecolor=GRAY, linewidth=0.4, label="warm-up (not recorded)", **WARM_UP))
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), handlelength=1.6)

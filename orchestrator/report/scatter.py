"""Scatter plots of accuracy against speed, forest plots, and the placement of labels next to points."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from orchestrator.analysis.costs import family_order
from orchestrator.analysis.intervals import Bounds, Estimate
from orchestrator.report.charts import BLACK, GRAY, LIGHT_GRAY, color_for, lay_out, marker_style, new_figure
from orchestrator.report.text import signed

MAX_LABELS = 14  # with more points, only those on the Pareto front get a label
FRONT_LINE: dict[str, Any] = {"color": BLACK, "linewidth": 0.8, "linestyle": (0, (2, 2))}
ERROR_BARS: dict[str, Any] = {"linewidth": 0.9, "capsize": 2.2, "alpha": 0.85}
SUCCESS_AREA: dict[str, Any] = {"facecolor": "#eef4ee", "edgecolor": "#b9cdb9", "hatch": "////"}
SUCCESS_EDGE_COLOR = "#3b6b3b"
MAX_PARETO_LABELS = 16
FAR_BELOW_POINTS = 40  # configurations that lose more accuracy are listed as text: they would compress the axis
FAMILY_MARKERS = {  # color and shape; decode settings are hollow and connected by lines, policies are filled
    "k=1": ("#1a1a1a", "o"),
    "threshold": ("#4d4d4d", "o"),
    "small block": ("#4d4d4d", "s"),
    "block cache": ("#4d4d4d", "^"),
    "reveal": ("#4d4d4d", "v"),
    "several decode settings": ("#4d4d4d", "D"),
    "fixed grid": ("#0072b2", "s"),
    "output mode": ("#56b4e9", "s"),
    "adaptive": ("#d55e00", "^"),
    "trim": ("#009e73", "D"),
    "trim, random": ("#117733", "x"),
    "mlp": ("#cc79a7", "P"),
    "attn": ("#882255", "X"),
    "skip": ("#aa4499", "v"),
    "stale": ("#56b4e9", "*"),
    "delayed": ("#999933", "p"),
    "dllm": ("#44aa99", "<"),
    "elastic": ("#332288", "H"),
    "es": ("#ddcc77", ">"),
    "focus": ("#cc6677", "d"),
}
OTHER_FAMILY_MARKER = ("#117733", "h")
CONNECTED_FAMILIES = ("threshold", "small block")
HOLLOW_FAMILIES = (*CONNECTED_FAMILIES, "block cache", "reveal", "several decode settings")
# Placement of labels
OFFSETS_POINTS = ((7, 5), (7, -11), (-7, 5), (-7, -11), (0, 10), (0, -17), (14, 14), (14, -20), (-14, 14), (-14, -20))
FIRST_DISTANT_OFFSET = 6  # from this offset on, a line connects the label with its point
POINT_RADIUS_PIXELS = 6  # around each point, kept free of labels
LEADER = {"arrowstyle": "-", "linewidth": 0.5, "color": GRAY, "shrinkA": 1, "shrinkB": 3}

XY = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A configuration against k=1 with the same decode settings. `speedup` is None if no text is generated."""

    label: str
    k: int | None
    subset: str | None
    difference: Estimate  # of accuracy, in points; negative is worse
    speedup: Estimate | None
    on_front: bool = False
    difference_bounds: Bounds | None = None  # what the verdict used
    speedup_bounds: Bounds | None = None
    stopped_early: bool = False  # by a race, so that its estimates are biased; drawn hollow


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyPoint:
    """A configuration against k=1 with the task's first decode settings."""

    label: str
    family: str
    difference: Estimate  # of accuracy, in points; negative is worse
    gain: Estimate  # a ratio; the ends equal the value where it is not a measured time
    on_front: bool


def plot_tradeoff(
    points: Sequence[Point], *, margin: float, speedup: float, accuracy: float | None, noise: Estimate | None
) -> Figure:
    """Accuracy difference over speed-up.

    `accuracy` is that of k=1 in percent, None if there are several baselines; `noise` is the spread of the k=1 runs.
    """
    figure = new_figure(6.6, 4.3)
    axes = figure.subplots()
    shown = [(point, point.speedup) for point in points if point.speedup is not None]
    _set_limits(axes, shown, margin, speedup)
    _draw_areas(axes, margin, speedup, noise)
    for point, ratio in shown:
        x, y = ratio, point.difference
        bars: dict[str, Any] = {"xerr": error_bars(x), "yerr": error_bars(y), **ERROR_BARS}
        axes.errorbar(x.value, y.value, fmt="none", ecolor=color_for(point.k), zorder=2, **bars)
        style = marker_style(point.k, point.subset, hollow=point.stopped_early)
        axes.plot(x.value, y.value, **style, markersize=7, linestyle="none", zorder=3)
    front = sorted((ratio.value, point.difference.value) for point, ratio in shown if point.on_front)
    baseline_beaten = any(x >= 1 and y >= 0 for x, y in front)
    if front:
        corners = front if baseline_beaten else [(1.0, 0.0), *front]
        axes.step(*zip(*corners, strict=True), where="pre", **FRONT_LINE, zorder=1.5)
    axes.plot(1, 0, **marker_style(1, "first"), markersize=8, linestyle="none", zorder=4)
    axes.set_xlabel("speed-up over k=1 (tokens/s, same documents)")
    axes.set_ylabel("accuracy difference (points)")
    axes.grid(True)
    if accuracy is not None:
        right = axes.secondary_yaxis("right", functions=(_shift(accuracy), _shift(-accuracy)))
        right.set_ylabel("accuracy (%)")
    _tradeoff_legend(figure, [point for point, _ in shown], noise)
    labels = [point.label if len(shown) <= MAX_LABELS or point.on_front else None for point, _ in shown]
    centers = [(ratio.value, point.difference.value) for point, ratio in shown]
    lines = [line for point, ratio in shown for line in _error_bar_lines(ratio, point.difference)]
    place_labels(axes, [(1.0, 0.0), *centers], ["k=1", *labels], lines)
    return figure


def _shift(by: float) -> Callable[[Any], Any]:
    return lambda value: value + by


def _set_limits(axes: Axes, shown: Sequence[tuple[Point, Estimate]], margin: float, speedup: float) -> None:
    xs = [end for _, ratio in shown for end in finite_ends(ratio)]
    ys = [end for point, _ in shown for end in finite_ends(point.difference)]
    left, right = min([0.95, *xs]), max([speedup * 1.06, *xs])
    low, high = min([-margin * 1.25, *ys]), max([1.0, *ys])
    axes.set_xlim(left - 0.04 * (right - left), right + 0.06 * (right - left))
    axes.set_ylim(low - 0.06 * (high - low), high + 0.08 * (high - low))


def _draw_areas(axes: Axes, margin: float, speedup: float, noise: Estimate | None) -> None:
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    corner, width, height = (speedup, -margin), right - speedup, top + margin
    axes.add_patch(Rectangle(corner, width, height, **SUCCESS_AREA, linewidth=0, zorder=0.5))
    axes.plot([speedup, speedup, right], [top, -margin, -margin], color=SUCCESS_EDGE_COLOR, linewidth=1.1, zorder=0.8)
    if noise is not None:
        axes.axvspan(1 / noise.value, noise.value, facecolor=LIGHT_GRAY, alpha=0.55, linewidth=0, zorder=0.4)
    axes.axhline(0, color=GRAY, linewidth=0.6, zorder=0.7)


def _error_bar_lines(x: Estimate, y: Estimate) -> list[tuple[XY, XY]]:
    xs, ys = finite_ends(x), finite_ends(y)
    return [((xs[0], y.value), (xs[-1], y.value)), ((x.value, ys[0]), (x.value, ys[-1]))]


def _tradeoff_legend(figure: Figure, points: Sequence[Point], noise: Estimate | None) -> None:
    entries: list[Line2D | Patch] = []
    for k in sorted({point.k for point in points if point.k is not None}):
        entries.append(Line2D([], [], **marker_style(k, "first"), linestyle="none", label=f"k={k}"))
    for subset in [name for name in ("first", "middle", "last") if any(point.subset == name for point in points)]:
        style = marker_style(1, subset) | {"marker": "h", "color": GRAY, "markeredgecolor": GRAY}
        entries.append(Line2D([], [], **style, linestyle="none", markersize=7, label=subset))
    entries.append(Line2D([], [], **FRONT_LINE, label="Pareto front"))
    entries.append(Patch(**SUCCESS_AREA, label="success"))
    if noise is not None:
        entries.append(Patch(facecolor=LIGHT_GRAY, alpha=0.55, label="noise (k=1 vs k=1)"))
    columns = 5 if len(entries) > 7 else len(entries)
    figure.legend(handles=entries, loc="outside lower center", ncols=columns, handlelength=1.8)


def plot_forest(
    points: Sequence[Point], *, margin: float, speedup: float | None, replicates: Sequence[float] = ()
) -> Figure:
    """One row per configuration: speed-up and accuracy difference, with 95 % intervals and the verdict's bounds.

    Without a declared `speedup`, accuracy alone. `replicates` are the speeds of the k=1 runs relative to all of them;
    they have a row of their own.
    """
    labels = [*(point.label for point in points), *(["k=1 replicates"] if replicates else [])]
    figure = new_figure(7.2 if speedup else 6.6, 1.25 + 0.29 * len(labels))
    *speed_axes, accuracy_axes = figure.subplots(1, 2 if speedup else 1, sharey=True, squeeze=False)[0]
    for row, point in enumerate(points):
        _forest_row(accuracy_axes, row, point, point.difference, point.difference_bounds)
        for axes in speed_axes:
            if point.speedup is not None:
                _forest_row(axes, row, point, point.speedup, point.speedup_bounds)
    for axes in speed_axes:
        style = marker_style(1, "last") | {"markersize": 5, "linestyle": "none"}
        axes.plot(replicates, [len(points)] * len(replicates), **style)
        _forest_axes(axes, f"speed-up (declared: {speedup:g}×)", speedup or 0.0, 1.0)
    _forest_axes(accuracy_axes, f"accuracy difference, points (margin: {margin:g})", -margin, 0.0)
    first = (*speed_axes, accuracy_axes)[0]
    first.set_yticks(range(len(labels)), labels)
    first.set_ylim(len(labels) - 0.4, -0.6)
    return figure


def _forest_axes(axes: Axes, label: str, declared: float, neutral: float) -> None:
    axes.axvline(declared, color=SUCCESS_EDGE_COLOR, linewidth=1.1, linestyle=(0, (4, 2)), zorder=1)
    axes.axvline(neutral, color=GRAY, linewidth=0.6, zorder=1)
    axes.set_xlabel(label)
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)


def _forest_row(axes: Axes, row: int, point: Point, value: Estimate, bounds: Bounds | None) -> None:
    color = color_for(point.k)
    if bounds is not None and all(math.isfinite(end) for end in (bounds.low, bounds.high)):
        axes.plot([bounds.low, bounds.high], [row, row], color=color, linewidth=0.8, marker="|", markersize=7, zorder=2)
    ends = finite_ends(value)
    axes.plot([ends[0], ends[-1]], [row, row], color=color, linewidth=2.6, solid_capstyle="butt", zorder=2.5)
    style = marker_style(point.k, point.subset, hollow=point.stopped_early)
    axes.plot(value.value, row, **style, markersize=6, linestyle="none", zorder=3)


def plot_pareto(points: Sequence[FamilyPoint], *, axis: str, margin: float) -> Figure:
    """Policies and decode settings on the same axes, with the Pareto front of all of them."""
    figure = new_figure(6.6, 4.4)
    axes = figure.subplots()
    shown = [point for point in points if point.difference.value > -FAR_BELOW_POINTS]
    far_below = [
        f"{point.label} ({signed(point.difference.value, 0)} points, {point.gain.value:.2f}×)"
        for point in points
        if point not in shown
    ]
    if far_below:
        note = f"far below: {', '.join(far_below)}"
        axes.text(0.01, 0.02, note, transform=axes.transAxes, fontsize=8, color=GRAY)
    axes.axhspan(-margin, 0, facecolor=SUCCESS_AREA["facecolor"], linewidth=0, zorder=0.3)
    axes.axhline(0, color=GRAY, linewidth=0.6, zorder=0.7)
    for point in shown:
        x, y, style = point.gain, point.difference, _family_style(point.family)
        bars: dict[str, Any] = {"xerr": error_bars(x), "yerr": error_bars(y), "ecolor": style["color"]}
        axes.errorbar(x.value, y.value, fmt="none", linewidth=0.7, alpha=0.5, zorder=2, **bars)
        axes.plot(x.value, y.value, **style, markersize=6.5, linestyle="none", zorder=3)
    for family in CONNECTED_FAMILIES:
        members = [point for point in shown if point.family in (family, "k=1")]
        line = sorted((point.gain.value, point.difference.value) for point in members)
        if len({point.family for point in members}) > 1:
            axes.plot(*zip(*line, strict=True), color="#9aa0a6", linewidth=0.7, zorder=1)
    front = sorted((point.gain.value, point.difference.value) for point in shown if point.on_front)
    if front:
        axes.step(*zip(*front, strict=True), where="pre", **FRONT_LINE, zorder=1.5)
    axes.set_xlabel(f"gain in {axis} over k=1 with the first decode settings (ratio)")
    axes.set_ylabel("accuracy difference (points)")
    axes.grid(True)
    families = sorted({point.family for point in shown}, key=family_order)
    entries = [Line2D([], [], **_family_style(name), linestyle="none", markersize=6.5, label=name) for name in families]
    entries.append(Line2D([], [], **FRONT_LINE, label="Pareto front"))
    figure.legend(handles=entries, loc="outside lower center", ncols=min(6, len(entries)), handlelength=1.6)
    labels = [point.label if len(shown) <= MAX_PARETO_LABELS or point.on_front else None for point in shown]
    place_labels(axes, [(point.gain.value, point.difference.value) for point in shown], labels)
    return figure


def _family_style(family: str) -> dict[str, Any]:
    color, marker = FAMILY_MARKERS.get(family, OTHER_FAMILY_MARKER)
    face = "white" if family in HOLLOW_FAMILIES else color
    return {"marker": marker, "color": color, "markerfacecolor": face, "markeredgecolor": color}


def finite_ends(estimate: Estimate) -> list[float]:
    """The finite ones of low end, value and high end (a single document has no interval)."""
    return [end for end in (estimate.low, estimate.value, estimate.high) if math.isfinite(end)]


def error_bars(estimate: Estimate) -> list[list[float]]:
    """Lengths below and above the value, in the form matplotlib expects; 0 where an end is not finite."""
    lengths = estimate.value - estimate.low, estimate.high - estimate.value
    return [[length if math.isfinite(length) else 0.0] for length in lengths]


def place_labels(
    axes: Axes, points: Sequence[XY], labels: Sequence[str | None], lines: Sequence[tuple[XY, XY]] = ()
) -> None:
    """Write each label next to its point, at the offset with the least overlap of points, lines and other labels."""
    figure: Any = axes.figure
    lay_out(figure)
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

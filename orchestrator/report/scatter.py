"""Draws what a configuration costs against what it buys: accuracy and speed-up with intervals. Judges nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.ranking import family_order
from orchestrator.report.drawing import FAINT, INK, QUIET, arms_of, colour_of, ends_of, mark, new_figure, place
from orchestrator.report.text import signed

MOST_NAMES = 14  # with more points only those on the front are named
FRONT: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": (0, (2, 2))}
BARS: dict[str, Any] = {"linewidth": 0.9, "capsize": 2.2, "alpha": 0.85}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One configuration; `drop` in points, negative is worse. No speed-up where nothing is generated."""

    label: str
    k: int | None
    subset: str | None
    drop: Estimate
    speedup: Estimate | None
    on_front: bool = False


def tradeoff(
    points: Sequence[Point], *, margin: float, speedup: float, accuracy: float | None, noise: Estimate | None
) -> Figure:
    """Difference in accuracy over speed-up.

    `accuracy` is that of k=1, None if there are several; `noise` is how far runs at k=1 lie apart.
    """
    figure = new_figure(6.6, 4.3)
    axes = figure.subplots()
    drawn = [point for point in points if point.speedup is not None]
    _limits(axes, drawn, margin, speedup)
    _regions(axes, margin, speedup, noise)
    for point in drawn:
        _cross(axes, point)
    front = sorted((p.speedup.value, p.drop.value) for p in drawn if p.on_front and p.speedup is not None)
    beaten = any(faster >= 1 and better >= 0 for faster, better in front)
    if front:
        axes.step(*zip(*([] if beaten else [(1.0, 0.0)]), *front, strict=True), where="pre", **FRONT, zorder=1.5)
    axes.plot(1, 0, **mark(1, "first"), markersize=8, linestyle="none", zorder=4)
    axes.set_xlabel("speed-up against k=1 (tokens/s, same documents)")
    axes.set_ylabel("accuracy difference (points)")
    axes.grid(True)
    if accuracy is not None:
        right = axes.secondary_yaxis("right", functions=(_shift(accuracy), _shift(-accuracy)))
        right.set_ylabel("accuracy (%)")
    _legend(figure, drawn, noise)
    named = [p.label if len(drawn) <= MOST_NAMES or p.on_front else None for p in drawn]
    centres = [(p.speedup.value, p.drop.value) for p in drawn if p.speedup is not None]
    bars = [bar for p in drawn for bar in _bars(p)]
    place(axes, [(1.0, 0.0), *centres], ["k=1", *named], bars)
    return figure


def _shift(by: float) -> Callable[[Any], Any]:
    return lambda value: value + by


def _limits(axes: Axes, points: Sequence[Point], margin: float, speedup: float) -> None:
    across = [end for p in points if p.speedup is not None for end in ends_of(p.speedup)]
    up = [end for p in points for end in ends_of(p.drop)]
    left, right = min([0.95, *across]), max([speedup * 1.06, *across])
    low, high = min([-margin * 1.25, *up]), max([1.0, *up])
    axes.set_xlim(left - 0.04 * (right - left), right + 0.06 * (right - left))
    axes.set_ylim(low - 0.06 * (high - low), high + 0.08 * (high - low))


def _regions(axes: Axes, margin: float, speedup: float, noise: Estimate | None) -> None:
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    axes.add_patch(
        Rectangle(
            (speedup, -margin),
            right - speedup,
            top + margin,
            facecolor="#eef4ee",
            edgecolor="#b9cdb9",
            hatch="////",
            linewidth=0,
            zorder=0.5,
        )
    )
    axes.plot([speedup, speedup, right], [top, -margin, -margin], color="#3b6b3b", linewidth=1.1, zorder=0.8)
    if noise is not None:
        low, high = 1 / noise.value, noise.value
        axes.axvspan(low, high, facecolor=FAINT, alpha=0.55, linewidth=0, zorder=0.4)
    axes.axhline(0, color=QUIET, linewidth=0.6, zorder=0.7)


def _cross(axes: Axes, point: Point) -> None:
    assert point.speedup is not None
    x, y = point.speedup, point.drop
    axes.errorbar(
        x.value,
        y.value,
        xerr=arms_of(x),
        yerr=arms_of(y),
        fmt="none",
        ecolor=colour_of(point.k),
        zorder=2,
        **BARS,
    )
    axes.plot(x.value, y.value, **mark(point.k, point.subset), markersize=7, linestyle="none", zorder=3)


def _bars(point: Point) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """The two lines of a cross, which names should not cover."""
    assert point.speedup is not None
    x, y = point.speedup, point.drop
    across, up = ends_of(x), ends_of(y)
    return [((across[0], y.value), (across[-1], y.value)), ((x.value, up[0]), (x.value, up[-1]))]


def _legend(figure: Figure, points: Sequence[Point], noise: Estimate | None) -> None:
    entries: list[Line2D | Patch] = []
    for k in sorted({p.k for p in points if p.k is not None}):
        entries.append(Line2D([], [], **mark(k, "first"), linestyle="none", label=f"k={k}"))
    for subset in [s for s in ("first", "middle", "last") if any(p.subset == s for p in points)]:
        style = mark(1, subset) | {"marker": "h", "color": QUIET, "markeredgecolor": QUIET}
        entries.append(Line2D([], [], **style, linestyle="none", markersize=7, label=subset))
    entries.append(Line2D([], [], **FRONT, label="Pareto front"))
    entries.append(Patch(facecolor="#eef4ee", edgecolor="#b9cdb9", hatch="////", label="success"))
    if noise is not None:
        entries.append(Patch(facecolor=FAINT, alpha=0.55, label="noise (A/A)"))
    figure.legend(
        handles=entries, loc="outside lower center", ncols=5 if len(entries) > 7 else len(entries), handlelength=1.8
    )


def forest(points: Sequence[Point], *, margin: float) -> Figure:
    """Differences in accuracy one below the other, for tasks that get no speed verdict."""
    figure = new_figure(6.6, 1.1 + 0.27 * len(points))
    axes = figure.subplots()
    ends = [end for p in points for end in ends_of(p.drop)]
    low, high = min([-margin * 1.3, *ends]), max([1.0, *ends])
    room = 0.05 * (high - low)
    axes.set_xlim(low - room, high + room)
    axes.axvspan(-margin, high + room, facecolor="#eef4ee", edgecolor="#b9cdb9", hatch="////", linewidth=0, zorder=0.5)
    axes.axvline(-margin, color="#3b6b3b", linewidth=1.1)
    axes.axvline(0, color=QUIET, linewidth=0.6)
    for row, point in enumerate(points):
        y = point.drop
        axes.errorbar(y.value, row, xerr=arms_of(y), fmt="none", ecolor=colour_of(point.k), zorder=2, **BARS)
        axes.plot(y.value, row, **mark(point.k, point.subset), markersize=6.5, linestyle="none", zorder=3)
    axes.set_yticks(range(len(points)), [point.label for point in points])
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"accuracy difference to k=1 (points); the hatched side is inside the margin of {margin:g}")
    axes.grid(True, axis="x")
    return figure


MOST_PARETO_NAMES = 16  # with more points only those on the front are named
FAR = 40  # points of accuracy: what loses more would press all others together, and is told in a line
MARKS = {  # colour and shape: decode settings are hollow and joined by lines, policies filled
    "k=1": ("#1a1a1a", "o"),
    "threshold": ("#4d4d4d", "o"),
    "small block": ("#4d4d4d", "s"),
    "block cache": ("#4d4d4d", "^"),
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
}
OTHER_MARK = ("#117733", "h")  # of rules that came later
JOINED = ("threshold", "small block")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """One configuration; `points` of accuracy against the reference, `gain` a ratio, with an interval where timed."""

    label: str
    family: str
    points: Estimate
    gain: Estimate
    on_front: bool


def pareto(everything: Sequence[Stand], *, axis: str, margin: float) -> Figure:
    figure = new_figure(6.6, 4.4)
    axes = figure.subplots()
    stands = [stand for stand in everything if stand.points.value > -FAR]
    far = [
        f"{s.label} ({signed(s.points.value, 0)} points, {s.gain.value:.2f}×)" for s in everything if s not in stands
    ]
    if far:
        axes.text(0.01, 0.02, f"far below: {', '.join(far)}", transform=axes.transAxes, fontsize=8, color=QUIET)
    axes.axhspan(-margin, 0, facecolor="#eef4ee", linewidth=0, zorder=0.3)
    axes.axhline(0, color=QUIET, linewidth=0.6, zorder=0.7)
    for stand in stands:
        x, y, colour = stand.gain, stand.points, _mark(stand.family)[0]
        spans: dict[str, Any] = {"xerr": arms_of(x), "yerr": arms_of(y)}
        axes.errorbar(x.value, y.value, fmt="none", ecolor=colour, linewidth=0.7, alpha=0.5, zorder=2, **spans)
        axes.plot(x.value, y.value, **_style(stand.family), markersize=6.5, linestyle="none", zorder=3)
    for family in JOINED:
        ends = [s for s in stands if s.family in (family, "k=1")]
        line = sorted((s.gain.value, s.points.value) for s in ends)
        if len({s.family for s in ends}) > 1:
            axes.plot(*zip(*line, strict=True), color="#9aa0a6", linewidth=0.7, zorder=1)
    front = sorted((s.gain.value, s.points.value) for s in stands if s.on_front)
    if front:
        axes.step(*zip(*front, strict=True), where="pre", **FRONT, zorder=1.5)
    axes.set_xlabel(f"gain in {axis} against k=1 at the first settings (ratio)")
    axes.set_ylabel("accuracy difference (points)")
    axes.grid(True)
    _pareto_legend(figure, stands)
    named = [s.label if len(stands) <= MOST_PARETO_NAMES or s.on_front else None for s in stands]
    place(axes, [(s.gain.value, s.points.value) for s in stands], named)
    return figure


def _mark(family: str) -> tuple[str, str]:
    return MARKS.get(family, OTHER_MARK)


def _style(family: str) -> dict[str, Any]:
    colour, marker = _mark(family)
    hollow = "white" if family in JOINED or family in ("block cache", "several decode settings") else colour
    return {"marker": marker, "color": colour, "markerfacecolor": hollow, "markeredgecolor": colour}


def _pareto_legend(figure: Figure, stands: Sequence[Stand]) -> None:
    present = sorted({s.family for s in stands}, key=family_order)
    entries = [Line2D([], [], **_style(family), linestyle="none", markersize=6.5, label=family) for family in present]
    entries.append(Line2D([], [], **FRONT, label="Pareto front"))
    figure.legend(handles=entries, loc="outside lower center", ncols=min(6, len(entries)), handlelength=1.6)

"""Draws tables of numbers as coloured grids with the number in each cell: k × subset, agreement, subjects.

The number is always there, so nothing is lost in grey; the colours (cividis, and purple to orange around zero) are told
apart by the colour-blind.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from orchestrator.analysis.details import Histogram
from orchestrator.report.drawing import INK, QUIET, colour_of, mark, new_figure

EQUAL = 0.19  # luminance on which white and our ink are read equally well


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Rows × columns of values, NaN where there is none; `texts` is what the cells say."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    texts: Sequence[Sequence[str]]
    around_zero: bool = False
    reach: float | None = None  # of the colours; None: as far as the values go


def panels(grids: Sequence[Grid], *, across: str = "layers reused", down: str = "k") -> Figure:
    """Small grids side by side."""
    height = 0.95 + 0.42 * max(len(grid.rows) for grid in grids)
    figure = new_figure(max(2.3 * len(grids), 0.75 * sum(len(grid.columns) for grid in grids)), height)
    for axes, grid in zip(figure.subplots(1, len(grids), squeeze=False)[0], grids, strict=True):
        _draw_grid(axes, grid)
        axes.set_title(grid.title)
        axes.set_xlabel(across)
        axes.set_ylabel(down)
    return figure


def tall(grid: Grid, *, note: str) -> Figure:
    """One grid with many rows, their names on the left, columns named on top."""
    longest = max(len(name) for name in grid.columns)
    slanted = longest > 9 or len(grid.columns) > 7
    width = 2.4 + 0.62 * len(grid.columns) + 0.045 * max(len(name) for name in grid.rows)
    figure = new_figure(max(5.0, width), 0.8 + 0.215 * len(grid.rows) + (0.04 * longest if slanted else 0))
    axes = figure.subplots()
    _draw_grid(axes, grid)
    axes.xaxis.tick_top()
    axes.set_xticks(
        range(len(grid.columns)), grid.columns, rotation=35 if slanted else 0, ha="left" if slanted else "center"
    )
    axes.set_xlabel(note, color=QUIET)
    return figure


def _draw_grid(axes: Axes, grid: Grid) -> None:
    values = np.ma.masked_invalid(np.array(grid.values, dtype=float))
    colours = matplotlib.colormaps["PuOr_r" if grid.around_zero else "cividis"]
    norm = _norm(values, grid)
    edges_x, edges_y = np.arange(len(grid.columns) + 1) - 0.5, np.arange(len(grid.rows) + 1) - 0.5
    axes.pcolormesh(edges_x, edges_y, values, cmap=colours, norm=norm, edgecolors="white", linewidth=1.2)
    for row, texts in enumerate(grid.texts):
        for column, text in enumerate(texts):
            value = float(grid.values[row][column])
            dark = math.isfinite(value) and _luminance(colours(norm(value))) < EQUAL
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else INK)
    axes.set_xticks(range(len(grid.columns)), grid.columns)
    axes.set_yticks(range(len(grid.rows)), grid.rows)
    axes.set_ylim(len(grid.rows) - 0.5, -0.5)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _norm(values: "np.ma.MaskedArray[tuple[int, ...], np.dtype[np.float64]]", grid: Grid) -> Normalize:
    finite = values.compressed()
    if grid.around_zero:
        reach = grid.reach or max(1e-9, float(np.abs(finite).max(initial=0)))
        return TwoSlopeNorm(0, -reach, reach)
    low, high = float(finite.min(initial=math.inf)), float(finite.max(initial=-math.inf))
    if not low < high:
        low, high = (low - 1, high + 1) if math.isfinite(low) else (0, 1)
    return Normalize(low, high)


def _luminance(colour: tuple[float, float, float, float]) -> float:
    """As WCAG defines it."""
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


HEIGHT = 0.85  # of a row that a histogram may fill


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """One configuration's histogram in one column of the figure."""

    label: str
    k: int | None
    histogram: Histogram


def spreads(columns: Sequence[tuple[str, Sequence[Spread]]]) -> Figure:
    """A column of histograms for each quantity; the outline on each is that of the first, k=1."""
    rows = max(len(spread) for _, spread in columns)
    figure = new_figure(7.2, 0.9 + 0.36 * rows)
    for place, (axes, (title, spread)) in enumerate(
        zip(figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True)
    ):
        for row, one in enumerate(spread):
            _draw_spread(axes, row, one, spread[0].histogram)
        axes.set_title(title)
        axes.set_ylim(rows - 1 + 0.35, -1)
        axes.set_yticks(range(len(spread)), [one.label for one in spread] if place == 0 else [""] * len(spread))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(True, axis="x")
        axes.set_xlim(*_reach(spread))
    return figure


def _draw_spread(axes: Axes, row: int, one: Spread, base: Histogram) -> None:
    centres, shape = _shape(one.histogram)
    axes.fill_between(centres, row - shape, row, step="mid", color=colour_of(one.k), alpha=0.45, linewidth=0, zorder=2)
    if row:
        axes.step(*_outline(base, row), where="mid", color=INK, linewidth=0.7, zorder=3)
    axes.plot([centres[0], centres[-1]], [row, row], color=QUIET, linewidth=0.5, zorder=1)
    axes.plot([one.histogram.p50] * 2, [row, row - 0.5], color=colour_of(one.k), linewidth=1.6, zorder=4)
    axes.plot(one.histogram.mean, row, marker="^", markersize=4, color=colour_of(one.k), clip_on=False, zorder=4)


def _shape(histogram: Histogram) -> tuple[np.ndarray, np.ndarray]:
    edges, counts = np.array(histogram.edges), np.array(histogram.counts, dtype=float)
    return (edges[:-1] + edges[1:]) / 2, HEIGHT * counts / max(1.0, counts.max(initial=0))


def _outline(histogram: Histogram, row: int) -> tuple[np.ndarray, np.ndarray]:
    centres, shape = _shape(histogram)
    return centres, row - shape


def _reach(spread: Sequence[Spread]) -> tuple[float, float]:
    """Without the emptiest far end: to where all but one in a thousand lie."""
    edges = np.array(spread[0].histogram.edges)
    total = np.sum([one.histogram.counts for one in spread], axis=0)
    kept = np.searchsorted(np.cumsum(total), 0.999 * total.sum()) + 1
    return float(edges[0]), float(edges[min(kept, len(edges) - 1)])


MOST_ACTORS = 12
MOST_POINTS = 240  # of an actor; more are joined into as many spans of time
LOADING: dict[str, Any] = {"facecolor": "#ececec", "hatch": "...."}
WARMING: dict[str, Any] = {"facecolor": "#f3dfc1", "hatch": "////"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A trial: when it began, in seconds since the sweep did, and how fast it was."""

    at: float
    k: int | None
    speed: float
    calibration: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One actor. `loading` and `warming` are spans that no row was recorded in."""

    actor: str
    dots: Sequence[Dot]
    loading: tuple[float, float] | None = None
    warming: tuple[float, float] | None = None


def over_time(lanes: Sequence[Lane]) -> Figure:
    shown = list(lanes)[:MOST_ACTORS]
    figure = new_figure(7.2, 0.95 + 1.05 * len(shown))
    unit, scale = _unit(shown)
    rows = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, lane in zip(rows, shown, strict=True):
        _spans(axes, lane, scale)
        _dots(axes, lane, scale)
        axes.set_title(lane.actor, fontsize=8.5, fontweight="normal", pad=3)
        axes.grid(True)
    fastest = max(max(dot.speed, dot.calibration) for lane in shown for dot in lane.dots)
    rows[0].set_ylim(0, 1.1 * fastest)
    rows[-1].set_xlabel(f"{unit} since the sweep began")
    figure.supylabel("tokens/s", fontsize=8.5)
    _time_legend(figure, shown)
    return figure


def _unit(lanes: Sequence[Lane]) -> tuple[str, float]:
    last = max((dot.at for lane in lanes for dot in lane.dots), default=0.0)
    return ("hours", 3600.0) if last > 2.5 * 3600 else ("minutes", 60.0) if last > 150 else ("seconds", 1.0)


def _spans(axes: Axes, lane: Lane, scale: float) -> None:
    for span, look in ((lane.loading, LOADING), (lane.warming, WARMING)):
        if span is not None:
            axes.axvspan(span[0] / scale, span[1] / scale, edgecolor=QUIET, linewidth=0.4, zorder=0.5, **look)


def _dots(axes: Axes, lane: Lane, scale: float) -> None:
    at = np.array([dot.at for dot in lane.dots]) / scale
    calibration = np.array([dot.calibration for dot in lane.dots])
    axes.plot(*_joined(at, calibration), color=QUIET, linewidth=0.8, marker="|", markersize=4, zorder=1.5)
    for k, dots in _by_k(lane.dots).items():
        when, speed = np.array([dot.at for dot in dots]) / scale, np.array([dot.speed for dot in dots])
        axes.plot(*_joined(when, speed), **mark(k, "first"), markersize=3.6, linestyle="none", zorder=2)


def _joined(at: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Medians of spans of time, where there are too many points to tell apart; the first ones stay single."""
    if len(at) <= MOST_POINTS:
        return at, values
    alone = 12
    parts = np.array_split(np.arange(alone, len(at)), MOST_POINTS - alone)
    medians = [(float(np.median(at[part])), float(np.median(values[part]))) for part in parts]
    joined = np.array([*zip(at[:alone], values[:alone], strict=True), *medians])
    return joined[:, 0], joined[:, 1]


def _by_k(dots: Sequence[Dot]) -> Mapping[int | None, list[Dot]]:
    found: dict[int | None, list[Dot]] = {}
    for dot in sorted(dots, key=lambda one: (one.k is None, one.k or 0, one.at)):
        found.setdefault(dot.k, []).append(dot)
    return found


def _time_legend(figure: Figure, lanes: Sequence[Lane]) -> None:
    found = {dot.k for lane in lanes for dot in lane.dots}
    entries: list[Line2D | Patch] = [
        Line2D([], [], **mark(k, "first"), linestyle="none", label="other" if k is None else f"k={k}")
        for k in sorted(found, key=lambda k: (k is None, k or 0))
    ]
    entries.append(Line2D([], [], color=QUIET, linewidth=0.8, marker="|", label="calibration (k=1)"))
    if any(lane.loading for lane in lanes):
        entries.append(Patch(edgecolor=QUIET, linewidth=0.4, label="loading", **LOADING))
    if any(lane.warming for lane in lanes):
        entries.append(Patch(edgecolor=QUIET, linewidth=0.4, label="warm-up, not recorded", **WARMING))
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), handlelength=1.6)

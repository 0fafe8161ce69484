"""Draws how steps and output lengths are spread, configuration by configuration, against k=1. Judges nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from orchestrator.analysis.details import Histogram
from orchestrator.report.drawing import INK, QUIET, colour_of, new_figure

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
            _draw(axes, row, one, spread[0].histogram)
        axes.set_title(title)
        axes.set_ylim(rows - 1 + 0.35, -1)
        axes.set_yticks(range(len(spread)), [one.label for one in spread] if place == 0 else [""] * len(spread))
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(True, axis="x")
        axes.set_xlim(*_reach(spread))
    return figure


def _draw(axes: Axes, row: int, one: Spread, base: Histogram) -> None:
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

"""Draws tables of numbers as coloured grids with the number in each cell: k × subset, agreement, subjects.

The number is always there, so nothing is lost in grey; the colours (cividis, and purple to orange around zero) are told
apart by the colour-blind.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.figure import Figure

from orchestrator.report.drawing import INK, QUIET, new_figure

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
        _draw(axes, grid)
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
    _draw(axes, grid)
    axes.xaxis.tick_top()
    axes.set_xticks(
        range(len(grid.columns)), grid.columns, rotation=35 if slanted else 0, ha="left" if slanted else "center"
    )
    axes.set_xlabel(note, color=QUIET)
    return figure


def _draw(axes: Axes, grid: Grid) -> None:
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

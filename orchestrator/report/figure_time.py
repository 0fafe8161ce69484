"""Draws tokens/s over time, actor by actor, with loading, warm-up and calibrations marked. Judges nothing.

A cold start shows as first trials far below the ones after it; calibrations show whether the machine itself changed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from orchestrator.report.drawing import QUIET, mark, new_figure

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
    _legend(figure, shown)
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


def _legend(figure: Figure, lanes: Sequence[Lane]) -> None:
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

"""Draws policies and decode settings on the same axes, with the front over all of them. Judges nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.ranking import place_of
from orchestrator.report.drawing import INK, QUIET, arms_of, new_figure
from orchestrator.report.labels import place
from orchestrator.report.words import signed

MOST_NAMES = 16  # with more points only those on the front are named
FAR = 40  # points of accuracy: what loses more would press all others together, and is told in a line
FRONT: dict[str, Any] = {"color": INK, "linewidth": 0.8, "linestyle": (0, (2, 2))}
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
    _legend(figure, stands)
    named = [s.label if len(stands) <= MOST_NAMES or s.on_front else None for s in stands]
    place(axes, [(s.gain.value, s.points.value) for s in stands], named)
    return figure


def _mark(family: str) -> tuple[str, str]:
    return MARKS.get(family, OTHER_MARK)


def _style(family: str) -> dict[str, Any]:
    colour, marker = _mark(family)
    hollow = "white" if family in JOINED or family in ("block cache", "several decode settings") else colour
    return {"marker": marker, "color": colour, "markerfacecolor": hollow, "markeredgecolor": colour}


def _legend(figure: Figure, stands: Sequence[Stand]) -> None:
    present = sorted({s.family for s in stands}, key=place_of)
    entries = [Line2D([], [], **_style(family), linestyle="none", markersize=6.5, label=family) for family in present]
    entries.append(Line2D([], [], **FRONT, label="Pareto front"))
    figure.legend(handles=entries, loc="outside lower center", ncols=min(6, len(entries)), handlelength=1.6)

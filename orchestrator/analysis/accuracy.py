"""Paired accuracy differences: a configuration against k=1 on the same documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from orchestrator.analysis.columns import Array
from orchestrator.analysis.intervals import (
    DRAWS,
    Bounds,
    Estimate,
    Levels,
    paired_bootstrap,
    tango_interval,
    tango_variance,
    unbounded,
)

POWER = 0.8
SIGNIFICANCE = 0.05
TYPICAL_DISAGREEMENT = (0.05, 0.20)  # share of documents on which two configurations differ, low and high
NEVER = 10_000_000  # documents; a need beyond this is not stated


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Accuracy in percentage points, configuration minus k=1: a drop is negative."""

    documents: int
    lost: int  # right at k=1, wrong here
    won: int
    both_right: int  # scored above 0 on both sides and neither lost nor won
    points: Estimate
    simultaneous: Estimate  # at the level that holds for all compared configurations together
    bounds: Bounds  # what the verdict compares with the margin
    p_value: float
    p_holm: float
    disagreement: float  # mean squared difference of scores: the share of documents lost or won, if binary
    detectable: float  # smallest difference from 0, in points, found with 80 % power

    @property
    def flips(self) -> int:
        return self.lost + self.won

    @property
    def both_wrong(self) -> int:
        return self.documents - self.flips - self.both_right


def paired_difference(
    baseline: Array,
    scores: Array,
    strata: Array,
    *,
    rng: np.random.Generator,
    levels: Levels | None = None,
    draws: int = DRAWS,
) -> PairedDifference:
    """Compares scores of the same documents: Tango's interval if all are 0 or 1, else the paired bootstrap."""
    levels = levels or Levels()
    differences = scores - baseline
    lost, won = int((differences < 0).sum()), int((differences > 0).sum())
    intervals = [one.percent() for one in _intervals(baseline, scores, strata, lost, won, levels.all, rng, draws)]
    disagreement = float(np.mean(differences**2)) if lost + won else 1 / (len(differences) + 2)
    p_value = mcnemar(lost, won)
    return PairedDifference(
        documents=len(differences),
        lost=lost,
        won=won,
        both_right=int(((differences == 0) & (scores > 0)).sum()),
        points=intervals[0],
        simultaneous=intervals[1],
        bounds=_bounds(intervals, len(differences), lost, won, binary=_is_binary(baseline, scores)),
        p_value=p_value,
        p_holm=p_value,
        disagreement=disagreement,
        detectable=100 * detectable(len(differences), disagreement),
    )


def _intervals(
    baseline: Array,
    scores: Array,
    strata: Array,
    lost: int,
    won: int,
    levels: Sequence[float],
    rng: np.random.Generator,
    draws: int,
) -> list[Estimate]:
    documents = len(scores)
    if documents < 2:
        return [unbounded(float((scores - baseline).mean()), level) for level in levels]
    if _is_binary(baseline, scores):
        return [tango_interval(lost, won, documents, level) for level in levels]
    return paired_bootstrap(scores - baseline, strata, rng, levels, draws)


def _is_binary(*scores: Array) -> bool:
    return all(bool(np.isin(part, (0.0, 1.0)).all()) for part in scores) and len(scores[0]) > 1


def _bounds(intervals: Sequence[Estimate], documents: int, lost: int, won: int, *, binary: bool) -> Bounds:
    """The upper bounds, which reject, are corrected for continuity: half a document less is lost.

    Without it, a true drop at the margin is rejected more often than stated, since lost documents are few and skewed.
    """
    bounds = Bounds.of(intervals)
    if not binary or not lost:
        return bounds
    high, joint = (
        tango_interval(lost - 0.5, won + 0.5, documents, one.level).percent().high
        for one in (intervals[1], intervals[3])
    )
    return replace(bounds, high=max(bounds.high, high), joint_high=max(bounds.joint_high, joint))


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p-value of the hypothesis that lost and won documents are equally likely."""
    discordant = lost + won
    if discordant == 0:
        return 1.0
    return float(min(1.0, 2 * special.bdtr(min(lost, won), discordant, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order."""
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(raised))
    return [float(p) for p in adjusted]


def detectable(documents: int, disagreement: float) -> float:
    """The smallest difference, between 0 and 1, that a paired test of so many documents finds with 80 % power."""
    reach = float(special.ndtri(1 - SIGNIFICANCE / 2) + special.ndtri(POWER))
    return min(1.0, reach * math.sqrt(disagreement / documents))


def documents_for_margin(margin: float, comparisons: int) -> int | None:
    """Documents that show non-inferiority with 80 % power, if 10 % of the answers change and nothing is lost."""
    return documents_needed(0.1, 0.0, margin, Levels(comparisons=comparisons))


def documents_needed(disagreement: float, points: float, margin: float, levels: Levels) -> int | None:
    """Documents that show, with 80 % power, on which side of minus `margin` a true difference of `points` lies.

    A non-inferiority test at the level of the verdict; None if the difference is too close to the margin.
    """
    difference, edge = points / 100, -margin / 100
    if difference == edge:
        return None
    disagreement = max(disagreement, abs(difference), 1e-4)
    at_edge = tango_variance((disagreement - difference) / 2, (disagreement + difference) / 2, edge)
    level = levels.confirming if difference > edge else levels.joint
    reach = float(special.ndtri((1 + level) / 2)) * math.sqrt(at_edge)
    reach += float(special.ndtri(POWER)) * math.sqrt(disagreement - difference**2)
    needed = (reach / (difference - edge)) ** 2
    return math.ceil(needed) if needed <= NEVER else None

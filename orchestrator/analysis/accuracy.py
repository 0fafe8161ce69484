"""Paired accuracy differences: a configuration against k=1 on the same documents."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from orchestrator.analysis.columns import Array
from orchestrator.analysis.intervals import CONFIDENCE, DRAWS, Estimate, bonferroni_level, paired_bootstrap

POWER, SIGNIFICANCE = 0.8, 0.05
TYPICAL_DISAGREEMENT = (0.05, 0.20)  # share of documents on which two configurations differ, low and high


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Accuracy in percentage points, configuration minus k=1: a drop is negative."""

    documents: int
    lost: int  # right at k=1, wrong here
    won: int
    points: Estimate
    simultaneous: Estimate  # at the level that holds for all compared configurations together
    p_value: float
    p_holm: float
    detectable: float  # smallest drop, in points, found with 80 % power


def paired_difference(
    baseline: Array,
    scores: Array,
    strata: Array,
    *,
    rng: np.random.Generator,
    comparisons: int = 1,
    draws: int = DRAWS,
) -> PairedDifference:
    """Compares scores of the same documents; `comparisons` configurations are judged together."""
    differences = scores - baseline
    lost, won = int((differences < 0).sum()), int((differences > 0).sum())
    levels = (CONFIDENCE, bonferroni_level(comparisons))
    alone, together = paired_bootstrap(differences, strata, rng, levels, draws)
    disagreement = float(np.mean(differences**2)) if lost + won else 1 / (len(differences) + 2)
    p_value = mcnemar(lost, won)
    return PairedDifference(
        documents=len(differences),
        lost=lost,
        won=won,
        points=alone.percent(),
        simultaneous=together.percent(),
        p_value=p_value,
        p_holm=p_value,
        detectable=100 * detectable(len(differences), disagreement),
    )


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

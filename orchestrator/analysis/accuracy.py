"""How far a configuration's accuracy lies from k=1's on the same documents. Knows differences, not who made them.

Resampling documents and counting how many were lost and won is one multinomial draw per stratum, so a bootstrap costs
the same for a hundred documents as for a million. Half a lost and half a won document are added before resampling:
without them no disagreement seen would mean no doubt at all. In simulation (100 documents, 5 % of them changed) the
plain percentile interval covers 88 %, this one 96 to 97 %; where far fewer change it errs on the wide side.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from orchestrator.analysis.columns import Array
from orchestrator.analysis.intervals import (
    DRAWS,
    LEVEL,
    Estimate,
    interval,
    simultaneous_level,
)

POWER, SIGNIFICANCE = 0.8, 0.05
USUAL_DISAGREEMENT = (0.05, 0.20)  # share of documents on which two configurations differ, little and much


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Paired accuracy in percentage points, configuration minus k=1: a drop is negative."""

    documents: int
    lost: int  # right at k=1, wrong here
    won: int
    points: Estimate
    simultaneous: Estimate  # at the level that holds for all configurations of the family together
    p_value: float
    p_holm: float
    detectable: float  # points; the drop that so many documents show in 80 of 100 runs


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p-value: lost and won documents are equally likely if nothing changed."""
    disagreeing = lost + won
    if disagreeing == 0:
        return 1.0
    return float(min(1.0, 2 * special.bdtr(min(lost, won), disagreeing, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given."""
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(raised))
    return [float(p) for p in adjusted]


def detectable(documents: int, disagreement: float) -> float:
    """The smallest difference, between 0 and 1, that a paired test of so many documents finds with 80 % power."""
    reach = float(special.ndtri(1 - SIGNIFICANCE / 2) + special.ndtri(POWER))
    return min(1.0, reach * math.sqrt(disagreement / documents))


def difference(
    baseline: Array,
    scores: Array,
    strata: Array,
    *,
    rng: np.random.Generator,
    family: int = 1,
    draws: int = DRAWS,
) -> Difference:
    """Compares two columns of scores of the same documents; `family` configurations are judged together."""
    apart = scores - baseline
    lost, won = int((apart < 0).sum()), int((apart > 0).sum())
    alone, together = map(_points, interval(apart, strata, rng, (LEVEL, simultaneous_level(family)), draws))
    spread = float(np.mean(apart**2))
    if lost + won == 0:
        spread = 1 / (len(apart) + 2)
    p_value = mcnemar(lost, won)
    return Difference(
        documents=len(apart),
        lost=lost,
        won=won,
        points=alone,
        simultaneous=together,
        p_value=p_value,
        p_holm=p_value,
        detectable=100 * detectable(len(apart), spread),
    )


def _points(share: Estimate) -> Estimate:
    return share.map(100 * share.low, 100 * share.value, 100 * share.high)

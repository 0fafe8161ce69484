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
from orchestrator.analysis.resample import DRAWS, LEVEL, Estimate, degrees, join_small, percentile

POWER, SIGNIFICANCE = 0.8, 0.05
USUAL_DISAGREEMENT = (0.05, 0.20)  # share of documents on which two configurations differ, little and much
MANY_VALUES = 256
ADDED = 0.5


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


def difference_draws(differences: Array, strata: Array, draws: int, rng: np.random.Generator) -> tuple[Array, int]:
    """Bootstrap draws of the mean difference, and the degrees of freedom behind them."""
    code, sizes = join_small(strata)
    total = len(differences)
    away = differences[differences != 0]
    unit = math.sqrt(float(np.mean(away**2))) if len(away) else 1.0
    values, place = np.unique(np.concatenate((differences, [-unit, 0.0, unit])), return_inverse=True)
    place = place.reshape(-1)[:total]
    added = np.isin(values, (-unit, unit)).astype(float)
    rounds = draws if len(values) <= MANY_VALUES else min(draws, 2_000)
    result = np.zeros(rounds)
    table = np.bincount(code * len(values) + place, minlength=len(sizes) * len(values)).reshape(len(sizes), -1)
    for counts, size in zip(table, sizes, strict=True):
        chances = counts + ADDED * added * size / total
        picked = rng.multinomial(max(1, int(size) - 1), chances / chances.sum(), size=rounds)
        result += picked @ values / picked[0].sum() * (size / total)
    return result, degrees(sizes)


def interval(
    differences: Array, strata: Array, rng: np.random.Generator, levels: Sequence[float] = (LEVEL,), draws: int = DRAWS
) -> list[Estimate]:
    """The mean difference with a paired bootstrap interval at each level, in the differences' own unit."""
    value = float(differences.mean())
    if len(differences) < 2:  # one document says nothing of others
        return [Estimate(value=value, low=-math.inf, high=math.inf, level=level) for level in levels]
    sampled, freedom = difference_draws(differences, strata, draws, rng)
    ends = [(level, *percentile(sampled, level, freedom)) for level in levels]
    return [Estimate(value=value, low=min(low, value), high=max(high, value), level=lv) for lv, low, high in ends]


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


def wilson(right: float, documents: int, level: float = LEVEL) -> Estimate:
    """Wilson's interval of an accuracy between 0 and 1; `right` need not be whole (a mean over repeats)."""
    assert documents > 0, "an accuracy needs documents"
    z = float(special.ndtri((1 + level) / 2))
    share = right / documents
    centre = (share + z * z / (2 * documents)) / (1 + z * z / documents)
    half = z / (1 + z * z / documents) * math.sqrt(share * (1 - share) / documents + z * z / (4 * documents**2))
    return Estimate(value=share, low=max(0.0, min(share, centre - half)), high=min(1.0, max(share, centre + half)))


def mean_interval(scores: Array, level: float = LEVEL) -> Estimate:
    """A configuration's own accuracy: Wilson for right or wrong, Student's t for other metrics."""
    documents, value = len(scores), float(scores.mean())
    if ((scores >= 0) & (scores <= 1)).all() and np.isin(scores, (0.0, 1.0)).mean() > 0.9:
        return wilson(float(scores.sum()), documents, level)
    half = 0.0
    if documents > 1:
        half = float(special.stdtrit(documents - 1, (1 + level) / 2) * scores.std(ddof=1) / math.sqrt(documents))
    return Estimate(value=value, low=value - half, high=value + half, level=level)


def few_documents_interval(lost: int, won: int, documents: int, level: float = LEVEL) -> Estimate:
    """Bonett and Price's interval of a paired difference, in closed form: for the many small parts of a breakdown."""
    n = documents + 2
    a, b = (lost + 1) / n, (won + 1) / n
    half = float(special.ndtri((1 + level) / 2)) * math.sqrt((a + b - (b - a) ** 2) / n)
    value = (won - lost) / documents
    return Estimate(value=value, low=max(-1.0, min(value, b - a - half)), high=min(1.0, max(value, b - a + half)))


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


def simultaneous_level(family: int) -> float:
    """The level at which `family` intervals all hold in 95 % of cases (Bonferroni)."""
    return 1 - (1 - LEVEL) / max(1, family)

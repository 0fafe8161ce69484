"""Bootstrap over documents within fixed strata, and intervals from its draws. Knows no accuracy and no speed.

Three things keep a nominal 95 % near 95 % when documents or their strata are few:
- a stratum of n resampled as n−1 draws that count n/(n−1) each, so that its variance is not too small (Rao and Wu);
- strata of fewer than `FEW` documents have no variance of their own worth the name and are joined;
- percentiles a little further out than asked, as Student's t lies further out than the normal (Hesterberg's expanded
  percentile interval).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from orchestrator.analysis.columns import Array

DRAWS = 10_000
FEW = 5
GROUPS = 2_000  # more units than this are joined into so many random groups: as exact, and a matrix that fits
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value and the ends of its interval at `level`."""

    value: float
    low: float
    high: float
    level: float = LEVEL

    def __post_init__(self) -> None:
        assert not self.low > self.high, f"the interval runs from {self.low} to {self.high}"

    def map(self, low: float, value: float, high: float) -> "Estimate":
        return Estimate(value=value, low=low, high=high, level=self.level)


def exp(estimate: Estimate) -> Estimate:
    """An interval on the log scale as one of ratios."""
    return estimate.map(math.exp(estimate.low), math.exp(estimate.value), math.exp(estimate.high))


def join_small(strata: Array) -> tuple[Array, Array]:
    """Codes from 0 on with small strata joined, and the size of each; what is still too small joins the largest."""
    _, code, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    code = code.reshape(-1)
    if len(sizes) > 1 and (sizes < FEW).any():
        merged = np.where(sizes < FEW, -1, np.arange(len(sizes)))
        if (sizes >= FEW).any() and sizes[sizes < FEW].sum() < FEW:
            merged[merged < 0] = int(np.argmax(sizes))
        _, code, sizes = np.unique(merged[code], return_inverse=True, return_counts=True)
        code = code.reshape(-1)
    return code, sizes


def degrees(sizes: Array) -> int:
    """What the strata leave to estimate a variance from."""
    return max(1, int(sizes.sum()) - len(sizes))


def percentile(draws: Array, level: float, freedom: int) -> tuple[float, float]:
    """The ends of the expanded percentile interval of bootstrap draws."""
    tail = float(special.ndtr(special.stdtrit(freedom, (1 - level) / 2)))
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Units:
    """Documents as the units that are resampled together, and the stratum of each unit."""

    of: Array  # document → unit
    stratum: Array  # unit → stratum
    sizes: Array  # stratum → units

    @property
    def count(self) -> int:
        return len(self.stratum)

    def sums(self, values: Array) -> Array:
        """Documents' values added up by unit; the last axis is documents."""
        flat = np.atleast_2d(values)
        return np.stack([np.bincount(self.of, weights=row, minlength=self.count) for row in flat])


def units_of(strata: Array, cluster: Array, rng: np.random.Generator) -> Units:
    """Documents that share a cluster (a batch) are one unit, in the stratum of its first document."""
    _, first, unit = np.unique(cluster, return_index=True, return_inverse=True)
    unit, home = unit.reshape(-1), strata[first]
    if len(first) > GROUPS:
        fold, home = _fold(home, rng)
        unit = fold[unit]
    code, sizes = join_small(home)
    return Units(of=unit, stratum=code, sizes=sizes)


def _fold(home: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Units joined at random within their stratum, so that about `GROUPS` are left."""
    fold, homes, next_group = np.zeros(len(home), dtype=np.int64), [], 0
    for stratum in np.unique(home):
        members = rng.permutation(np.flatnonzero(home == stratum))
        groups = min(len(members), max(2 * FEW, round(GROUPS * len(members) / len(home))))
        fold[members] = next_group + np.arange(len(members)) % groups
        homes += [stratum] * groups
        next_group += groups
    return fold, np.array(homes)


def weights(units: Units, draws: int, rng: np.random.Generator, chunk: int = 1_000) -> Iterator[Array]:
    """How often each unit counts in each draw, in chunks of draws."""
    order = np.argsort(units.stratum, kind="stable")
    for start in range(0, draws, chunk):
        rows = min(chunk, draws - start)
        result = np.empty((rows, units.count))
        begin = 0
        for size in units.sizes:
            members = order[begin : begin + size]
            begin += size
            result[:, members] = _draw(int(size), rows, rng)
        yield result


def _draw(size: int, rows: int, rng: np.random.Generator) -> Array:
    if size == 1:
        return np.ones((rows, 1))
    picked = rng.integers(0, size, size=(rows, size - 1)) + np.arange(rows)[:, None] * size
    counted = np.bincount(picked.ravel(), minlength=rows * size).reshape(rows, size)
    result: Array = counted * (size / (size - 1))
    return result


MANY_VALUES = 256
ADDED = 0.5


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


def simultaneous_level(family: int) -> float:
    """The level at which `family` intervals all hold in 95 % of cases (Bonferroni)."""
    return 1 - (1 - LEVEL) / max(1, family)

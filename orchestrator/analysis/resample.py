"""Bootstrap over documents within fixed strata, and intervals from its draws. Knows no accuracy and no speed.

Three things keep a nominal 95 % near 95 % when documents or their strata are few:
- a stratum of n resampled as n−1 draws that count n/(n−1) each, so that its variance is not too small (Rao and Wu);
- strata of fewer than `FEW` documents have no variance of their own worth the name and are joined;
- percentiles a little further out than asked, as Student's t lies further out than the normal (Hesterberg's expanded
  percentile interval).
"""

import math
from collections.abc import Iterator
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

"""Evidence that may be looked at as often as one likes: e-processes for accuracy, confidence sequences for speed.

Accuracy: differences of scores between a configuration and k=1, each between −1 and 1, of documents drawn without
replacement, in random order, from a benchmark. What is tested is the benchmark's own mean. Under the null hypothesis
that it is at most `bound`, the expected next value is at most (population × bound − sum so far) ÷ documents left, so
betting a fraction of the wealth against it is a supermartingale that starts at 1. The mean over many fractions is one
too. By Ville's inequality it ever reaches 1/α with a probability of at most α (Waudby-Smith & Ramdas 2020, 2024).

Speed: the mean of log speed-ups of shards, with an asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy
& Ramdas 2021). Neighbouring shards may share a slow moment of the machine, so positive covariance between neighbours is
added to the variance. docs/statistics.md has the derivations.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

STAKES = np.geomspace(0.01, 0.9, 24)  # fractions of the wealth that are bet on each document
MAX_LOG_E = 700.0  # a hypothesis that the documents seen so far exclude; e⁷⁰⁰ is still a float
BURN_IN_SHARDS = 8  # before which no confidence sequence is used: its variance is not known well enough
SEQUENCE_RHO2 = 0.01  # narrow late rather than early: early variances are uncertain, and noise may be skewed
TOLERANCE = 1e-9  # of sums of scores, per document
BISECTIONS = 30


def log_wealth(differences: Array, bound: float, population: int) -> tuple[Array, Array]:
    """log E⁺ and log E⁻ after each document: evidence that the population's mean lies above and below `bound`.

    `differences` has one document per entry of its last axis, in the random order in which they are drawn.
    """
    y, center = (np.asarray(differences, dtype=np.float64) + 1) / 2, (bound + 1) / 2
    drawn = np.arange(1, y.shape[-1] + 1)
    assert y.shape[-1] <= population
    total = np.cumsum(y, axis=-1)
    expected = np.clip((population * center - (total - y)) / (population - drawn + 1), 1e-9, 1 - 1e-9)
    above, below = (y - expected) / expected, (expected - y) / (1 - expected)
    plus, minus = np.full(y.shape, -np.inf), np.full(y.shape, -np.inf)
    for stake in STAKES:
        plus = np.logaddexp(plus, np.cumsum(np.log1p(stake * above), axis=-1))
        minus = np.logaddexp(minus, np.cumsum(np.log1p(stake * below), axis=-1))
    goal, slack = population * center, TOLERANCE * population
    surely_above = total > goal + slack  # even if all other documents are lost
    surely_below = total + (population - drawn) <= goal + slack  # even if all are won; at the bound is not above it
    return (
        np.where(surely_above, MAX_LOG_E, np.minimum(plus - np.log(len(STAKES)), MAX_LOG_E)),
        np.where(surely_below, MAX_LOG_E, np.minimum(minus - np.log(len(STAKES)), MAX_LOG_E)),
    )


def difference_bounds(differences: Array, population: int, level: float) -> tuple[float, float]:
    """Lower and upper bound of the population's mean, each wrong at some time with a probability of at most `level`."""
    needed = -np.log(level)

    def search(side: int) -> float:
        """The bound that was ever excluded on one side and is nearest to the data: evidence is monotone in it."""
        excluded, possible = (-1.0, 1.0) if side == 0 else (1.0, -1.0)
        for _ in range(BISECTIONS):
            middle = (excluded + possible) / 2
            if log_wealth(differences, middle, population)[side].max(initial=0.0) >= needed:
                excluded = middle
            else:
                possible = middle
        return excluded

    return search(0), search(1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeanSequence:
    """Running means of a series and what their confidence sequences need; the last axis is the number of values."""

    mean: Array
    deviation: Array  # standard deviation of one value, with the covariance of neighbours

    @classmethod
    def of(cls, values: Array) -> "MeanSequence":
        values = np.asarray(values, dtype=np.float64)
        count = np.arange(1, values.shape[-1] + 1)
        first = values[..., :1]
        shifted = values - first  # by a constant, for the precision of the sums
        total = np.cumsum(shifted, axis=-1)
        mean, several = total / count, np.maximum(count - 1, 1)
        variance = (np.cumsum(shifted**2, axis=-1) - count * mean**2) / several
        previous = np.concatenate((np.zeros_like(first), shifted[..., :-1]), axis=-1)
        neighbours = np.cumsum(shifted * previous, axis=-1) - mean * (2 * total - shifted) + (count - 1) * mean**2
        neighbours += mean * shifted[..., :1]  # the first value has no predecessor; shifted, it is 0
        spread = np.maximum(variance, 0) + 2 * np.maximum(neighbours / several, 0)
        return cls(mean=mean + first, deviation=np.sqrt(np.maximum(spread, 1e-18)))

    def half_width(self, level: float) -> Array:
        """Of a one-sided sequence: the mean lies beyond it at some time with a probability of about `level`."""
        count = np.arange(1, self.mean.shape[-1] + 1)
        growth = count * SEQUENCE_RHO2 + 1
        factor = np.sqrt(2 * growth / (count**2 * SEQUENCE_RHO2) * np.log1p(np.sqrt(growth) / (2 * level)))
        return np.where(count >= BURN_IN_SHARDS, self.deviation * factor, np.inf)

    def low(self, level: float) -> Array:
        result: Array = self.mean - self.half_width(level)
        return result

    def high(self, level: float) -> Array:
        result: Array = self.mean + self.half_width(level)
        return result

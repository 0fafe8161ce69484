"""Confidence intervals: stratified bootstrap over documents, paired bootstrap, and score intervals for shares.

Three corrections keep a nominal 95 % near 95 % when documents or strata are few:
- a stratum of n documents is resampled as n−1 draws with weight n/(n−1), so its variance is not too small (Rao and Wu);
- strata with fewer than MIN_STRATUM documents are joined;
- percentiles lie further out, as Student's t does compared with the normal (Hesterberg's expanded percentiles).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from orchestrator.analysis.columns import Array
from orchestrator.core.totals import wilson_interval

CONFIDENCE = 0.95
DRAWS = 10_000
MIN_STRATUM = 5  # documents
MAX_UNITS = 1_000  # more units are joined at random into about this many groups, which keeps the weight matrix small
DRAWS_PER_CHUNK = 1_000
LARGEST_LOG = 700.0  # its exponential is still finite
MAX_DISTINCT_DIFFERENCES = 256  # with more distinct values, the paired bootstrap takes only FEWER_DRAWS
FEWER_DRAWS = 2_000
PSEUDO_DOCUMENTS = 0.5  # added as lost and as won before a paired bootstrap
FREEDOM_DISCOUNT = 0.7  # sample fourth moments are too low, so degrees of freedom derived from them are too high
UNDISCOUNTED_FREEDOM = 10.0  # up to here they are not discounted


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A value and the ends of its confidence interval at `level`."""

    value: float
    low: float
    high: float
    level: float = CONFIDENCE

    def __post_init__(self) -> None:
        assert not self.low > self.high, f"the interval runs from {self.low} to {self.high}"

    def mapped(self, function: Callable[[float], float]) -> "Estimate":
        """The same interval on another scale; the function must be increasing."""
        value, low, high = map(function, (self.value, self.low, self.high))
        return Estimate(value=value, low=low, high=high, level=self.level)

    def exp(self) -> "Estimate":
        """From the log scale to ratios."""
        return self.mapped(exp)

    def percent(self) -> "Estimate":
        """From shares to percent (or percentage points)."""
        return self.mapped(lambda share: 100 * share)


def exp(value: float) -> float:
    """Infinity if the result is too large for a float."""
    return math.exp(value) if value < LARGEST_LOG else math.inf


def log(value: float) -> float:
    """Minus infinity for 0."""
    return math.log(value) if value > 0 else -math.inf


def around(value: float, low: float, high: float, level: float = CONFIDENCE) -> Estimate:
    """An estimate whose interval is extended to contain its value."""
    return Estimate(value=value, low=min(low, value), high=max(high, value), level=level)


def unbounded(value: float, level: float) -> Estimate:
    """The estimate from a single document, which says nothing about others."""
    return Estimate(value=value, low=-math.inf, high=math.inf, level=level)


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """Two-sided confidence levels of a task's intervals, for `comparisons` configurations and `looks` at the data.

    The familywise error is divided by the looks. Verdicts use one end of an interval, which is a one-sided bound with
    half of the error (see `one_sided`).
    """

    comparisons: int = 1
    looks: int = 1

    @property
    def error(self) -> float:
        return (1 - CONFIDENCE) / max(1, self.looks)

    @property
    def simultaneous(self) -> float:
        """At this level all intervals hold together, and a single configuration is rejected (two criteria share it)."""
        return 1 - self.error / max(1, self.comparisons)

    @property
    def confirming(self) -> float:
        """At this level a configuration is confirmed: both criteria must hold, so each may use the whole error."""
        return 1 - 2 * self.error / max(1, self.comparisons)

    @property
    def joint(self) -> float:
        """At this level all configurations are rejected: an intersection-union test, whose parts need no correction."""
        return 1 - self.error

    @property
    def all(self) -> tuple[float, ...]:
        return CONFIDENCE, self.simultaneous, self.confirming, self.joint


def one_sided(level: float) -> float:
    """The level of each end of a two-sided interval, taken as a one-sided bound."""
    return (1 + level) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """One-sided bounds that decide: `low` confirms, `high` rejects, `joint_high` rejects all configurations at once."""

    low: float
    low_level: float
    high: float
    high_level: float
    joint_high: float
    joint_level: float

    @classmethod
    def of(cls, intervals: Sequence[Estimate]) -> "Bounds":
        """From intervals at the levels of `Levels.all`."""
        _, simultaneous, confirming, joint = intervals
        return cls(
            low=confirming.low,
            low_level=one_sided(confirming.level),
            high=simultaneous.high,
            high_level=one_sided(simultaneous.level),
            joint_high=joint.high,
            joint_level=one_sided(joint.level),
        )

    def mapped(self, function: Callable[[float], float]) -> "Bounds":
        """The same bounds on another scale; the function must be increasing."""
        ends = {name: function(getattr(self, name)) for name in ("low", "high", "joint_high")}
        return replace(self, **ends)


def accuracy_interval(scores: Array) -> Estimate:
    """Mean score, with Wilson's interval if (nearly) all scores are 0 or 1, else with Student's t."""
    documents, value = len(scores), float(scores.mean())
    if ((scores >= 0) & (scores <= 1)).all() and np.isin(scores, (0.0, 1.0)).mean() > 0.9:
        return around(value, *wilson_interval(float(scores.sum()), documents))
    half = 0.0
    if documents > 1:
        reach = special.stdtrit(documents - 1, one_sided(CONFIDENCE))
        half = float(reach * scores.std(ddof=1) / math.sqrt(documents))
    return Estimate(value=value, low=value - half, high=value + half)


def tango_interval(lost: float, won: float, documents: int, level: float = CONFIDENCE) -> Estimate:
    """Tango's score interval of a paired difference of shares, won minus lost (Statistics in Medicine 17, 1998)."""
    reach = float(special.ndtri(one_sided(level)))
    value = (won - lost) / documents
    low = _tango_end(lost, won, documents, reach, -1.0, value)
    high = _tango_end(lost, won, documents, -reach, value, 1.0)
    return around(value, low, high, level)


def _tango_end(lost: float, won: float, documents: int, score: float, below: float, above: float) -> float:
    """The difference between `below` and `above` at which Tango's score has this value.

    Bisection: the score falls as the difference grows.
    """
    while True:
        middle = (below + above) / 2
        if not below < middle < above:
            return middle
        if _tango_score(lost, won, documents, middle) > score:
            below = middle
        else:
            above = middle


def _tango_score(lost: float, won: float, n: int, difference: float) -> float:
    """(won − lost − n·difference) ÷ its standard error."""
    variance = tango_variance(lost / n, won / n, difference)
    distance = won - lost - n * difference
    return math.copysign(math.inf, distance) if variance <= 0 else distance / math.sqrt(n * variance)


def tango_variance(lost: float, won: float, difference: float) -> float:
    """Variance of a document's paired difference, given the shares lost and won, if this is the true difference."""
    linear = (2 - won + lost) * difference - won - lost
    constant = -lost * difference * (1 - difference)
    likeliest = (math.sqrt(max(0.0, linear * linear - 8 * constant)) - linear) / 4  # share of lost documents
    return 2 * likeliest + difference * (1 - difference)


def paired_bootstrap(
    differences: Array,
    strata: Array,
    rng: np.random.Generator,
    levels: Sequence[float] = (CONFIDENCE,),
    draws: int = DRAWS,
) -> list[Estimate]:
    """The mean of paired differences with a stratified bootstrap interval at each level."""
    value = float(differences.mean())
    if len(differences) < 2:
        return [unbounded(value, level) for level in levels]
    sampled, freedom = difference_draws(differences, strata, draws, rng)
    return [around(value, *expanded_percentiles(sampled, level, freedom), level) for level in levels]


def difference_draws(differences: Array, strata: Array, draws: int, rng: np.random.Generator) -> tuple[Array, int]:
    """Bootstrap draws of the mean difference, and their degrees of freedom.

    Resampling documents and counting those lost and won is one multinomial draw per stratum, so the cost does not
    grow with the documents. Half a lost and half a won document are added first: otherwise an interval without any
    observed change would be empty. In simulation (100 documents, 5 % changed) the plain percentile interval covers
    88 %, this one 96 to 97 %; with far fewer changes it is too wide rather than too narrow.
    """
    code, sizes = join_small(strata)
    total = len(differences)
    changed = differences[differences != 0]
    unit = math.sqrt(float(np.mean(changed**2))) if len(changed) else 1.0
    values, value_code = np.unique(np.concatenate((differences, [-unit, 0.0, unit])), return_inverse=True)
    value_code = value_code.reshape(-1)[:total]
    pseudo = np.isin(values, (-unit, unit)).astype(float)
    rounds = draws if len(values) <= MAX_DISTINCT_DIFFERENCES else min(draws, FEWER_DRAWS)
    result = np.zeros(rounds)
    table = np.bincount(code * len(values) + value_code, minlength=len(sizes) * len(values)).reshape(len(sizes), -1)
    for counts, size in zip(table, sizes, strict=True):
        chances = counts + PSEUDO_DOCUMENTS * pseudo * size / total
        picked = rng.multinomial(max(1, int(size) - 1), chances / chances.sum(), size=rounds)
        result += picked @ values / picked[0].sum() * (size / total)
    return result, degrees_of_freedom(sizes)


def join_small(strata: Array) -> tuple[Array, Array]:
    """Stratum codes after small strata are joined, and the size of each stratum.

    If all small strata together are still too small, they join the largest stratum.
    """
    _, code, sizes = np.unique(strata, return_inverse=True, return_counts=True)
    code = code.reshape(-1)
    if len(sizes) > 1 and (sizes < MIN_STRATUM).any():
        merged = np.where(sizes < MIN_STRATUM, -1, np.arange(len(sizes)))
        if (sizes >= MIN_STRATUM).any() and sizes[sizes < MIN_STRATUM].sum() < MIN_STRATUM:
            merged[merged < 0] = int(np.argmax(sizes))
        _, code, sizes = np.unique(merged[code], return_inverse=True, return_counts=True)
        code = code.reshape(-1)
    return code, sizes


def degrees_of_freedom(sizes: Array) -> int:
    """Of a stratified sample, from the sizes of its strata."""
    return max(1, int(sizes.sum()) - len(sizes))


def effective_freedom(weights: Array, influence: Array | None = None) -> float:
    """Degrees of freedom of a variance, from its units' weights in it; before strata are subtracted.

    With equal weights it is about the number of units. It is smaller if a few heavy units dominate the variance, or if
    `influence` (each unit's part in the statistic) has heavy tails.
    """
    positive = weights > 0
    kurtosis = 3 * _fourth_moment(weights[positive])
    if influence is not None:
        kurtosis = max(kurtosis, _fourth_moment(influence[positive]))
    freedom = 2 * int(positive.sum()) / (kurtosis - 1)
    return max(min(freedom, UNDISCOUNTED_FREEDOM), FREEDOM_DISCOUNT * freedom)


def _fourth_moment(values: Array) -> float:
    """Relative to the squared second moment; 1 if all values are equal or 0."""
    squares = values**2
    total = float(squares.sum())
    return float(squares @ squares) * len(values) / total**2 if total > 0 else 1.0


def scaled_percentiles(draws: Array, level: float, freedom: float) -> tuple[float, float]:
    """Ends of an interval: the 95 % percentiles of the draws, with their distances from the median scaled to `level`.

    The scale follows from Student's t. With few degrees of freedom, reading percentiles that far out would return the
    extremes of the draws.
    """
    low, middle, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, 0.5, (1 + CONFIDENCE) / 2])
    scale = float(special.stdtrit(freedom, one_sided(level)) / special.ndtri(one_sided(CONFIDENCE)))
    return float(middle - scale * (middle - low)), float(middle + scale * (high - middle))


def expanded_percentiles(draws: Array, level: float, freedom: float) -> tuple[float, float]:
    """Ends of the expanded percentile interval of bootstrap draws."""
    tail = float(special.ndtr(special.stdtrit(freedom, (1 - level) / 2)))
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Units:
    """Documents grouped into the units that are resampled, and the stratum of each unit."""

    of: Array  # document → unit
    stratum: Array  # unit → stratum
    sizes: Array  # stratum → number of units

    @property
    def count(self) -> int:
        return len(self.stratum)

    def sums(self, values: Array) -> Array:
        """Document values (last axis) summed by unit."""
        flat = np.atleast_2d(values)
        return np.stack([np.bincount(self.of, weights=row, minlength=self.count) for row in flat])


def units_of(strata: Array, cluster: Array, rng: np.random.Generator) -> Units:
    """Makes each cluster (the documents of a batch) a unit, in the stratum of its first document."""
    _, first, unit = np.unique(cluster, return_index=True, return_inverse=True)
    unit, stratum = unit.reshape(-1), strata[first]
    if len(first) > MAX_UNITS:
        group, stratum = _random_groups(stratum, rng)
        unit = group[unit]
    code, sizes = join_small(stratum)
    return Units(of=unit, stratum=code, sizes=sizes)


def _random_groups(stratum_of: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Joins units of a stratum at random, into about MAX_UNITS groups: each unit's group, and each group's stratum."""
    group_of, group_strata, next_group = np.zeros(len(stratum_of), dtype=np.int64), [], 0
    for stratum in np.unique(stratum_of):
        members = rng.permutation(np.flatnonzero(stratum_of == stratum))
        groups = min(len(members), max(2 * MIN_STRATUM, round(MAX_UNITS * len(members) / len(stratum_of))))
        group_of[members] = next_group + np.arange(len(members)) % groups
        group_strata += [stratum] * groups
        next_group += groups
    return group_of, np.array(group_strata)


def bootstrap_weights(units: Units, draws: int, rng: np.random.Generator) -> Iterator[Array]:
    """Weight of each unit in each draw, in chunks of draws."""
    order = np.argsort(units.stratum, kind="stable")
    for start in range(0, draws, DRAWS_PER_CHUNK):
        rows = min(DRAWS_PER_CHUNK, draws - start)
        result = np.empty((rows, units.count))
        begin = 0
        for size in units.sizes:
            members = order[begin : begin + size]
            begin += size
            result[:, members] = _stratum_weights(int(size), rows, rng)
        yield result


def _stratum_weights(size: int, rows: int, rng: np.random.Generator) -> Array:
    if size == 1:
        return np.ones((rows, 1))
    picked = rng.integers(0, size, size=(rows, size - 1)) + np.arange(rows)[:, None] * size
    counted = np.bincount(picked.ravel(), minlength=rows * size).reshape(rows, size)
    result: Array = counted * (size / (size - 1))
    return result

"""Evidence that stays valid at any number of looks: e-processes for accuracy, confidence sequences for speed.

Accuracy: the data are differences of scores between a configuration and k=1, each between −1 and 1, of documents drawn
from a benchmark in random order without replacement. The test is about the mean over the whole benchmark. Under the
null hypothesis that this mean is at most `bound`, the expected next value is at most (population × bound − sum so far)
÷ documents left, so the wealth from betting a fraction of it against the hypothesis is a supermartingale that starts
at 1, and so is the mean of the wealth over many fractions. By Ville's inequality, it ever reaches 1/α with a
probability of at most α (Waudby-Smith & Ramdas 2020, 2024).

Speed: the mean of the shards' log speed-ups, with an asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha,
Kennedy & Ramdas 2021). The machine may be slow during several neighbouring shards, so a positive covariance between
neighbours is added to the variance. docs/statistics.md has the derivations.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from orchestrator.core.speed import MAX_LENGTH_CHANGE, Array, TrialTimes, calibrate
from orchestrator.core.totals import COLUMNS, Sums, sums_by_attempt
from orchestrator.core.trial import Trial

STAKES = np.geomspace(0.01, 0.9, 24)  # fractions of the wealth that are bet on each document
MAX_LOG_E = 700.0  # for a hypothesis that the documents rule out; e⁷⁰⁰ still fits a float
BURN_IN_SHARDS = 12  # before these, the variance is too uncertain for a confidence sequence
SEQUENCE_FOCUS = 3.0  # ρ² × planned shards; 16 would be narrowest at the end, but early variances are uncertain
COVARIANCE_LAGS = 3  # the number of following shards that a slow phase of the machine also affects
UNCERTAIN_SHARDS = 3.0  # a deviation estimated from n shards is multiplied by 1 + 3/n
TOLERANCE = 1e-9  # of sums of scores, per document
BISECTIONS = 30
ROW_COLUMNS = ("doc_id", "correct", "metrics", *(name for name in COLUMNS if name != "correct"))


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
        """The bound nearest to the data that was excluded at any time on one side, by bisection."""
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
    deviation: Array  # standard deviation of one value, with the covariance of its neighbours
    rho2: float

    @classmethod
    def of(cls, values: Array, rho2: float) -> "MeanSequence":
        values = np.asarray(values, dtype=np.float64)
        count = np.arange(1, values.shape[-1] + 1)
        first = values[..., :1]
        shifted = values - first  # by a constant, for the precision of the sums
        total = np.cumsum(shifted, axis=-1)
        mean, several = total / count, np.maximum(count - 1, 1)
        squares = np.cumsum(shifted**2, axis=-1) - count * mean**2
        covariance = np.zeros_like(mean)
        for lag in range(1, min(COVARIANCE_LAGS, values.shape[-1] - 1) + 1):
            products = np.cumsum(shifted[..., lag:] * shifted[..., :-lag], axis=-1)
            later, earlier = total[..., lag:] - total[..., lag - 1 : lag], total[..., :-lag]
            average, pairs = mean[..., lag:], count[lag:] - lag
            found = products - average * (later + earlier) + pairs * average**2
            covariance[..., lag:] += np.maximum(found, 0)
        spread = (np.maximum(squares, 0) + 2 * covariance) / several
        deviation = np.sqrt(np.maximum(spread, 1e-18)) * (1 + UNCERTAIN_SHARDS / count)
        return cls(mean=mean + first, deviation=deviation, rho2=rho2)

    def half_width(self, level: float) -> Array:
        """Half-width of a one-sided sequence: the mean is ever beyond it with a probability of about `level`."""
        count = np.arange(1, self.mean.shape[-1] + 1)
        growth = count * self.rho2 + 1
        factor = np.sqrt(2 * growth / (count**2 * self.rho2) * np.log1p(np.sqrt(growth) / (2 * level)))
        return np.where(count >= BURN_IN_SHARDS, self.deviation * factor, np.inf)

    def low(self, level: float) -> Array:
        result: Array = self.mean - self.half_width(level)
        return result

    def high(self, level: float) -> Array:
        result: Array = self.mean + self.half_width(level)
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceRules:
    alpha: float
    margin: float  # points
    speedup: float
    comparisons: int  # configurations of the task that are compared with k=1
    generates: bool = True  # otherwise accuracy alone decides
    shards: int = 1600  # planned for the task; older stored decisions lack it

    @property
    def rho2(self) -> float:
        """The parameter that sets where the confidence sequence of the speed is narrowest. Fixed before the sweep."""
        return SEQUENCE_FOCUS / self.shards

    @property
    def log_e_confirm(self) -> float:
        return math.log(self.comparisons / self.alpha)

    @property
    def log_e_reject(self) -> float:
        return math.log(2 * self.comparisons / self.alpha)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialEvidence:
    """The facts from a finished trial's rows that a race uses."""

    scores: Mapping[str, float]  # primary metric by document id
    tokens: int
    seconds: float
    calibration: float
    actor: str


def trial_evidence(rows: pa.Table, primary: Mapping[str, str]) -> Iterator[tuple[Trial, TrialEvidence]]:
    """Each trial in a table with ROW_COLUMNS, in any order; `primary` is the metric of each task."""
    trials: dict[str, Trial] = {}
    sums: dict[str, Sums] = {}
    for trial, own in sums_by_attempt(rows):
        trials[trial.trial_id] = trial
        sums.setdefault(trial.trial_id, Sums()).add(own)
    scores: dict[str, dict[str, float]] = {}
    columns = (rows[name].to_pylist() for name in ("trial_id", "doc_id", "correct", "metrics"))
    for trial_id, doc_id, right, text in zip(*columns, strict=True):
        value = metric_value(text, primary.get(trials[trial_id].task, "")) if right is None else float(right)
        scores.setdefault(trial_id, {})[doc_id] = value
    for trial_id, total in sums.items():
        yield (
            trials[trial_id],
            TrialEvidence(
                scores=scores[trial_id],
                tokens=total.tokens,
                seconds=total.seconds,
                calibration=total.work / total.seconds if total.seconds else math.nan,
                actor=total.actor,
            ),
        )


def metric_value(text: str | None, primary: str) -> float:
    """The primary metric in a row's JSON, or its only metric; NaN if there is none."""
    try:
        metrics = json.loads(text or "")
    except ValueError:
        return math.nan
    if not isinstance(metrics, Mapping):
        return math.nan
    value = metrics.get(primary)
    if value is None and len(metrics) == 1:
        value = next(iter(metrics.values()))
    return float(value) if isinstance(value, bool | int | float) else math.nan


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedEvidence:
    """Confidence sequences of log ratios against k=1, over shards: tokens/s, documents/s and answer length."""

    tokens: MeanSequence
    documents: MeanSequence
    length: MeanSequence

    @classmethod
    def of(cls, tokens: Array, documents: Array, rules: RaceRules) -> "SpeedEvidence":
        values = {"tokens": tokens, "documents": documents, "length": tokens - documents}
        return cls(**{name: MeanSequence.of(value, rules.rho2) for name, value in values.items()})

    def bounds(self, rules: RaceRules) -> dict[str, float]:
        """The speed-up in tokens/s with its bounds after the last shard, as `Look` names them."""
        level, tokens = rules.alpha / rules.comparisons, self.tokens
        values = {"speedup": tokens.mean, "speedup_low": tokens.low(level), "speedup_high": tokens.high(level / 4)}
        return {name: math.exp(float(path[-1])) for name, path in values.items()}

    def is_fast(self, rules: RaceRules) -> Array:
        """After each shard, whether the speed-up is certainly above the goal.

        It must be so in tokens/s, and also in documents/s unless the answer length certainly stays the same.
        """
        goal, level = math.log(rules.speedup), rules.alpha / rules.comparisons
        same_length = (self.length.low(level / 4) > math.log(1 - MAX_LENGTH_CHANGE)) & (
            self.length.high(level / 4) < math.log(1 + MAX_LENGTH_CHANGE)
        )
        result: Array = (self.tokens.low(level) > goal) & ((self.documents.low(level / 2) > goal) | same_length)
        return result

    def is_slow(self, rules: RaceRules) -> Array:
        """After each shard, whether the speed-up is certainly below the goal.

        It must be so in tokens/s, or in documents/s if the answer length certainly differs.
        """
        goal, level = math.log(rules.speedup), rules.alpha / rules.comparisons
        other_length = (self.length.low(level / 8) > math.log(1 + MAX_LENGTH_CHANGE)) | (
            self.length.high(level / 8) < math.log(1 - MAX_LENGTH_CHANGE)
        )
        result: Array = (self.tokens.high(level / 4) < goal) | ((self.documents.high(level / 4) < goal) & other_length)
        return result


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FirstDecisions:
    """The first decisions of many simulated races: arrays of sweeps × configurations."""

    outcome: Array  # 1 confirmed, −1 rejected, 0 neither
    shards: Array  # until the decision; all of them without one


def first_decisions(differences: Array, tokens: Array, documents: Array, rules: RaceRules) -> FirstDecisions:
    """The decisions of many races that are evaluated after every shard. For simulations: takes arrays, not rows.

    The last axes are documents (`differences` of scores) and shards (log speed-ups in tokens/s and in documents/s).
    """
    population, shards = differences.shape[-1], tokens.shape[-1]
    ends = (np.arange(1, shards + 1) * population) // shards
    plus, minus = (path[..., ends - 1] for path in log_wealth(differences, -rules.margin / 100, population))
    accurate, inaccurate = plus >= rules.log_e_confirm, minus >= rules.log_e_reject
    fast, slow = np.ones_like(accurate), np.zeros_like(accurate)
    if rules.generates:
        speed = SpeedEvidence.of(tokens, documents, replace(rules, shards=shards))
        fast, slow = speed.is_fast(rules), speed.is_slow(rules)
    ever_fast, ever_accurate = (np.maximum.accumulate(found, axis=-1) for found in (fast, accurate))
    confirmed, rejected = (
        np.where(found.any(-1), found.argmax(-1), shards) for found in (ever_fast & ever_accurate, slow | inaccurate)
    )
    first = np.minimum(confirmed, rejected)
    outcome = np.where(first == shards, 0, np.where(confirmed < rejected, 1, -1))
    return FirstDecisions(outcome=outcome, shards=np.minimum(first + 1, shards))


def log_ratios(own: Sequence[TrialEvidence], base: Sequence[TrialEvidence]) -> tuple[Array, Array]:
    """Calibrated log speed-ups of each shard over k=1, in tokens/s and in documents/s, from these shards alone."""
    trials, shards = [*own, *base], len(own)
    actors = {name: code for code, name in enumerate(dict.fromkeys(trial.actor for trial in trials))}
    is_k1 = np.repeat([False, True], shards)
    seconds = np.array([trial.seconds for trial in trials])
    times = TrialTimes(
        shard=np.tile(np.arange(shards), 2),
        baseline=np.zeros(2 * shards, dtype=np.int64),
        configuration=is_k1.astype(np.int64),
        is_k1=is_k1,
        actor=np.array([actors[trial.actor] for trial in trials], dtype=np.int64),
        documents=np.array([len(trial.scores) for trial in trials]),
        tokens=np.array([trial.tokens for trial in trials]),
        seconds=seconds,
        calibration=np.array([trial.calibration for trial in trials]),
    )
    work = np.log(np.maximum(calibrate(times, paired=True).work, 1e-12))
    documents = work[shards:] - work[:shards]
    tokens = np.log(np.maximum(times.tokens, 1))
    return tokens[:shards] - tokens[shards:] + documents, documents

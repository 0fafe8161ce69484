"""The estimator of speed that every display uses: calibrated times of trials, and speed-ups over k=1.

A speed-up compares a configuration with all k=1 runs on the shards of documents that both have completed: tokens ÷
calibrated time of one side ÷ the same of the other. An actor's typical calibration counts in full, since actors may run
on different devices. A trial's deviation from it counts with an exponent below 1, because a calibration is itself a
noisy sample. The exponent is fitted to the k=1 replicates, which do the same work; in a race, to the compared pairs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PRIOR_EXPONENT = 0.66  # fitted on earlier sweeps; counts as PRIOR_WEIGHT observations
PRIOR_WEIGHT = 4.0
MAX_LENGTH_CHANGE = 0.1  # of answers; beyond it, tokens per second do not measure what is gained


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrialTimes:
    """One entry per trial in each array; codes are integers from 0."""

    shard: Array  # code of sweep, task and shard: trials with the same documents
    baseline: Array  # code of task and decode settings: configurations with the same k=1
    configuration: Array  # code of task and configuration
    is_k1: Array
    actor: Array  # code of sweep, actor and device
    documents: Array
    tokens: Array
    seconds: Array  # wall time of the decode batches
    calibration: Array  # tokens/s of the actor; NaN if unknown

    @property
    def complete(self) -> Array:
        """Trials with as many documents as any trial of their shard; only these are compared."""
        most = np.zeros(int(self.shard.max(initial=-1)) + 1, dtype=np.int64)
        np.maximum.at(most, self.shard, self.documents)
        result: Array = (self.documents == most[self.shard]) & (self.seconds > 0)
        return result


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CalibratedTimes:
    """`work` is each trial's time × its actor's calibrated speed: the tokens k=1 would have generated meanwhile."""

    work: Array
    exponent: float


def calibrate(times: TrialTimes, *, paired: bool = False) -> CalibratedTimes:
    """`paired`: the shards have one trial of k=1 and one of a single configuration."""
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.log(times.calibration.astype(np.float64))
    known = np.isfinite(speed)
    typical = _medians(speed[known], times.actor[known], int(times.actor.max(initial=-1)) + 1)
    found = typical[np.isfinite(typical)]
    typical = np.where(np.isfinite(typical), typical, np.median(found) if len(found) else 0.0)[times.actor]
    deviation = np.where(known, speed - typical, 0.0)
    exponent = _fit_exponent(times, typical, deviation, paired)
    return CalibratedTimes(work=times.seconds * np.exp(typical + exponent * deviation), exponent=exponent)


def _medians(values: Array, group: Array, groups: int) -> Array:
    """The median of each group's values; NaN for a group without values."""
    order = np.lexsort((values, group))
    ordered, count = values[order], np.bincount(group, minlength=groups)
    start = np.cumsum(count) - count
    some = count > 0
    low, high = (np.where(some, start + (count - 1) // 2, 0), np.where(some, start + count // 2, 0))
    if not len(ordered):
        return np.full(groups, np.nan)
    return np.where(some, (ordered[low] + ordered[high]) / 2, np.nan)


def _fit_exponent(times: TrialTimes, typical: Array, deviation: Array, paired: bool) -> float:
    """Least squares between trials of a shard, shrunk towards PRIOR_EXPONENT, between 0 and 1.

    The trials are k=1 replicates, or pairs, whose times per token may differ by a constant factor.
    """
    taken = np.flatnonzero(times.complete & (times.is_k1 | paired))
    same_work, cells = group_codes(times.shard[taken], times.baseline[taken])
    count = np.maximum(1, np.bincount(same_work, minlength=cells))

    def within(values: Array) -> Array:
        result: Array = values - (np.bincount(same_work, weights=values, minlength=cells) / count)[same_work]
        return result

    x, y = deviation[taken], np.log(times.seconds[taken]) + typical[taken]
    freedom = len(taken) - cells
    if paired:
        sign = np.where(times.is_k1[taken], 1.0, -1.0)
        x, y = sign * within(x), sign * within(y - np.log(np.maximum(times.tokens[taken], 1)))
        x, y, freedom = x - x.mean(), y - y.mean(), freedom - 1
    else:
        x, y = within(x), within(y)
    squares = float(x @ x) if len(taken) else 0.0
    if freedom < 1 or squares < 1e-12:
        return PRIOR_EXPONENT
    fitted = -float(x @ y) / squares
    return float(np.clip((freedom * fitted + PRIOR_WEIGHT * PRIOR_EXPONENT) / (freedom + PRIOR_WEIGHT), 0.0, 1.0))


def paired_speedups(times: TrialTimes, work: Array) -> dict[int, float]:
    """By configuration: tokens per calibrated time relative to k=1, on the shards that both have completed."""
    taken = np.flatnonzero(times.complete)
    shard, baseline, configuration = times.shard[taken], times.baseline[taken], times.configuration[taken]
    tokens, spent, is_k1 = times.tokens[taken].astype(np.float64), work[taken], times.is_k1[taken]
    pair, pairs = group_codes(baseline, shard)
    base = _means(pair[is_k1], pairs, tokens[is_k1], spent[is_k1])
    own, cells = group_codes(configuration, pair)
    sums = _means(own, cells, tokens, spent)
    pair_of, configuration_of = np.zeros(cells, dtype=np.int64), np.zeros(cells, dtype=np.int64)
    pair_of[own], configuration_of[own] = pair, configuration
    shared = np.isfinite(base[0][pair_of])
    names = configuration_of[shared]
    columns = (sums[0][shared], sums[1][shared], base[0][pair_of][shared], base[1][pair_of][shared])
    totals = [np.bincount(names, weights=column) for column in columns]
    own_tokens, own_work, base_tokens, base_work = totals
    return {
        int(name): float(own_tokens[name] / own_work[name] / (base_tokens[name] / base_work[name]))
        for name in np.unique(names)
        if own_tokens[name] > 0 and base_tokens[name] > 0
    }


def ideal_speedup(k: int | None, layers: int, depth: int | None) -> float | None:
    """The speed-up if `layers` of `depth` layers ran only in every k-th pass and nothing else changed.

    1 / (1 − (k−1)/k · layers/depth), or 1.27 for 12 of 28 layers at k=2. None where it is not defined: at
    k=1, and for policies without a period.
    """
    if k is None or k < 2 or not depth:
        return None
    left = 1 - (k - 1) / k * layers / depth
    return 1 / left if left > 0 else None


def _means(group: Array, groups: int, *columns: Array) -> list[Array]:
    """The mean of each column by group (over repeats, or over all k=1 runs); NaN for an empty group."""
    count = np.bincount(group, minlength=groups)
    with np.errstate(invalid="ignore"):
        return [np.bincount(group, weights=column, minlength=groups) / count for column in columns]


def group_codes(*keys: Array) -> tuple[Array, int]:
    """A code for each distinct combination of the keys, in their sorted order, and how many there are."""
    combined, span = np.zeros(len(keys[0]), dtype=np.int64), 1
    for key in keys:
        rank, values = _ranked(key)
        if span * values > 2**62:
            combined, span = _without_gaps(combined, span)
        combined, span = combined * values + rank, span * values
    return _without_gaps(combined, span)


def _ranked(key: Array) -> tuple[Array, int]:
    """A key as small integers in the same order, and a number that is larger than all of them."""
    if key.dtype.kind in "iub" and len(key) and key.min() >= 0 and key.max() < 2**31:
        return key.astype(np.int64), int(key.max()) + 1
    values, rank = np.unique(key, return_inverse=True)
    return rank.reshape(-1), max(1, len(values))


def _without_gaps(combined: Array, span: int) -> tuple[Array, int]:
    """The same groups as consecutive codes, and how many there are; `span` is larger than all values of `combined`.

    Counts the values if the span is small, else sorts them.
    """
    if span <= 8 * len(combined) + 1024:
        used = np.bincount(combined, minlength=span) > 0
        return (np.cumsum(used) - 1)[combined], int(used.sum())
    values, code = np.unique(combined, return_inverse=True)
    return code.reshape(-1), len(values)

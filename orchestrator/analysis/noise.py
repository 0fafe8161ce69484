"""The noise floor: how far runs at k=1, which are the same by definition, lie apart. Knows no policies.

Two things are read from these A/A runs. Their spread, which any speed-up must exceed. And the part of it that belongs
to whole trials (a calibration a little off, a machine busy for a minute): documents of a trial share it, so resampling
documents cannot see it, and every interval of a speed-up is widened by it.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from orchestrator.analysis.columns import Array
from orchestrator.analysis.pairs import TaskRows
from orchestrator.analysis.resample import LEVEL, Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialNoise:
    """Standard deviation of a trial's log speed beyond what its documents explain."""

    deviation: float
    freedom: int

    def half_width(self, trials: float, replicates: float, level: float) -> float:
        """What it adds to the log speed-up of a configuration of so many trials against so many pooled runs."""
        reach = float(special.stdtrit(self.freedom, (1 + level) / 2))
        return reach * self.deviation * math.sqrt((1 + 1 / replicates) / trials)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseFloor:
    """Calibrated speeds of the runs at k=1 relative to their pooled speed, on the documents all of them have."""

    labels: tuple[str, ...]
    speeds: tuple[Estimate, ...]  # 1 is the pooled speed
    raw: tuple[float, ...]  # tokens/s of the same runs, not calibrated
    spread: Estimate  # fastest ÷ slowest
    documents: int
    trial: TrialNoise


def widened(estimate: Estimate, half: float) -> Estimate:
    """A log interval with independent noise added to both sides."""
    low = estimate.value - math.hypot(estimate.value - estimate.low, half)
    high = estimate.value + math.hypot(estimate.high - estimate.value, half)
    return estimate.map(low, estimate.value, high)


def trial_noise(rows: TaskRows, runs: Array, clusters: Array) -> TrialNoise:
    """From runs of the same work on the same documents: variance between trials minus what their parts explain.

    A part is a document, or those that share a batch and thus its errors. Per part the log calibrated time of a run is
    compared with the mean over runs; a trial's mean of these, weighted by the parts' shares of its time, is its own
    error plus the average of its parts' errors.
    """
    everywhere = (rows.cell[runs] >= 0).all(axis=0)
    _, first, part = np.unique(clusters[everywhere], return_index=True, return_inverse=True)
    replicates, parts = len(runs), len(first)
    if replicates < 2 or parts < 2:
        return TrialNoise(deviation=0.0, freedom=1)
    times = rows.values(runs, "work")[:, everywhere]
    work = np.maximum(np.stack([np.bincount(part.reshape(-1), weights=row) for row in times]), 1e-12)
    off = np.log(work) - np.log(work).mean(axis=0)
    trial = rows.columns["trial_id"][rows.cell[runs][:, everywhere][:, first]]
    group = np.unique(trial, axis=1, return_inverse=True)[1].reshape(-1)  # parts that share their trials in all runs
    weight = work.mean(axis=0)
    weight = weight / np.bincount(group, weights=weight)[group]
    blocks, concentration = int(group.max()) + 1, np.bincount(group, weights=weight**2)
    means = np.stack([np.bincount(group, weights=weight * row) for row in off])
    left = off - means[:, group]
    single = float((left**2).sum()) / max(1, (replicates - 1) * (parts - blocks))
    between = float((means**2).sum()) / ((replicates - 1) * blocks)
    excess = max(0.0, between - single * float(concentration.mean()))
    return TrialNoise(deviation=math.sqrt(excess), freedom=(replicates - 1) * blocks)


def trials_per_run(rows: TaskRows, runs: Array) -> float:
    counts = [len(np.unique(rows.columns["trial_id"][rows.rows_of([run])])) for run in runs]
    return float(np.mean(counts))


def floor(rows: TaskRows, runs: Array, draws: Array, trial: TrialNoise, documents: Array) -> NoiseFloor:
    """`draws` are bootstrap draws × runs of log calibrated speed; the first row is the estimate itself."""
    centred = draws - draws.mean(axis=1, keepdims=True)
    extra = trial.half_width(trials_per_run(rows, runs), float("inf"), LEVEL) if len(runs) > 1 else 0.0
    speeds = []
    for column in centred.T:
        low, high = np.quantile(column[1:], [0.025, 0.975])
        value = float(column[0])
        ends = Estimate(value=value, low=min(float(low), value), high=max(float(high), value))
        ends = widened(ends, extra)
        speeds.append(ends.map(math.exp(ends.low), math.exp(ends.value), math.exp(ends.high)))
    apart = np.exp(centred.max(axis=1) - centred.min(axis=1))
    low, high = np.quantile(apart[1:], [0.025, 0.975])
    value = float(apart[0])
    raw = [_raw(rows, int(run), documents) for run in runs]
    return NoiseFloor(
        labels=tuple(rows.run_label(int(run)) for run in runs),
        speeds=tuple(speeds),
        raw=tuple(raw),
        spread=Estimate(value=value, low=min(float(low), value), high=max(float(high), value)),
        documents=int(documents.sum()),
        trial=trial,
    )


def _raw(rows: TaskRows, run: int, documents: Array) -> float:
    tokens, wall = rows.values([run], "tokens")[0][documents], rows.values([run], "wall")[0][documents]
    return float(tokens.sum() / wall.sum()) if wall.sum() > 0 else math.nan

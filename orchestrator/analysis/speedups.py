"""Throughput, speed-ups against k=1 on the same documents, and the noise floor.

Throughput is tokens ÷ wall time of batches; for a speed-up each side's time is multiplied by its actor's calibrated
speed. Documents (with larger batches: batches of the k=1 run) are resampled, sums recomputed, and the interval is
taken from the log of the ratio.

Runs at k=1 are identical by definition. Their spread is the noise floor. The part of it that belongs to whole trials
(a calibration slightly off, a machine busy for a minute) is shared by all documents of a trial, so resampling
documents cannot see it: every interval of a speed-up is widened by it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from orchestrator.analysis.columns import Array, group_codes
from orchestrator.analysis.intervals import (
    CONFIDENCE,
    DRAWS,
    Estimate,
    Units,
    around,
    bonferroni_level,
    bootstrap_weights,
    degrees_of_freedom,
    expanded_percentiles,
    unbounded,
    units_of,
)
from orchestrator.analysis.runs import TaskRuns

MAX_LENGTH_CHANGE = 0.10  # of the mean output length against k=1
MAX_EXTRA_TRUNCATED = 0.01  # share of documents that hit the length limit, more than at k=1


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """What a configuration's runs cost, over all their documents."""

    documents: int
    tokens: int
    seconds: float  # wall time of all batches
    tokens_per_second: Estimate | None  # None if nothing is generated
    seconds_per_document: Estimate
    p50: float
    p90: float
    p99: float
    tokens_per_document: float
    passes_per_token: float | None
    steps_per_document: float
    layers_per_token: float | None  # layer executions
    positions_per_token: float | None  # layer-positions
    truncated: float  # share of documents that hit the length limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Ratios against k=1; above 1 is faster. If `length_changed`, tokens/s alone would reward longer answers."""

    documents: int
    tokens: Estimate | None  # of tokens/s; None if nothing is generated
    tokens_simultaneous: Estimate | None
    seconds: Estimate  # of documents per second, whatever their length
    seconds_simultaneous: Estimate
    length_ratio: float | None  # mean tokens per document ÷ those at k=1
    length_changed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialNoise:
    """Standard deviation of a trial's log speed beyond what its documents explain."""

    deviation: float
    freedom: int

    def half_width(self, trials: float, replicates: float, level: float) -> float:
        """What it adds to the log speed-up of so many trials against so many pooled runs."""
        reach = float(special.stdtrit(self.freedom, (1 + level) / 2))
        return reach * self.deviation * math.sqrt((1 + 1 / replicates) / trials)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseFloor:
    """How far the calibrated speeds of the runs at k=1 differ, on the documents that all of them have."""

    labels: tuple[str, ...]
    spread: Estimate  # fastest ÷ slowest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BaselineRuns:
    """The runs at k=1 with one set of decode settings, pooled."""

    runs: Array
    noise: TrialNoise
    noise_floor: NoiseFloor | None  # None: there is only one run


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimeBootstrap:
    """Bootstrap of one task's sums, shared by all its configurations. Row 0 of `sums` is the data itself."""

    rows: TaskRuns
    clusters: Array  # document → cluster; times of one cluster belong together
    units: Units
    weights: tuple[Array, ...]

    def sums(self, values: Array) -> Array:
        """Draws × columns of summed document values; `values` is columns × documents, 0 where absent."""
        by_unit = self.units.sums(values).T
        single = by_unit.astype(np.float32)  # as the weights: mixed types would convert them in each product
        parts = [by_unit.sum(axis=0, keepdims=True), *(weight @ single for weight in self.weights)]
        result: Array = np.concatenate(parts)
        return result

    def estimate(self, draws: Array, level: float = CONFIDENCE) -> Estimate:
        """A statistic's interval from its draws, the first of which is its value."""
        value = float(draws[0])
        if self.units.count < 2:
            return unbounded(value, level)
        ends = expanded_percentiles(draws[1:], level, degrees_of_freedom(self.units.sizes))
        return around(value, *ends, level)


def bootstrap_times(rows: TaskRuns, rng: np.random.Generator, draws: int = DRAWS) -> TimeBootstrap:
    clusters = _clusters(rows)
    units = units_of(rows.strata, clusters, rng)
    single = tuple(part.astype(np.float32) for part in bootstrap_weights(units, draws, rng))
    return TimeBootstrap(rows=rows, clusters=clusters, units=units, weights=single)


def _clusters(rows: TaskRuns) -> Array:
    """Documents that shared a batch in the first run at k=1 that has them; with batch size 1 each is alone."""
    columns = rows.columns
    if columns["batch_size"].max() <= 1:
        return np.arange(rows.documents)
    batch, _ = group_codes(columns["trial_id"], columns["attempt"], columns["batch_id"])
    order = sorted(rows.all_runs, key=lambda run: (not rows.is_baseline_run(run), run))
    cluster = np.full(rows.documents, -1, dtype=np.int64)
    for run in order:
        cells = rows.cell[run]
        cluster = np.where((cluster < 0) & (cells >= 0), batch[cells], cluster)
    return cluster


def throughput(bootstrap: TimeBootstrap, runs: Array) -> Throughput:
    rows = bootstrap.rows
    places = rows.rows_of(runs)
    column = {name: rows.columns[name][places] for name in ("tokens", "wall", "seconds", "passes", "steps")}
    tokens, wall = int(column["tokens"].sum()), float(column["wall"].sum())
    count = (rows.cell[runs] >= 0).sum(axis=0)
    totals = [np.nan_to_num(rows.mean(runs, name)) * count for name in ("tokens", "wall")]
    sums = bootstrap.sums(np.stack([*totals, count]))
    p50, p90, p99 = (float(q) for q in np.quantile(column["seconds"], [0.5, 0.9, 0.99]))
    with np.errstate(divide="ignore", invalid="ignore"):
        rates, each = sums[:, 0] / sums[:, 1], sums[:, 1] / sums[:, 2]

    def per_token(name: str) -> float | None:
        return int(rows.columns[name][places].sum()) / tokens if tokens else None

    return Throughput(
        documents=int(rows.present(runs).sum()),
        tokens=tokens,
        seconds=wall,
        tokens_per_second=bootstrap.estimate(rates[np.isfinite(rates)]) if tokens and wall > 0 else None,
        seconds_per_document=bootstrap.estimate(each[np.isfinite(each)]),
        p50=p50,
        p90=p90,
        p99=p99,
        tokens_per_document=tokens / len(places),
        passes_per_token=per_token("passes"),
        steps_per_document=float(column["steps"].mean()),
        layers_per_token=per_token("layers_computed"),
        positions_per_token=per_token("layer_positions"),
        truncated=float(hit_length_limit(rows)[places].mean()),
    )


def hit_length_limit(rows: TaskRuns) -> Array:
    """Whether each row ended at the length limit."""
    names = rows.names["finish"]
    result: Array = rows.columns["finish"] == (names.index("length") if "length" in names else -1)
    return result


def _truncated_share(rows: TaskRuns, runs: Array) -> Array:
    """Per document, the share of the runs that hit the length limit; NaN if none of them has it."""
    cells = rows.cell[runs]
    found = cells >= 0
    total = np.where(found, hit_length_limit(rows)[cells], False).sum(axis=0)
    return np.where(found.any(axis=0), total / np.maximum(found.sum(axis=0), 1), np.nan)


def speedup(bootstrap: TimeBootstrap, baseline: BaselineRuns, runs: Array, comparisons: int = 1) -> Speedup | None:
    """None if the two sides share no document that took time."""
    rows = bootstrap.rows
    both = rows.present(runs) & rows.present(baseline.runs)
    columns = [rows.mean(side, name) for side in (runs, baseline.runs) for name in ("tokens", "work")]
    if not both.any() or not all((column[both] > 0).all() for column in columns[1::2]):
        return None
    sums = bootstrap.sums(np.where(both, np.stack(columns), 0.0))
    sums = sums[(sums[:, 1] > 0) & (sums[:, 3] > 0)]  # with few documents a draw may hold none that both sides have
    levels = (CONFIDENCE, bonferroni_level(comparisons))
    trials = trials_per_run(rows, runs) * len(runs)
    halves = [baseline.noise.half_width(trials, len(baseline.runs) / len(runs), level) for level in levels]
    log_speedup = np.log(sums[:, 3] / sums[:, 1])
    seconds = _ratio_intervals(bootstrap, log_speedup, levels, halves)
    tokens: list[Estimate] | list[None] = [None, None]
    length_ratio = None
    if sums[0, 0] > 0 and sums[0, 2] > 0:
        some = (sums[:, 0] > 0) & (sums[:, 2] > 0)
        log_length = np.log(sums[some, 0] / sums[some, 2])
        tokens = _ratio_intervals(bootstrap, log_speedup[some] + log_length, levels, halves)
        length_ratio = float(sums[0, 0] / sums[0, 2])
    ours, base = (float(np.nanmean(_truncated_share(rows, side)[both])) for side in (runs, baseline.runs))
    return Speedup(
        documents=int(both.sum()),
        tokens=tokens[0],
        tokens_simultaneous=tokens[1],
        seconds=seconds[0],
        seconds_simultaneous=seconds[1],
        length_ratio=length_ratio,
        length_changed=length_ratio is not None
        and (abs(length_ratio - 1) > MAX_LENGTH_CHANGE or ours - base > MAX_EXTRA_TRUNCATED),
    )


def _ratio_intervals(
    bootstrap: TimeBootstrap, draws: Array, levels: Sequence[float], halves: Sequence[float]
) -> list[Estimate]:
    pairs = zip(levels, halves, strict=True)
    return [widen(bootstrap.estimate(draws, level), half).exp() for level, half in pairs]


def widen(estimate: Estimate, half: float) -> Estimate:
    """A log interval with independent noise of this half-width added."""
    low = estimate.value - math.hypot(estimate.value - estimate.low, half)
    high = estimate.value + math.hypot(estimate.high - estimate.value, half)
    return Estimate(value=estimate.value, low=low, high=high, level=estimate.level)


def measure_baseline(bootstrap: TimeBootstrap, runs: Array) -> BaselineRuns:
    rows = bootstrap.rows
    noise = trial_noise(rows, runs, bootstrap.clusters)
    everywhere: Array = np.logical_and.reduce(rows.cell[runs] >= 0)
    if len(runs) < 2 or not everywhere.any() or not (rows.columns["work"][rows.rows_of(runs)] > 0).all():
        return BaselineRuns(runs=runs, noise=noise, noise_floor=None)
    sums = bootstrap.sums(np.where(everywhere, rows.values(runs, "work"), 0.0))
    sums = sums[(sums > 0).all(axis=1)]  # with few documents a draw may hold none that all runs have
    ratios = sums.max(axis=1) / sums.min(axis=1)
    low, high = np.quantile(ratios[1:], [0.025, 0.975])
    labels = tuple(rows.run_label(int(run)) for run in runs)
    floor = NoiseFloor(labels=labels, spread=around(float(ratios[0]), float(low), float(high)))
    return BaselineRuns(runs=runs, noise=noise, noise_floor=floor)


def trial_noise(rows: TaskRuns, runs: Array, clusters: Array) -> TrialNoise:
    """From runs of the same work on the same documents: variance between trials minus what their clusters explain.

    A cluster is a document, or the documents of one batch, which share its errors. Per cluster the log calibrated time
    of a run is compared with the mean over runs. A trial's mean of these, weighted by the clusters' shares of its
    time, is its own error plus the average of its clusters' errors.
    """
    everywhere = (rows.cell[runs] >= 0).all(axis=0)
    _, first, cluster = np.unique(clusters[everywhere], return_index=True, return_inverse=True)
    replicates, count = len(runs), len(first)
    if replicates < 2 or count < 2:
        return TrialNoise(deviation=0.0, freedom=1)
    times = rows.values(runs, "work")[:, everywhere]
    work = np.maximum(np.stack([np.bincount(cluster.reshape(-1), weights=row) for row in times]), 1e-12)
    deviations = np.log(work) - np.log(work).mean(axis=0)
    trial = rows.columns["trial_id"][rows.cell[runs][:, everywhere][:, first]]
    group = np.unique(trial, axis=1, return_inverse=True)[1].reshape(-1)  # clusters that share their trials in all runs
    weight = work.mean(axis=0)
    weight = weight / np.bincount(group, weights=weight)[group]
    groups, concentration = int(group.max()) + 1, np.bincount(group, weights=weight**2)
    means = np.stack([np.bincount(group, weights=weight * row) for row in deviations])
    residuals = deviations - means[:, group]
    within = float((residuals**2).sum()) / max(1, (replicates - 1) * (count - groups))
    between = float((means**2).sum()) / ((replicates - 1) * groups)
    excess = max(0.0, between - within * float(concentration.mean()))
    return TrialNoise(deviation=math.sqrt(excess), freedom=(replicates - 1) * groups)


def trials_per_run(rows: TaskRuns, runs: Array) -> float:
    counts = [len(np.unique(rows.columns["trial_id"][rows.rows_of([run])])) for run in runs]
    return float(np.mean(counts))

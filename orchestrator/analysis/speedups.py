"""Throughput, speed-ups against k=1 on the same documents, and the noise of trials.

Throughput is tokens ÷ wall time of batches; a speed-up compares calibrated times (see orchestrator.core.speed).
Two sources of error are added:

documents   documents (with larger batches: batches of the k=1 run) are resampled, sums recomputed, and the interval is
            taken from the log of the ratio
trials      the machine's speed while a trial ran, which all its documents share and resampling documents cannot see.
            Runs at k=1 are identical by definition: the spread between their trials of one shard, beyond what their
            documents explain, is this noise. It is pooled over all tasks of a sweep, whose actors are the same.

The spread of the k=1 runs, the noise floor, is printed and decides nothing: the intervals contain that noise already.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from orchestrator.analysis.columns import Array
from orchestrator.analysis.intervals import (
    CONFIDENCE,
    DRAWS,
    Bounds,
    Estimate,
    Levels,
    Units,
    around,
    bootstrap_weights,
    degrees_of_freedom,
    effective_freedom,
    one_sided,
    scaled_percentiles,
    unbounded,
    units_of,
)
from orchestrator.analysis.runs import TaskRuns, document_clusters
from orchestrator.core.speed import MAX_LENGTH_CHANGE, PRIOR_WEIGHT, group_codes

DRAWS_PER_PRODUCT = 32  # so small that BLAS uses one thread; with more, waiting makes it ten times slower
MAX_EXTRA_TRUNCATED = 0.01  # tolerated increase, over k=1, in the share of documents that hit the length limit


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

    @property
    def tokens_per_pass(self) -> float | None:
        return 1 / self.passes_per_token if self.passes_per_token else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Ratios against k=1; above 1 is faster. If `length_changed`, tokens/s alone would reward longer answers."""

    documents: int
    trials: float  # effective number of this configuration's trials: fewer than counted if their sizes differ
    tokens: Estimate | None  # of tokens/s; None if nothing is generated
    tokens_simultaneous: Estimate | None
    tokens_bounds: Bounds | None  # what the verdict compares with the declared speed-up
    seconds: Estimate  # of documents per second, whatever their length
    seconds_simultaneous: Estimate
    seconds_bounds: Bounds
    length: (
        Estimate | None
    )  # mean tokens per document ÷ those at k=1, at the level at which a configuration is rejected
    length_changed: bool
    noise_known: bool  # False: nothing shows how much trials vary, because k=1 ran once, in one trial

    @property
    def length_ratio(self) -> float | None:
        return None if self.length is None else self.length.value

    @property
    def length_certainly_changed(self) -> bool:
        """The whole interval of the length ratio lies more than MAX_LENGTH_CHANGE away from 1."""
        ends = self.length
        return ends is not None and (ends.low > 1 + MAX_LENGTH_CHANGE or ends.high < 1 - MAX_LENGTH_CHANGE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialNoise:
    """How much the log time of a trial varies."""

    variance: float | None  # beyond what its documents explain; None: unknown
    total: float = 0.0  # as observed, including what its documents explain
    freedom: float = 1.0  # degrees of freedom of `total`

    @property
    def deviation(self) -> float:
        return math.sqrt(self.variance or 0.0)

    def added_to(self, estimate: Estimate, share: float, freedom: float) -> Estimate:
        """The estimate, on a log scale, with trial noise added to its interval; see `noise_share` for `share`.

        Each half of the interval is converted to a standard error over documents, with these degrees of `freedom`. The
        sum of the variances over documents and trials has Satterthwaite's degrees of freedom.
        """
        added, level = (self.variance or 0.0) * share, one_sided(estimate.level)
        if share <= 0 or self.total <= 0 or not math.isfinite(estimate.low + estimate.high):
            return estimate
        reach = float(special.stdtrit(freedom, level))

        def half(own: float) -> float:
            documents = (own / reach) ** 2
            total = documents + added
            uncertainty = documents**2 / freedom + (share * self.total) ** 2 / self.freedom
            degrees = total**2 / uncertainty if uncertainty > 0 else freedom
            degrees = max(degrees, min(freedom, self.freedom) / 2, 1.0)
            return float(special.stdtrit(degrees, level)) * math.sqrt(total)

        low, high = half(estimate.value - estimate.low), half(estimate.high - estimate.value)
        return replace(estimate, low=estimate.value - low, high=estimate.value + high)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedNoise:
    """Noise of trials in calibrated time, which speed-ups contain, and in wall time, which tokens/s contain."""

    work: TrialNoise
    wall: TrialNoise


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseFloor:
    """How far the calibrated speeds of the runs at k=1 differ, on the documents that all of them have."""

    labels: tuple[str, ...]
    spread: Estimate  # fastest ÷ slowest
    speeds: tuple[float, ...] = ()  # of each run, relative to all of them together


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BaselineRuns:
    """The runs at k=1 with one set of decode settings, pooled."""

    runs: Array
    noise_floor: NoiseFloor | None  # None: there is only one run


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimeBootstrap:
    """Bootstrap of one task's sums; all configurations share its draws, so that they are compared on the same ones."""

    rows: TaskRuns
    clusters: Array  # document → cluster; times of one cluster belong together
    units: Units
    weights: tuple[Array, ...]

    def sums(self, values: Array) -> Array:
        """Draws × columns of summed document values; row 0 has the sums of the data itself.

        `values` is columns × documents, 0 where a document is missing.
        """
        by_unit = self.units.sums(values).T
        single = by_unit.astype(np.float32)  # the type of the weights, which each product would convert otherwise
        products = (
            weight[start : start + DRAWS_PER_PRODUCT] @ single
            for weight in self.weights
            for start in range(0, len(weight), DRAWS_PER_PRODUCT)
        )
        result: Array = np.concatenate([by_unit.sum(axis=0, keepdims=True), *products])
        return result

    def freedom(self, times: Array, influence: Array | None = None) -> float:
        """Degrees of freedom of a variance over documents that take these times: long ones weigh more than others."""
        weights = np.bincount(self.clusters, weights=times)
        influences = None if influence is None else np.bincount(self.clusters, weights=influence)
        effective = effective_freedom(weights, influences)
        return max(1.0, min(effective - len(self.units.sizes), degrees_of_freedom(self.units.sizes)))

    def estimate(self, draws: Array, level: float = CONFIDENCE, freedom: float | None = None) -> Estimate:
        """A statistic and its interval; `draws` are the statistic in each row of `sums`, so the first is its value."""
        value = float(draws[0])
        if self.units.count < 2:
            return unbounded(value, level)
        ends = scaled_percentiles(draws[1:], level, freedom or degrees_of_freedom(self.units.sizes))
        return around(value, *ends, level)


def bootstrap_times(rows: TaskRuns, rng: np.random.Generator, draws: int = DRAWS) -> TimeBootstrap:
    clusters = document_clusters(rows)
    units = units_of(rows.strata, clusters, rng)
    single = tuple(part.astype(np.float32) for part in bootstrap_weights(units, draws, rng))
    return TimeBootstrap(rows=rows, clusters=clusters, units=units, weights=single)


def throughput(bootstrap: TimeBootstrap, runs: Array, noise: TrialNoise) -> Throughput:
    """`noise` is that of wall time."""
    rows = bootstrap.rows
    indices = rows.rows_of(runs)
    column = {name: rows.columns[name][indices] for name in ("tokens", "wall", "seconds", "passes", "steps")}
    tokens, wall = int(column["tokens"].sum()), float(column["wall"].sum())
    count = (rows.cell[runs] >= 0).sum(axis=0)
    totals = [np.nan_to_num(rows.mean(runs, name)) * count for name in ("tokens", "wall")]
    sums = bootstrap.sums(np.stack([*totals, count]))
    p50, p90, p99 = (float(q) for q in np.quantile(column["seconds"], [0.5, 0.9, 0.99]))
    share = noise_share(bootstrap, runs, "wall", rows.present(runs))[0]
    freedom = bootstrap.freedom(totals[1]) if wall > 0 else 1.0

    def interval(numerator: Array, denominator: Array) -> Estimate:
        positive = (numerator > 0) & (denominator > 0)
        if not positive[0]:  # no time was measured
            return unbounded(0.0, CONFIDENCE)
        logs = bootstrap.estimate(np.log(numerator[positive] / denominator[positive]), freedom=freedom)
        return noise.added_to(logs, share, freedom).exp()

    def per_token(name: str) -> float | None:
        return int(rows.columns[name][indices].sum()) / tokens if tokens else None

    return Throughput(
        documents=int(rows.present(runs).sum()),
        tokens=tokens,
        seconds=wall,
        tokens_per_second=interval(sums[:, 0], sums[:, 1]) if tokens and wall > 0 else None,
        seconds_per_document=interval(sums[:, 1], sums[:, 2]),
        p50=p50,
        p90=p90,
        p99=p99,
        tokens_per_document=tokens / len(indices),
        passes_per_token=per_token("passes"),
        steps_per_document=float(column["steps"].mean()),
        layers_per_token=per_token("layers_computed"),
        positions_per_token=per_token("layer_positions"),
        truncated=float(rows.columns["truncated"][indices].mean()),
    )


def speedup(
    bootstrap: TimeBootstrap, baseline: BaselineRuns, runs: Array, noise: TrialNoise, levels: Levels | None = None
) -> Speedup | None:
    """None if the two sides share no complete shard that took time. `noise` is that of calibrated time."""
    rows, all_levels = bootstrap.rows, (levels or Levels()).all
    both = rows.present(runs, timed=True) & rows.present(baseline.runs, timed=True)
    columns = [rows.mean(side, name, timed=True) for side in (runs, baseline.runs) for name in ("tokens", "work")]
    if not both.any() or not all((column[both] > 0).all() for column in columns[1::2]):
        return None
    sums = bootstrap.sums(np.where(both, np.stack(columns), 0.0))
    sums = sums[(sums[:, 1] > 0) & (sums[:, 3] > 0)]  # with few documents a draw may hold none that both sides have
    own, base = (noise_share(bootstrap, side, "work", both) for side in (runs, baseline.runs))
    shares = [np.where(both, column, 0.0) / max(column[both].sum(), 1e-12) for column in columns]

    def intervals(draws: Array, influence: Array) -> list[Estimate]:
        freedom = bootstrap.freedom(shares[3], influence)
        estimates = (bootstrap.estimate(draws, level, freedom) for level in all_levels)
        return [noise.added_to(estimate, own[0] + base[0], freedom).exp() for estimate in estimates]

    log_speedup = np.log(sums[:, 3] / sums[:, 1])
    seconds = intervals(log_speedup, shares[3] - shares[1])
    tokens: list[Estimate] | None = None
    length = None
    if sums[0, 0] > 0 and sums[0, 2] > 0:
        generated = (sums[:, 0] > 0) & (sums[:, 2] > 0)
        log_length = np.log(sums[generated, 0] / sums[generated, 2])
        tokens = intervals(log_speedup[generated] + log_length, shares[3] - shares[1] + shares[0] - shares[2])
        length = bootstrap.estimate(log_length, all_levels[1], bootstrap.freedom(shares[3])).exp()
    ours, theirs = (float(rows.mean(side, "truncated")[both].mean()) for side in (runs, baseline.runs))
    return Speedup(
        documents=int(both.sum()),
        trials=own[1],
        tokens=None if tokens is None else tokens[0],
        tokens_simultaneous=None if tokens is None else tokens[1],
        tokens_bounds=None if tokens is None else Bounds.of(tokens),
        seconds=seconds[0],
        seconds_simultaneous=seconds[1],
        seconds_bounds=Bounds.of(seconds),
        length=length,
        length_changed=length is not None
        and (abs(length.value - 1) > MAX_LENGTH_CHANGE or ours - theirs > MAX_EXTRA_TRUNCATED),
        noise_known=noise.variance is not None or own[0] + base[0] < 1e-12,  # or each trial is resampled as a whole
    )


def noise_share(bootstrap: TimeBootstrap, runs: Array, column: str, documents: Array) -> tuple[float, float]:
    """The factor of the trial noise that is added to an interval, and the effective number of trials.

    A trial weighs as much as its share of the time, and the effective number is 1 ÷ the sum of the squared weights.
    That sum is also the factor, minus the part of the noise that resampling documents contains already: documents
    carry the noise of their trials with the square of their own, smaller weights.
    """
    rows = bootstrap.rows
    cells = rows.timed[runs][:, documents]
    timed = cells >= 0
    values, trial = rows.columns[column][cells[timed]], rows.columns["trial_id"][cells[timed]]
    cluster = np.broadcast_to(bootstrap.clusters[documents], cells.shape)[timed]
    total = values.sum()
    if not total > 0:
        return 0.0, 0.0

    def squares(*keys: Array) -> float:
        group, count = group_codes(*keys)
        weights = np.bincount(group, weights=values, minlength=count) / total
        return float(weights @ weights)

    by_trial = squares(trial)
    return max(0.0, by_trial - squares(trial, cluster)), 1 / by_trial


def measure_baseline(bootstrap: TimeBootstrap, runs: Array) -> BaselineRuns:
    """The runs with their noise floor."""
    rows = bootstrap.rows
    shared = rows.timed_in_all(runs)
    if len(runs) < 2 or not shared.any() or not (rows.columns["work"][rows.rows_of(runs)] > 0).all():
        return BaselineRuns(runs=runs, noise_floor=None)
    sums = bootstrap.sums(np.where(shared, rows.values(runs, "work"), 0.0))
    sums = sums[(sums > 0).all(axis=1)]  # with few documents a draw may hold none that all runs have
    ratios = sums.max(axis=1) / sums.min(axis=1)
    low, high = np.quantile(ratios[1:], [0.025, 0.975])
    floor = NoiseFloor(
        labels=tuple(rows.run_label(int(run)) for run in runs),
        spread=around(float(ratios[0]), float(low), float(high)),
        speeds=tuple(float(speed) for speed in sums[0].mean() / sums[0]),
    )
    return BaselineRuns(runs=runs, noise_floor=floor)


def speed_noise(tasks: Sequence[TaskRuns]) -> SpeedNoise:
    """Noise of a sweep, pooled over the decode settings of all generating tasks, or of all tasks if none generates."""
    generating = [rows for rows in tasks if rows.columns["tokens"].any()] or list(tasks)
    clusters = [document_clusters(rows) for rows in generating]
    return SpeedNoise(
        work=_pooled_noise(generating, clusters, "work"),
        wall=_pooled_noise(generating, clusters, "wall"),
    )


def _pooled_noise(tasks: Sequence[TaskRuns], clusters: Sequence[Array], column: str) -> TrialNoise:
    """From k=1 replicates; without any, from the residuals of all runs after their own and the documents' means."""
    for replicates in (True, False):
        parts = []
        for rows, cluster in zip(tasks, clusters, strict=True):
            for settings in dict.fromkeys(one.settings for one in rows.configurations):
                runs = rows.baseline_runs(settings)
                if not replicates and len(runs):
                    runs = np.array([run for run in rows.all_runs if rows.configuration_of(run).settings == settings])
                parts.append(_noise_sums(rows, runs, cluster, column, remove_run_means=not replicates))
        known = [part for part in parts if part is not None]
        between, within, count = (sum(values) for values in zip(*known, strict=True)) if known else (0.0, 0.0, 0)
        freedom = count - count / (count + PRIOR_WEIGHT) * (column == "work")  # less the fitted calibration exponent
        if freedom > 0:
            return TrialNoise(variance=max(0.0, between - within) / freedom, total=between / freedom, freedom=freedom)
    return TrialNoise(variance=None)


def _noise_sums(
    rows: TaskRuns, runs: Array, clusters: Array, column: str, *, remove_run_means: bool
) -> tuple[float, float, int] | None:
    """Sum of squares between trials of the same documents, the part that clusters explain, and degrees of freedom.

    A cluster is a document, or the documents of one batch, which share its errors. Per cluster the log time of a run is
    compared with the mean over runs. A trial's mean of these, weighted by the clusters' shares of its time, is its own
    error plus the average of its clusters' errors. None if nothing is repeated.
    """
    shared = rows.timed_in_all(runs)
    if len(runs) < 2 or not shared.any():
        return None
    cells = rows.timed[runs][:, shared]
    _, first, cluster = np.unique(clusters[shared], return_index=True, return_inverse=True)
    sums = [
        np.stack([np.bincount(cluster.reshape(-1), weights=row) for row in rows.columns[name][cells]])
        for name in (column, "tokens")
    ]
    work, tokens = np.maximum(sums[0], 1e-12), sums[1]
    deviations = np.log(work) - (np.log(tokens) if (tokens > 0).all() else 0.0)  # per token, as in a speed-up
    deviations = deviations - deviations.mean(axis=0)
    trial = rows.columns["trial_id"][cells[:, first]]
    group = np.unique(trial, axis=1, return_inverse=True)[1].reshape(-1)  # clusters that share their trials in all runs
    weight = work.mean(axis=0)
    if remove_run_means:
        deviations = deviations - np.average(deviations, axis=1, weights=weight)[:, None]
    weight = weight / np.bincount(group, weights=weight)[group]
    left = 1 - np.bincount(group, weights=weight**2)
    several = left > 1e-9  # a trial that is a single cluster is resampled as a whole
    means = np.stack([np.bincount(group, weights=weight * row) for row in deviations])
    squares = ((weight * (deviations - means[:, group])) ** 2).sum(axis=0)
    explained = np.bincount(group, weights=squares)[several] / left[several]
    freedom = (len(runs) - 1) * (int(several.sum()) - int(remove_run_means))
    return (float((means[:, several] ** 2).sum()), float(explained.sum()), freedom) if freedom > 0 else None

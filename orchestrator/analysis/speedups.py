"""The noise floor: how far runs at k=1, which are the same by definition, lie apart. Knows no policies.

Two things are read from these A/A runs. Their spread, which any speed-up must exceed. And the part of it that belongs
to whole trials (a calibration a little off, a machine busy for a minute): documents of a trial share it, so resampling
documents cannot see it, and every interval of a speed-up is widened by it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from orchestrator.analysis.columns import Array, grouped
from orchestrator.analysis.intervals import (
    DRAWS,
    LEVEL,
    Estimate,
    Units,
    degrees,
    exp,
    percentile,
    simultaneous_level,
    units_of,
    weights,
)
from orchestrator.analysis.runs import TaskRows


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


DRIFT = 0.10  # mean output length further off k=1 than this
MORE_CUT = 0.01  # and this many more of the documents cut at the longest length allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """What a configuration's runs cost, all their documents together."""

    documents: int
    tokens: int
    seconds: float  # wall time of all batches
    tokens_per_second: Estimate | None  # None where nothing is generated
    seconds_per_document: Estimate
    p50: float
    p90: float
    p99: float
    tokens_per_document: float
    passes_per_token: float | None
    steps_per_document: float
    layers_per_token: float | None  # layer executions
    positions_per_token: float | None  # layer-positions
    cut: float  # share of documents that ended at the longest length allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Ratios against k=1, above 1 is faster; `drifts` says why seconds per document must stand beside tokens/s."""

    documents: int
    tokens: Estimate | None  # of tokens/s; None where nothing is generated
    tokens_simultaneous: Estimate | None
    seconds: Estimate  # of documents per second: the same whatever their length
    seconds_simultaneous: Estimate
    length_ratio: float | None  # mean tokens of a document ÷ those at k=1
    drifts: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Speeds:
    """Bootstrap of one task's sums, shared by all its configurations. Row 0 of `sums` is the data itself."""

    rows: TaskRows
    clusters: Array  # of documents: those whose times belong together
    units: Units
    weights: tuple[Array, ...]

    def sums(self, values: Array) -> Array:
        """Draws × columns of summed document values; `values` is columns × documents, 0 where absent."""
        by_unit = self.units.sums(values).T
        single = by_unit.astype(np.float32)  # as the weights are: mixed, each product would convert them first
        parts = [by_unit.sum(axis=0, keepdims=True), *(weight @ single for weight in self.weights)]
        result: Array = np.concatenate(parts)
        return result

    def estimate(self, draws: Array, level: float = LEVEL) -> Estimate:
        """The interval of a statistic from its draws, the first of which is its value."""
        value = float(draws[0])
        if self.units.count < 2:  # one document says nothing of others
            return Estimate(value=value, low=-math.inf, high=math.inf, level=level)
        low, high = percentile(draws[1:], level, degrees(self.units.sizes))
        return Estimate(value=value, low=min(low, value), high=max(high, value), level=level)


def speeds(rows: TaskRows, rng: np.random.Generator, draws: int = DRAWS) -> Speeds:
    clusters = _clusters(rows)
    units = units_of(rows.strata, clusters, rng)
    single = tuple(part.astype(np.float32) for part in weights(units, draws, rng))
    return Speeds(rows=rows, clusters=clusters, units=units, weights=single)


def _clusters(rows: TaskRows) -> Array:
    """Documents that shared a batch, in the first run at k=1 that has them; a document alone where batches hold one."""
    columns = rows.columns
    if columns["batch_size"].max() <= 1:
        return np.arange(rows.documents)
    batch, _ = grouped(columns["trial_id"], columns["attempt"], columns["batch_id"])
    order = sorted(rows.all_runs, key=lambda run: (not rows.is_baseline_run(run), run))
    cluster = np.full(rows.documents, -1, dtype=np.int64)
    for run in order:
        cells = rows.cell[run]
        cluster = np.where((cluster < 0) & (cells >= 0), batch[cells], cluster)
    return cluster


def throughput(bootstrap: Speeds, runs: Array) -> Throughput:
    rows = bootstrap.rows
    places = rows.rows_of(runs)
    column = {name: rows.columns[name][places] for name in ("tokens", "wall", "seconds", "passes", "steps")}
    tokens, wall = int(column["tokens"].sum()), float(column["wall"].sum())
    count = (rows.cell[runs] >= 0).sum(axis=0)
    totals = [np.nan_to_num(rows.mean(runs, name)) * count for name in ("tokens", "wall")]
    sums = bootstrap.sums(np.stack([*totals, count]))
    middle, most, nearly_all = (float(q) for q in np.quantile(column["seconds"], [0.5, 0.9, 0.99]))
    with np.errstate(divide="ignore", invalid="ignore"):
        rates, each = sums[:, 0] / sums[:, 1], sums[:, 1] / sums[:, 2]
    return Throughput(
        documents=int(rows.present(runs).sum()),
        tokens=tokens,
        seconds=wall,
        tokens_per_second=bootstrap.estimate(rates[np.isfinite(rates)]) if tokens and wall > 0 else None,
        seconds_per_document=bootstrap.estimate(each[np.isfinite(each)]),
        p50=middle,
        p90=most,
        p99=nearly_all,
        tokens_per_document=tokens / len(places),
        passes_per_token=int(column["passes"].sum()) / tokens if tokens else None,
        steps_per_document=float(column["steps"].mean()),
        layers_per_token=int(rows.columns["layers_computed"][places].sum()) / tokens if tokens else None,
        positions_per_token=int(rows.columns["layer_positions"][places].sum()) / tokens if tokens else None,
        cut=float(cut(rows)[places].mean()),
    )


def cut(rows: TaskRows) -> Array:
    """Rows that ended at the longest length allowed."""
    names = rows.names["finish"]
    result: Array = rows.columns["finish"] == (names.index("length") if "length" in names else -1)
    return result


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Against:
    """The runs at k=1 that configurations with the same decode settings are compared with."""

    runs: Array
    noise: TrialNoise
    floor: NoiseFloor | None  # None: one run only, so nothing is known of it


def baseline(bootstrap: Speeds, runs: Array) -> Against:
    rows = bootstrap.rows
    noise = trial_noise(rows, runs, bootstrap.clusters)
    everywhere: Array = np.logical_and.reduce(rows.cell[runs] >= 0)
    if len(runs) < 2 or not everywhere.any() or not (rows.columns["work"][rows.rows_of(runs)] > 0).all():
        return Against(runs=runs, noise=noise, floor=None)
    sums = bootstrap.sums(np.where(everywhere, rows.values(runs, "work"), 0.0))
    with np.errstate(divide="ignore"):
        draws = -np.log(sums)
    draws = draws[np.isfinite(draws).all(axis=1)]  # few documents: a draw may hold none that all runs have
    return Against(runs=runs, noise=noise, floor=floor(rows, runs, draws, noise, everywhere))


def speedup(bootstrap: Speeds, against: Against, runs: Array, family: int = 1) -> Speedup | None:
    """None where the two sides share no document that took time."""
    rows = bootstrap.rows
    both = rows.present(runs) & rows.present(against.runs)
    columns = [rows.mean(side, name) for side in (runs, against.runs) for name in ("tokens", "work")]
    if not both.any() or not all((column[both] > 0).all() for column in columns[1::2]):
        return None
    sums = bootstrap.sums(np.where(both, np.stack(columns), 0.0))
    sums = sums[(sums[:, 1] > 0) & (sums[:, 3] > 0)]  # few documents: a draw may hold none that both sides have
    levels = (LEVEL, simultaneous_level(family))
    trials = trials_per_run(rows, runs) * len(runs)
    halves = [against.noise.half_width(trials, len(against.runs) / len(runs), level) for level in levels]
    faster = np.log(sums[:, 3] / sums[:, 1])
    seconds = _widened(bootstrap, faster, levels, halves)
    tokens: list[Estimate] | list[None] = [None, None]
    ratio = None
    if sums[0, 0] > 0 and sums[0, 2] > 0:
        some = (sums[:, 0] > 0) & (sums[:, 2] > 0)
        tokens = _widened(bootstrap, faster[some] + np.log(sums[some, 0] / sums[some, 2]), levels, halves)
        ratio = float(sums[0, 0] / sums[0, 2])
    more = float(np.nanmean(_cut_share(rows, runs)[both]) - np.nanmean(_cut_share(rows, against.runs)[both]))
    return Speedup(
        documents=int(both.sum()),
        tokens=tokens[0],
        tokens_simultaneous=tokens[1],
        seconds=seconds[0],
        seconds_simultaneous=seconds[1],
        length_ratio=ratio,
        drifts=ratio is not None and (abs(ratio - 1) > DRIFT or more > MORE_CUT),
    )


def _widened(bootstrap: Speeds, draws: Array, levels: Sequence[float], halves: Sequence[float]) -> list[Estimate]:
    pairs = zip(levels, halves, strict=True)
    return [exp(widened(bootstrap.estimate(draws, level), half)) for level, half in pairs]


def _cut_share(rows: TaskRows, runs: Array) -> Array:
    cells = rows.cell[runs]
    found = cells >= 0
    total = np.where(found, cut(rows)[cells], False).sum(axis=0)
    return np.where(found.any(axis=0), total / np.maximum(found.sum(axis=0), 1), np.nan)

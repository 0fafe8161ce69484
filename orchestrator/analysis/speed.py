"""How fast a configuration is, and how much faster than k=1 on the same documents. Knows no accuracy.

Throughput is tokens ÷ wall time of batches; a speed-up divides each side by its actor's calibration. Documents are
resampled (batches, where several documents share one: the batches of the k=1 run), the sums taken anew and the
interval read from the log of the ratio. Where a batch holds several documents its time is apportioned by tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.analysis.accuracy import simultaneous_level
from orchestrator.analysis.columns import Array, grouped
from orchestrator.analysis.noise import NoiseFloor, TrialNoise, floor, trial_noise, trials_per_run, widened
from orchestrator.analysis.pairs import TaskRows
from orchestrator.analysis.resample import DRAWS, LEVEL, Estimate, Units, degrees, exp, percentile, units_of, weights

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

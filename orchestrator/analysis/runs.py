"""One task's rows as a table of runs × documents.

A run is one repeat of a configuration. The baseline of a configuration is all runs at k=1 with the same decode
settings (with the first ones, if the sweep declares that), pooled: they are identical by definition.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis.columns import (
    NAMES,
    NUMBERS,
    Array,
    apportioned_wall_time,
    encode,
    first_indices,
    primary_scores,
    to_numpy,
    without_unused,
)
from orchestrator.core.configuration import (
    CONFIGURATION_KEYS,
    DECODE_SETTINGS,
    OWN_BASELINE,
    BaselineRule,
    Configuration,
    varying_settings,
)
from orchestrator.core.speed import TrialTimes, calibrate, group_codes

Settings = tuple[Any, ...]  # values of DECODE_SETTINGS
SUBSETS = ("first", "middle", "last", "all")
PASS_KINDS = ("prefill", "full", "small", "commit")
HISTOGRAM_BINS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfiguration:
    """A configuration, and what its rows record about its policy; `layers` are layer indices of the sweep's model."""

    configuration: Configuration
    k: int | None
    subset: str | None
    mode: str | None
    layers: tuple[int, ...]
    label: str  # shows the decode settings that vary in this table
    rule: BaselineRule = OWN_BASELINE

    @property
    def policy(self) -> str:
        return self.configuration.policy

    @property
    def settings(self) -> Settings:
        return self.configuration.settings

    @property
    def is_baseline(self) -> bool:
        return self.k == 1 and self.rule.is_baseline(self.configuration)

    @property
    def compared_with(self) -> Settings:
        """The decode settings of its baseline."""
        return self.rule.settings_for(self.configuration)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TaskRuns:
    """One task's rows. `cell` is runs × documents: an index into the columns, −1 if the run lacks the document."""

    task: str
    configurations: tuple[ResolvedConfiguration, ...]
    owner: Array  # run → configuration
    repeat: Array  # run → repeat
    cell: Array
    timed: Array  # as `cell`, but −1 also where the run's trial is incomplete: speed is compared on complete shards
    doc_ids: Array
    strata: Array  # document → subtask
    subtasks: tuple[str, ...]
    columns: Mapping[str, Array]  # one value per row; of NAMES, codes into `names`
    names: Mapping[str, tuple[str | None, ...]]
    run: Array  # row → run
    row: Array  # row → row in the table of all tasks

    @property
    def documents(self) -> int:
        return len(self.doc_ids)

    @property
    def all_runs(self) -> range:
        return range(len(self.owner))

    def runs_of(self, configuration: int) -> Array:
        return np.flatnonzero(self.owner == configuration)

    def baseline_runs(self, settings: Settings) -> Array:
        """Runs at k=1 with these decode settings; may be empty."""
        runs = filter(self.is_baseline_run, self.all_runs)
        return np.array([run for run in runs if self.configuration_of(run).settings == settings], dtype=int)

    def is_baseline_run(self, run: int) -> bool:
        return self.configuration_of(run).is_baseline

    def configuration_of(self, run: int) -> ResolvedConfiguration:
        return self.configurations[int(self.owner[run])]

    def run_label(self, run: int) -> str:
        repeat = int(self.repeat[run])
        return self.configuration_of(run).label + (f".r{repeat}" if repeat else "")

    def present(self, runs: Sequence[int] | Array, *, timed: bool = False) -> Array:
        """Documents that at least one of the runs has (`timed`: in a complete trial)."""
        cells = (self.timed if timed else self.cell)[np.asarray(runs, dtype=int)]
        result: Array = (cells >= 0).any(axis=0)
        return result

    def values(self, runs: Sequence[int] | Array, column: str) -> Array:
        """Runs × documents, NaN if a run lacks a document."""
        cells = self.cell[np.asarray(runs, dtype=int)]
        return np.where(cells >= 0, self.columns[column][cells], np.nan)

    def timed_in_all(self, runs: Sequence[int] | Array) -> Array:
        """Documents that every one of the runs has in a complete trial."""
        result: Array = (self.timed[np.asarray(runs, dtype=int)] >= 0).all(axis=0)
        return result

    def mean(self, runs: Sequence[int] | Array, column: str, *, timed: bool = False) -> Array:
        """Per document, the mean over the runs that have it (`timed`: in a complete trial); NaN if none has."""
        cells = (self.timed if timed else self.cell)[np.asarray(runs, dtype=int)]
        present = cells >= 0
        total = np.where(present, self.columns[column][cells], 0).sum(axis=0, dtype=np.float64)
        count = present.sum(axis=0)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def rows_of(self, runs: Sequence[int] | Array) -> Array:
        """Indices into the columns of all rows of the runs."""
        cells = self.cell[np.asarray(runs, dtype=int)]
        result: Array = cells[cells >= 0]
        return result

    def described(self, documents: pa.Table, column: str) -> pa.Array:
        """A column of the task's documents, in the order of `doc_ids`; null for documents that are not described."""
        index = pc.index_in(pa.array(self.doc_ids, pa.string()), value_set=documents["doc_id"].combine_chunks())
        return documents[column].combine_chunks().take(index)

    def trials_of(self, rows: Array) -> tuple[str, ...]:
        """Sorted trial ids of these rows."""
        names = self.names["trial_id"]
        return tuple(sorted(str(names[code]) for code in np.unique(self.columns["trial_id"][rows])))


@dataclass(frozen=True, kw_only=True, slots=True)
class IncompleteRun:
    """A run that has fewer documents than it needs."""

    run: int
    present: int
    needed: int


def split_by_task(
    rows: pa.Table,
    fingerprints: Array,
    primary: Mapping[str, str],
    baselines: Mapping[str, BaselineRule] | None = None,
) -> list[TaskRuns]:
    """One TaskRuns per task, those in `primary` (task → metric) first; `baselines` has a rule for each task."""
    columns: dict[str, Array] = {name: to_numpy(rows[name]) for name in (*NUMBERS, "shard", "correct")}
    names: dict[str, tuple[Any, ...]] = {}
    for name in (*NAMES, *DECODE_SETTINGS, "sweep", "task"):
        columns[name], names[name] = encode(rows[name])
    columns["answer"], columns["started_at"] = fingerprints, to_numpy(rows["started_at"].cast(pa.int64())) / 1e6
    columns |= _calibrated_times(columns, len(names["trial_id"]))
    columns["passes"] = sum((columns[f"passes_{kind}"] for kind in PASS_KINDS), np.zeros(len(rows), np.int32))
    columns["steps"] = columns["passes_full"] + columns["passes_small"]
    finish = names["finish"]
    columns["truncated"] = columns["finish"] == (finish.index("length") if "length" in finish else -1)
    tasks = names["task"]
    ordered = [*(task for task in primary if task in tasks), *(task for task in tasks if task not in primary)]
    task_rows = [np.flatnonzero(columns["task"] == tasks.index(task)) for task in ordered]
    parts: list[dict[str, Array]] = [{} for _ in ordered]
    for name in list(columns):
        column = columns.pop(name)  # so that only one column is in memory twice
        for part, indices in zip(parts, task_rows, strict=True):
            part[name] = _at(column, indices)
    return [
        _task_runs(task, rows, row, part, dict(names), primary.get(task, ""), (baselines or {}).get(task, OWN_BASELINE))
        for task, row, part in zip(ordered, task_rows, parts, strict=True)
    ]


def _at(column: Array, indices: Array) -> Array:
    """The values at these increasing indices; a view of the column if the indices are consecutive."""
    start, end = int(indices[0]), int(indices[-1]) + 1
    return column[start:end] if end - start == len(indices) else column[indices]


def _calibrated_times(columns: Mapping[str, Array], trials: int) -> dict[str, Array]:
    """Per row: `wall` time, calibrated time (`work`), and whether its trial is `complete`."""
    trial = columns["trial_id"]
    wall = apportioned_wall_time(
        trial, columns["attempt"], columns["batch_id"], columns["batch_seconds"], columns["tokens"]
    )
    last = np.zeros(trials, dtype=np.int64)  # a row of each trial's last attempt
    order = np.argsort(columns["attempt"], kind="stable")
    last[trial[order]] = order

    def codes(*names: str) -> Array:
        return group_codes(*(columns[name][last] for name in names))[0]

    def sums(values: Array) -> Array:
        return np.bincount(trial, weights=values, minlength=trials)

    seconds = sums(wall)
    with np.errstate(divide="ignore", invalid="ignore"):
        calibration = sums(wall * columns["calibration"]) / seconds
    times = TrialTimes(
        shard=codes("sweep", "task", "shard"),
        baseline=codes("task", *DECODE_SETTINGS),
        configuration=codes("task", *CONFIGURATION_KEYS),
        is_k1=columns["k"][last] == 1,
        actor=codes("sweep", "actor", "device"),
        documents=np.bincount(trial, minlength=trials),
        tokens=sums(columns["tokens"]),
        seconds=seconds,
        calibration=calibration,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = calibrate(times).work / seconds
    return {"wall": wall, "work": wall * speed[trial], "complete": times.complete[trial]}


def _task_runs(
    task: str,
    rows: pa.Table,
    row: Array,
    columns: dict[str, Array],
    names: dict[str, tuple[Any, ...]],
    primary: str,
    baseline: BaselineRule,
) -> TaskRuns:
    """`rows` is the table of all tasks, `row` the indices of this task's rows in it; `columns` has only its values."""
    for name in NAMES:
        columns[name], names[name] = without_unused(columns[name], names[name])
    columns["score"] = primary_scores(columns["correct"], rows["metrics"], row, primary)
    configuration, first = _configuration_codes(columns, names)
    run, runs = group_codes(configuration, columns["repeat"])
    cell = np.full((runs, len(names["doc_id"])), -1, dtype=np.int64)
    backwards = np.arange(len(row))[::-1]  # so that of two rows of one document the first one stays
    cell[run[backwards], columns["doc_id"][backwards]] = backwards
    example = first_indices(run, runs)
    strata = np.zeros(len(names["doc_id"]), dtype=np.int64)
    strata[columns["doc_id"]] = columns["subtask"]
    return TaskRuns(
        task=task,
        configurations=_resolved(rows, row[first], baseline),
        owner=configuration[example],
        repeat=columns["repeat"][example],
        cell=cell,
        timed=np.where((cell >= 0) & columns["complete"][cell], cell, -1),
        doc_ids=np.array(names["doc_id"], dtype=object),
        strata=strata,
        subtasks=tuple(str(name) for name in names["subtask"]),
        columns=columns,
        names=names,
        run=run,
        row=row,
    )


def _configuration_codes(
    columns: Mapping[str, Array], names: Mapping[str, tuple[str | None, ...]]
) -> tuple[Array, Array]:
    """Each row's configuration (numbered by settings, k and subset), and the first row of each configuration."""
    k = np.nan_to_num(columns["k"].astype(np.float64), nan=np.inf)
    rank = np.array([SUBSETS.index(name) if name in SUBSETS else len(SUBSETS) for name in names["subset"]])
    settings = (columns[name] for name in DECODE_SETTINGS)
    key, count = group_codes(*settings, k, rank[columns["subset"]], columns["policy"])
    return key, first_indices(key, count)


def _resolved(rows: pa.Table, first: Array, rule: BaselineRule) -> tuple[ResolvedConfiguration, ...]:
    """The configurations of which `first` has a row each."""
    values = rows.select([*CONFIGURATION_KEYS, "k", "subset", "mode"]).take(pa.array(first)).to_pylist()
    layers = [rows["layers"][int(row)].as_py() for row in first]  # taking lists from the whole column is slow
    configurations = [Configuration.from_mapping(row) for row in values]
    shown = varying_settings(configurations)
    return tuple(
        ResolvedConfiguration(
            configuration=configuration,
            k=row["k"],
            subset=row["subset"],
            mode=row["mode"],
            layers=tuple(indices),
            label=configuration.label(shown),
            rule=rule,
        )
        for configuration, row, indices in zip(configurations, values, layers, strict=True)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Number of documents between edges, which all configurations of a task share."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    p50: float
    p90: float
    mean: float


def histograms(rows: TaskRuns, column: str) -> tuple[Histogram, ...]:
    """The distribution of a column's values, by configuration."""
    values = rows.columns[column].astype(float)
    low, high = float(values.min()), float(values.max())
    width = max(1.0, np.ceil((high - low + 1) / HISTOGRAM_BINS))
    edges = np.arange(low, high + 2 * width, width)
    result = []
    for number in range(len(rows.configurations)):
        own = values[rows.rows_of(rows.runs_of(number))]
        p50, p90 = (float(q) for q in np.quantile(own, [0.5, 0.9]))
        result.append(
            Histogram(
                edges=tuple(float(edge) for edge in edges),
                counts=tuple(int(count) for count in np.histogram(own, bins=edges)[0]),
                p50=p50,
                p90=p90,
                mean=float(own.mean()),
            )
        )
    return tuple(result)


def document_clusters(rows: TaskRuns) -> Array:
    """Each document's cluster: documents that shared a batch in the first run (at k=1, if possible) that has them.

    With batch size 1, each document is a cluster.
    """
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

"""One task's rows as a table of runs × documents.

A run is one repeat of a configuration. The baseline of a configuration is all runs at k=1 with the same decode
settings, pooled: they are identical by definition.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from orchestrator.analysis.columns import (
    NAMES,
    NUMBERS,
    Array,
    apportioned_wall_time,
    encode,
    group_codes,
    primary_scores,
    to_numpy,
)
from orchestrator.core.configuration import CONFIGURATION_KEYS, DECODE_SETTINGS, Configuration, varying_settings
from orchestrator.core.speed import TrialTimes, calibrate

Settings = tuple[Any, ...]  # values of DECODE_SETTINGS
SUBSETS = ("first", "middle", "last", "all")
PASS_KINDS = ("prefill", "full", "small", "commit")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfiguration:
    """A configuration with what its rows say about its policy; `layers` are indices into this model."""

    configuration: Configuration
    k: int | None
    subset: str | None
    mode: str | None
    layers: tuple[int, ...]
    label: str  # with the settings that vary in this table

    @property
    def policy(self) -> str:
        return self.configuration.policy

    @property
    def settings(self) -> Settings:
        return self.configuration.settings

    @property
    def is_baseline(self) -> bool:
        return self.k == 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TaskRuns:
    """One task's rows. `cell` is runs × documents: an index into the columns, −1 if the run lacks the document."""

    task: str
    configurations: tuple[ResolvedConfiguration, ...]
    owner: Array  # run → configuration
    repeat: Array  # run → repeat
    cell: Array
    timed: Array  # as `cell`, but −1 where the run's trial is incomplete: only complete shards are compared in speed
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
        found = [self.is_baseline_run(run) and self._configuration(run).settings == settings for run in self.all_runs]
        return np.flatnonzero(found)

    def is_baseline_run(self, run: int) -> bool:
        return self._configuration(run).is_baseline

    def _configuration(self, run: int) -> ResolvedConfiguration:
        return self.configurations[int(self.owner[run])]

    def run_label(self, run: int) -> str:
        repeat = int(self.repeat[run])
        return self._configuration(run).label + (f".r{repeat}" if repeat else "")

    def present(self, runs: Sequence[int] | Array, *, timed: bool = False) -> Array:
        """Documents that at least one of the runs has (`timed`: in a complete trial)."""
        cells = (self.timed if timed else self.cell)[np.asarray(runs, dtype=int)]
        result: Array = (cells >= 0).any(axis=0)
        return result

    def values(self, runs: Sequence[int] | Array, column: str) -> Array:
        """Runs × documents, NaN if a run lacks a document."""
        cells = self.cell[np.asarray(runs, dtype=int)]
        return np.where(cells >= 0, self.columns[column][cells], np.nan)

    def mean(self, runs: Sequence[int] | Array, column: str, *, timed: bool = False) -> Array:
        """Per document, the mean over the runs that have it (`timed`: in a complete trial); NaN if none has."""
        cells = (self.timed if timed else self.cell)[np.asarray(runs, dtype=int)]
        found = cells >= 0
        total = np.where(found, self.columns[column][cells], 0).sum(axis=0, dtype=np.float64)
        count = found.sum(axis=0)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def rows_of(self, runs: Sequence[int] | Array) -> Array:
        """Indices into the columns of all rows of the runs."""
        cells = self.cell[np.asarray(runs, dtype=int)]
        result: Array = cells[cells >= 0]
        return result

    def trials_of(self, rows: Array) -> tuple[str, ...]:
        """Sorted trial ids of these rows."""
        names = self.names["trial_id"]
        return tuple(sorted(str(names[code]) for code in np.unique(self.columns["trial_id"][rows])))


def split_by_task(rows: pa.Table, fingerprints: Array, primary: Mapping[str, str]) -> list[TaskRuns]:
    """One TaskRuns per task, tasks of `primary` (task → metric) first."""
    code, tasks = encode(rows["task"])
    requested = [task for task in primary if task in tasks]
    narrow = rows.select([*DECODE_SETTINGS, *NUMBERS, *NAMES, "correct", "metrics"])
    for name, values in _calibrated_times(rows).items():
        narrow = narrow.append_column(name, pa.array(values))
    result = []
    for task in (*requested, *(task for task in tasks if task not in requested)):
        places = np.flatnonzero(code == tasks.index(task))
        part = narrow if len(tasks) == 1 else narrow.take(pa.array(places))
        result.append(_task_runs(task, part, rows["layers"], fingerprints[places], places, primary.get(task, "")))
    return result


def _calibrated_times(rows: pa.Table) -> dict[str, Array]:
    """Per row: `wall` time, calibrated time (`work`), and whether its trial is `complete`."""
    trial, trials = encode(rows["trial_id"])
    numbers = {name: to_numpy(rows[name]) for name in ("attempt", "batch_id", "batch_seconds", "tokens", "calibration")}
    batch = (numbers[name] for name in ("attempt", "batch_id", "batch_seconds", "tokens"))
    wall = apportioned_wall_time(trial, *batch)
    last = np.zeros(len(trials), dtype=np.int64)  # a row of each trial's last attempt
    order = np.argsort(numbers["attempt"], kind="stable")
    last[trial[order]] = order

    def codes(*names: str) -> Array:
        columns = (rows[name] for name in names)
        kinds = (encode(column)[0] if _is_text(column.type) else to_numpy(column) for column in columns)
        return group_codes(*(values[last] for values in kinds))[0]

    seconds, tokens, weighted = (
        np.bincount(trial, weights=values, minlength=len(trials))
        for values in (wall, numbers["tokens"], wall * numbers["calibration"])
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        calibration = weighted / seconds
    times = TrialTimes(
        shard=codes("sweep", "task", "shard"),
        baseline=codes("task", *DECODE_SETTINGS),
        configuration=codes("task", *CONFIGURATION_KEYS),
        is_k1=to_numpy(rows["k"])[last] == 1,
        actor=codes("sweep", "actor", "device"),
        documents=np.bincount(trial, minlength=len(trials)),
        tokens=tokens,
        seconds=seconds,
        calibration=calibration,
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = calibrate(times).work / seconds
    return {"wall": wall, "work": wall * speed[trial], "complete": times.complete[trial]}


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_dictionary(kind))


def _task_runs(
    task: str, rows: pa.Table, layers: pa.ChunkedArray, fingerprints: Array, places: Array, primary: str
) -> TaskRuns:
    """`layers` is the whole table's column: taking long lists is slow, and one per configuration is enough."""
    columns: dict[str, Array] = {name: to_numpy(rows[name]) for name in NUMBERS}
    names: dict[str, tuple[str | None, ...]] = {}
    for name in NAMES:
        columns[name], names[name] = encode(rows[name])
    for name in DECODE_SETTINGS:
        columns[name] = encode(rows[name])[0] if _is_text(rows[name].type) else to_numpy(rows[name])
    columns["answer"] = fingerprints
    columns["score"] = primary_scores(rows, primary)
    columns["wall"], columns["work"] = (to_numpy(rows[name]) for name in ("wall", "work"))
    columns["passes"] = sum((columns[f"passes_{kind}"] for kind in PASS_KINDS), np.zeros(len(rows), np.int64))
    columns["steps"] = columns["passes_full"].astype(np.int64) + columns["passes_small"]
    configuration, first = _configuration_codes(columns, names)
    run, runs = group_codes(configuration, columns["repeat"])
    cell = np.full((runs, len(names["doc_id"])), -1, dtype=np.int64)
    backwards = np.arange(len(rows))[::-1]  # so that of two rows of one document the first one stays
    cell[run[backwards], columns["doc_id"][backwards]] = backwards
    example = np.zeros(runs, dtype=np.int64)
    example[run[backwards]] = backwards
    strata = np.zeros(len(names["doc_id"]), dtype=np.int64)
    strata[columns["doc_id"]] = columns["subtask"]
    return TaskRuns(
        task=task,
        configurations=_resolved(rows.take(pa.array(first)), [layers[int(row)].as_py() for row in places[first]]),
        owner=configuration[example],
        repeat=columns["repeat"][example],
        cell=cell,
        timed=np.where((cell >= 0) & to_numpy(rows["complete"]).astype(bool)[cell], cell, -1),
        doc_ids=np.array(names["doc_id"], dtype=object),
        strata=strata,
        subtasks=tuple(str(name) for name in names["subtask"]),
        columns=columns,
        names=names,
        run=run,
        row=places,
    )


def _configuration_codes(
    columns: Mapping[str, Array], names: Mapping[str, tuple[str | None, ...]]
) -> tuple[Array, Array]:
    """Each row's configuration, ordered by settings, k and subset, and the first row of each configuration."""
    k = np.nan_to_num(columns["k"].astype(np.float64), nan=np.inf)
    rank = np.array([SUBSETS.index(name) if name in SUBSETS else len(SUBSETS) for name in names["subset"]])
    settings = (columns[name] for name in DECODE_SETTINGS)
    key, count = group_codes(*settings, k, rank[columns["subset"]], columns["policy"])
    first = np.zeros(count, dtype=np.int64)
    first[key[::-1]] = np.arange(len(key))[::-1]
    return key, first


def _resolved(rows: pa.Table, layers: Sequence[Sequence[int]]) -> tuple[ResolvedConfiguration, ...]:
    """`rows` has one row per configuration."""
    values = rows.select([*CONFIGURATION_KEYS, "k", "subset", "mode"]).to_pylist()
    found = [Configuration.from_mapping(row) for row in values]
    shown = varying_settings(found)
    return tuple(
        ResolvedConfiguration(
            configuration=configuration,
            k=row["k"],
            subset=row["subset"],
            mode=row["mode"],
            layers=tuple(indices),
            label=configuration.label(shown),
        )
        for configuration, row, indices in zip(found, values, layers, strict=True)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialAttempt:
    """One attempt at a trial on one actor, as a point in time."""

    trial_id: str
    task: str
    label: str
    settings: Settings
    actor: str
    started_at: float  # seconds since 1970
    documents: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    calibration: float
    work_per_pass: float  # calibrated time of an average pass
    work_per_layer: float  # calibrated time per layer that ran, overhead included
    first_of_actor: bool


def timeline(tasks: Sequence[TaskRuns], table: pa.Table) -> tuple[TrialAttempt, ...]:
    """Every attempt of all tasks, in order of time."""
    started = to_numpy(table["started_at"].cast(pa.int64())) / 1e6
    found = sorted((one for rows in tasks for one in _attempts(rows, started[rows.row])), key=lambda a: a.started_at)
    seen: set[str] = set()
    result = []
    for attempt in found:
        result.append(attempt if attempt.actor in seen else replace(attempt, first_of_actor=True))
        seen.add(attempt.actor)
    return tuple(result)


def _attempts(rows: TaskRuns, started: Array) -> Iterator[TrialAttempt]:
    columns, names = rows.columns, rows.names
    group, count = group_codes(columns["trial_id"], columns["attempt"], columns["actor"])
    first = np.zeros(count, dtype=np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]
    began = np.full(count, np.inf)
    np.minimum.at(began, group, started)
    documents = np.bincount(group, minlength=count)
    sums = {
        name: np.bincount(group, weights=columns[name], minlength=count)
        for name in ("tokens", "wall", "work", "passes", "layers_computed")
    }
    for i, row in enumerate(first):
        tokens, wall = int(sums["tokens"][i]), float(sums["wall"][i])
        yield TrialAttempt(
            trial_id=str(names["trial_id"][columns["trial_id"][row]]),
            task=rows.task,
            label=rows.run_label(int(rows.run[row])),
            settings=rows.configurations[rows.owner[rows.run[row]]].settings,
            actor=str(names["actor"][columns["actor"][row]]),
            started_at=float(began[i]),
            documents=int(documents[i]),
            tokens=tokens,
            seconds=wall,
            tokens_per_second=tokens / wall if tokens and wall > 0 else None,
            calibration=float(columns["calibration"][row]),
            work_per_pass=float(sums["work"][i] / max(1.0, sums["passes"][i])),
            work_per_layer=float(sums["work"][i] / max(1.0, sums["layers_computed"][i])),
            first_of_actor=False,
        )

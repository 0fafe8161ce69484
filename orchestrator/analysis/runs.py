"""Rows of one task as runs × documents: which configuration answered which document, and at what cost.

A configuration is a policy with its decode settings; a run is one repeat of it. The baseline of a configuration is
every run at k=1 with the same decode settings, pooled: they are the same by definition. Knows no statistics.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from orchestrator.analysis.columns import (
    NAMES,
    NUMBERS,
    Array,
    codes,
    grouped,
    numbers,
    score_of,
    speeds_of_moments,
    wall_time,
)

Settings = tuple[float, int, bool]
SUBSETS = ("first", "middle", "last", "all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """A policy with its decode settings; `layers` are the indices it names in this model."""

    policy: str
    k: int | None
    subset: str | None
    mode: str | None
    layers: tuple[int, ...]
    threshold: float
    small_block: int
    block_cache: bool
    label: str  # the policy, with the settings that vary in this table

    @property
    def settings(self) -> Settings:
        return self.threshold, self.small_block, self.block_cache

    @property
    def is_baseline(self) -> bool:
        return self.k == 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TaskRows:
    """One task's rows. `cell` is runs × documents: a row's place in the columns, −1 where there is none."""

    task: str
    configurations: tuple[Configuration, ...]
    owner: Array  # run → configuration
    repeat: Array  # run → repeat
    cell: Array
    doc_ids: Array
    strata: Array  # document → subtask
    subtasks: tuple[str, ...]
    columns: Mapping[str, Array]  # per row of this task; names are codes into `names`
    names: Mapping[str, tuple[str | None, ...]]
    run: Array  # place in the columns → run
    row: Array  # place in the columns → place in the table of all tasks

    @property
    def documents(self) -> int:
        return len(self.doc_ids)

    def runs_of(self, configuration: int) -> Array:
        return np.flatnonzero(self.owner == configuration)

    def baseline_runs(self, settings: Settings) -> Array:
        """The runs at k=1 with these decode settings; none if there is no such run."""
        return np.flatnonzero(
            [self.is_baseline_run(run) and self._of(run).settings == settings for run in self.all_runs]
        )

    @property
    def all_runs(self) -> range:
        return range(len(self.owner))

    def is_baseline_run(self, run: int) -> bool:
        return self._of(run).is_baseline

    def _of(self, run: int) -> Configuration:
        return self.configurations[int(self.owner[run])]

    def run_label(self, run: int) -> str:
        repeat = int(self.repeat[run])
        return self._of(run).label + (f".r{repeat}" if repeat else "")

    def present(self, runs: Sequence[int] | Array) -> Array:
        """Documents that at least one of the runs has."""
        result: Array = (self.cell[np.asarray(runs, dtype=int)] >= 0).any(axis=0)
        return result

    def values(self, runs: Sequence[int] | Array, column: str) -> Array:
        """Runs × documents, NaN where a run lacks a document."""
        cells = self.cell[np.asarray(runs, dtype=int)]
        return np.where(cells >= 0, self.columns[column][cells], np.nan)

    def mean(self, runs: Sequence[int] | Array, column: str) -> Array:
        """Per document the mean over those of the runs that have it, NaN where none has."""
        cells = self.cell[np.asarray(runs, dtype=int)]
        found = cells >= 0
        total = np.where(found, self.columns[column][cells], 0).sum(axis=0, dtype=np.float64)
        count = found.sum(axis=0)
        return np.where(count > 0, total / np.maximum(count, 1), np.nan)

    def rows_of(self, runs: Sequence[int] | Array) -> Array:
        """Places in the columns of all rows of the runs."""
        cells = self.cell[np.asarray(runs, dtype=int)]
        result: Array = cells[cells >= 0]
        return result


def split(rows: pa.Table, marks: Array, primary: Mapping[str, str]) -> list[TaskRows]:
    """The table by task, in the order of `primary`'s tasks; `marks` are the fingerprints of its answers."""
    code, tasks = codes(rows["task"])
    asked = [task for task in primary if task in tasks]
    narrow = rows.select([*NUMBERS, *NAMES, "correct", "metrics"])
    narrow = narrow.append_column("moment", pa.array(speeds_of_moments(rows)))
    result = []
    for task in (*asked, *(task for task in tasks if task not in asked)):
        places = np.flatnonzero(code == tasks.index(task))
        part = narrow if len(tasks) == 1 else narrow.take(pa.array(places))
        result.append(task_rows(task, part, rows["layers"], marks[places], places, primary.get(task, "")))
    return result


def task_rows(
    task: str, rows: pa.Table, layers: pa.ChunkedArray, marks: Array, places: Array, primary: str
) -> TaskRows:
    """`layers` and `places` are those of the whole table: lists are long, and one of each configuration is enough."""
    columns: dict[str, Array] = {name: numbers(rows[name]) for name in NUMBERS}
    names: dict[str, tuple[str | None, ...]] = {}
    for name in NAMES:
        columns[name], names[name] = codes(rows[name])
    columns["mark"] = marks
    columns["score"] = score_of(rows, primary)
    columns["wall"] = wall_time(
        columns["trial_id"],
        columns["attempt"],
        columns["batch_id"],
        columns["batch_seconds"],
        columns["tokens"],
    )
    columns["work"] = columns["wall"] * numbers(rows["moment"])  # seconds in units of what this actor does in one
    columns["passes"] = sum(
        (columns[f"passes_{kind}"] for kind in ("prefill", "full", "small", "commit")), np.zeros(len(rows), np.int64)
    )
    columns["steps"] = columns["passes_full"].astype(np.int64) + columns["passes_small"]
    configuration, first = _configurations(columns, names)
    run, runs = grouped(configuration, columns["repeat"])
    cell = np.full((runs, len(names["doc_id"])), -1, dtype=np.int64)
    backwards = np.arange(len(rows))[::-1]  # so that of two rows for one document the first one stays
    cell[run[backwards], columns["doc_id"][backwards]] = backwards
    example = np.zeros(runs, dtype=np.int64)
    example[run[backwards]] = backwards
    strata = np.zeros(len(names["doc_id"]), dtype=np.int64)
    strata[columns["doc_id"]] = columns["subtask"]
    return TaskRows(
        task=task,
        configurations=_described(columns, names, first, [layers[int(row)].as_py() for row in places[first]]),
        owner=configuration[example],
        repeat=columns["repeat"][example],
        cell=cell,
        doc_ids=np.array(names["doc_id"], dtype=object),
        strata=strata,
        subtasks=tuple(str(name) for name in names["subtask"]),
        columns=columns,
        names=names,
        run=run,
        row=places,
    )


def _configurations(columns: Mapping[str, Array], names: Mapping[str, tuple[str | None, ...]]) -> tuple[Array, Array]:
    """Each row's configuration, k=1 first and then as a model's layers lie, and a row of each configuration."""
    k = np.nan_to_num(columns["k"].astype(np.float64), nan=np.inf)
    rank = np.array([SUBSETS.index(name) if name in SUBSETS else len(SUBSETS) for name in names["subset"]])
    keys = (*(columns[axis] for axis in ("threshold", "small_block", "block_cache")), k, rank[columns["subset"]])
    key, count = grouped(*keys, columns["policy"])
    first = np.zeros(count, dtype=np.int64)
    first[key[::-1]] = np.arange(len(key))[::-1]
    return key, first


def _described(
    columns: Mapping[str, Array],
    names: Mapping[str, tuple[str | None, ...]],
    first: Array,
    layers: Sequence[Sequence[int]],
) -> tuple[Configuration, ...]:
    axes = ("threshold", "small_block", "block_cache")
    varying = [axis for axis in axes if len(np.unique(columns[axis])) > 1]
    return tuple(_describe(columns, names, int(row), tuple(layers[i]), varying) for i, row in enumerate(first))


def _describe(
    columns: Mapping[str, Array],
    names: Mapping[str, tuple[str | None, ...]],
    row: int,
    layers: tuple[int, ...],
    varying: Sequence[str],
) -> Configuration:
    policy = str(names["policy"][columns["policy"][row]])
    k = float(columns["k"][row])
    values = {
        "threshold": float(columns["threshold"][row]),
        "small_block": int(columns["small_block"][row]),
        "block_cache": bool(columns["block_cache"][row]),
    }
    said = "".join(f" {axis.replace('_', ' ')} {_plain(values[axis])}" for axis in varying)
    return Configuration(
        policy=policy,
        k=None if np.isnan(k) else int(k),
        subset=names["subset"][columns["subset"][row]],
        mode=names["mode"][columns["mode"][row]],
        layers=layers,
        label=policy + said,
        threshold=values["threshold"],
        small_block=int(values["small_block"]),
        block_cache=bool(values["block_cache"]),
    )


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One attempt at a trial on one actor, as a point in time."""

    trial_id: str
    attempt: int
    task: str
    label: str
    settings: Settings
    actor: str
    device: str
    started_at: float  # seconds since 1970
    documents: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    calibration: float
    work_per_pass: float  # calibrated seconds of an average pass
    work_per_layer: float  # and of an average layer that ran, all else included
    first_of_actor: bool


def timeline(tasks: Sequence[TaskRows], table: pa.Table) -> tuple[Trial, ...]:
    """Every trial and attempt of all tasks with its speed, in order of time."""
    started = numbers(table["started_at"].cast(pa.int64())) / 1e6
    found = sorted((trial for rows in tasks for trial in _trials(rows, started[rows.row])), key=lambda t: t.started_at)
    seen: set[str] = set()
    result = []
    for trial in found:
        result.append(trial if trial.actor in seen else replace(trial, first_of_actor=True))
        seen.add(trial.actor)
    return tuple(result)


def _trials(rows: TaskRows, started: Array) -> Iterator[Trial]:
    columns, names = rows.columns, rows.names
    group, count = grouped(columns["trial_id"], columns["attempt"], columns["actor"])
    first = np.zeros(count, dtype=np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]
    began = np.full(count, np.inf)
    np.minimum.at(began, group, started)
    documents = np.bincount(group, minlength=count)
    totals = {
        name: np.bincount(group, weights=columns[name], minlength=count)
        for name in ("tokens", "wall", "work", "passes", "layers_computed")
    }
    for i, row in enumerate(first):
        tokens, wall = int(totals["tokens"][i]), float(totals["wall"][i])
        yield Trial(
            trial_id=str(names["trial_id"][columns["trial_id"][row]]),
            attempt=int(columns["attempt"][row]),
            task=rows.task,
            label=rows.run_label(int(rows.run[row])),
            settings=rows.configurations[rows.owner[rows.run[row]]].settings,
            actor=str(names["actor"][columns["actor"][row]]),
            device=str(names["device"][columns["device"][row]]),
            started_at=float(began[i]),
            documents=int(documents[i]),
            tokens=tokens,
            seconds=wall,
            tokens_per_second=tokens / wall if tokens and wall > 0 else None,
            calibration=float(columns["calibration"][row]),
            work_per_pass=float(totals["work"][i] / max(1.0, totals["passes"][i])),
            work_per_layer=float(totals["work"][i] / max(1.0, totals["layers_computed"][i])),
            first_of_actor=False,
        )

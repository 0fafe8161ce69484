"""Facts about the trials of a sweep: actor start-ups, memory, provenance, counters, and all attempts in order of time.

They are computed from the rows and from the trial.json files. Attempts are a table (store.schema.ATTEMPTS), because a
large sweep has hundreds of thousands of trials.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis.columns import COUNTERS, Array, first_indices
from orchestrator.analysis.runs import ResolvedConfiguration, TaskRuns
from orchestrator.core.configuration import Configuration
from orchestrator.core.speed import group_codes
from orchestrator.core.totals import KEYS, TaskConfiguration

STARTUP = ("load_seconds", "warm_up_seconds", "calibration_seconds", "started_at")
MIN_PEERS = 2  # attempts that an actor's first one is compared with
LAST = pc.ScalarAggregateOptions(skip_nulls=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterSums:
    """Sums over all rows of one task and configuration."""

    rows: int
    sums: dict[str, int | float]  # by name in COUNTERS
    began: datetime
    ended: datetime  # when the last document began


def counter_sums(rows: pa.Table) -> dict[TaskConfiguration, CounterSums]:
    """By task and configuration."""
    aggregations = [
        *((name, "sum") for name in COUNTERS),
        ("started_at", "min"),
        ("started_at", "max"),
        ([], "count_all"),
    ]
    grouped = rows.select([*KEYS, *COUNTERS, "started_at"]).group_by(list(KEYS)).aggregate(aggregations)
    return {
        task_configuration(row): CounterSums(
            rows=row["count_all"],
            sums={name: row[f"{name}_sum"] for name in COUNTERS},
            began=row["started_at_min"],
            ended=row["started_at_max"],
        )
        for row in grouped.to_pylist()
    }


def task_configuration(row: Mapping[str, Any]) -> TaskConfiguration:
    return row["task"], Configuration.from_mapping(row)


def peak_memory(attempts: pa.Table) -> dict[TaskConfiguration, int]:
    """Peak memory in bytes over all attempts at a configuration's trials; on a CPU, that of the whole process."""
    most = attempts.group_by(list(KEYS)).aggregate([("peak_memory", "max")]).to_pylist()
    return {task_configuration(row): int(peak) for row in most if (peak := row["peak_memory_max"]) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorStartup:
    """When an actor began to start up, had loaded its model, and was warm; in seconds since 1970."""

    began: float
    loaded: float
    warm: float


def actor_startups(attempts: pa.Table) -> dict[str, ActorStartup]:
    """By actor, for those whose first attempt records how long loading and warm-up took."""
    known = attempts.filter(pc.field("load_seconds").is_valid() & pc.field("warm_up_seconds").is_valid())
    ordered = known.sort_by("started_at")  # ISO 8601, all of one machine's time zone
    first = ordered.group_by("actor", use_threads=False).aggregate([(name, "first") for name in STARTUP]).to_pylist()
    startups = {}
    for row in first:
        loading, warm_up, calibration, started_at = (row[f"{name}_first"] for name in STARTUP)
        at = _seconds(started_at)
        if at is not None:
            warm = at - (calibration or 0.0)  # an attempt starts when its calibration is done
            began = warm - warm_up - loading
            startups[str(row["actor"])] = ActorStartup(began=began, loaded=warm - warm_up, warm=warm)
    return startups


def _seconds(timestamp: object) -> float | None:
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedDevice:
    """A type of device and the actors that ran on it."""

    name: str
    facts: tuple[tuple[str, str], ...]
    actors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialProvenance:
    """Devices, packages and code versions of attempts, in the order of their first use."""

    devices: tuple[UsedDevice, ...]
    packages: tuple[tuple[str, tuple[str, ...]], ...]
    codes: tuple[str, ...]


def provenance_by_configuration(attempts: pa.Table) -> dict[TaskConfiguration | None, TrialProvenance]:
    """Of each task and configuration; of all attempts together under None."""
    used: dict[TaskConfiguration | None, list[Mapping[str, Any]]] = {None: []}
    for row in distinct(attempts, *KEYS, "device", "packages", "code", "actor"):
        used[None].append(row)
        used.setdefault(task_configuration(row), []).append(row)
    return {key: _provenance(rows) for key, rows in used.items()}


def distinct(table: pa.Table | None, *columns: str) -> Iterator[dict[str, Any]]:
    """Distinct combinations of these columns' values, in the order in which they occur; JSON columns are parsed."""
    parsed: dict[str, Any] = {}
    if table is None:
        return
    for row in table.group_by(list(columns), use_threads=False).aggregate([]).to_pylist():
        for name in columns:
            if pa.types.is_dictionary(table.schema.field(name).type) and row[name] is not None:
                row[name] = parsed.setdefault(row[name], json.loads(row[name]))
        yield row


def _provenance(rows: Iterable[Mapping[str, Any]]) -> TrialProvenance:
    devices: dict[str, tuple[dict[str, str], dict[str, None]]] = {}
    packages: dict[str, dict[str, None]] = {}
    codes: dict[str, None] = {}
    for row in rows:
        device = row["device"] or {}
        if device:
            facts, actors = devices.setdefault(str(device.get("name")), ({}, {}))
            facts |= {str(k): str(v) for k, v in device.items() if k not in ("name", *facts) and v is not None}
            actors[str(row["actor"])] = None
        for name, version in (row["packages"] or {}).items():
            packages.setdefault(str(name), {})[str(version)] = None
        if row["code"]:
            codes[describe_code(row["code"])] = None
    return TrialProvenance(
        devices=tuple(
            UsedDevice(name=name, facts=tuple(facts.items()), actors=tuple(actors))
            for name, (facts, actors) in devices.items()
        ),
        packages=tuple((name, tuple(versions)) for name, versions in packages.items()),
        codes=tuple(codes),
    )


def describe_code(code: object) -> str:
    """A version of the code in words, from its record in sweep.json or trial.json."""
    if not isinstance(code, Mapping):
        return "unknown"
    if not code.get("commit"):
        return f"version {code['version']}, commit unknown" if code.get("version") else "unknown"
    return f"commit {str(code['commit'])[:12]}" + (" with uncommitted changes" if code.get("dirty") else "")


def trials_by_code(attempts: pa.Table) -> dict[str, list[str]]:
    """By version of the code (see `describe_code`): ids of the trials that it ran."""
    result: dict[str, list[str]] = {}
    for row in attempts.group_by("code").aggregate([("trial_id", "distinct")]).to_pylist():
        version = describe_code(row["code"] and json.loads(row["code"]))
        result.setdefault(version, []).extend(row["trial_id_distinct"])
    return result


def unfinished_trials(attempts: pa.Table) -> list[str]:
    """A sentence for each trial that is not finished, with the reason of its last attempt."""
    last = [(name, "last", LAST) for name in ("task", "policy", "shard", "status", "reason")]
    left = attempts.filter(pc.field("status") != "finished").group_by("trial_id", use_threads=False).aggregate(last)
    return [
        f"Trial {row['task_last']}/{row['policy_last']}/{row['shard_last']} is {row['status_last']}, not finished"
        + (f": {row['reason_last']}." if row["reason_last"] else ".")
        for row in left.to_pylist()
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOfTask:
    """A run on one of the tasks, and its configuration."""

    task: str
    label: str
    resolved: ResolvedConfiguration


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttemptTimeline:
    """All attempts at trials, in the order in which they started: one entry per attempt in each array."""

    runs: tuple[RunOfTask, ...]
    run: Array  # attempt → run
    trial_id: Array
    actor: Array
    started_at: Array  # seconds since 1970
    tokens: Array
    wall: Array  # seconds of the decode batches
    calibration: Array
    work: Array  # calibrated time
    passes: Array
    layers_computed: Array


def timeline(tasks: Sequence[TaskRuns]) -> AttemptTimeline:
    runs = [
        RunOfTask(task=rows.task, label=rows.run_label(run), resolved=rows.configuration_of(run))
        for rows in tasks
        for run in rows.all_runs
    ]
    starts = np.cumsum([0, *(len(rows.owner) for rows in tasks)])
    parts = [_attempts(rows, int(start)) for rows, start in zip(tasks, starts, strict=False)]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(columns["started_at"], kind="stable")
    return AttemptTimeline(runs=tuple(runs), **{name: values[order] for name, values in columns.items()})


def _attempts(rows: TaskRuns, first_run: int) -> dict[str, Array]:
    """The arrays of an AttemptTimeline for one task."""
    columns = rows.columns
    group, count = group_codes(columns["trial_id"], columns["attempt"], columns["actor"])
    first = first_indices(group, count)
    began = np.full(count, np.inf)
    np.minimum.at(began, group, columns["started_at"])
    names = {name: np.array(rows.names[name], dtype=object)[columns[name][first]] for name in ("trial_id", "actor")}
    sums = {
        name: np.bincount(group, weights=columns[name], minlength=count)
        for name in ("tokens", "wall", "work", "passes", "layers_computed")
    }
    run = rows.run[first] + first_run
    return {**names, **sums, "run": run, "started_at": began, "calibration": columns["calibration"][first]}


def first_attempt_slowness(line: AttemptTimeline) -> Iterator[tuple[int, float]]:
    """The first attempt of each actor, and how many times slower than its peers it was (below 1: faster).

    Peers are attempts at the same configuration (for k=1: at any k=1 policy), or all attempts with the same decode
    settings if these are too few. Other policies leave out other layers, and in output mode most of a pass. So the
    ratio is that per pass or per layer computed, whichever is closer to 1; it is 1 if they lie on both sides of 1.
    """
    settings = _codes((run.task, run.resolved.settings) for run in line.runs)
    same = _codes(
        (run.task, run.resolved.settings, run.resolved.is_baseline or run.resolved.label) for run in line.runs
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        costs = [line.work / np.maximum(1.0, counts) for counts in (line.passes, line.layers_computed)]
    timed = line.work > 0
    for first in np.sort(np.unique(line.actor.astype(str), return_index=True)[1]):
        if not timed[first]:
            continue
        peers = timed & (same[line.run] == same[line.run[first]])
        if peers.sum() <= MIN_PEERS:
            peers = timed & (settings[line.run] == settings[line.run[first]])
        peers[first] = False
        if peers.sum() < MIN_PEERS:
            continue
        ratios = [float(cost[first] / np.median(cost[peers])) for cost in costs]
        yield int(first), min(ratios) if min(ratios) > 1 else min(1.0, max(ratios))


def _codes(keys: Iterable[object]) -> Array:
    """A number for each key; equal keys get the same one."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def overlapping_attempts(line: AttemptTimeline, attempts: pa.Table | None) -> list[tuple[int, int]]:
    """Pairs of consecutive attempts on one GPU by different actors, where the second began before the first ended."""
    used = distinct(attempts, "actor", "node_id", "gpus")
    by_gpu: dict[tuple[str, str], list[str]] = {}
    for row in {row["actor"]: row for row in used}.values():
        for gpu in row["gpus"] or ():
            by_gpu.setdefault((str(row["node_id"]), str(gpu)), []).append(row["actor"])
    return [
        (first, second)
        for actors in by_gpu.values()
        if len(actors) > 1
        for first, second in pairwise(np.flatnonzero(np.isin(line.actor.astype(str), actors)).tolist())
        if line.actor[first] != line.actor[second]
        and line.started_at[second] < line.started_at[first] + line.wall[first]
    ]

"""What trial.json files say about a sweep, and sums of its rows' counters: actor start-ups, memory, provenance."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from orchestrator.analysis.columns import COUNTERS
from orchestrator.core.configuration import Configuration
from orchestrator.core.totals import KEYS, TaskConfiguration

TrialFiles = Mapping[str, Mapping[str, Any]]  # trial_id → content of trial.json


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterSums:
    """Sums over all rows of one task and configuration."""

    rows: int
    sums: dict[str, int | float]  # by name in COUNTERS
    began: datetime
    ended: datetime  # when the last document began


def counter_sums(rows: pa.Table) -> dict[TaskConfiguration, CounterSums]:
    wanted = [*((name, "sum") for name in COUNTERS), ("started_at", "min"), ("started_at", "max"), ([], "count_all")]
    grouped = rows.select([*KEYS, *COUNTERS, "started_at"]).group_by(list(KEYS)).aggregate(wanted)
    return {
        (row["task"], Configuration.from_mapping(row)): CounterSums(
            rows=row["count_all"],
            sums={name: row[f"{name}_sum"] for name in COUNTERS},
            began=row["started_at_min"],
            ended=row["started_at_max"],
        )
        for row in grouped.to_pylist()
    }


def trials_by_configuration(trials: TrialFiles) -> dict[TaskConfiguration, dict[str, Mapping[str, Any]]]:
    found: dict[TaskConfiguration, dict[str, Mapping[str, Any]]] = {}
    for trial_id, facts in trials.items():
        found.setdefault(_task_configuration(facts["trial"]), {})[trial_id] = facts
    return found


def peak_memory(trials: TrialFiles) -> dict[TaskConfiguration, int]:
    """The most bytes that any attempt at a configuration's trials used; on a CPU, by its whole process."""
    most: dict[TaskConfiguration, int] = {}
    for trial, attempt in _attempts(trials):
        if isinstance(attempt.get("peak_memory"), int | float):
            key = _task_configuration(trial)
            most[key] = max(most.get(key, 0), int(attempt["peak_memory"]))
    return most


def _task_configuration(trial: Mapping[str, Any]) -> TaskConfiguration:
    return trial["task"], Configuration.from_mapping(trial)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorStartup:
    """Times of an actor before its first row, in seconds since 1970."""

    actor: str
    began: float
    loaded: float
    warm: float


def actor_startups(trials: TrialFiles) -> dict[str, ActorStartup]:
    """By actor, if its first attempt records how long loading and warm-up took."""
    first: dict[str, tuple[float, Mapping[str, Any]]] = {}
    for _, attempt in _attempts(trials):
        at = _seconds(attempt.get("started_at"))
        if at is not None and {"actor", "load_seconds", "warm_up_seconds"} <= attempt.keys():
            actor = str(attempt["actor"])
            if actor not in first or at < first[actor][0]:
                first[actor] = at, attempt
    return {actor: _startup(actor, at, attempt) for actor, (at, attempt) in first.items()}


def _startup(actor: str, at: float, attempt: Mapping[str, Any]) -> ActorStartup:
    """An attempt's start time is when its calibration was done."""
    warm = at - float(attempt.get("calibration_seconds") or 0)
    loaded = warm - float(attempt["warm_up_seconds"])
    return ActorStartup(actor=actor, began=loaded - float(attempt["load_seconds"]), loaded=loaded, warm=warm)


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedDevice:
    """A type of device and the actors that ran on it."""

    name: str
    facts: tuple[tuple[str, str], ...]
    actors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedTrial:
    trial_id: str
    name: str
    status: str
    reason: str  # of the last attempt


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialProvenance:
    """Devices, packages and code versions of all attempts, in the order of their first use."""

    devices: tuple[UsedDevice, ...]
    packages: tuple[tuple[str, tuple[str, ...]], ...]
    codes: tuple[str, ...]
    unfinished: tuple[UnfinishedTrial, ...]
    attempts: int


def trial_provenance(trials: TrialFiles) -> TrialProvenance:
    devices: dict[str, tuple[dict[str, str], dict[str, None]]] = {}
    packages: dict[str, dict[str, None]] = {}
    codes: dict[str, None] = {}
    count = 0
    for _, attempt in _attempts(trials):
        count += 1
        device = attempt.get("device")
        if isinstance(device, Mapping):
            facts, actors = devices.setdefault(str(device.get("name")), ({}, {}))
            facts |= {str(k): str(v) for k, v in device.items() if k not in ("name", *facts) and v is not None}
            actors[str(attempt.get("actor"))] = None
        for name, version in (attempt.get("packages") or {}).items():
            packages.setdefault(str(name), {})[str(version)] = None
        if isinstance(attempt.get("code"), Mapping):
            codes[describe_code(attempt["code"])] = None
    return TrialProvenance(
        devices=tuple(
            UsedDevice(name=name, facts=tuple(facts.items()), actors=tuple(actors))
            for name, (facts, actors) in devices.items()
        ),
        packages=tuple((name, tuple(versions)) for name, versions in packages.items()),
        codes=tuple(codes),
        unfinished=tuple(_unfinished(trials)),
        attempts=count,
    )


def describe_code(code: object) -> str:
    if not isinstance(code, Mapping):
        return "unknown"
    if not code.get("commit"):
        return f"version {code['version']}, commit unknown" if code.get("version") else "unknown"
    return f"commit {str(code['commit'])[:12]}" + (" with uncommitted changes" if code.get("dirty") else "")


def _unfinished(trials: TrialFiles) -> Iterator[UnfinishedTrial]:
    for trial_id, facts in trials.items():
        if facts.get("status") != "finished":
            trial = facts.get("trial", {})
            attempts = facts.get("attempts") or [{}]
            yield UnfinishedTrial(
                trial_id=trial_id,
                name=f"{trial.get('task')}/{trial.get('policy')}/{trial.get('shard')}",
                status=str(facts.get("status")),
                reason=str(attempts[-1].get("reason") or ""),
            )


def _attempts(trials: TrialFiles) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each attempt with its trial; a reconstructed trial.json has no attempts."""
    for facts in trials.values():
        for attempt in facts.get("attempts") or ():
            yield facts["trial"], attempt


def _seconds(timestamp: object) -> float | None:
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except ValueError:
        return None

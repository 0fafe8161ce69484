"""What trial.json files say beside the rows: startups, peak memory, devices, versions, failures. No statistics."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

from orchestrator.analysis.runs import Configuration

Trials = Mapping[str, Mapping[str, Any]]
Key = tuple[str, str, float, int, bool]  # task, policy and decode settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Startup:
    """An actor before its first row, in seconds since 1970: nothing of it is recorded in rows."""

    actor: str
    began: float
    loaded: float
    warm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A type of device and which actors ran on it."""

    name: str
    facts: tuple[tuple[str, str], ...]
    actors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A trial that has not finished, and why, as its last attempt tells."""

    trial_id: str
    name: str
    status: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What rows were made with; every value that occurs, in the order of its first use."""

    devices: tuple[Device, ...]
    packages: tuple[tuple[str, tuple[str, ...]], ...]
    codes: tuple[str, ...]
    failures: tuple[Failure, ...]
    attempts: int


def startups(trials: Trials) -> dict[str, Startup]:
    """By actor, for those whose first attempt states how long loading and warm-up took."""
    first: dict[str, tuple[float, Mapping[str, Any]]] = {}
    for _, attempt in _attempts(trials):
        at = _seconds(attempt.get("started_at"))
        if at is not None and {"actor", "load_seconds", "warm_up_seconds"} <= attempt.keys():
            actor = str(attempt["actor"])
            if actor not in first or at < first[actor][0]:
                first[actor] = at, attempt
    return {actor: _startup(actor, at, attempt) for actor, (at, attempt) in first.items()}


def _startup(actor: str, at: float, attempt: Mapping[str, Any]) -> Startup:
    """An attempt begins when its calibration is done."""
    warm = at - float(attempt.get("calibration_seconds") or 0)
    loaded = warm - float(attempt["warm_up_seconds"])
    return Startup(actor=actor, began=loaded - float(attempt["load_seconds"]), loaded=loaded, warm=warm)


def key_of(task: str, configuration: Configuration) -> Key:
    return task, configuration.policy, *configuration.settings


def by_configuration(trials: Trials) -> dict[Key, dict[str, Mapping[str, Any]]]:
    found: dict[Key, dict[str, Mapping[str, Any]]] = {}
    for trial_id, facts in trials.items():
        found.setdefault(_key(facts["trial"]), {})[trial_id] = facts
    return found


def _key(spec: Mapping[str, Any]) -> Key:
    return spec["task"], spec["policy"], spec["threshold"], spec["small_block"], spec["block_cache"]


def peak_memory(trials: Trials) -> dict[Key, int]:
    """The most that any attempt at a configuration's trials held, in bytes; on a CPU that of its whole process."""
    most: dict[Key, int] = {}
    for spec, attempt in _attempts(trials):
        if isinstance(attempt.get("peak_memory"), int | float):
            most[_key(spec)] = max(most.get(_key(spec), 0), int(attempt["peak_memory"]))
    return most


def provenance(trials: Trials) -> Provenance:
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
            codes[code_text(attempt["code"])] = None
    return Provenance(
        devices=tuple(
            Device(name=name, facts=tuple(facts.items()), actors=tuple(actors))
            for name, (facts, actors) in devices.items()
        ),
        packages=tuple((name, tuple(versions)) for name, versions in packages.items()),
        codes=tuple(codes),
        failures=tuple(_failures(trials)),
        attempts=count,
    )


def code_text(code: Mapping[str, Any]) -> str:
    """A version of the code for people."""
    if not code.get("commit"):
        return f"version {code['version']}, no commit known" if code.get("version") else "unknown"
    return f"commit {str(code['commit'])[:12]}" + (" with changed files" if code.get("dirty") else "")


def _failures(trials: Trials) -> Iterator[Failure]:
    for trial_id, facts in trials.items():
        if facts.get("status") != "finished":
            spec = facts.get("trial", {})
            attempts = facts.get("attempts") or [{}]
            yield Failure(
                trial_id=trial_id,
                name=f"{spec.get('task')}/{spec.get('policy')}/{spec.get('shard')}",
                status=str(facts.get("status")),
                reason=str(attempts[-1].get("reason") or ""),
            )


def _attempts(trials: Trials) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each attempt with the trial it belongs to; a trial.json that had to be made anew knows no attempts."""
    for facts in trials.values():
        for attempt in facts.get("attempts") or ():
            yield facts["trial"], attempt


def _seconds(stamp: object) -> float | None:
    try:
        return datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError:
        return None


SUMS = (
    "tokens",
    "prompt_tokens",
    "prefill_tokens",
    "passes_prefill",
    "passes_full",
    "passes_small",
    "passes_commit",
    "layers_computed",
    "layers_reused",
    "layer_positions",
    "eligible",
    "replayed",
    "seconds",
)
KEYS = ("task", "policy", "threshold", "small_block", "block_cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """All rows of one configuration."""

    rows: int
    sums: dict[str, int | float]
    began: datetime
    ended: datetime  # when the last document began
    devices: tuple[str, ...]


def totals(rows: pa.Table) -> dict[Key, Totals]:
    wanted = [*((name, "sum") for name in SUMS), ("started_at", "min"), ("started_at", "max"), ("device", "distinct")]
    table = rows.select([*KEYS, *SUMS, "started_at", "device"])
    grouped = table.group_by(list(KEYS)).aggregate([*wanted, ([], "count_all")])
    return {
        tuple(row[name] for name in KEYS): Totals(
            rows=row["count_all"],
            sums={name: row[f"{name}_sum"] for name in SUMS},
            began=row["started_at_min"],
            ended=row["started_at_max"],
            devices=tuple(sorted(row["device_distinct"])),
        )
        for row in grouped.to_pylist()
    }

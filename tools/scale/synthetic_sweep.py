"""Writes sweep folders of any size with the real store and constant rows, without running anything."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.core.totals import trial_sums
from orchestrator.core.trial import Trial
from orchestrator.planning.run_plan import plan_trials
from orchestrator.planning.settings import PolicyGrid, SweepSettings
from orchestrator.planning.sweep_record import SweepIdentity
from orchestrator.store import StoreWriter
from orchestrator.store.files import Disk
from orchestrator.store.schema import DOCUMENTS, ROWS
from orchestrator.store.trial_files import TOTALS_KEY

SHARD_SIZE = 50
TASK = "made"
SWEEP_ID = "made-00000000"
CONSTANTS: tuple[tuple[Any, Any], ...] = (
    (pa.types.is_string, "a few words"),
    (pa.types.is_list, []),
    (pa.types.is_timestamp, datetime(2026, 1, 1, tzinfo=UTC)),
    (pa.types.is_boolean, True),
    (pa.types.is_floating, 1.0),
    (pa.types.is_integer, 1),
)


class DiskWithoutSync(Disk):
    """A disk without flushes: faster, for data that need not survive a crash."""

    def sync(self, handle: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


def write_finished_sweep(folder: Path, *, rows: int) -> int:
    """Writes a finished sweep. Returns its number of rows, which is `rows` rounded up to whole shards."""
    documents = -(-rows // len(PolicyGrid().policies) // SHARD_SIZE) * SHARD_SIZE
    trials = write_planned_sweep(folder, documents=documents, shard_size=SHARD_SIZE)
    with StoreWriter(folder, disk=DiskWithoutSync()) as store:
        for trial in trials:
            _write_trial(store, trial)
    return SHARD_SIZE * len(trials)


def write_planned_sweep(folder: Path, *, documents: int, shard_size: int) -> list[Trial]:
    """Writes sweep.json and documents; returns the trials, none of which has begun."""
    settings = SweepSettings(tasks=(TASK,), shard_size=shard_size, model="made", out="made")
    identity = synthetic_identity(shard_size=shard_size)
    with StoreWriter(folder, disk=DiskWithoutSync()) as store:
        store.write_sweep_record(_request(settings, identity, documents))
        ids = [{"doc_id": f"{TASK}/{n}", "shard": n // shard_size} for n in range(documents)]
        store.write_documents(TASK, pa.Table.from_pylist([constant_row(DOCUMENTS) | own for own in ids], DOCUMENTS))
    return plan_trials(identity, settings, {TASK: range(documents // shard_size)})


def constant_row(schema: pa.Schema) -> dict[str, Any]:
    """A row with a constant in every column that must not be null."""
    return {
        column.name: None if column.nullable else next(value for matches, value in CONSTANTS if matches(column.type))
        for column in schema
    }


def _write_trial(store: StoreWriter, trial: Trial) -> None:
    ids = [f"{TASK}/{trial.shard * SHARD_SIZE + index}" for index in range(SHARD_SIZE)]
    common = constant_row(ROWS) | trial.as_dict() | {"k": int(trial.policy[1])}
    columns = {name: [value] * SHARD_SIZE for name, value in common.items()}
    columns |= {"doc_id": ids, "batch_id": list(range(SHARD_SIZE))}
    batch = pa.RecordBatch.from_pydict({name: columns[name] for name in ROWS.names}, schema=ROWS)
    attempt = store.begin(trial.as_dict(), {"actor": "worker-1"})
    store.append(trial.trial_id, attempt, batch)
    store.finish(trial.trial_id, {TOTALS_KEY: trial_sums(pa.Table.from_batches([batch])).as_json()}, ids)


def synthetic_identity(**changes: Any) -> SweepIdentity:
    """The identity of a sweep of the bundled data with default settings, except for `changes`."""
    values: dict[str, Any] = {
        "model": "made",
        "model_revision": None,
        "depth": 8,
        "dtype": "float32",
        "subset_size": 3,
        "data": "bundled",
        "datasets": {TASK: {}},
        "sample": None,
        "seed": 0,
        "fewshot": None,
        "chat_template": True,
        "max_new_tokens": None,
        "batch_size": 1,
        "shard_size": SHARD_SIZE,
    }
    return SweepIdentity(**values | changes)


def _request(settings: SweepSettings, identity: SweepIdentity, documents: int) -> dict[str, Any]:
    task = {"kind": "generate", "primary": "exact", "documents": documents, "fewshot": 0, "source": "made"}
    return {
        "sweep": SWEEP_ID,
        "created": "2026-01-01T00:00:00+00:00",
        "identity": identity.as_dict(),
        "settings": settings.as_dict(),
        "margin": settings.margin,
        "speedup": settings.speedup,
        "model": {"source": "made", "revision": None, "depth": identity.depth, "parameters": 1},
        "tasks": {TASK: {**task, "datasets": {}}},
        "commands": [],
    }

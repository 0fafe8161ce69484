"""A million rows in a folder: what a status of it costs, and whether its memory grows with the rows. Knows no Ray."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.core.totals import trial_sums
from orchestrator.core.trial import Trial
from orchestrator.planning.grid import SweepIdentity, plan_trials
from orchestrator.planning.settings import PolicyGrid, SweepSettings
from orchestrator.store import StoreWriter
from orchestrator.store.files import Disk
from orchestrator.store.schema import DOCUMENTS, ROWS
from tools.scale.figure import Figure, spent_by

SHARD = 50
TASK = "made"
BLANK: tuple[tuple[Any, Any], ...] = (
    (pa.types.is_string, "a few words"),
    (pa.types.is_list, []),
    (pa.types.is_timestamp, datetime(2026, 1, 1, tzinfo=UTC)),
    (pa.types.is_boolean, True),
    (pa.types.is_floating, 1.0),
    (pa.types.is_integer, 1),
)


class Unsynced(Disk):
    """Quick: nothing here has to survive a crash."""

    def sync(self, handle: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


def million_rows(folder: Path, *, rows: int = 1_000_000) -> list[Figure]:
    large, small = folder / "large", folder / "small"
    count = write_rows(large, rows=rows)
    write_rows(small, rows=rows // 10)
    spent, tenth = (spent_by("orchestrator.status", [str(path), "--json"]) for path in (large, small))
    return [
        Figure(what=f"status of {count:,} rows", value=spent.wall, unit="s", wanted=2),
        Figure(what="  of the processor", value=spent.cpu, unit="s"),
        Figure(what="  memory", value=spent.memory, unit="MB"),
        Figure(
            what="  against that of a tenth of the rows", value=spent.memory / tenth.memory, unit="times", wanted=1.5
        ),
    ]


def write_rows(folder: Path, *, rows: int) -> int:
    """A finished sweep by the real store; how many rows it has."""
    documents = -(-rows // len(PolicyGrid().policies) // SHARD) * SHARD
    trials = write_begun(folder, documents=documents, shard=SHARD)
    with StoreWriter(folder, disk=Unsynced()) as store:
        for trial in trials:
            _write_trial(store, trial)
    return SHARD * len(trials)


def write_begun(folder: Path, *, documents: int, shard: int) -> list[Trial]:
    """A sweep's request and documents, and its trials, of which none has begun."""
    settings = SweepSettings(tasks=(TASK,), shard_size=shard, model="made", out="made")
    identity = _identity(shard)
    with StoreWriter(folder, disk=Unsynced()) as store:
        store.write_sweep_record(_request(settings, identity, documents))
        ids = [{"doc_id": f"{TASK}/{n}", "shard": n // shard} for n in range(documents)]
        store.write_documents(TASK, pa.Table.from_pylist([constants(DOCUMENTS) | own for own in ids], DOCUMENTS))
    return plan_trials(identity, settings, {TASK: range(documents // shard)})


def constants(schema: pa.Schema) -> dict[str, Any]:
    """A row in which everything is something."""
    return {
        column.name: None if column.nullable else next(value for matches, value in BLANK if matches(column.type))
        for column in schema
    }


def _write_trial(store: StoreWriter, trial: Trial) -> None:
    ids = [f"{TASK}/{trial.shard * SHARD + place}" for place in range(SHARD)]
    same = constants(ROWS) | trial.as_dict() | {"k": int(trial.policy[1])}
    columns = {name: [value] * SHARD for name, value in same.items()}
    columns |= {"doc_id": ids, "batch_id": list(range(SHARD))}
    batch = pa.RecordBatch.from_pydict({name: columns[name] for name in ROWS.names}, schema=ROWS)
    attempt = store.begin(trial.as_dict(), {"actor": "worker-1"})
    store.append(trial.trial_id, attempt, batch)
    store.finish(trial.trial_id, {"tally": trial_sums(pa.Table.from_batches([batch])).as_json()}, ids)


def _identity(shard: int) -> SweepIdentity:
    return SweepIdentity(
        model="made",
        model_revision=None,
        depth=8,
        dtype="float32",
        subset_size=3,
        data="bundled",
        datasets={TASK: {}},
        sample=None,
        seed=0,
        fewshot=None,
        chat_template=True,
        max_new_tokens=None,
        batch_size=1,
        shard_size=shard,
    )


def _request(settings: SweepSettings, identity: SweepIdentity, documents: int) -> dict[str, Any]:
    task = {"kind": "generate", "primary": "exact", "documents": documents, "fewshot": 0, "source": "made"}
    return {
        "sweep": "made-00000000",
        "created": "2026-01-01T00:00:00+00:00",
        "identity": identity.as_dict(),
        "settings": settings.as_dict(),
        "margin": settings.margin,
        "speedup": settings.speedup,
        "model": {"source": "made", "revision": None, "depth": identity.depth, "parameters": 1},
        "tasks": {TASK: {**task, "datasets": {}}},
        "commands": [],
    }

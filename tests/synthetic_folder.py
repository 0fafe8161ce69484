"""Rows, and sweep folders written by the real store, that no model has computed."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.core.totals import trial_sums
from orchestrator.core.trial import Trial
from orchestrator.planning.run_plan import plan_trials
from orchestrator.planning.settings import SweepSettings
from orchestrator.store import StoreWriter
from orchestrator.store.schema import DOCUMENTS, ROWS
from tools.scale.synthetic_sweep import DiskWithoutSync, synthetic_identity

_DEFAULT_OF_TYPE: list[tuple[Any, Any]] = [
    (pa.types.is_string, ""),
    (pa.types.is_list, []),
    (pa.types.is_timestamp, datetime(2026, 1, 1, tzinfo=UTC)),
    (pa.types.is_boolean, True),
    (pa.types.is_floating, 1.0),
    (pa.types.is_integer, 0),
]
DEFAULTS: dict[str, Any] = {
    field.name: None if field.nullable else next(value for matches, value in _DEFAULT_OF_TYPE if matches(field.type))
    for field in ROWS
} | {"threshold": 0.95, "small_block": 8, "metrics": "{}", "calibration": 50.0}


def rows_with_defaults(rows: list[dict[str, Any]]) -> pa.Table:
    """Rows with the full schema, of which a test states only the columns that it is about."""
    return pa.Table.from_pylist([DEFAULTS | row for row in rows], schema=ROWS)


class SyntheticFolder:
    """A request, its documents and its trials; a test decides which of them run and how far."""

    def __init__(
        self, folder: Path, *, documents: int = 20, kinds: Sequence[str] = ("generate",), **settings: Any
    ) -> None:
        self.folder, self.count = folder, documents
        tasks = tuple(f"task{i}" for i in range(len(kinds)))
        self.settings = SweepSettings(
            **{
                "tasks": tasks,
                "policies": ("k1", "k2_middle"),
                "shard_size": 10,
                "out": "out",
                "model": "made",
                **settings,
            }
        )
        self.kinds = dict(zip(tasks, kinds, strict=True))
        self.identity = synthetic_identity(
            model_revision="0123456789abcdef",
            datasets={task: {} for task in tasks},
            shard_size=self.settings.shard_size,
        )
        shards = {task: list(range(-(-documents // self.settings.shard_size))) for task in tasks}
        scored = [task for task, kind in self.kinds.items() if kind == "loglikelihood"]
        self.trials = plan_trials(self.identity, self.settings, shards, scored=scored)

    def wanted(self, trial: Trial) -> list[str]:
        size = self.settings.shard_size
        return [f"d{i}" for i in range(trial.shard * size, min((trial.shard + 1) * size, self.count))]

    def begin(self) -> StoreWriter:
        """The folder with its request and documents, open for writing."""
        store = StoreWriter(self.folder, disk=DiskWithoutSync())
        facts = {"primary": "exact", "documents": self.count, "fewshot": 0, "source": "made", "datasets": {}}
        store.write_sweep_record(
            {
                "sweep": "made-01234567",
                "created": "2026-01-01T00:00:00+00:00",
                "identity": self.identity.as_dict(),
                "settings": self.settings.as_dict(),
                "margin": 5.0,
                "speedup": 1.2,
                "model": {"source": "made", "revision": "0123456789abcdef", "depth": 8, "parameters": 1},
                "tasks": {task: {"kind": kind, **facts} for task, kind in self.kinds.items()},
                "commands": [],
            }
        )
        for task in self.kinds:
            store.write_documents(task, self._documents())
        return store

    def _documents(self) -> pa.Table:
        size = self.settings.shard_size
        blank = {"subtask": "", "doc_hash": "", "level": None, "question": "?", "choices": None, "gold": "!"}
        rows = [{**blank, "doc_id": f"d{i}", "shard": i // size} for i in range(self.count)]
        return pa.Table.from_pylist(rows, schema=DOCUMENTS)

    def rows(self, trial: Trial, attempt: int, doc_ids: Sequence[str]) -> pa.RecordBatch:
        """Made up from the trial and the document alone, so that repeating it makes the same rows."""
        k = int(trial.policy[1])
        rows = []
        for number, doc_id in enumerate(doc_ids):
            rng = random.Random(f"{trial.trial_id}{doc_id}")
            made = {
                "trial_id": trial.trial_id, "task": trial.task, "policy": trial.policy, "k": k, "shard": trial.shard,
                **trial.configuration.as_dict(),
                "doc_id": doc_id, "batch_id": number, "batch_seconds": rng.uniform(1, 2) / (1 + 0.1 * k),
                "tokens": rng.randrange(50, 90), "correct": rng.random() < 0.8, "attempt": attempt,
                "repeat": trial.repeat, "layer_positions": 1000 // k, "calibration": 50.0,
                "text": "an answer of some length " * 10,
            }  # fmt: skip
            rows.append({**DEFAULTS, **made, **({"tokens": 0} if self.kinds[trial.task] == "loglikelihood" else {})})
        return pa.RecordBatch.from_pylist(rows, schema=ROWS)

    def run(
        self, store: StoreWriter, trial: Trial, doc_ids: Sequence[str] | None = None, *, tally: bool = True
    ) -> None:
        """All of a trial, or the first documents of it, left unfinished."""
        attempt = store.begin(trial.as_dict(), {"actor": "worker-1", "packages": {"torch": "2.13.0", "ray": "2.60.0"}})
        wanted = self.wanted(trial)
        batch = self.rows(trial, attempt, wanted if doc_ids is None else doc_ids)
        store.append(trial.trial_id, attempt, batch)
        if doc_ids is None:
            facts = {"tally": trial_sums(pa.Table.from_batches([batch])).as_json()} if tally else {}
            store.finish(trial.trial_id, {"calibration_seconds": 0.1, **facts}, wanted)

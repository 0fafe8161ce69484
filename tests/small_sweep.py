"""A model, documents and trials small enough that a sweep takes seconds; shared by the tests of orchestrator/."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from random_model import write_model
from test_tasks_sources import gsm8k_folder, write_dataset

from orchestrator.core.trial import Trial
from orchestrator.planning.run_plan import WorkerSettings
from tasks.documents import TaskOptions

DOCUMENTS = 12
NEW_TOKENS = 40


def mmlu_row(number: int) -> dict[str, Any]:
    options = [str(number + offset) for offset in range(4)]
    return {"question": f"Which number is {number} and no other?", "choices": options, "answer": 0}


def write_model_and_data(root: Path, *, documents: int = DOCUMENTS) -> Path:
    """`root`/model and `root`/data with gsm8k and one subject of mmlu."""
    write_model(root / "model")
    gsm8k_folder(root / "data", count=documents)
    rows = [mmlu_row(number) for number in range(20)]
    write_dataset(root / "data", "cais/mmlu", "anatomy", {"dev": rows[:5], "test": rows[5:]}, suffix="parquet")
    return root


def trial(policy: str = "k1", task: str = "gsm8k", **changes: Any) -> Trial:
    values: dict[str, Any] = {
        "trial_id": f"{policy}{task}".encode().hex(),
        "task": task,
        "policy": policy,
        "threshold": 0.95,
        "small_block": 8,
        "block_cache": True,
        "repeat": 0,
        "shard": 0,
    }
    return Trial.from_dict(values | changes)


def worker_settings(root: Path, **changes: Any) -> WorkerSettings:
    values: dict[str, Any] = {
        "model": str(root / "model"),
        "dtype": "float32",
        "options": TaskOptions(data=str(root / "data"), max_new_tokens=NEW_TOKENS),
        "calibration_task": "gsm8k",
        "device": "cpu",
        "threads": 1,
    }
    return WorkerSettings(**values | changes)


def context(**changes: Any) -> dict[str, Any]:
    return {"sweep": "s-1", "attempt": 0, "actor": "worker-1", "node": "n"} | changes


def gsm8k_ids(numbers: Sequence[int]) -> list[str]:
    return [f"gsm8k/{number}" for number in numbers]

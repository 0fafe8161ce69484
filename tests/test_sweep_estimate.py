"""What a sweep will take: memory, disk and time, from rows where there are any; and the lines of --dry-run."""

import datetime
import io
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fake_cuda import SEVEN_B
from random_model import write_model

from orchestrator.core.configuration import Configuration
from orchestrator.core.system import ANY_GPU, CORE, GPU_PROFILES, format_bytes
from orchestrator.planning.estimate import (
    ROW_BYTES,
    RUNNING_ROW_BYTES,
    STEP_BYTES,
    TOKEN_BYTES,
    TRIAL_BYTES,
    RemainingWork,
    SecondsNeeded,
    disk_needed,
    document_seconds,
    duration_range,
    measured_seconds,
    memory_needed,
    parameters,
    relative_cost,
    rough_duration,
    rough_pass_seconds,
    seconds_needed,
)
from orchestrator.planning.forecast import describe_plan
from orchestrator.planning.machine import Placement
from orchestrator.planning.prepared import PreparedSweep, PreparedTask
from orchestrator.planning.settings import SweepSettings
from orchestrator.store.files import encode_table
from orchestrator.store.schema import ROWS
from sampler.loading import find_model, load_model
from tasks.catalog import CATALOG
from tasks.documents import Document, Provenance, TaskOptions
from tasks.task import Task
from tools.scale.synthetic_sweep import synthetic_identity


def row(number: int, **changes: Any) -> dict[str, Any]:
    plain: dict[Any, Any] = {pa.string(): "gsm8k", pa.bool_(): True, pa.float64(): 0.5}
    made = {
        field.name: plain.get(
            field.type, [] if pa.types.is_list(field.type) else number if pa.types.is_integer(field.type) else None
        )
        for field in ROWS
    }
    return {**made, "started_at": datetime.datetime.now(datetime.UTC), "layers": list(range(12)), **changes}


def test_the_full_model_is_counted_right() -> None:
    assert parameters(SEVEN_B) == 7_615_616_512
    needed = memory_needed(SEVEN_B, "bfloat16")
    assert 15.2e9 < needed < 16.5e9
    assert memory_needed(SEVEN_B, "float32") > 30e9
    caches = memory_needed(SEVEN_B, "bfloat16", batch_size=8) - needed
    assert caches > 7 * 4096 * 57_344, "57,344 bytes of keys and values for each position"
    assert memory_needed(SEVEN_B, "bfloat16", positions=10**9) == memory_needed(SEVEN_B, "bfloat16", positions=32_768)


def test_a_small_model_is_counted_right(tmp_path: Path) -> None:
    write_model(tmp_path)
    files = find_model(str(tmp_path))
    loaded = load_model(files, device="cpu")
    assert parameters(files.config) * 4 == pytest.approx((tmp_path / "model.safetensors").stat().st_size, rel=0.05)
    assert memory_needed(files.config, "float32") > parameters(loaded.config) * 4


@pytest.mark.parametrize(("tokens", "steps"), [(0, False), (256, False), (256, True)])
def test_bytes_on_disk_are_of_the_right_size(tokens: int, steps: bool) -> None:
    stored = {
        "token_steps": [t % 32 // 2 for t in range(tokens)],
        "token_confidences": [random.random() for _ in range(tokens)],
        "token_ends": [5 * t for t in range(tokens)],
    }
    rows = [
        row(n, token_ids=[(n * 7919 * t) % 150_000 for t in range(tokens)], text="word " * tokens)
        | (stored if steps else {})
        for n in range(50)
    ]
    a_token = TOKEN_BYTES + STEP_BYTES * steps
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, ROWS) as writer:
        for one in rows:
            writer.write_batch(pa.RecordBatch.from_pylist([one], schema=ROWS))
    file = encode_table(pa.Table.from_pylist(rows, schema=ROWS))
    running = 50 * (RUNNING_ROW_BYTES + 2 * a_token * tokens)
    assert 0.3 * running < len(stream.getvalue()) < running
    assert len(file) < TRIAL_BYTES + 50 * (ROW_BYTES + a_token * tokens) < 8 * len(file)


def test_disk_counts_trials_rows_and_what_runs() -> None:
    work = {"a": RemainingWork(trials=2, rows=100, tokens=0), "b": RemainingWork(trials=1, rows=10, tokens=331)}
    least = 3 * TRIAL_BYTES + 110 * ROW_BYTES + 10 * 331 * TOKEN_BYTES
    assert disk_needed(work, running=0) == least
    assert disk_needed(work, running=50) > least + 50 * RUNNING_ROW_BYTES
    assert disk_needed(work, running=10**9) == disk_needed(work, running=110)
    assert disk_needed({}, running=5) == 0


def test_rough_seconds_agree_with_measured_and_published_speeds() -> None:
    """The 7B on GSM8K at threshold 0.9: 49.6 tokens/s on an RTX 6000, 101.7 on an A100; there 39.1 at threshold 1."""
    facts = {"config": SEVEN_B, "dtype": "float16"}
    tokens_per_second = {
        name: 331 / document_seconds(331, device=GPU_PROFILES[name], **facts) for name in ("rtx6000", "a100-80")
    }
    assert tokens_per_second == pytest.approx({"rtx6000": 49.6, "a100-80": 101.7}, rel=0.02)
    one_by_one, _ = relative_cost(Configuration(policy="k1", threshold=1.0), depth=28, subset_size=None, generates=True)
    assert tokens_per_second["a100-80"] / one_by_one == pytest.approx(39.1, rel=0.02)
    assert rough_pass_seconds(SEVEN_B, "float32", CORE) > 1


def test_what_policies_cost() -> None:
    def cost(policy: str, *, generates: bool = True) -> tuple[float, float]:
        return relative_cost(Configuration(policy=policy), depth=28, subset_size=None, generates=generates)

    assert cost("k1_first") == (1, 1)
    assert cost("k2_middle") == pytest.approx((1 / 1.27, 1), rel=0.01), "12 of 28 layers in every second pass"
    assert cost("k3_last") == pytest.approx((1 / 1.40, 1), rel=0.01)
    assert cost("k2_last.output") == (0.5, 1), "no layer runs"
    assert cost("adaptive=0.2_middle") == (1, 1), "not known"
    assert [cost(name, generates=False) for name in ("k1", "k3_last", "stale=2")] == [(1, 1), (3, 3), (2, 2)]


def test_measured_seconds_win_over_the_rule() -> None:
    work = {"a": RemainingWork(trials=1, rows=10, tokens=100), "b": RemainingWork(trials=1, rows=10, tokens=0)}
    needed = seconds_needed(work, {"a": 2.0}, config=SEVEN_B, dtype="bfloat16", device=ANY_GPU)
    assert needed["a"] == SecondsNeeded(least=20.0, most=20.0, measured=True)
    assert not needed["b"].measured
    assert needed["b"].most == pytest.approx(10 * 4 * rough_pass_seconds(SEVEN_B, "bfloat16", ANY_GPU))
    gaining = {"b": replace(work["b"], least=0.5)}
    needed = seconds_needed(gaining, {}, config=SEVEN_B, dtype="bfloat16", device=ANY_GPU)
    assert needed["b"].most == 2 * needed["b"].least


def test_seconds_are_wall_time_of_batches() -> None:
    """Two batches of two and one of one; documents of a batch overlap."""
    batches = [("t1", 0, 0, 4.0)] * 2 + [("t1", 0, 1, 2.0)] * 2 + [("t1", 1, 0, 1.5)]
    rows = [
        row(n, task="gsm8k", trial_id=trial, attempt=attempt, batch_id=batch, batch_seconds=seconds, seconds=99.0)
        for n, (trial, attempt, batch, seconds) in enumerate(batches)
    ]
    rows.append(row(9, task="mmlu", trial_id="t2", attempt=0, batch_id=0, batch_seconds=0.25))
    assert measured_seconds(pa.Table.from_pylist(rows, schema=ROWS)) == {"gsm8k": pytest.approx(1.5), "mmlu": 0.25}
    assert measured_seconds(ROWS.empty_table()) == {}


def prepared(documents: int, tmp_path: Path, **changes: Any) -> PreparedSweep:
    task = Task(
        spec=CATALOG["gsm8k"],
        options=TaskOptions(),
        provenance=Provenance(source="hub", datasets={"openai/gsm8k": "a"}),
        subtasks={},
        documents=[
            Document(doc_id=f"gsm8k/{index}", subtask="gsm8k", index=index, doc_hash="") for index in range(documents)
        ],
    )
    settings = SweepSettings(tasks=("gsm8k",), model="x", out="/results", shard_size=1, **changes)
    datasets = {"gsm8k": {"openai/gsm8k": "a"}}
    identity = synthetic_identity(
        model="x", model_revision="y", depth=6, subset_size=2, data="hub", datasets=datasets, shard_size=1
    )
    shards = {document.doc_id: place for place, document in enumerate(task.documents)}
    return PreparedSweep(
        settings=settings,
        requested=settings,
        files=find_model(str(write_model(tmp_path))),
        tasks={"gsm8k": PreparedTask(task=task, shards=shards, shard_size=1, limit=settings.limit)},
        identity=identity,
        placement=Placement(actors=2, gpus_per_actor=0, cpus_per_actor=1, threads_per_actor=1),
        notices=("a notice",),
    )


def test_a_dry_run_says_what_there_is_to_do(tmp_path: Path) -> None:
    ready = prepared(10, tmp_path, limit=4)
    lines = describe_plan(ready)
    assert lines[:2] == ["a notice", "directory  /results/x"]
    text = "\n".join(lines)
    assert "gsm8k: 4 of 10 documents, 4 shards, 36 rows to run" in text
    assert "36 of 36 to run, 36 rows" in text
    assert "a rough estimate (answers of 331 tokens" in text
    done = {trial.trial_id: set(ready.wanted.of(trial)) for trial in ready.trials[:30]}
    text = "\n".join(describe_plan(ready, done=done, measured={"gsm8k": 100.0}))
    assert "6 of 36 to run, 6 rows" in text
    assert "about 10 minutes on one actor, 5 minutes on 2 actors, from the rows measured so far" in text


def test_work_that_is_half_done(tmp_path: Path) -> None:
    ready = prepared(10, tmp_path)
    two = replace(
        ready, tasks={"gsm8k": replace(ready.tasks["gsm8k"], shards={f"gsm8k/{n}": n // 5 for n in range(10)})}
    )
    first = two.trials[0]
    half = two.work({first.trial_id: {"gsm8k/0", "gsm8k/1", "gsm8k/99"}})["gsm8k"]
    assert (half.trials, half.rows) == (18, 9 * 10 - 2)


def test_a_hundred_thousand_trials_are_described_quickly(tmp_path: Path) -> None:
    ready = prepared(11_200, tmp_path)
    began = time.process_time()
    lines = describe_plan(ready, done={trial.trial_id: {"x"} for trial in ready.trials[::2]})
    assert time.process_time() - began < 100
    assert any("100,800 of 100,800 to run" in line for line in lines)


def test_sizes_and_durations_for_people() -> None:
    assert [format_bytes(n) for n in (5, 2_000, 5e6, 15.23e9, 4e12)] == ["5 bytes", "2 kB", "5 MB", "15.2 GB", "4.0 TB"]
    assert [rough_duration(n) for n in (5, 119, 120, 7_200, 200_000)] == [
        "5 seconds",
        "119 seconds",
        "2 minutes",
        "2.0 hours",
        "56 hours",
    ]
    ranges = [duration_range(*pair) for pair in ((5, 5), (60_000, 72_000), (6_000, 8_000))]
    assert ranges == ["5 seconds", "17 to 20 hours", "100 minutes to 2.2 hours"]

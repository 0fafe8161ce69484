"""A worker turns trials into rows: right ones, timed without scoring, the same whatever ran before."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from emulated_gpu import SplitLinear, with_products
from small_sweep import NEW_TOKENS, context, gsm8k_ids, mmlu_row, trial, worker_settings, write_model_and_data
from test_tasks_sources import gsm8k_folder, write_dataset

from orchestrator.core import system
from orchestrator.planning.preflight import folder_revision
from orchestrator.running.trainable import TrialTotals
from orchestrator.running.worker import Worker, explain_out_of_memory, find_planned_model, wait_for_memory
from orchestrator.store.schema import ROWS
from sampler import DecodeSettings, InputError, ReusePolicy
from tasks.documents import TaskOptions
from tasks.evaluate import ModelDecoder, evaluate
from tasks.task import Task, open_task


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_data(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def worker(root: Path) -> Worker:
    return Worker(worker_settings(root))


def rows_of(worker: Worker, spec: Any, documents: list[str]) -> list[dict[str, Any]]:
    batches = list(worker.run(spec, documents, context()))
    return pa.Table.from_batches(batches, ROWS).to_pylist()


def test_rows_say_what_the_sampler_did(worker: Worker, root: Path) -> None:
    spent = worker.calibrate()
    rows = rows_of(worker, trial("k2_middle"), gsm8k_ids([3, 1, 2]))
    assert rows[0]["calibration"] == worker.facts(trial("k2_middle"), spent)["calibration"]
    assert [row["doc_id"] for row in rows] == gsm8k_ids([3, 1, 2])
    task = open_task("gsm8k", worker_settings(root).options)
    sampler = ModelDecoder(model=worker.model, policy=ReusePolicy.parse("k2_middle"), settings=DecodeSettings())
    expected = evaluate(task, [task.documents[number] for number in (3, 1, 2)], sampler)
    for row, result in zip(rows, expected, strict=True):
        assert tuple(row["token_ids"]) == result.token_ids
        assert row["text"] == result.text
        assert row["doc_hash"] == result.document.doc_hash
        assert json.loads(row["metrics"]) == result.metrics
        assert row["correct"] is result.correct
        counters = result.counters
        assert row["layers_reused"] == counters.layers_reused > 0
        assert (row["passes_full"], row["passes_small"]) == (counters.full, counters.small)
        assert (row["k"], row["subset"], row["mode"], row["layers"]) == (2, "middle", "residual", [2, 3])
        assert row["tokens"] == len(row["token_ids"]) <= NEW_TOKENS
        assert (row["actor"], row["dtype"]) == ("worker-1", "float32")
        assert row["device"] == system.describe_device("cpu")["name"]


def test_rows_hold_the_steps_of_their_tokens_on_request(worker: Worker, root: Path) -> None:
    steps = ("token_steps", "token_confidences", "token_ends")
    plain = rows_of(worker, trial("k2_middle"), gsm8k_ids([3, 1]))
    assert all(row[name] is None for row in plain for name in steps)
    stored = rows_of(Worker(worker_settings(root, store_steps=True)), trial("k2_middle"), gsm8k_ids([3, 1]))
    measured = ("seconds", "batch_seconds", "calibration", "started_at")
    for row, before in zip(stored, plain, strict=True):
        assert all(row[name] == before[name] for name in row if name not in (*steps, *measured))
        assert {len(row[name]) for name in steps} == {row["tokens"]}
        assert row["token_ends"][-1] <= len(row["text"])
    task = open_task("gsm8k", worker_settings(root).options)
    decoder = ModelDecoder(
        model=worker.model, policy=ReusePolicy.parse("k2_middle"), settings=DecodeSettings(), with_reveals=True
    )
    for row, result in zip(stored, evaluate(task, [task.documents[3], task.documents[1]], decoder), strict=True):
        assert result.reveals is not None
        assert row["token_steps"] == [reveal.step for reveal in result.reveals]
        assert row["token_confidences"] == [reveal.confidence for reveal in result.reveals]


def test_a_policy_without_layers_has_no_subset_and_no_mode(worker: Worker) -> None:
    (row,) = rows_of(worker, trial("k1"), gsm8k_ids([0]))
    assert (row["k"], row["subset"], row["mode"], row["layers"]) == (1, None, None, [])


def test_a_trial_does_not_depend_on_those_before_it(worker: Worker, root: Path) -> None:
    """Reuse caches and prefix caches would show in the tokens of a random model."""
    kept = ("token_ids", "layers_reused", "layer_positions", "passes_full", "passes_small")
    first = rows_of(Worker(worker_settings(root)), trial("k3_last"), gsm8k_ids(range(4)))
    for policy in ("k1", "k2_first.output", "k2_all"):
        rows_of(worker, trial(policy), gsm8k_ids([4, 5]))
    later = rows_of(worker, trial("k3_last"), gsm8k_ids(range(4)))
    assert [[row[name] for name in kept] for row in first] == [[row[name] for name in kept] for row in later]


def test_batches_have_as_many_rows_as_are_decoded_together(root: Path) -> None:
    worker = Worker(worker_settings(root, batch_size=3))
    batches = list(worker.run(trial("k2_last"), gsm8k_ids(range(7)), context()))
    assert [batch.num_rows for batch in batches] == [3, 3, 1]
    assert all(batch.schema.equals(ROWS, check_metadata=True) for batch in batches)
    for number, batch in enumerate(batches):
        assert set(batch.column("batch_id").to_pylist()) == {number}
        assert len(set(batch.column("batch_seconds").to_pylist())) == 1
        assert batch.column("batch_seconds")[0].as_py() > 0
    alone = rows_of(Worker(worker_settings(root)), trial("k2_last"), gsm8k_ids(range(7)))
    together = {row["doc_id"]: row for row in pa.Table.from_batches(batches, ROWS).to_pylist()}
    assert {row["doc_id"]: row["token_ids"] for row in alone} == {d: row["token_ids"] for d, row in together.items()}


def test_a_resumed_trial_gives_the_rows_of_an_uninterrupted_one(root: Path) -> None:
    """In half precision, with products whose rounding depends on their size: the documents left have other mates."""
    worker = Worker(worker_settings(root, batch_size=3, dtype="bfloat16"))
    worker.model = with_products(worker.model, SplitLinear)
    whole, resumed = (
        {row["doc_id"]: row["token_ids"] for row in rows_of(worker, trial("k2_middle"), gsm8k_ids(range(first, 7)))}
        for first in (0, 2)
    )
    assert len(resumed) == 5
    assert resumed == {doc_id: whole[doc_id] for doc_id in resumed}


def test_only_decoding_is_timed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    score = Task.score

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.2)
        return score(*arguments)

    monkeypatch.setattr(Task, "score", slowly)
    began = time.perf_counter()
    rows = rows_of(worker, trial("k1"), gsm8k_ids(range(3)))
    spent = time.perf_counter() - began
    counted = sum(row["batch_seconds"] for row in rows)
    assert sum(row["seconds"] for row in rows) <= counted <= spent - 3 * 0.2


def test_calibrations_are_stored_next_to_a_trial_and_change_nothing_in_it(root: Path) -> None:
    worker = Worker(worker_settings(root))
    wanted = [row["token_ids"] for row in rows_of(worker, trial("k3_first"), gsm8k_ids(range(4)))]
    assert worker.recalibration_seconds == 0, "without a calibration before it there is none within a trial"
    worker.calibrate()
    began = time.perf_counter()
    rows = rows_of(worker, trial("k3_first"), gsm8k_ids(range(4)))
    spent = time.perf_counter() - began
    assert [row["token_ids"] for row in rows] == wanted
    assert sum(row["batch_seconds"] for row in rows) + worker.recalibration_seconds < spent
    assert rows[0]["calibration"] > 0


def test_scored_tasks_calibrate_by_decoding_too(root: Path) -> None:
    worker = Worker(worker_settings(root, calibration_task="mmlu_anatomy"))
    worker.calibrate()
    rows = rows_of(worker, trial("k2_middle", "mmlu_anatomy"), ["mmlu_anatomy/0", "mmlu_anatomy/4"])
    assert rows[0]["calibration"] > 0
    assert [len(row["scores"]) for row in rows] == [4, 4]
    assert [row["finish"] for row in rows] == [None, None]
    assert all(row["batch_seconds"] > 0 for row in rows)
    totals = TrialTotals()
    for batch in worker.run(trial("k1", "mmlu_anatomy"), ["mmlu_anatomy/0"], context()):
        totals.add(batch)
    assert (totals.documents, totals.tokens, totals.metrics["tokens_per_s"]) == (1, 0, 0.0)


def test_facts_are_plain_and_complete(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_a-secret-that-nobody-may-see")
    facts = worker.facts(trial("k2_first", threshold=0.9), worker.calibrate())
    text = json.dumps(facts)
    assert json.loads(text) == facts
    assert "secret" not in text
    assert facts["layers"] == [1, 2]
    assert facts["settings"]["threshold"] == 0.9
    assert facts["settings"]["max_new_tokens"] == NEW_TOKENS
    assert facts["device"]["name"]
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["process"] == os.getpid()
    assert min(facts[f"{name}_seconds"] for name in ("load", "warm_up", "calibration")) > 0
    assert worker.peak_memory() > 10 * 2**20


def test_other_documents_than_planned_are_refused(root: Path) -> None:
    datasets = {"gsm8k": {"openai/gsm8k": "sha256:0"}}
    with pytest.raises(InputError, match="task gsm8k has different documents on this node"):
        Worker(worker_settings(root, datasets=datasets))
    worker = Worker(worker_settings(root))
    with pytest.raises(InputError, match="no document gsm8k/999 on this node"):
        worker.run(trial("k1"), ["gsm8k/0", "gsm8k/999"], context())


def test_a_task_that_this_node_lacks_is_found_before_a_trial_runs(root: Path, tmp_path: Path) -> None:
    """The calibration task is opened when a worker is set up, the others when a trial needs them."""
    gsm8k_folder(tmp_path, count=4)
    options = TaskOptions(data=str(tmp_path), max_new_tokens=NEW_TOKENS)
    worker = Worker(worker_settings(root, options=options))
    worker.open_task("gsm8k")
    for _ in range(2):  # a failure is not remembered as success
        with pytest.raises(InputError, match=r"task mmlu_anatomy cannot be opened on this node: .* no cais/mmlu/"):
            worker.open_task("mmlu_anatomy")
    rows = [mmlu_row(number) for number in range(8)]
    write_dataset(tmp_path, "cais/mmlu", "anatomy", {"dev": rows[:5], "test": rows[5:]}, suffix="parquet")
    worker.open_task("mmlu_anatomy")
    with pytest.raises(InputError, match=r"task gsm8k cannot be opened on this node: --data .* does not exist"):
        Worker(worker_settings(root, options=TaskOptions(data=str(tmp_path / "nowhere"))))


def test_a_worker_refuses_another_model_than_the_planned_one(root: Path, tmp_path: Path) -> None:
    planned = folder_revision(root / "model")
    copied = shutil.copytree(root / "model", tmp_path / "copied")
    assert Worker(worker_settings(root, model=str(copied), revision=planned)).model.folder == copied
    changed = bytearray((copied / "model.safetensors").read_bytes())
    changed[-1] ^= 1
    (copied / "model.safetensors").write_bytes(changed)
    with pytest.raises(InputError, match=f"model {copied} on this node differs from .* copy the same files to every"):
        Worker(worker_settings(root, model=str(copied), revision=planned))
    missing = tmp_path / "missing"
    with pytest.raises(InputError, match=f"--model {missing} is not a directory on this node: copy it to every node"):
        Worker(worker_settings(root, model=str(missing), revision=planned))


def test_the_bundled_model_has_a_revision_too() -> None:
    found = find_planned_model("tiny", None)
    assert find_planned_model("tiny", found.revision) == found
    with pytest.raises(InputError, match=r"model tiny on this node differs .* install the same version"):
        find_planned_model("tiny", "0123456789ab")


def test_a_gpu_that_is_too_small_is_named_with_its_memory() -> None:
    """Without a GPU: torch raises the same error by hand."""
    with (
        pytest.raises(InputError, match=r"GPU on this node is too small: .* need about 15\.0 GB and 3\.0 GB were free"),
        explain_out_of_memory(15 * 10**9, 3 * 10**9),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
    with pytest.raises(RuntimeError, match="another"), explain_out_of_memory(1, 1):
        raise RuntimeError("another")


def test_a_worker_waits_for_memory_but_not_for_ever() -> None:
    offered = iter([1, 2, 5])
    assert wait_for_memory(4, lambda: next(offered), step=0.0) == 5
    assert next(offered, None) is None
    began = time.monotonic()
    assert wait_for_memory(4, lambda: 1, seconds=0.2, step=0.01) == 1
    assert time.monotonic() - began >= 0.2

"""The result actor's class without Ray: what it acknowledged is on disk, and a restarted one continues from there."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from small_sweep import trial
from synthetic_folder import DEFAULTS

from orchestrator.core.trial import Trial, WantedDocuments
from orchestrator.planning.run_plan import RunPlan
from orchestrator.running.result_actor import KILLED_IN_SETUP, FailedSetup, Node, Results
from orchestrator.store import Store, StoreError, StoreWriter
from orchestrator.store.lock import FolderInUse
from orchestrator.store.schema import ROWS

DOCUMENTS = ("a", "b", "c")
ONE, TWO = trial("k1"), trial("k2_middle")
NODE = Node(node_id="a1", host="node-a")


def plan_for(folder: Path, documents: tuple[str, ...] = DOCUMENTS) -> RunPlan:
    return RunPlan(
        folder=str(folder), sweep="s-1", trials=(ONE, TWO), wanted=WantedDocuments(by_shard={"gsm8k": {0: documents}})
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "sweep") as writer:
        writer.write_sweep_record({"sweep": "s-1"})
    return tmp_path / "sweep"


def batch(spec: Trial, documents: str, *, attempt: int = 0, batch_id: int = 0, **changes: Any) -> pa.RecordBatch:
    policy = {"policy": spec.policy, "task": spec.task, "trial_id": spec.trial_id, "k": int(spec.policy[1])}
    rows = [
        {**DEFAULTS, **policy, "doc_id": d, "attempt": attempt, "batch_id": batch_id, "tokens": 10, **changes}
        for d in documents
    ]
    return pa.RecordBatch.from_pylist(rows, schema=ROWS)


def test_what_is_acknowledged_is_on_disk(folder: Path) -> None:
    results = Results(plan_for(folder), actors=2)
    assert results.assign(ONE.key, "worker-1").missing == DOCUMENTS
    attempt = results.begin(ONE.trial_id, {"actor": "worker-1"})
    assert results.append(ONE.trial_id, attempt, batch(ONE, "ab")) == 2
    assert Store(folder).completed_documents(ONE.trial_id) == {"a", "b"}
    assert results.assign(ONE.key, "worker-1").missing == ("c",)
    progress = results.progress()
    assert (progress.documents, progress.wanted, progress.finished, progress.running) == (2, 6, 0, (ONE.label,))
    results.append(ONE.trial_id, attempt, batch(ONE, "c", batch_id=1))
    results.finish(ONE.trial_id, {"peak_memory": 1})
    facts = Store(folder).trials()[ONE.trial_id]
    assert (facts["status"], facts["rows"], facts["tally"]["documents"]) == ("finished", 3, 3)
    assert facts["attempts"][0]["peak_memory"] == 1
    assert (results.progress().finished, results.progress().running) == (1, ())


def test_repeated_calls_add_nothing(folder: Path) -> None:
    """Ray calls again what an actor may have died in."""
    results = Results(plan_for(folder), actors=1)
    results.begin(ONE.trial_id, {})
    for _ in range(3):
        results.append(ONE.trial_id, 0, batch(ONE, "ab"))
    assert results.append(ONE.trial_id, 0, batch(ONE, "bc", batch_id=1)) == 1
    assert results.progress().documents == 3
    assert len(Store(folder).rows()) == 3
    results.finish(ONE.trial_id, {})
    results.finish(ONE.trial_id, {})
    assert results.progress().finished == 1


def test_a_new_one_goes_on_where_the_old_one_died(folder: Path) -> None:
    old = Results(plan_for(folder), actors=2)
    for spec, actor in ((ONE, "worker-1"), (TWO, "worker-2")):
        old.begin(spec.trial_id, {"actor": actor})
        old.append(spec.trial_id, 0, batch(spec, "ab"))
    before = old.progress()
    old.close()  # a dead process holds no lock either
    new = Results(plan_for(folder), actors=2)
    assert new.progress().totals == before.totals
    assert new.first_worker() == 3, "names are not used twice"
    assert new.append(ONE.trial_id, 0, batch(ONE, "abc", batch_id=1)) == 1
    new.finish(ONE.trial_id, {})
    assert Store(folder).trials()[ONE.trial_id]["status"] == "finished"


def test_a_live_one_is_not_pushed_aside(folder: Path) -> None:
    results = Results(plan_for(folder), actors=1)
    with pytest.raises(FolderInUse):
        StoreWriter(folder)
    results.close()
    StoreWriter(folder).close()


def test_a_trial_that_never_began_can_fail(folder: Path) -> None:
    results = Results(plan_for(folder), actors=1)
    results.fail(ONE.trial_id, "its worker died")
    facts = Store(folder).trials()[ONE.trial_id]
    assert (facts["status"], facts["attempts"][-1]["reason"]) == ("failed", "its worker died")
    assert results.progress().failed == 1
    assert plan_for(folder).unfinished(Store(folder).trials()) == [ONE, TWO]
    results.close()
    again = Results(plan_for(folder), actors=1)
    assert again.progress().failed == 0  # it is to be tried again
    assert again.begin(ONE.trial_id, {}) == 1


def test_a_finished_trial_that_wants_more_is_unfinished(folder: Path) -> None:
    results = Results(plan_for(folder), actors=1)
    results.begin(ONE.trial_id, {})
    results.append(ONE.trial_id, 0, batch(ONE, "abc"))
    results.finish(ONE.trial_id, {})
    results.close()
    facts = Store(folder).trials()
    assert plan_for(folder).unfinished(facts) == [TWO]
    assert plan_for(folder, ("a", "b")).unfinished(facts) == [TWO]
    larger = plan_for(folder, ("a", "b", "c", "d"))
    assert larger.unfinished(facts) == [ONE, TWO]
    again = Results(larger, actors=1)
    assert again.assign(ONE.key, "worker-1").missing == ("d",)
    attempt = again.begin(ONE.trial_id, {})
    again.append(ONE.trial_id, attempt, batch(ONE, "d", attempt=attempt))
    again.finish(ONE.trial_id, {})
    assert larger.unfinished(Store(folder).trials()) == [TWO]


def test_progress_counts_only_what_is_wanted_now(folder: Path) -> None:
    """An earlier command with a larger limit left more rows than this one asks for."""
    results = Results(plan_for(folder), actors=1)
    results.begin(ONE.trial_id, {})
    results.append(ONE.trial_id, 0, batch(ONE, "abc"))
    results.finish(ONE.trial_id, {})
    results.close()
    smaller = plan_for(folder, ("a",))
    progress = Results(smaller, actors=1).progress()
    assert (progress.documents, progress.wanted, progress.finished) == (1, 2, 1)


def test_a_worker_made_again_for_the_same_trial_waits_longer_each_time(folder: Path) -> None:
    results = Results(plan_for(folder), actors=1)
    pauses = [results.register(ONE.key, f"worker-{number}", NODE) for number in range(1, 9)]
    assert pauses == [0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert results.register(TWO.key, "worker-9", NODE) == 0.0
    assert results.first_worker() == 10


def test_a_second_try_waits_on_any_worker(folder: Path) -> None:
    results = Results(plan_for(folder), actors=2)
    results.register(ONE.key, "worker-1", NODE)
    results.register(TWO.key, "worker-2", NODE)
    assert results.assign(ONE.key, "worker-1").pause == 0.0
    assert results.assign(ONE.key, "worker-2").pause == 2.0, "worker-1 died; this one is warm and was made for another"
    assert results.register(ONE.key, "worker-3", NODE) == 4.0
    assert results.assign(ONE.key, "worker-3").pause == 0.0, "it waited before it loaded"
    assert results.assign(TWO.key, "worker-3").pause == 0.0, "nothing went wrong with this one"


def test_a_failed_worker_is_known_by_how_far_it_came(folder: Path) -> None:
    results = Results(plan_for(folder), actors=2)
    results.register(ONE.key, "worker-1", NODE)
    killed = results.worker_failed(ONE.key)
    assert killed.setup == FailedSetup(node=NODE, reason=KILLED_IN_SETUP)
    assert (killed.alive, killed.successful_setups) == (0, {})
    results.register(ONE.key, "worker-2", NODE)
    refused = FailedSetup(node=NODE, reason="no such model", is_input_error=True)
    results.setup_failed("worker-2", refused)
    assert results.worker_failed(ONE.key).setup == refused
    again = results.worker_failed(ONE.key)
    assert (again.was_known, again.setup) == (False, None), "each failure is judged once"
    results.register(ONE.key, "worker-3", NODE)
    results.ready("worker-3")
    results.assign(ONE.key, "worker-3")
    assert results.progress().warm == 1
    died = results.worker_failed(ONE.key)
    assert died.was_known
    assert (died.setup, died.alive, died.successful_setups) == (None, 0, {NODE.node_id: 1})
    assert results.progress().warm == 0


def test_a_restarted_actor_counts_the_workers_that_ask_it_for_work(folder: Path) -> None:
    results = Results(plan_for(folder), actors=2)
    results.assign(ONE.key, "worker-7")
    assert results.worker_failed(TWO.key).alive == 1


def test_a_trial_whose_rows_were_damaged_after_it_ended_is_unfinished_again(folder: Path) -> None:
    """As the actor finds when it comes back: Tune has seen this trial end."""
    old = Results(plan_for(folder), actors=1)
    attempt = old.begin(ONE.trial_id, {})
    old.append(ONE.trial_id, attempt, batch(ONE, "abc"))
    old.finish(ONE.trial_id, {})
    assert old.unfinished() == ([TWO.trial_id], [])
    old.close()
    path = Store(folder).trial_folder(ONE.trial_id) / "rows.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    unfinished, damage = Results(plan_for(folder), actors=1).unfinished()
    assert unfinished == sorted([ONE.trial_id, TWO.trial_id])
    assert len(damage) == 1
    assert str(path) in damage[0]


def test_a_folder_that_cannot_be_opened_raises_in_the_caller(folder: Path) -> None:
    first = Results(plan_for(folder), actors=1)
    second = Results(plan_for(folder), actors=1)  # Ray would show a trace of what is raised here
    for call in (second.progress, second.unfinished, lambda: second.assign(ONE.key, "worker-1")):
        with pytest.raises(StoreError, match="is in use"):
            call()
    second.close()
    assert first.assign(ONE.key, "worker-1").missing == DOCUMENTS
    first.close()


def test_the_result_actor_starts_without_torch_and_tune() -> None:
    program = "import sys, orchestrator.running.result_actor; print({'torch', 'ray.tune'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"

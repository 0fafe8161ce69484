"""From a command to a folder that is ready: the request, the documents, and which trials are still to run."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from small_sweep import DOCUMENTS, write_model_and_data
from synthetic_folder import DEFAULTS

from orchestrator.cli.sweep import parse_sweep
from orchestrator.planning.machine import Machine, Nodes
from orchestrator.planning.preflight import folder_revision, prepare
from orchestrator.planning.prepared import PreparedSweep
from orchestrator.planning.run_plan import RunPlan, plan_run, save_plan, worker_settings
from orchestrator.store import Store, StoreWriter
from orchestrator.store.schema import ROWS
from sampler import InputError

MACHINE = Machine(nodes=(Nodes(resources={"CPU": 2}),))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_data(tmp_path_factory.mktemp("case"))


@pytest.fixture
def common(root: Path, tmp_path: Path) -> list[str]:
    model, data, out = str(root / "model"), str(root / "data"), str(tmp_path)
    return [
        "--model",
        model,
        "--data",
        data,
        "--out",
        out,
        "--name",
        "s",
        "--shard-size",
        "4",
        "--policies",
        "k1,k2_all",
        "--no-replicate",
    ]


def ready(arguments: Sequence[str], *, finish: bool = False) -> tuple[PreparedSweep, RunPlan]:
    """As the command does it; with `finish`, all that is to do is done."""
    command = parse_sweep(list(arguments))
    folder = Path(command.settings.out) / "s"
    stored = Store(folder).read_sweep_record()
    prepared = prepare(command.settings, MACHINE, stored)
    with StoreWriter(prepared.folder) as writer:
        made = plan_run(prepared, writer, stored, force=command.force)
        if made.remaining:
            save_plan(prepared, writer, made, arguments=arguments)
        for spec in made.remaining if finish else ():
            wanted = made.wanted.of(spec)
            missing = [doc_id for doc_id in wanted if doc_id not in writer.completed_documents(spec.trial_id)]
            attempt = writer.begin(spec.as_dict(), {})
            row = {**DEFAULTS, "attempt": attempt, **spec.as_dict()}
            rows = [{**row, "doc_id": doc_id} for doc_id in missing]
            writer.append(spec.trial_id, attempt, pa.RecordBatch.from_pylist(rows, schema=ROWS))
            writer.finish(spec.trial_id, {}, wanted)
    return prepared, made


def test_a_new_folder_holds_request_and_documents(common: list[str]) -> None:
    arguments = [*common, "--tasks", "gsm8k", "--limit", "6"]
    prepared, made = ready(arguments)
    assert [spec.label for spec in made.remaining if spec.shard == 1] != []
    assert len(made.remaining) == 4  # two shards of 4 and 2, two policies
    request = Store(prepared.folder).read_sweep_record()
    assert request is not None
    assert request["sweep"] == made.sweep
    assert request["sweep"].startswith("s-")
    assert request["calibration_task"] == "gsm8k"
    assert (request["margin"], request["speedup"]) == (5.0, 1.2)
    assert request["commands"][0]["argv"] == arguments
    assert request["commands"][0]["packages"]["ray"]
    table = Store(prepared.folder).documents("gsm8k")
    assert table["doc_id"].to_pylist() == [f"gsm8k/{n}" for n in range(6)]
    assert table["shard"].to_pylist() == [0, 0, 0, 1, 1, 1]


def test_nothing_of_the_environment_is_written(common: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_a-secret-that-nobody-may-see")
    prepared, _ = ready([*common, "--tasks", "gsm8k", "--limit", "2"], finish=True)
    for path in prepared.folder.rglob("*"):
        assert not path.is_file() or b"secret" not in path.read_bytes(), path


def test_the_same_command_continues_and_then_has_nothing_to_do(common: list[str]) -> None:
    arguments = [*common, "--tasks", "gsm8k", "--limit", "6"]
    prepared, first = ready(arguments)
    _, second = ready(arguments, finish=True)
    assert second.remaining == first.remaining
    assert second.sweep == first.sweep
    before = {path: path.read_bytes() for path in prepared.folder.rglob("*.json") if "lock" not in path.parts}
    _, third = ready(arguments)
    assert third.remaining == ()
    assert before == {path: path.read_bytes() for path in prepared.folder.rglob("*.json") if "lock" not in path.parts}


def test_a_larger_limit_a_task_and_a_policy_extend(common: list[str]) -> None:
    _, first = ready([*common, "--tasks", "gsm8k", "--limit", "6"], finish=True)
    _, larger = ready([*common, "--tasks", "gsm8k"], finish=True)
    known = {spec.trial_id for spec in first.remaining}
    assert sorted(spec.shard for spec in larger.remaining) == [2, 2, 3, 3]
    assert not any(spec.trial_id in known for spec in larger.remaining), "finished trials stay as they are"
    assert any("limit all" in notice for notice in larger.notices)
    prepared, more = ready([*common, "--tasks", "mmlu_anatomy,gsm8k", "--policies", "k1,k3_first"])
    assert {(spec.task, spec.policy) for spec in more.remaining} == {
        ("mmlu_anatomy", "k1"),
        ("mmlu_anatomy", "k3_first"),
        ("gsm8k", "k3_first"),
    }
    request = Store(prepared.folder).read_sweep_record()
    assert request is not None
    assert request["settings"]["policies"] == ["k1", "k2_all", "k3_first"]
    assert request["settings"]["limit"] is None
    assert request["calibration_task"] == "gsm8k"
    assert len(request["commands"]) == 3
    assert len(Store(prepared.folder).documents("gsm8k")) == DOCUMENTS


def test_a_smaller_limit_asks_for_nothing(common: list[str]) -> None:
    prepared, _ = ready([*common, "--tasks", "gsm8k", "--limit", "6"], finish=True)
    _, smaller = ready([*common, "--tasks", "gsm8k", "--limit", "2"])
    assert smaller.remaining == ()
    assert len(Store(prepared.folder).documents("gsm8k")) == 6


def test_other_settings_for_existing_trials_are_refused(common: list[str]) -> None:
    prepared, _ = ready([*common, "--tasks", "gsm8k", "--limit", "4"], finish=True)
    before = (prepared.folder / "sweep.json").read_bytes()
    with pytest.raises(InputError, match=r"--batch-size 1 \(now 2\)"):
        ready([*common, "--tasks", "gsm8k", "--limit", "4", "--batch-size", "2"])
    assert (prepared.folder / "sweep.json").read_bytes() == before


def test_nothing_is_written_before_it_is_known_to_fit(common: list[str]) -> None:
    """A batch too large for the device is refused late, and a smaller one must not be another sweep then."""
    arguments = [*common, "--tasks", "gsm8k", "--limit", "4", "--batch-size", "4"]
    command = parse_sweep(arguments)
    prepared = prepare(command.settings, MACHINE, None)
    with StoreWriter(prepared.folder) as writer:
        assert len(plan_run(prepared, writer, writer.read_sweep_record()).remaining) == 2
    assert {path.name for path in prepared.folder.iterdir()} == {"lock"}
    _, made = ready([*arguments[:-1], "2"])
    assert len(made.remaining) == 2


@pytest.mark.parametrize(("force", "again"), [(["--force"], {"k1", "k2_all"}), (["--force", "k2_all"], {"k2_all"})])
def test_force_runs_again_and_keeps_the_old_rows(common: list[str], force: list[str], again: set[str]) -> None:
    arguments = [*common, "--tasks", "gsm8k", "--limit", "4"]
    prepared, _ = ready(arguments, finish=True)
    old = {spec.trial_id: Store(prepared.folder).rows([spec.trial_id]) for spec in prepared.trials}
    for count in (1, 2):
        _, forced = ready([*arguments, *force], finish=True)
        assert {spec.policy for spec in forced.remaining} == again
        aside = sorted(path.name for path in (prepared.folder / "quarantine").iterdir())
        assert aside == sorted(f"{spec.trial_id}-{n}" for spec in forced.remaining for n in range(1, count + 1))
    first = forced.remaining[0].trial_id
    kept = json.loads((prepared.folder / "quarantine" / f"{first}-1" / "trial.json").read_text())
    assert (kept["status"], kept["rows"]) == ("finished", len(old[first]))


def test_a_corrupted_row_file_is_quarantined_and_only_its_documents_run_again(common: list[str]) -> None:
    arguments = [*common, "--tasks", "gsm8k", "--limit", "8"]
    prepared, made = ready(arguments, finish=True)
    victim = made.remaining[1]
    path = prepared.folder / "trials" / victim.trial_id / "rows.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    _, again = ready(arguments)
    assert again.remaining == (victim,)
    assert any("rows.parquet" in notice for notice in again.notices)


def test_workers_receive_the_plan(common: list[str], root: Path) -> None:
    prepared, made = ready([*common, "--tasks", "mmlu_anatomy,gsm8k", "--limit", "2", "--batch-size", "3"])
    sent = worker_settings(prepared, made)
    assert (sent.model, sent.dtype, sent.batch_size) == (str(root / "model"), "float32", 3)
    assert (sent.threads, sent.device, sent.calibration_task) == (1, "cpu", "gsm8k")
    assert sent.datasets == prepared.identity.datasets
    assert sent.options.limit is None


def test_workers_know_the_revision_of_the_planned_model(root: Path, common: list[str]) -> None:
    prepared, made = ready([*common, "--tasks", "gsm8k"])
    assert worker_settings(prepared, made).revision == folder_revision(root / "model")

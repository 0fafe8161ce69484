"""The status of real folders: complete, running, cut short, failed, corrupted, grown, enormous, or none at all."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from synthetic_folder import SyntheticFolder

from orchestrator.cli.sweep import parse_sweep
from orchestrator.core.totals import totals_of
from orchestrator.progress.status import read_status
from orchestrator.store import StoreWriter
from sampler.errors import InputError
from tools.scale.figures import measure_command

ROOT = Path(__file__).parent.parent


def status(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator.status", *map(str, arguments)]
    known = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **environment}
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **known}, capture_output=True, text=True, timeout=900)


def as_json(folder: Path, *flags: str) -> dict[str, Any]:
    done = status(folder, "--json", *flags)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def sweep(tmp_path: Path) -> SyntheticFolder:
    return SyntheticFolder(tmp_path / "made")  # 2 policies × 2 shards of 10 documents


def test_a_complete_sweep(sweep: SyntheticFolder) -> None:
    with sweep.begin() as store:
        for trial in sweep.trials:
            sweep.run(store, trial)
    found_status = read_status(sweep.folder)
    assert found_status.state == "complete"
    assert found_status.trials == {
        "finished": 4,
        "running": 0,
        "unfinished": 0,
        "failed": 0,
        "pending": 0,
        "skipped": 0,
    }
    assert (found_status.documents, found_status.wanted, found_status.missing) == (40, 40, 0)
    from_rows = {totals.key: totals for totals in totals_of(store.rows())}
    for totals in found_status.totals:
        assert totals.as_json() == pytest.approx(from_rows[totals.key].as_json())
    printed = status(sweep.folder)
    assert printed.returncode == 0
    assert printed.stdout.startswith(
        "made-01234567: made at 0123456789ab\ntask0 (20 documents); 2 policies\ncomplete; "
    )
    assert "documents: 40 of 40\ntrials: 4 finished of 4\n" in printed.stdout
    assert max(map(len, printed.stdout.splitlines())) <= 80


def test_a_sweep_that_is_being_prepared(tmp_path: Path) -> None:
    """Its folder is taken, but says nothing yet."""
    prepares = f"process {os.getpid()} on .* is preparing a sweep there; try again"
    with StoreWriter(tmp_path / "new"), pytest.raises(InputError, match=prepares):
        read_status(tmp_path / "new")
    with pytest.raises(InputError, match=r"has no sweep\.json"):
        read_status(tmp_path / "new")


def test_sums_in_trial_json_and_rows_give_the_same(sweep: SyntheticFolder, tmp_path: Path) -> None:
    other = SyntheticFolder(tmp_path / "other")
    for one, tally in ((sweep, True), (other, False)):
        with one.begin() as store:
            for trial in one.trials:
                one.run(store, trial, tally=tally)
    pairs = zip(read_status(sweep.folder).totals, read_status(other.folder).totals, strict=True)
    assert all(ours.as_json() == pytest.approx(theirs.as_json()) for ours, theirs in pairs)


def test_a_sweep_that_runs_and_then_was_stopped(sweep: SyntheticFolder) -> None:
    with sweep.begin() as store:
        sweep.run(store, sweep.trials[0])
        sweep.run(store, sweep.trials[1], ["d0", "d1", "d2"])
        running = as_json(sweep.folder)
        output = status(sweep.folder).stdout
    stopped = as_json(sweep.folder)
    assert running["state"] == "running"
    assert running["writer"]["pid"] == os.getpid()
    assert running["trials"] == {
        "wanted": 4,
        "finished": 1,
        "running": 1,
        "unfinished": 0,
        "failed": 0,
        "pending": 2,
        "skipped": 0,
    }
    assert f"running: process {os.getpid()} on " in output
    assert (stopped["state"], stopped["writer"]) == ("stopped", None)
    assert stopped["trials"] == {
        "wanted": 4,
        "finished": 1,
        "running": 0,
        "unfinished": 1,
        "failed": 0,
        "pending": 2,
        "skipped": 0,
    }
    assert stopped["documents"] == {"done": 13, "wanted": 40, "missing": 27}
    assert sorted(one["missing"] for one in stopped["configurations"]) == [10, 17]
    command = status(sweep.folder, COLUMNS="20").stdout.partition("continue with: ")[2].split()
    assert command[:2] == ["reuse-sweep", "sweep"]
    again = parse_sweep(command[2:]).settings
    assert again.policies == tuple(stopped["settings"]["policies"])
    assert (again.tasks, Path(again.out) / str(again.name)) == (("task0",), sweep.folder.resolve())


def test_nothing_has_begun(sweep: SyntheticFolder) -> None:
    sweep.begin().close()
    found = as_json(sweep.folder)
    assert (found["state"], found["last_row"], found["trials"]["pending"]) == ("stopped", None, 4)
    assert [one["policy"] for one in found["configurations"]] == ["k1", "k2_middle"]
    assert "documents: 0 of 40, 40 missing" in status(sweep.folder).stdout


def test_a_failed_trial_keeps_its_reason(sweep: SyntheticFolder) -> None:
    with sweep.begin() as store:
        sweep.run(store, sweep.trials[0])
        sweep.run(store, sweep.trials[1], ["d0"])
        store.fail(sweep.trials[1].trial_id, "CUDA out of memory")
    found = as_json(sweep.folder)
    assert found["trials"]["failed"] == 1
    label = sweep.trials[1].label
    assert [(one["label"], one["reason"], one["attempts"]) for one in found["failures"]] == [
        (label, "CUDA out of memory", 1)
    ]
    assert f"failed: {label} (1 attempt): CUDA out of memory" in status(sweep.folder).stdout


def test_a_larger_limit_leaves_finished_trials_unfinished(tmp_path: Path) -> None:
    small = SyntheticFolder(tmp_path / "made", documents=15)
    with small.begin() as store:
        for trial in small.trials:
            small.run(store, trial)
    SyntheticFolder(tmp_path / "made", documents=30).begin().close()
    found = as_json(small.folder)
    assert found["trials"] == {
        "wanted": 6,
        "finished": 2,
        "running": 0,
        "unfinished": 2,
        "failed": 0,
        "pending": 2,
        "skipped": 0,
    }
    assert found["documents"]["missing"] == 30


def test_scored_tasks_have_no_decode_settings(tmp_path: Path) -> None:
    made = SyntheticFolder(
        tmp_path / "made",
        kinds=("generate", "loglikelihood"),
        threshold=(0.9, 0.95),
        block_cache=(True, False),
        repeats=2,
    )
    with made.begin() as store:
        for trial in made.trials:
            made.run(store, trial)
    found_status = read_status(made.folder)
    assert found_status.state == "complete"
    assert found_status.trials["finished"] == len(made.trials) == 2 * 2 * 2 * (4 + 1)
    assert len(found_status.totals) == 8 + 2
    assert all(line.wanted == line.documents == 40 for line in found_status.totals)
    assert all((line.speedup is None) == (line.task == "task1") for line in found_status.totals)


@pytest.mark.parametrize("name", ["rows.parquet", "trial.json"])
def test_corruption_is_reported(sweep: SyntheticFolder, name: str) -> None:
    with sweep.begin() as store:
        for trial in sweep.trials:
            sweep.run(store, trial)
    path = sweep.folder / "trials" / sweep.trials[0].trial_id / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    checked = status(sweep.folder, "--check")
    assert checked.returncode == 2
    assert f"corrupted: {path} " in checked.stdout
    assert status(sweep.folder).returncode == 0
    assert as_json(sweep.folder)["documents"]["done"] == 40  # rows are still there, or listed
    if name == "trial.json":
        assert any(str(path) in sentence for sentence in as_json(sweep.folder)["corrupted"])


def test_lost_rows_are_reported_without_reading_all(sweep: SyntheticFolder) -> None:
    with sweep.begin() as store:
        sweep.run(store, sweep.trials[0])
    lost = sweep.folder / "trials" / sweep.trials[0].trial_id / "rows.parquet"
    lost.unlink()
    assert f"{lost} is missing" in as_json(sweep.folder)["corrupted"]


def test_a_lost_table_of_documents_does_not_hide_the_rest(sweep: SyntheticFolder) -> None:
    with sweep.begin() as store:
        for trial in sweep.trials:
            sweep.run(store, trial)
    (sweep.folder / "documents" / "task0.parquet").unlink()
    found = as_json(sweep.folder)
    assert found["documents"]["missing"] == 0
    assert found["trials"]["finished"] == 4
    assert len(found["corrupted"]) == 1


def test_a_folder_without_a_sweep_is_one_sentence(tmp_path: Path, sweep: SyntheticFolder) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine", encoding="utf-8")
    sweep.begin().close()
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "sweep.json").write_text('{"schema": 99}', encoding="utf-8")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sweep.json").write_text('{"schema": 1, "settings": {"tasks": ["a"]}}', encoding="utf-8")
    for name in ("absent", "other", "other/notes.txt", "newer", "bare", "."):
        failed = status(tmp_path / name)
        assert failed.returncode == 2, name
        assert failed.stdout == ""
        assert failed.stderr.startswith("error: ")
        assert len(failed.stderr.splitlines()) == 1, failed.stderr
    assert status().stderr == "error: the following arguments are required: DIR (see --help)\n"


def test_no_reader_changes_the_folder(sweep: SyntheticFolder) -> None:
    with sweep.begin() as store:
        sweep.run(store, sweep.trials[0], ["d0"])
    before = {path: path.stat().st_mtime_ns for path in sweep.folder.rglob("*")}
    status(sweep.folder, "--check")
    assert {path: path.stat().st_mtime_ns for path in sweep.folder.rglob("*")} == before


def test_help_names_every_key_of_the_json(sweep: SyntheticFolder) -> None:
    with sweep.begin() as store:
        sweep.run(store, sweep.trials[0])
        store.fail(sweep.trials[0].trial_id, "for the sake of it")
        output = status("--help").stdout
        found = as_json(sweep.folder)
    keys = [
        *found,
        *found["documents"],
        *found["trials"],
        *found["configurations"][0],
        *found["failures"][0],
        *found["writer"],
    ]
    words = set(output.replace(",", " ").replace(";", " ").replace(":", " ").replace("(", " ").split())
    assert not set(keys) - words, set(keys) - words


def test_reading_waits_neither_for_torch_nor_for_ray() -> None:
    slow = ("torch", "ray", "lm_eval", "datasets")
    code = f"import sys, orchestrator.status; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.alone
@pytest.mark.slow
def test_status_of_a_million_rows_is_fast_and_needs_little_memory(tmp_path: Path) -> None:
    nine = tuple(f"k{k}_middle" for k in range(1, 10))
    made = SyntheticFolder(tmp_path / "made", documents=11_150, shard_size=50, policies=nine, repeats=10)
    with made.begin() as store:
        for trial in made.trials:
            made.run(store, trial)
    output = [measure_command("orchestrator.status", [str(made.folder), "--json"]) for _ in range(3)]
    spent = min(output, key=lambda each: each.cpu_seconds)
    print(spent)
    assert spent.cpu_seconds < 20, "usually 1.2"
    assert spent.memory_mb < 200
    assert as_json(made.folder)["documents"] == {"done": 1_003_500, "wanted": 1_003_500, "missing": 0}

"""tools.faults: planning of rounds, detection of problems, results. A slow test runs a short campaign."""

import errno
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from crashing_disk import TRIAL, make_rows, trial_columns

from orchestrator.store import Store, StoreWriter
from sampler.errors import InputError
from tools.faults.__main__ import main
from tools.faults.campaign import Outcome, Round, plan_round
from tools.faults.disk import SmallDisk
from tools.faults.faults import (
    DISK_FULL,
    FAULTS,
    IN_USE,
    WATCHDOG_PROCESS,
    flip_bit,
    newest_file,
    tear_file,
    trial_files,
)
from tools.faults.results import CampaignResult, CommandTime, Journal, RestartCost, failures, page, table
from tools.faults.row_checker import LOST, OTHER, RERUN, WRONG, Problem, RowChecker, read_reference
from tools.faults.sweep import RESULT_PROCESS, TRIALS_ANNOUNCED, WORKER_PROCESS, DisturbedSweep, SweepCase

ROOT = Path(__file__).parents[1]
ALL = list(FAULTS)


def write(folder: Path, marks: dict[str, int], *, attempt: int = 0, finished: bool = False) -> Path:
    """A sweep of one trial whose rows say these numbers of tokens."""
    with StoreWriter(folder) as writer:
        writer.write_sweep_record({"sweep": "s"})
        writer.begin(trial_columns(), {})
        for doc_id, tokens in marks.items():
            writer.append(TRIAL, 0, make_rows([doc_id], tokens=tokens, attempt=attempt))
        if finished:
            writer.finish(TRIAL, {}, list(marks))
    return folder


def test_a_round_depends_only_on_seed_and_number() -> None:
    assert plan_round(ALL, 3, 5) == plan_round(ALL, 3, 5)
    assert plan_round(ALL, 3, 5) != plan_round(ALL, 4, 5)
    drawn = Counter(name for number in range(8) for name in plan_round(ALL, 7, number))
    assert drawn == {**dict.fromkeys(ALL, 8), "node killed": 4}, "only every second round has nodes"


def test_the_checker_finds_lost_and_wrong_rows(tmp_path: Path) -> None:
    reference = read_reference(write(tmp_path / "calm", {"a": 1, "b": 2}, finished=True))
    folder = write(tmp_path / "sweep", {"a": 1})
    checker = RowChecker(folder, reference)
    assert checker.check() == []
    assert [problem.kind for problem in checker.check_finished()] == [LOST, OTHER]  # b is missing, the trial runs
    os.rename(folder / "trials", tmp_path / "away")
    assert [(problem.kind, problem.rows) for problem in checker.check()] == [(LOST, 1)]
    again = RowChecker(write(tmp_path / "other", {"a": 1, "b": 3}), reference)
    assert [(problem.kind, problem.rows) for problem in again.check()] == [(WRONG, 1)]


def test_the_checker_finds_a_document_that_was_run_again(tmp_path: Path) -> None:
    """The same tokens, but another attempt: nothing is lost, and yet work was done twice."""
    reference = read_reference(write(tmp_path / "calm", {"a": 1}, finished=True))
    folder = write(tmp_path / "sweep", {"a": 1})
    checker = RowChecker(folder, reference)
    checker.check()
    os.rename(folder / "trials", tmp_path / "away")
    write(folder, {"a": 1}, attempt=1)
    assert [problem.kind for problem in checker.check()] == [RERUN]


def test_rows_of_a_corrupted_file_may_be_rerun(tmp_path: Path) -> None:
    reference = read_reference(write(tmp_path / "calm", {"a": 1, "b": 2}, finished=True))
    folder = write(tmp_path / "sweep", {"a": 1, "b": 2}, finished=True)
    checker = RowChecker(folder, reference)
    checker.check()
    (path,) = trial_files(folder, ("rows.parquet",))
    checker.allow_rerun(TRIAL)
    flip_bit(path, Random(0))
    assert checker.check() == []
    assert [problem.kind for problem in checker.check_finished()] == [LOST, OTHER]
    StoreWriter(folder).close()
    assert (folder / "quarantine" / TRIAL / "rows.parquet").exists()


def test_a_torn_end_is_detected_or_at_a_batch_boundary(tmp_path: Path) -> None:
    folder = write(tmp_path / "sweep", {f"d{number}": number for number in range(6)})
    (path,) = trial_files(folder, ("rows-*.arrows",))
    assert newest_file([path]) == path
    whole, data = len(Store(folder).rows()), path.read_bytes()
    for seed in range(30):
        path.write_bytes(data)
        seen = tear_file(path, Random(seed))
        left = len(Store(folder).rows())
        assert left < whole
        assert bool(Store(folder).check()) is seen


def test_the_table_and_the_command_that_repeats_a_failure() -> None:
    lost = Problem(kind=LOST, rows=2, text="2 rows lost")
    undisturbed = CommandTime(total=30.0, startup=10.0, rows=80)
    continued = CommandTime(total=19.0, startup=10.0, rows=40)
    cost = RestartCost(undisturbed=undisturbed, killed_after=20.0, rows_kept=40, continued=continued)
    assert (cost.extra_seconds, cost.extra_seconds_without_startup) == (9.0, -1.0)
    result = CampaignResult(seed=5, requested=3, disk="ext4", impossible=("disk slow",), cost=cost)
    result = result.with_round(
        Round(number=0, outcomes=(Outcome(fault="worker killed", round=0),), rows=80), seconds=40
    )
    bad = Outcome(fault="worker killed", round=4, problems=(lost,))
    result = result.with_round(
        Round(number=4, outcomes=(bad, Outcome(fault="disk full", round=4)), rows=80), seconds=90
    )
    assert (result.rows, result.seconds, result.failed) == (160, 90, [bad])
    lines = table(result)
    assert "| worker killed | 2 | 2 | 0 | 0 | 0 | 0 |" in lines
    assert lines[-1] == "| **all** | 3 | 2 | 0 | 0 | 0 | 0 |"
    assert failures(result) == ["- worker killed: 2 rows lost (`python -m tools.faults --seed 5 --round 4`)"]
    text = page(result)
    assert "not possible on this machine: disk slow" in text
    assert all(name.split(" ")[0] in text for name in FAULTS)


def test_a_campaign_continues_from_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    bad = Outcome(fault="disk full", round=3, problems=(Problem(kind=LOST, rows=2, text="2 rows lost"),))
    first, second = (
        Round(number=0, outcomes=(Outcome(fault="disk slow", round=0),), rows=80),
        Round(number=3, outcomes=(bad,), rows=80),
    )
    journal = Journal(path, 5)
    journal.add(first, seconds=10)
    journal.add(Round(number=1), seconds=20)  # given up
    journal.add(second, seconds=30)
    again = Journal(path, 5)
    assert (again.rounds, again.seconds) == ([first, second], 30)
    result = again.continue_result(
        CampaignResult(seed=5, requested=3, disk="ext4", impossible=(), code_versions=("this",))
    )
    assert (result.failed, result.rows, result.seconds, len(result.code_versions)) == ([bad], 160, 30, 2)
    with pytest.raises(InputError, match="--seed 5, not of --seed 6"):
        Journal(path, 6)
    for text in ("not json\n", "[]\n", '{"seconds": 1}\n', '{"seconds": 1, "round": {"number": 0}}\n'):
        (tmp_path / "other").write_text(text)
        with pytest.raises(InputError, match="not a campaign journal"):
            Journal(tmp_path / "other", 5)
        assert (tmp_path / "other").read_text() == text


@pytest.mark.parametrize("flag", ["--runs", "--round", "--lanes", "--minutes", "--worker-timeout"])
def test_numbers_must_be_above_zero(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["faults", flag, "0"])
    with pytest.raises(InputError, match=rf"{flag} must be above 0 \(got 0"):
        main()


def test_a_process_that_has_just_ended_is_not_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Process 0 would be the campaign itself, with all its lanes."""
    looks = iter([[], [4001], [], [4002], [4002]])
    monkeypatch.setattr(DisturbedSweep, "processes", lambda *_: next(looks))
    monkeypatch.setattr(DisturbedSweep, "running", True)
    case = SweepCase(folder=tmp_path, worker_timeout_seconds=1)
    disk = SmallDisk(tmp_path / "disk", tmp_path / "image")
    try:
        checker = RowChecker(tmp_path, {})
        sweep = DisturbedSweep(case=case, out=tmp_path, outputs=tmp_path, disk=disk, checker=checker, nodes=None)
        assert sweep.random_process("worker", Random(0)) == 4002
    finally:
        disk.close()


def test_a_small_disk_can_be_filled_and_freed(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "disk", tmp_path / "image")
    try:
        if not disk.can_be_full:
            pytest.skip("nothing can be mounted here")
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (disk.folder / "more").write_bytes(b"x" * 5000)
        disk.free()
        (disk.folder / "more").write_bytes(b"x" * 5000)
        if disk.can_be_slow:
            disk.freeze(0.05)
            (disk.folder / "more").write_bytes(b"y")
    finally:
        disk.close()


def test_names_and_messages_that_the_campaign_looks_for_are_in_the_product() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "orchestrator").rglob("*.py")))
    for process in (WORKER_PROCESS, RESULT_PROCESS):
        assert f"class {process.removeprefix('ray::')}" in source
    by_operating_system, *messages = DISK_FULL
    assert by_operating_system == os.strerror(errno.ENOSPC).partition(" on")[0]
    for text in (WATCHDOG_PROCESS, IN_USE, TRIALS_ANNOUNCED, *messages):
        assert text in source, text


@pytest.mark.slow
def test_a_short_campaign_loses_nothing() -> None:
    """A round of either kind: with its own Ray, and on two nodes."""
    faults = 2 * len(ALL) - 1
    command = [sys.executable, "-m", "tools.faults", "--runs", str(faults), "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| **all** | {faults} | 0 | 0 | 0 | 0 | 0 |" in done.stdout

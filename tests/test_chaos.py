"""The campaign of faults: what it draws, what it notices, and what it says. One short campaign is run for real."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from store_fakes import TRIAL, make_rows, spec

from orchestrator.store import Store, StoreWriter
from sampler.errors import InputError
from tools.faults import damage
from tools.faults.__main__ import main
from tools.faults.campaign import Outcome, Round, plan
from tools.faults.case import Case
from tools.faults.cost import Cost, Timed
from tools.faults.disk import SmallDisk
from tools.faults.faults import FAULTS
from tools.faults.journal import Journal
from tools.faults.ledger import DOUBLED, LOST, OTHER, REMADE, WRONG, Ledger, Problem, reference_of
from tools.faults.scene import Scene
from tools.faults.table import Result, failures, page, table

ROOT = Path(__file__).parents[1]
ALL = list(FAULTS)


def write(folder: Path, marks: dict[str, int], *, attempt: int = 0, finished: bool = False) -> Path:
    """A sweep of one trial whose rows say these numbers of tokens."""
    with StoreWriter(folder) as writer:
        writer.write_sweep_record({"sweep": "s"})
        writer.begin(spec(), {})
        for doc_id, tokens in marks.items():
            writer.append(TRIAL, 0, make_rows([doc_id], tokens=tokens, attempt=attempt))
        if finished:
            writer.finish(TRIAL, {}, list(marks))
    return folder


def test_a_round_is_drawn_from_seed_and_number_alone() -> None:
    assert plan(ALL, 3, 5) == plan(ALL, 3, 5)
    assert plan(ALL, 3, 5) != plan(ALL, 4, 5)
    drawn = Counter(name for number in range(8) for name in plan(ALL, 7, number))
    assert drawn == {**dict.fromkeys(ALL, 8), "node killed": 4}, "only every second round has nodes"


def test_the_ledger_sees_what_is_wrong(tmp_path: Path) -> None:
    reference = reference_of(write(tmp_path / "calm", {"a": 1, "b": 2}, finished=True))
    folder = write(tmp_path / "sweep", {"a": 1})
    ledger = Ledger(folder, reference)
    assert ledger.look() == []
    assert [problem.kind for problem in ledger.look_at_the_end()] == [LOST, OTHER]  # b is missing, the trial runs
    os.rename(folder / "trials", tmp_path / "away")
    assert [(problem.kind, problem.rows) for problem in ledger.look()] == [(LOST, 1)]
    again = Ledger(write(tmp_path / "other", {"a": 1, "b": 3}), reference)
    assert [(problem.kind, problem.rows) for problem in again.look()] == [(WRONG, 1)]


def test_the_ledger_sees_a_document_that_was_run_again(tmp_path: Path) -> None:
    """The same tokens, but another attempt: nothing is lost, and yet work was done twice."""
    reference = reference_of(write(tmp_path / "calm", {"a": 1}, finished=True))
    folder = write(tmp_path / "sweep", {"a": 1})
    ledger = Ledger(folder, reference)
    ledger.look()
    os.rename(folder / "trials", tmp_path / "away")
    write(folder, {"a": 1}, attempt=1)
    assert [problem.kind for problem in ledger.look()] == [REMADE]


def test_rows_of_a_damaged_file_may_be_made_again(tmp_path: Path) -> None:
    reference = reference_of(write(tmp_path / "calm", {"a": 1, "b": 2}, finished=True))
    folder = write(tmp_path / "sweep", {"a": 1, "b": 2}, finished=True)
    ledger = Ledger(folder, reference)
    ledger.look()
    (path,) = damage.files(folder, ("rows.parquet",))
    ledger.forgive(TRIAL)
    damage.flip(path, Random(0))
    assert ledger.look() == []
    assert [problem.kind for problem in ledger.look_at_the_end()] == [LOST, OTHER]
    StoreWriter(folder).close()
    assert (folder / "quarantine" / TRIAL / "rows.parquet").exists()


def test_a_torn_end_is_seen_or_at_a_border(tmp_path: Path) -> None:
    folder = write(tmp_path / "sweep", {f"d{number}": number for number in range(6)})
    (path,) = damage.files(folder, ("rows-*.arrows",))
    assert damage.newest([path]) == path
    whole, data = len(Store(folder).rows()), path.read_bytes()
    for seed in range(30):
        path.write_bytes(data)
        seen = damage.tear(path, Random(seed))
        left = len(Store(folder).rows())
        assert left < whole
        assert bool(Store(folder).check()) is seen


def test_the_table_counts_and_names_the_round_of_a_failure() -> None:
    lost = Problem(kind=LOST, rows=2, text="2 rows lost")
    timed = Timed(total=30.0, before=10.0, rows=80)
    cost = Cost(whole=timed, killed_after=20.0, rows_kept=40, rest=Timed(total=19.0, before=10.0, rows=40))
    assert (cost.extra, cost.beyond) == (9.0, -1.0)
    result = Result(seed=5, asked=3, disk="ext4", left_out=("disk slow",), cost=cost)
    result = result.grown(Round(number=0, outcomes=(Outcome(fault="worker killed", round=0),), rows=80), seconds=40)
    bad = Outcome(fault="worker killed", round=4, problems=(lost,))
    result = result.grown(Round(number=4, outcomes=(bad, Outcome(fault="disk full", round=4)), rows=80), seconds=90)
    assert (result.rows, result.seconds, result.bad) == (160, 90, [bad])
    lines = table(result)
    assert "| worker killed | 2 | 2 | 0 | 0 | 0 | 0 |" in lines
    assert lines[-1] == "| **all** | 3 | 2 | 0 | 0 | 0 | 0 |"
    assert failures(result) == ["- worker killed: 2 rows lost (`python -m tools.faults --seed 5 --round 4`)"]
    text = page(result)
    assert "not possible here: disk slow" in text
    assert all(name.split(" ")[0] in text for name in FAULTS)
    assert DOUBLED in text


def test_a_campaign_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
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
    result = again.continued(Result(seed=5, asked=3, disk="ext4", left_out=(), codes=("this",)))
    assert (result.bad, result.rows, result.seconds, len(result.codes)) == ([bad], 160, 30, 2)
    with pytest.raises(InputError, match="--seed 5, not to --seed 6"):
        Journal(path, 6)
    for text in ("not json\n", "[]\n", '{"seconds": 1}\n', '{"seconds": 1, "round": {"number": 0}}\n'):
        (tmp_path / "other").write_text(text)
        with pytest.raises(InputError, match="no journal"):
            Journal(tmp_path / "other", 5)
        assert (tmp_path / "other").read_text() == text


@pytest.mark.parametrize("flag", ["--runs", "--round", "--lanes", "--minutes", "--worker-timeout"])
def test_numbers_from_one_on_are_allowed(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos", flag, "0"])
    with pytest.raises(InputError, match=f"{flag} 0(.0)?: a number above 0 is allowed"):
        main()


def test_a_victim_that_has_just_ended_is_nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Process 0 would be the campaign itself, with all its lanes."""
    looks = iter([[], [4001], [], [4002], [4002]])
    monkeypatch.setattr(Scene, "victims", lambda *_: next(looks))
    monkeypatch.setattr(Scene, "running", True)
    case = Case(folder=tmp_path, timeout=1)
    disk = SmallDisk(tmp_path / "disk", tmp_path / "image")
    try:
        scene = Scene(case=case, out=tmp_path, outputs=tmp_path, disk=disk, ledger=Ledger(tmp_path, {}), nodes=None)
        assert scene.victim("worker", Random(0)) == 4002
    finally:
        disk.close()


def test_a_small_disk_is_full_and_then_is_not(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_short_campaign_loses_nothing() -> None:
    """A round of either kind: on a Ray of its own, and on two nodes."""
    faults = 2 * len(ALL) - 1
    command = [sys.executable, "-m", "tools.faults", "--runs", str(faults), "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| **all** | {faults} | 0 | 0 | 0 | 0 | 0 |" in done.stdout

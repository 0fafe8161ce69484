"""The guarantees of the store, one scenario each: power cuts, full disks, corruption, late rows, concurrent readers."""

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from orchestrator.store import RowsLost, Store, StoreError, StoreWriter
from orchestrator.store.files import Disk
from sampler.errors import InputError
from tests.crashing_disk import TRIAL, CrashingDisk, PowerCut, make_documents, make_rows, tokens_by_key, trial_columns

DOCS = [f"d{n}" for n in range(4)]


def fill(writer: StoreWriter, doc_ids: list[str], *, tokens: int = 7, trial_id: str = TRIAL) -> int:
    attempt = writer.begin(trial_columns(trial_id), {"actor": "worker-1", "settings": {"threshold": 0.95}})
    for doc_id in doc_ids:
        writer.append(trial_id, attempt, make_rows([doc_id], trial_id=trial_id, attempt=attempt, tokens=tokens))
    return attempt


def new_sweep(folder: Path) -> StoreWriter:
    writer = StoreWriter(folder)
    writer.write_sweep_record({"sweep": "test"})
    return writer


def marks(folder: Path) -> dict[str, int]:
    return {doc_id: mark for (_, doc_id), mark in tokens_by_key(Store(folder).rows()).items()}


def test_rows_trial_records_and_documents_are_read_back(tmp_path: Path) -> None:
    with new_sweep(tmp_path) as writer:
        documents = make_documents(DOCS)
        writer.write_documents("gsm8k", documents)
        fill(writer, DOCS)
        assert len(writer.completed_documents(TRIAL)) == 4
        writer.finish(TRIAL, {"peak_memory": 5, "tally": {"documents": 4}}, DOCS[::-1])
        reader = Store(tmp_path)
        assert reader.documents("gsm8k").equals(documents, check_metadata=True)
        assert reader.read_sweep_record() == {"schema": 1, "sweep": "test"}
        facts = reader.trials()[TRIAL]
        assert facts["trial"] == trial_columns()
        assert (facts["status"], facts["rows"]) == ("finished", 4)
        assert (facts["settings"], facts["tally"]) == ({"threshold": 0.95}, {"documents": 4})
        (attempt,) = facts["attempts"]
        assert (attempt["attempt"], attempt["actor"], attempt["peak_memory"]) == (0, "worker-1", 5)
        assert reader.rows(columns=["doc_id"])["doc_id"].to_pylist() == DOCS[::-1]
        assert reader.check() == []


def test_the_folder_can_be_read_without_this_project(tmp_path: Path) -> None:
    with new_sweep(tmp_path) as writer:
        fill(writer, DOCS)
        streams = list(tmp_path.glob("trials/*/rows-*.arrows"))
        assert pa.ipc.open_stream(streams[0]).read_all().num_rows == 4
        writer.finish(TRIAL, {}, DOCS)
    assert ds.dataset(sorted(tmp_path.glob("trials/*/rows.parquet"))).count_rows() == 4
    shown = subprocess.run(["sha256sum", *tmp_path.glob("trials/*/rows.parquet")], capture_output=True, text=True)
    assert shown.stdout.split()[0] == Store(tmp_path).trials()[TRIAL]["sha256"]


def test_a_finished_trial_can_be_extended(tmp_path: Path) -> None:
    with new_sweep(tmp_path) as writer:
        fill(writer, DOCS[:2])
        writer.finish(TRIAL, {}, DOCS[:2])
        assert fill(writer, DOCS, tokens=9) == 1
        assert marks(tmp_path) == {"d0": 7, "d1": 7, "d2": 9, "d3": 9}
        writer.finish(TRIAL, {}, DOCS)
        assert marks(tmp_path) == {"d0": 7, "d1": 7, "d2": 9, "d3": 9}
        assert Store(tmp_path).trials()[TRIAL]["rows"] == 4


def test_a_late_row_of_a_finished_trial_makes_it_unfinished(tmp_path: Path) -> None:
    with new_sweep(tmp_path) as writer:
        fill(writer, DOCS[:2])
        writer.finish(TRIAL, {"tally": {"documents": 2}}, DOCS[:2])
        assert len(writer.append(TRIAL, 0, make_rows(DOCS[:2]))) == 0
        assert writer.trials()[TRIAL]["status"] == "finished"
        assert len(writer.append(TRIAL, 0, make_rows(DOCS[:3]))) == 1
        facts = writer.trials()[TRIAL]
        assert (facts["status"], facts["tally"]) == ("running", None)


def test_a_failed_trial_keeps_its_rows_and_begins_again(tmp_path: Path) -> None:
    with new_sweep(tmp_path) as writer:
        fill(writer, DOCS[:1])
        writer.fail(TRIAL, "out of memory")
        facts = writer.trials()[TRIAL]
        assert (facts["status"], facts["attempts"][0]["reason"]) == ("failed", "out of memory")
        assert fill(writer, DOCS, tokens=9) == 1
        assert marks(tmp_path) == {"d0": 7, "d1": 9, "d2": 9, "d3": 9}


def test_rows_of_another_schema_or_trial_are_refused(tmp_path: Path) -> None:
    with new_sweep(tmp_path) as writer:
        attempt = fill(writer, [])
        with pytest.raises(AssertionError):
            writer.append(TRIAL, attempt, make_rows(DOCS).drop_columns(["text"]))
        with pytest.raises(AssertionError):
            writer.append(TRIAL, attempt, make_rows(DOCS, trial_id="other"))
        nothing = make_rows(DOCS).set_column(0, "sweep", pa.array([None] * 4, pa.string()))
        nothing = pa.RecordBatch.from_arrays(nothing.columns, schema=make_rows(DOCS).schema)
        with pytest.raises(AssertionError, match="sweep must not be null"):
            writer.append(TRIAL, attempt, nothing)
        assert marks(tmp_path) == {}


def run_scenario(writer: StoreWriter, acknowledged: dict[str, int], mark: int) -> None:
    """A trial is begun, filled, finished, extended and finished again; a second time it changes nothing."""
    writer.write_sweep_record({"sweep": "test"})
    for wanted in (DOCS[:2], DOCS):
        attempt = writer.begin(trial_columns(), {})
        for doc_id in wanted:
            writer.append(TRIAL, attempt, make_rows([doc_id], attempt=attempt, tokens=mark))
            acknowledged.setdefault(doc_id, mark)
        writer.finish(TRIAL, {}, wanted)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_power_cut_at_every_call(tmp_path: Path, seed: int) -> None:
    """At each primitive in turn: nothing is lost, and the scenario can continue."""
    for cut in range(1000):
        folder = tmp_path / str(cut)
        disk = CrashingDisk(tmp_path / f"scratch-{cut}", seed=seed * 1000 + cut)
        disk.calls_left = cut
        acknowledged: dict[str, int] = {}
        writer = None
        try:
            writer = StoreWriter(folder, disk=disk)
            run_scenario(writer, acknowledged, mark=1)
            break
        except PowerCut:
            if writer is not None:
                writer.close()
            disk.lose()
        left = marks(folder)
        assert acknowledged.items() <= left.items(), cut
        assert set(left.values()) <= {1}, cut
        with StoreWriter(folder, disk=disk) as again:
            assert all(one.torn for one in again.corrupted.values()), cut
            assert marks(folder) == left, cut
            run_scenario(again, left, mark=2)
        assert marks(folder) == left, cut
        assert sorted(left) == DOCS
        assert sorted(path.name for path in (folder / "trials" / TRIAL).iterdir()) == ["rows.parquet", "trial.json"]
        assert Store(folder).check() == []
    assert cut > 60
    assert marks(folder) == dict.fromkeys(DOCS, 1)
    assert writer is not None
    writer.close()


class FullDisk(Disk):
    """Takes part of a write and then has no space left, while `full`."""

    def __init__(self, *, cut_fails: bool) -> None:
        self.full = False
        self._cut_fails = cut_fails

    def write(self, handle: int, data: bytes) -> None:
        if self.full:
            super().write(handle, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(handle, data)

    def truncate(self, handle: int, size: int) -> None:
        if self._cut_fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().truncate(handle, size)


@pytest.mark.parametrize("cut_fails", [False, True])
def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path, cut_fails: bool) -> None:
    disk = FullDisk(cut_fails=cut_fails)
    writer = StoreWriter(tmp_path, disk=disk)
    writer.write_sweep_record({"sweep": "test"})
    attempt = fill(writer, DOCS[:2])
    disk.full = True
    with pytest.raises(StoreError, match=f"cannot write rows of trial {TRIAL} in .*No space left on device"):
        writer.append(TRIAL, attempt, make_rows(["d2"]))
    with pytest.raises(StoreError, match="No space left"):
        writer.finish(TRIAL, {}, DOCS[:2])
    with pytest.raises(StoreError, match="No space left"):
        writer.begin(trial_columns("other"), {})
    assert marks(tmp_path) == dict.fromkeys(DOCS[:2], 7)
    assert writer.completed_documents(TRIAL) == set(DOCS[:2])
    disk.full = False
    assert len(writer.append(TRIAL, attempt, make_rows(["d2", "d3"], tokens=9))) == 2
    writer.finish(TRIAL, {}, DOCS)
    assert marks(tmp_path) == {"d0": 7, "d1": 7, "d2": 9, "d3": 9}
    writer.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_really_full_disk(small_disk: Path) -> None:
    folder = small_disk / "sweep"
    acknowledged = []
    with new_sweep(folder) as writer:
        attempt = fill(writer, [])

        def fill_up() -> None:
            for number in range(1000):
                writer.append(TRIAL, attempt, make_rows([f"d{number}"]))
                acknowledged.append(f"d{number}")

        with pytest.raises(StoreError, match="No space left on device"):
            fill_up()
        assert len(acknowledged) > 10
        assert list(marks(folder)) == acknowledged
        with pytest.raises(StoreError, match="No space left on device"):
            writer.append(TRIAL, attempt, make_rows(["later"]))
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    with StoreWriter(folder) as writer:
        assert list(marks(folder)) == acknowledged
        writer.append(TRIAL, attempt, make_rows(["later"]))
        writer.finish(TRIAL, {}, [*acknowledged, "later"])
        assert list(marks(folder)) == [*acknowledged, "later"]


def change_byte(path: Path, at: float) -> bytes:
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 4
    path.write_bytes(data)
    return bytes(data)


def corrupted_sweep(folder: Path, name: str, at: float) -> bytes:
    """Trial aa is finished, trial bb runs; then a file of one changes."""
    with new_sweep(folder) as writer:
        fill(writer, DOCS, trial_id="aa")
        writer.finish("aa", {}, DOCS)
        fill(writer, DOCS, trial_id="bb")
    return change_byte(folder / name, at)


def test_a_power_cut_at_every_call_of_a_recovery(tmp_path: Path) -> None:
    """Good rows of corrupted files are kept, and so are the corrupted files, in place or in quarantine."""
    corrupted_sweep(tmp_path / "model", "trials/aa/rows.parquet", 0.5)
    change_byte(tmp_path / "model" / "trials/bb/rows-0.arrows", 0.6)
    change_byte(tmp_path / "model" / "trials/bb/trial.json", 0.5)
    names = ("trials/aa/rows.parquet", "trials/bb/rows-0.arrows", "trials/bb/trial.json")
    corrupted = {(tmp_path / "model" / name).read_bytes() for name in names}
    left = {("bb", doc_id): 7 for doc_id in DOCS[:2]}
    for cut in range(1000):
        folder = tmp_path / str(cut)
        shutil.copytree(tmp_path / "model", folder)
        disk = CrashingDisk(tmp_path / f"scratch-{cut}", seed=cut)
        disk.calls_left = cut
        try:
            StoreWriter(folder, disk=disk).close()
            break
        except PowerCut:
            disk.lose()
        assert tokens_by_key(Store(folder).rows()) == left, cut
        with StoreWriter(folder) as writer:
            assert tokens_by_key(writer.rows()) == left, cut
            assert set(writer.trials()) == {"aa", "bb"}
            assert writer.check() == []
        assert corrupted <= {path.read_bytes() for path in folder.rglob("*") if path.is_file()}, cut
    assert cut > 20


CASES: list[tuple[str, float, list[str], list[str]]] = [  # file, where, what is left of aa and of bb
    ("trials/aa/rows.parquet", 0.5, [], DOCS),
    ("trials/aa/rows.parquet", 0.99, [], DOCS),
    ("trials/aa/trial.json", 0.5, DOCS, DOCS),
    ("trials/bb/trial.json", 0.5, DOCS, DOCS),
    ("trials/bb/rows-0.arrows", 0.01, DOCS, []),
    ("trials/bb/rows-0.arrows", 0.6, DOCS, DOCS[:2]),
    ("trials/bb/rows-0.arrows", 0.99, DOCS, DOCS[:3]),
]


@pytest.mark.parametrize(("name", "at", "of_aa", "of_bb"), CASES)
def test_a_corrupted_file_is_named_quarantined_and_only_its_rows_are_lost(
    tmp_path: Path, name: str, at: float, of_aa: list[str], of_bb: list[str]
) -> None:
    data = corrupted_sweep(tmp_path, name, at)
    left = {("aa", doc_id): 7 for doc_id in of_aa} | {("bb", doc_id): 7 for doc_id in of_bb}
    reader = Store(tmp_path)
    assert tokens_by_key(reader.rows()) == left
    facts = reader.trials()
    assert [facts[trial_id]["trial"] for trial_id in ("aa", "bb")] == [trial_columns("aa"), trial_columns("bb")]
    assert list(reader.corrupted) == [tmp_path / name]
    (sentence,) = reader.check()
    assert sentence.startswith(str(tmp_path / name))
    assert (tmp_path / name).read_bytes() == data, "a reader changed something"
    with StoreWriter(tmp_path) as writer:
        assert list(writer.corrupted) == [tmp_path / name]
        assert [path.read_bytes() for path in tmp_path.glob("quarantine/*/*")] == [data]
        assert tokens_by_key(writer.rows()) == left
        assert writer.check() == []
        for trial_id in ("aa", "bb"):
            fill(writer, DOCS, trial_id=trial_id, tokens=9)
            writer.finish(trial_id, {}, DOCS)
        again = {(trial_id, doc_id): left.get((trial_id, doc_id), 9) for trial_id in ("aa", "bb") for doc_id in DOCS}
        assert tokens_by_key(Store(tmp_path).rows()) == again


def test_a_rebuilt_trial_record_has_its_attempts(tmp_path: Path) -> None:
    with new_sweep(tmp_path) as writer:
        fill(writer, DOCS[:1])
        fill(writer, DOCS[1:2])
    change_byte(tmp_path / "trials" / TRIAL / "trial.json", 0.5)
    with StoreWriter(tmp_path) as writer:
        assert len(writer.trials()[TRIAL]["attempts"]) == 2
        assert len(writer.append(TRIAL, 3, make_rows(["d2"], attempt=3))) == 1  # begun, but not a row was there to tell
        assert writer.begin(trial_columns(), {}) == 4


def test_a_missing_table_is_detected(tmp_path: Path) -> None:
    with new_sweep(tmp_path) as writer:
        fill(writer, DOCS)
        writer.finish(TRIAL, {}, DOCS)
    (tmp_path / "trials" / TRIAL / "rows.parquet").unlink()
    (sentence,) = Store(tmp_path).check()
    assert sentence.endswith(f"rows.parquet should have 4 rows of trial {TRIAL}, but has 0")
    with StoreWriter(tmp_path) as writer:
        assert [one.problem for one in writer.corrupted.values()] == ["is missing"]
        assert writer.trials()[TRIAL]["status"] == "running"


def test_rows_corrupted_while_the_trial_runs_are_reported_as_lost(tmp_path: Path) -> None:
    with new_sweep(tmp_path) as writer:
        fill(writer, DOCS)
        change_byte(tmp_path / "trials" / TRIAL / "rows-0.arrows", 0.6)
        with pytest.raises(RowsLost, match=r"2 rows of .* must be computed again: .*rows-0\.arrows"):
            writer.finish(TRIAL, {}, DOCS)
        assert list(writer.corrupted) == [tmp_path / "trials" / TRIAL / "rows-0.arrows"]
        assert writer.completed_documents(TRIAL) == set(DOCS[:2])
        writer.append(TRIAL, 0, make_rows(DOCS, tokens=9))
        writer.finish(TRIAL, {}, DOCS)
        assert marks(tmp_path) == {"d0": 7, "d1": 7, "d2": 9, "d3": 9}
        assert len(list(tmp_path.glob("quarantine/*/*"))) == 1


def test_corrupted_documents_are_quarantined_and_can_be_written_again(tmp_path: Path) -> None:
    with new_sweep(tmp_path) as writer:
        writer.write_documents("gsm8k", make_documents(DOCS))
    change_byte(tmp_path / "documents" / "gsm8k.parquet", 0.5)
    with pytest.raises(InputError, match=r"gsm8k\.parquet does not match its own checksum"):
        Store(tmp_path).documents("gsm8k")
    assert len(Store(tmp_path).check()) == 1
    with StoreWriter(tmp_path) as writer:
        assert len(writer.corrupted) == 1
        with pytest.raises(InputError, match="has no documents of gsm8k"):
            writer.documents("gsm8k")
        writer.write_documents("gsm8k", make_documents(DOCS))
        assert len(writer.documents("gsm8k")) == 4


def test_a_torn_end_is_not_corruption_while_a_writer_is_active(tmp_path: Path) -> None:
    with new_sweep(tmp_path) as writer:
        fill(writer, DOCS)
        path = tmp_path / "trials" / TRIAL / "rows-0.arrows"
        with path.open("ab") as file:
            file.write(b"\xff\xff\xff\xff\x10")
        assert Store(tmp_path).check() == []
        assert sorted(marks(tmp_path)) == DOCS
    (sentence,) = Store(tmp_path).check()
    assert sentence == f"{path} batch 4 is truncated"
    with StoreWriter(tmp_path) as writer:
        assert [str(one) for one in writer.corrupted.values()] == [sentence]
        assert sorted(marks(tmp_path)) == DOCS


def test_readers_see_every_row_while_trials_are_merged(tmp_path: Path) -> None:
    """Reads in a loop while another thread appends, finishes and extends."""
    problems: list[Any] = []
    acknowledged: dict[tuple[str, str], int] = {}
    ended = threading.Event()

    def write() -> None:
        with new_sweep(tmp_path) as writer:
            for round_number in range(12):
                fill(writer, doc_ids := [f"d{round_number}-{n}" for n in range(3)])
                acknowledged.update({(TRIAL, doc_id): 7 for doc_id in doc_ids})
                writer.finish(TRIAL, {}, [doc_id for _, doc_id in acknowledged])
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not ended.is_set():
        before = dict(acknowledged)
        reader = Store(tmp_path)
        if not before.items() <= tokens_by_key(reader.rows()).items() or reader.corrupted:
            problems.append((before, reader.corrupted))
    thread.join()
    assert problems == []
    assert len(marks(tmp_path)) == 36


def test_threads_may_append_to_different_trials_at_once(tmp_path: Path) -> None:
    names = [f"trial{n}" for n in range(8)]
    with new_sweep(tmp_path) as writer:
        threads = [threading.Thread(target=fill, args=(writer, DOCS), kwargs={"trial_id": name}) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tokens_by_key(Store(tmp_path).rows()) == {(name, doc_id): 7 for name in names for doc_id in DOCS}


def test_rows_that_come_while_their_trial_is_finished_are_kept(tmp_path: Path) -> None:
    """Two workers on one trial, the first thought dead: each row is written once, whichever finishes."""
    docs = [f"d{n}" for n in range(12)]
    with new_sweep(tmp_path) as writer:
        attempt = fill(writer, docs[:1])

        def append_all() -> None:
            for doc_id in docs:
                writer.append(TRIAL, attempt, make_rows([doc_id]))

        def finish_often() -> None:
            for _ in docs:
                writer.finish(TRIAL, {}, docs[:1])

        threads = [threading.Thread(target=act) for act in (append_all, append_all, finish_often)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(marks(tmp_path)) == sorted(docs)
        assert writer.completed_documents(TRIAL) == set(docs)

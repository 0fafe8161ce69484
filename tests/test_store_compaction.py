"""Compaction: rows of many finished trials move into one file, and no reader ever misses or doubles one."""

import errno
import json
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from synthetic_folder import SyntheticFolder

from orchestrator.progress.status import read_status
from orchestrator.report.sweeps import read_sweeps
from orchestrator.store import Store, StoreError, StoreWriter
from orchestrator.store.compaction import COMPACTED_FOLDER, compaction_groups, encode_compacted, read_compacted
from orchestrator.store.files import CorruptedFile, Disk
from orchestrator.store.schema import attempts_of
from orchestrator.store.upload import open_remote_copy
from tests.crashing_disk import CrashingDisk, PowerCut, make_rows, tokens_by_key, trial_columns

TRIALS = [f"trial{n}" for n in range(4)]
DOCUMENTS = ["d0", "d1", "d2"]
ROWS = {(trial_id, doc_id): 1 for trial_id in TRIALS for doc_id in DOCUMENTS}


def write_trials(writer: StoreWriter, trial_ids: list[str] = TRIALS) -> None:
    for trial_id in trial_ids:
        attempt = writer.begin(trial_columns(trial_id), {"actor": "worker-1", "packages": {"torch": "2"}})
        writer.append(trial_id, attempt, make_rows(DOCUMENTS, trial_id=trial_id, tokens=1))
        writer.finish(trial_id, {"peak_memory": 1}, DOCUMENTS)


def new_writer(folder: Path, disk: Disk | None = None) -> StoreWriter:
    writer = StoreWriter(folder, disk=disk or Disk())
    writer.write_sweep_record({"sweep": "s"})
    return writer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / COMPACTED_FOLDER).glob("*"))


def test_compacted_trials_are_read_as_before(tmp_path: Path) -> None:
    with new_writer(tmp_path) as writer:
        write_trials(writer)
        before = Store(tmp_path).trials()
        assert writer.compact() == 0, "too few rows"
        assert names(tmp_path) == []
        assert writer.compact(minimum=1) == 1
        assert list((tmp_path / "trials").iterdir()) == []
        assert len(names(tmp_path)) == 1
        for store in (writer, Store(tmp_path)):
            assert store.trial_ids() == TRIALS
            assert store.trials() == before
            assert store.trial("trial2") == before["trial2"]
            assert tokens_by_key(store.rows()) == ROWS
            assert tokens_by_key(store.rows(["trial1"])) == {key: 1 for key in ROWS if key[0] == "trial1"}
            assert store.rows(["trial3"], ["doc_id"])["doc_id"].to_pylist() == DOCUMENTS
            assert store.completed_documents("trial3") == set(DOCUMENTS)
            attempts = sorted(store.attempts().to_pylist(), key=str)
            assert attempts == sorted(attempts_of(before.items()).to_pylist(), key=str)
            for file in store._compacted_now().files:
                assert file._usual_attempts().equals(file.attempts()), "the quick way was taken"
        assert Store(tmp_path).check() == writer.check() == []
    assert json.loads((tmp_path / "sweep.json").read_text())["schema"] == 2, "version 1 would not see the rows"
    with StoreWriter(tmp_path) as writer:
        writer.write_sweep_record({"sweep": "s"})
        assert tokens_by_key(writer.rows()) == ROWS
    assert Store(tmp_path).read_sweep_record() == {"schema": 2, "sweep": "s"}


def test_files_have_at_least_a_thousand_rows_of_one_task() -> None:
    record = {"trial": {"task": "a", "repeat": 0, "shard": 0, "policy": "k1", "trial_id": ""}, "rows": 10}
    trials = {f"t{n}": {**record, "trial": {**record["trial"], "shard": n, "task": "ab"[n % 2]}} for n in range(1100)}
    groups = compaction_groups(trials)
    assert [(task, len(ids)) for task, ids in groups] == [("a", 400), ("a", 150), ("b", 400), ("b", 150)]
    assert compaction_groups({key: trials[key] for key in list(trials)[:198]}) == []


def test_a_power_cut_at_every_call_of_a_compaction(tmp_path: Path) -> None:
    """Readers look before each call, and after the cut."""
    for calls in range(1000):
        folder = tmp_path / str(calls)
        disk = CrashingDisk(tmp_path / f"scratch{calls}", seed=calls)
        writer = new_writer(folder, disk)
        write_trials(writer)
        reader = Store(folder)

        def look(reader: Store = reader) -> None:
            assert tokens_by_key(reader.rows()) == ROWS
            assert sorted(reader.trials()) == TRIALS

        disk.watch, disk.calls_left = look, calls
        try:
            writer.compact(minimum=1)
        except PowerCut:
            disk.watch = lambda: None
            writer.close()
            disk.lose()
        else:
            assert calls > 15
            writer.close()
            return
        with StoreWriter(folder) as writer:
            assert writer.corrupted == {}
            assert tokens_by_key(writer.rows()) == ROWS
            writer.compact(minimum=1)
            assert tokens_by_key(Store(folder).rows()) == ROWS
            assert writer.check() == []
        assert list((folder / "trials").iterdir()) == []
    raise AssertionError("the compaction never ended")


def test_a_full_disk_leaves_the_rows_where_they_are(tmp_path: Path) -> None:
    class FullDisk(Disk):
        full = False

        def write(self, handle: int, data: bytes) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            super().write(handle, data)

    disk = FullDisk()
    with new_writer(tmp_path, disk) as writer:
        write_trials(writer)
        disk.full = True
        with pytest.raises(StoreError, match="No space left"):
            writer.compact(minimum=1)
        disk.full = False
        assert names(tmp_path) == []
        assert tokens_by_key(Store(tmp_path).rows()) == ROWS
        assert writer.compact(minimum=1) == 1


def test_a_compacted_trial_goes_on(tmp_path: Path) -> None:
    with new_writer(tmp_path) as writer:
        write_trials(writer)
        writer.compact(minimum=1)
        attempt = writer.begin(trial_columns("trial0"), {"actor": "worker-2"})
        assert attempt == 1
        assert len(writer.append("trial0", attempt, make_rows(["d0", "d9"], trial_id="trial0", tokens=5))) == 1
        more = {**ROWS, ("trial0", "d9"): 5}
        assert tokens_by_key(Store(tmp_path).rows()) == tokens_by_key(writer.rows()) == more
        assert Store(tmp_path).trials()["trial0"]["status"] == "running"
    with StoreWriter(tmp_path) as writer:
        assert writer.corrupted == {}
        writer.finish("trial0", {}, [*DOCUMENTS, "d9"])
        assert writer.compact(minimum=1) == 1
        assert Store(tmp_path).trials()["trial0"]["rows"] == 4
        assert tokens_by_key(Store(tmp_path).rows()) == more
        assert len(Store(tmp_path).compacted_trials(without=())) == len(TRIALS)
    assert list((tmp_path / "trials").iterdir()) == []


def test_a_late_row_during_a_compaction_is_kept(tmp_path: Path) -> None:
    """It arrives when the rows of its trial were read, and before they are published."""

    class LateRow(Disk):
        writer: StoreWriter | None = None

        def create(self, path: Path) -> int:
            if path.parent.name == COMPACTED_FOLDER and self.writer is not None:
                writer, self.writer = self.writer, None
                writer.append("trial1", 0, make_rows(["late"], trial_id="trial1", tokens=7))
                writer.finish("trial1", {}, [*DOCUMENTS, "late"])
            return super().create(path)

    disk = LateRow()
    with new_writer(tmp_path, disk) as writer:
        write_trials(writer)
        disk.writer = writer
        writer.compact(minimum=1)
        more = {**ROWS, ("trial1", "late"): 7}
        assert tokens_by_key(Store(tmp_path).rows()) == tokens_by_key(writer.rows()) == more
        assert writer.check() == []
    with StoreWriter(tmp_path) as writer:
        assert tokens_by_key(writer.rows()) == more
        assert Store(tmp_path).trials()["trial1"]["rows"] == 4


def test_forced_trials_leave_their_compacted_file(tmp_path: Path) -> None:
    with new_writer(tmp_path) as writer:
        write_trials(writer)
        writer.compact(minimum=1)
        old = names(tmp_path)
        writer.quarantine(["trial0", "trial3"])
        left = {key: mark for key, mark in ROWS.items() if key[0] in ("trial1", "trial2")}
        assert tokens_by_key(Store(tmp_path).rows()) == tokens_by_key(writer.rows()) == left
        assert Store(tmp_path).trial_ids() == ["trial1", "trial2"]
        assert [path.name for path in (tmp_path / "quarantine" / COMPACTED_FOLDER).iterdir()] == old
        assert writer.begin(trial_columns("trial0"), {}) == 0
        writer.quarantine(["trial1", "trial2"])
        assert names(tmp_path) == []
        assert tokens_by_key(Store(tmp_path).rows()) == {}


def test_a_corrupted_compacted_file_is_quarantined_and_only_its_trials_are_lost(tmp_path: Path) -> None:
    with new_writer(tmp_path) as writer:
        write_trials(writer, TRIALS[:2])
        writer.compact(minimum=1)
        write_trials(writer, TRIALS[2:])
        writer.compact(minimum=1)
    first, second = names(tmp_path)
    data = bytearray((tmp_path / COMPACTED_FOLDER / first).read_bytes())
    data[len(data) // 3] ^= 1
    (tmp_path / COMPACTED_FOLDER / first).write_bytes(data)
    (sentence,) = Store(tmp_path).check()
    assert first in sentence
    with StoreWriter(tmp_path) as writer:
        assert [path.name for path in writer.corrupted] == [first]
        assert {trial_id for trial_id, _ in tokens_by_key(writer.rows())} == set(TRIALS[2:])
        assert (tmp_path / "quarantine" / COMPACTED_FOLDER / first).read_bytes() == data
        write_trials(writer, TRIALS[:2])
        assert tokens_by_key(Store(tmp_path).rows()) == ROWS
    assert names(tmp_path) == [second]


@pytest.mark.parametrize("value", [-1, 10**17, "a\x1b[2J", "\ud800", [], {"a": 1}, None])
def test_records_that_no_sweep_writes_are_found(tmp_path: Path, value: object) -> None:
    """Somebody else may have written the file: one record among good ones is wrong."""
    with new_writer(tmp_path) as writer:
        write_trials(writer)
        records = writer.trials()
        rows = writer.rows()
    records["trial2"] = {**records["trial2"], "attempts": [{**records["trial2"]["attempts"][0], "actor": value}]}
    folder = tmp_path / COMPACTED_FOLDER
    folder.mkdir()
    with suppress(UnicodeEncodeError):
        (folder / "task-000001-00000000.parquet").write_bytes(encode_compacted(rows, records))
        with pytest.raises(CorruptedFile, match="records of trials that cannot be used"):
            list(read_compacted(folder / "task-000001-00000000.parquet").parse())


def made(folder: Path) -> SyntheticFolder:
    return SyntheticFolder(folder, documents=40, kinds=("generate", "loglikelihood"), shard_size=4)


def test_status_and_report_see_the_same(tmp_path: Path) -> None:
    """Also of trials without stored totals, as older versions wrote them."""
    sweep = made(tmp_path / "s")
    with sweep.begin() as store:
        for number, trial in enumerate(sweep.trials[:-2]):
            sweep.run(store, trial, tally=number % 5 > 0)
        sweep.run(store, sweep.trials[-2], ["d36"])
        before, rows = read_status(sweep.folder).as_json(), read_sweeps([sweep.folder])[0]
        assert store.compact(minimum=1, full=20) > 4
        after, again = read_status(sweep.folder).as_json(), read_sweeps([sweep.folder])[0]
    assert len(Store(sweep.folder).trial_folders()) == 1
    assert after.pop("last_row") is not None
    del before["last_row"]
    for one, other in zip(before.pop("configurations"), after.pop("configurations"), strict=True):
        assert other == {name: pytest.approx(v) if isinstance(v, float) else v for name, v in one.items()}
    assert before == after
    key = [("trial_id", "ascending"), ("doc_id", "ascending")]
    plain = [found.rows.cast(_plain(found.rows.schema)).sort_by(key) for found in (rows, again)]
    assert plain[0].equals(plain[1])
    stated = [sorted(found.attempts.to_pylist(), key=str) for found in (rows, again)]
    assert stated[0] == stated[1]
    assert rows.origin == again.origin == {}


def _plain(schema: pa.Schema) -> pa.Schema:
    """Without dictionaries, which can be in another order."""
    return pa.schema([(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema])


def test_a_copy_follows_a_compaction(tmp_path: Path) -> None:
    """At every moment the copy can be downloaded, and has the rows that were copied so far."""
    sweep = made(tmp_path / "s")
    url = (tmp_path / "copies").as_uri()
    with sweep.begin() as store:
        for trial in sweep.trials[:10]:
            sweep.run(store, trial)
        copy = open_remote_copy(url, sweep.folder, dry_run=False, note=lambda _: None)
        assert copy is not None
        assert not copy.copy_finished().missing
        store.compact(minimum=1)
        for trial in sweep.trials[10:]:
            sweep.run(store, trial)
        assert not copy.copy_finished().missing
        forced = sweep.trials[0].trial_id
        store.quarantine([forced])
        sweep.run(store, sweep.trials[0])
    assert not copy.copy_all().missing
    local, remote = sweep.folder, tmp_path / "copies" / "s"
    for part in (COMPACTED_FOLDER, "trials"):
        here, there = (
            sorted(p.relative_to(root).as_posix() for p in (root / part).rglob("*.*")) for root in (local, remote)
        )
        assert here == there, part
    fetched = tmp_path / "elsewhere" / "s"
    assert open_remote_copy(url, fetched, dry_run=False, note=lambda _: None) is not None
    assert Store(fetched).check() == []
    assert Store(fetched).trials() == Store(local).trials()
    assert _by_key(Store(fetched).rows()) == _by_key(Store(local).rows())


def _by_key(rows: pa.Table) -> dict[tuple[str, str], dict[str, object]]:
    found = {(row["trial_id"], row["doc_id"]): row for row in rows.to_pylist()}
    assert len(found) == len(rows)
    return found

"""One writer per folder: a live writer keeps the lock, and exactly one process replaces a dead one."""

import errno
import json
import os
import re
import signal
import threading
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from orchestrator.store import StoreError, StoreWriter
from orchestrator.store.lock import FolderInUse, FolderLock, LockHolder, active_writer
from tests.crashing_disk import TRIAL, make_rows, trial_columns
from tests.store_processes import PROCESSES, hold_lock, race_for_lock


def start_holder(folder: Path) -> BaseProcess:
    connection, says = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=hold_lock, args=(folder, says))
    process.start()
    assert connection.recv() == "held"
    return process


def leave_lock(folder: Path, **changes: object) -> Path:
    """A lock file as another writer would have left it."""
    path = folder / "lock" / "000001.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**asdict(LockHolder.this_process()), **changes}))
    return path


def grow_old(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_folder_is_free_again_after_release(tmp_path: Path) -> None:
    for _ in range(3):
        lock = FolderLock.acquire(tmp_path)
        holder = active_writer(tmp_path)
        assert holder is not None
        assert holder.pid == os.getpid()
        lock.release()
        lock.release()
        assert active_writer(tmp_path) is None
    assert len(list((tmp_path / "lock").iterdir())) == 1


def test_a_live_writer_is_named_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    process = start_holder(tmp_path)
    refusal = rf"{re.escape(str(tmp_path))} is in use: process {process.pid} on .* has been writing to it since 20.*"
    with pytest.raises(FolderInUse, match=refusal + rf"stop it \(kill {process.pid}\)"):
        FolderLock.acquire(tmp_path)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)  # stopped is not dead, however old its last heartbeat
    grow_old(tmp_path / "lock" / "000001.json", 3600)
    with pytest.raises(FolderInUse):
        StoreWriter(tmp_path)
    process.kill()
    process.join()
    FolderLock.acquire(tmp_path).release()


def test_a_reused_process_id_does_not_hold_the_lock(tmp_path: Path) -> None:
    leave_lock(tmp_path, start="1")
    FolderLock.acquire(tmp_path).release()


def test_a_writer_on_another_machine_is_alive_while_it_sends_heartbeats(tmp_path: Path) -> None:
    path = leave_lock(tmp_path, machine="another", host="node7", pid=5)
    with pytest.raises(FolderInUse, match=r"process 5 on node7 .* last heartbeat was \d+ s ago; wait .* 60 s"):
        FolderLock.acquire(tmp_path)
    grow_old(path, 20)
    with pytest.raises(FolderInUse, match=r"heartbeat was [2-5]\d s ago"):
        FolderLock.acquire(tmp_path)
    grow_old(path, 70)
    assert active_writer(tmp_path) is None
    FolderLock.acquire(tmp_path).release()


def test_heartbeats_are_sent(tmp_path: Path) -> None:
    lock = FolderLock.acquire(tmp_path, stale_seconds=0.3)
    path = tmp_path / "lock" / "000001.json"
    grow_old(path, 100)
    deadline = time.monotonic() + 300
    while time.time() - path.stat().st_mtime > 50:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lock.release()


@pytest.mark.parametrize("content", [b"", b'{"host": "a', b"[]", b'{"pid": {}}'])
def test_an_unreadable_lock_file_counts_while_it_is_fresh(tmp_path: Path, content: bytes) -> None:
    path = leave_lock(tmp_path)
    path.write_bytes(content)
    with pytest.raises(FolderInUse):
        FolderLock.acquire(tmp_path)
    grow_old(path, 70)
    FolderLock.acquire(tmp_path).release()


def test_a_lock_that_could_not_be_written_does_not_block_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            FolderLock.acquire(tmp_path)
    FolderLock.acquire(tmp_path).release()


def test_a_writer_that_lost_its_lock_stops_writing(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    writer.write_sweep_record({"sweep": "x"})
    attempt = writer.begin(trial_columns(), {})
    (path,) = (tmp_path / "lock").iterdir()
    path.write_text(json.dumps({**asdict(LockHolder.this_process()), "machine": "another"}))
    grow_old(path, 70)
    other = StoreWriter(tmp_path)
    with pytest.raises(StoreError, match="another process has taken over"):
        writer.append(TRIAL, attempt, make_rows(["d0"]))
    writer.close()
    other.append(TRIAL, attempt, make_rows(["d0"]))
    other.close()


def test_a_lock_folder_removed_by_hand_ends_the_writer(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    (path,) = (tmp_path / "lock").iterdir()
    path.unlink()
    with pytest.raises(StoreError, match="taken over"):
        writer.write_sweep_record({"sweep": "x"})
    writer.close()


def race(folder: Path, racers: int) -> list[bool]:
    start = PROCESSES.Barrier(racers)
    pipes: list[tuple[Connection, Connection]] = [PROCESSES.Pipe(duplex=False) for _ in range(racers)]
    processes = [PROCESSES.Process(target=race_for_lock, args=(folder, start, says)) for _, says in pipes]
    for process in processes:
        process.start()
    results = [connection.recv() for connection, _ in pipes]
    for process in processes:
        process.join()
    return results


@pytest.mark.parametrize("stale", [True, False])
def test_one_of_many_simultaneous_takeovers_succeeds(tmp_path: Path, stale: bool) -> None:
    """Round after round, each on the lock that the dead winner of the last one left, or on none."""
    for number in range(6):
        folder = tmp_path if stale else tmp_path / str(number)
        folder.mkdir(exist_ok=True)
        assert sum(race(folder, 4)) == 1


def test_threads_never_hold_the_lock_together(tmp_path: Path) -> None:
    inside = threading.Lock()
    taken, together = [], []

    def work() -> None:
        for _ in range(15):
            try:
                lock = FolderLock.acquire(tmp_path)
            except FolderInUse:
                continue
            if not inside.acquire(blocking=False):
                together.append(True)
            else:
                taken.append(True)
                inside.release()
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == []
    assert len(taken) >= 5


def test_a_process_that_resumes_late_gives_up_its_number(tmp_path: Path) -> None:
    """It had decided on number 2; since then 2 came and went and 3 is held."""
    from orchestrator.store import lock as locks

    leave_lock(tmp_path, start="1")
    for _ in range(2):
        held = FolderLock.acquire(tmp_path)
        held.release()
    held = FolderLock.acquire(tmp_path)
    before = sorted((tmp_path / "lock").iterdir())
    assert locks._create(tmp_path / "lock", 2) is None
    assert sorted((tmp_path / "lock").iterdir()) == before
    assert not held.is_lost()
    held.release()


def test_a_file_system_without_hard_links_is_locked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    lock = FolderLock.acquire(tmp_path)
    with pytest.raises(FolderInUse, match=str(os.getpid())):
        FolderLock.acquire(tmp_path)
    lock.release()
    FolderLock.acquire(tmp_path).release()

"""Functions that tests run in separate processes, to kill or stop them."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

from orchestrator.store import StoreWriter
from orchestrator.store.lock import FolderInUse, FolderLock
from tests.crashing_disk import TRIAL, make_rows, trial_columns

PROCESSES = multiprocessing.get_context("forkserver")  # no fork of a process with threads, and imports only once
PROCESSES.set_forkserver_preload(["tests.store_processes"])


def hold_lock(folder: Path, connection: Connection) -> None:
    FolderLock.acquire(folder)
    connection.send("held")
    time.sleep(600)


def race_for_lock(folder: Path, start: Barrier, connection: Connection) -> None:
    """Sends whether it got the lock, and keeps it until all have tried."""
    start.wait()
    try:
        FolderLock.acquire(folder)
        connection.send(True)
    except FolderInUse:
        connection.send(False)
    start.wait()


def append_for_ever(folder: Path, connection: Connection, first: int) -> None:
    """Sends each document's number once the store has acknowledged it; finishes and compacts the trial now and then."""
    writer = StoreWriter(folder)
    writer.write_sweep_record({"sweep": "killed"})
    attempt = writer.begin(trial_columns(), {})
    for number in range(first, first + 10_000):
        writer.append(TRIAL, attempt, make_rows([f"d{number}"], attempt=attempt, tokens=number))
        connection.send(number)
        if number % 7 == 6:
            writer.finish(TRIAL, {}, [f"d{number}"])
            writer.compact(minimum=1)
            attempt = writer.begin(trial_columns(), {})

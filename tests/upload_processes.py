"""Uploads and fetches in processes of their own, killed at random moments."""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from orchestrator.store.remote_folder import RemoteFolder
from orchestrator.store.upload import open_remote_copy

PROCESSES = multiprocessing.get_context("forkserver")  # no fork of a process with threads, and imports only once
PROCESSES.set_forkserver_preload(["tests.upload_processes"])


def upload(url: str, folder: Path, connection: Connection, environment: dict[str, str]) -> None:
    """Fetches or uploads everything there is, and announces each access to the remote folder before it begins."""
    os.environ.update(environment)  # the fork server has that of the first test
    _announce(connection)
    copy = open_remote_copy(url, folder, dry_run=False, note=lambda _: None)
    assert copy is not None
    outcome = copy.copy_all()
    assert not outcome.missing, outcome


def _announce(connection: Connection) -> None:
    guard = threading.Lock()

    def announced(method: Callable[..., Any]) -> Callable[..., Any]:
        def act(self: RemoteFolder, *arguments: Any) -> Any:
            with guard:
                connection.send(method.__name__)
            return method(self, *arguments)

        return act

    for name in ("write", "read", "delete"):
        setattr(RemoteFolder, name, announced(getattr(RemoteFolder, name)))


def kill_upload(url: str, folder: Path, chance: random.Random, *, shortest: int = 1, longest: int) -> bool:
    """Kills an upload shortly after it accesses its n-th file; False if the upload had ended before."""
    hears, says = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=upload, args=(url, folder, says, dict(os.environ)))
    process.start()
    says.close()
    try:
        for _ in range(chance.randint(shortest, longest)):
            hears.recv()
        time.sleep(chance.uniform(0, 0.004))
    except EOFError:
        process.join()
        assert process.exitcode == 0
        return False
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL

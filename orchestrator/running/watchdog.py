"""Kills this process if it hangs.

A child process does it, because a stopped or blocked process cannot kill itself. A thread of this process writes a
heartbeat to the child, but not while one piece of work takes longer than allowed. The child counts time only while it
runs itself, so a machine that sleeps kills nothing.
"""

import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
HEARTBEATS = 20  # within the time allowed


def kill_silent_parent(parent: int, seconds: float, ticks: int = 10) -> None:
    """Runs in the child process, as source without any of our packages: reads heartbeats from standard input."""
    import os
    import select
    import signal

    silent = 0
    while silent < ticks:
        readable, _, _ = select.select([0], [], [], seconds / ticks)
        if not readable:
            silent += 1
        elif os.read(0, 4096):
            silent = 0
        else:
            return  # the parent closed the pipe, or ended
    if os.getppid() == parent:  # never another process that has the same id since
        os.kill(parent, signal.SIGKILL)


class Watchdog:
    """Watches this process until `close`. `seconds`: how long one piece of work may take."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._work_started: float | None = None
        self._closed = threading.Event()
        program = f"{inspect.getsource(kill_silent_parent)}\n{kill_silent_parent.__name__}({os.getpid()}, {seconds})"
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )
        self._thread = threading.Thread(target=self._send_heartbeats, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def working(self) -> Iterator[None]:
        """One piece of work, which must not take longer than allowed."""
        self._work_started = time.monotonic()
        try:
            yield
        finally:
            self._work_started = None

    def each(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yields the same items; producing an item is a piece of work, using it is not."""
        while True:
            with self.working():
                item = next(items, None)
            if item is None:
                return
            yield item

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def _send_heartbeats(self) -> None:
        assert self._child.stdin is not None
        while not self._closed.wait(self._seconds / HEARTBEATS):
            started = self._work_started
            if started is None or time.monotonic() - started < self._seconds:
                try:
                    os.write(self._child.stdin.fileno(), b".")
                except BrokenPipeError:  # the child was killed: this process is no longer watched
                    return

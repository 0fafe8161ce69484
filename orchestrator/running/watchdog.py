"""Ends this process if it hangs: a child process waits for its signs of life. Knows no Ray and no trials.

The child is another process because a stopped or blocked one cannot end itself. It hears nothing while this process is
stopped, or while one piece of work takes longer than allowed; then it kills, and whoever started this process sees a
worker that died. A machine that sleeps, or stops both processes, is no reason: the child counts ticks, not hours.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Item = TypeVar("Item")
PROGRAM = Path(__file__).with_name("watchdog_process.py")
BEATS = 20  # in the time allowed


class Watchdog:
    """Watches from its making to the end of the process, or until `close`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None  # when the work that is going on was begun
        self._ended = threading.Event()
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), str(os.getpid()), str(seconds)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # an interrupt typed at the terminal is not for it
        )
        self._thread = threading.Thread(target=self._beat, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def working(self) -> Iterator[None]:
        """One piece of work, which must not take longer than allowed."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def each(self, items: Iterator[Item]) -> Iterator[Item]:
        """The same items; making each of them is a piece of work, using it is not."""
        while True:
            with self.working():
                found = next(items, None)
            if found is None:
                return
            yield found

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def _beat(self) -> None:
        assert self._child.stdin is not None
        while not self._ended.wait(self._seconds / BEATS):
            since = self._since
            if since is None or time.monotonic() - since < self._seconds:
                try:
                    os.write(self._child.stdin.fileno(), b".")
                except BrokenPipeError:  # somebody ended it; nothing is watched then
                    return

"""Signals that end a sweep early: raised at once, or where it is safe. Knows no Ray.

Ctrl-C, SIGTERM (schedulers), SIGUSR1 (a warning before the end of a job) and SIGHUP (a closed terminal) mean the same.
Only the first counts: whoever is impatient must not interrupt the clearing up.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Someone asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, as shells count."""
        return 128 + self.number


class Stop:
    """Catches the signals. Outside of `deferred` the first one raises Interrupted wherever the program is."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._deferred = False

    def install(self) -> None:
        """Again, if need be: libraries put their own handlers there."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def check(self) -> None:
        if self.asked is not None:
            raise Interrupted(self.asked)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Signals wait for `check`, or for the end."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self.check()

    def exit_within(self, seconds: float, code: int) -> threading.Timer:
        """Ends the process the hard way unless the returned timer is cancelled in time."""
        timer = threading.Timer(seconds, os._exit, args=(code,))
        timer.daemon = True
        timer.start()
        return timer

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.asked is not None:
            return
        self.asked = number
        if not self._deferred:
            raise Interrupted(number)

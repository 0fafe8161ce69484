"""Signals that end a sweep early: raised at once, or where it is safe. Knows no Ray.

Ctrl-C, SIGTERM (schedulers), SIGUSR1 (a warning before the end of a job) and SIGHUP (a closed terminal) mean the same.
Only the first counts: whoever is impatient must not interrupt the clearing up.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

CLEAR_UP = 8.0  # seconds
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


class Aborted(BaseException):
    """The sweep cannot go on, for one or more reasons. Not an Exception: Tune would take it for a trial's."""

    def __init__(self, *sentences: str) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = sentences


class Stop:
    """Catches the signals. Outside of `deferred` the first one raises Interrupted wherever the program is.

    From then on the program has so many seconds to clear up; what is not gone by then ends with it.
    """

    def __init__(self, farewell: str = "", seconds: float = CLEAR_UP) -> None:
        self.asked: int | None = None
        self.farewell, self._seconds = farewell, seconds
        self._deferred = False
        self._timer: threading.Timer | None = None

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

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around a library that sets handlers of its own: Ray's leaves with a SIGTERM's number while it starts."""
        try:
            yield
        except SystemExit as left:
            if left.code != signal.SIGTERM:
                raise
            self._receive(signal.SIGTERM, None)
        finally:
            self.install()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.asked is not None:
            return
        self.asked = number
        self._timer = threading.Timer(self._seconds, self.leave)
        self._timer.daemon = True
        self._timer.start()
        if not self._deferred:
            raise Interrupted(number)

    def leave(self) -> NoReturn:
        """Ends the process without Python's own clearing up, in which threads of libraries may keep it waiting.

        Ray's processes on this machine notice that it is gone, those that were not told before as well.
        """
        number = signal.SIGINT if self.asked is None else self.asked
        sys.stdout.flush()
        os.write(sys.stderr.fileno(), f"{self.farewell}\n".encode())
        os._exit(Interrupted(number).exit_code)

"""How a sweep ends early: on a signal, or because it cannot continue.

Ctrl-C, SIGTERM (schedulers), SIGUSR1 (a job's warning before its time limit) and SIGHUP (a closed terminal) mean the
same. Only the first signal counts: a second one must not interrupt the cleanup.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

CLEANUP_SECONDS = 8.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked the sweep to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as in a shell: 130 after Ctrl-C."""
        return 128 + self.number


class Aborted(BaseException):
    """The sweep cannot continue, for one or more reasons. Not an Exception: Tune would blame it on a trial."""

    def __init__(self, *sentences: str) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = sentences


class StopSignals:
    """Handles the signals. The first one raises Interrupted, at once or, inside `deferred`, where it is safe.

    It also starts a timer: if cleanup takes longer than `cleanup_seconds`, the process exits without it.
    """

    def __init__(self, exit_message: str = "", cleanup_seconds: float = CLEANUP_SECONDS) -> None:
        self.received: int | None = None
        self._exit_message, self._cleanup_seconds = exit_message, cleanup_seconds
        self._deferred = False
        self._timer: threading.Timer | None = None

    def install(self) -> None:
        """Called again after libraries have installed handlers of their own."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def raise_if_received(self) -> None:
        if self.received is not None:
            raise Interrupted(self.received)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Signals wait for `raise_if_received`, or for the end of the block."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self.raise_if_received()

    @contextmanager
    def reinstalled(self) -> Iterator[None]:
        """For a block in which a library installs its own handlers. Ray's exits with SIGTERM's number as exit code."""
        try:
            yield
        except SystemExit as error:
            if error.code != signal.SIGTERM:
                raise
            self._receive(signal.SIGTERM, None)
        finally:
            self.install()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.received is not None:
            return
        self.received = number
        self._timer = threading.Timer(self._cleanup_seconds, self.exit_now)
        self._timer.daemon = True
        self._timer.start()
        if not self._deferred:
            raise Interrupted(number)

    def exit_now(self) -> NoReturn:
        """Exits without Python's own cleanup, which threads of libraries may block.

        Ray's processes on this machine notice that this process is gone, and exit too.
        """
        number = signal.SIGINT if self.received is None else self.received
        sys.stdout.flush()
        os.write(sys.stderr.fileno(), f"{self._exit_message}\n".encode())
        os._exit(Interrupted(number).exit_code)

"""How the processes of a sweep end early: on a signal, because the sweep cannot continue, or because a worker hangs.

Ctrl-C, SIGTERM (schedulers), SIGUSR1 (a job's warning before its time limit) and SIGHUP (a closed terminal) all stop
the sweep. Only the first signal counts: a second one must not interrupt the cleanup.

A worker that hangs is killed by a child process, because a stopped or blocked process cannot kill itself. A thread of
the worker writes heartbeats to the child, unless one piece of work takes longer than allowed. The child counts time
only while it runs itself, so nothing is killed while the machine sleeps.
"""

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TypeVar

Item = TypeVar("Item")
CLEANUP_SECONDS = 8.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
HEARTBEATS = 20  # sent by a worker within the time allowed for one piece of work


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
    """The sweep cannot continue, for one or more reasons. No Exception: Tune would blame a trial for it."""

    def __init__(self, *sentences: str) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = sentences


class StopSignals:
    """Handles the signals. The first one raises Interrupted at once; inside `deferred` it waits for a safe point.

    It also starts a timer: if the cleanup takes longer than `cleanup_seconds`, the process exits without finishing it.
    """

    def __init__(self, exit_message: str = "", cleanup_seconds: float = CLEANUP_SECONDS) -> None:
        self.received: int | None = None
        self._exit_message, self._cleanup_seconds = exit_message, cleanup_seconds
        self._deferred = False
        self._timer: threading.Timer | None = None

    def install(self) -> None:
        """Also called after a library has installed its own handlers."""
        for number in SIGNALS:
            signal.signal(number, self._receive)

    def raise_if_received(self) -> None:
        if self.received is not None:
            raise Interrupted(self.received)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block a signal raises Interrupted only in `raise_if_received`, or at the end of the block."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        self.raise_if_received()

    @contextmanager
    def reinstalled(self) -> Iterator[None]:
        """Restores these handlers after a block in which a library installs its own.

        Ray's handler of SIGTERM raises SystemExit with the signal's number as exit code.
        """
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

        Ray's processes on this machine notice that this process has ended, and exit too.
        """
        number = signal.SIGINT if self.received is None else self.received
        sys.stdout.flush()
        os.write(sys.stderr.fileno(), f"{self._exit_message}\n".encode())
        os._exit(Interrupted(number).exit_code)


def kill_silent_parent(parent: int, seconds: float, ticks: int = 10) -> None:
    """Reads heartbeats from standard input, and kills `parent` if none arrives within `seconds`.

    The child process runs this function's source code, without any package of this project.
    """
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
            return  # the parent has closed the pipe or ended
    if os.getppid() == parent:  # not another process that got the same id later
        os.kill(parent, signal.SIGKILL)


class Watchdog:
    """Kills this process if one piece of work takes longer than `seconds`; ends with `close`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._work_started: float | None = None
        self._closed = threading.Event()
        program = f"{inspect.getsource(kill_silent_parent)}\n{kill_silent_parent.__name__}({os.getpid()}, {seconds})"
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
        )
        self._thread = threading.Thread(target=self._send_heartbeats, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def working(self) -> Iterator[None]:
        """The block is one piece of work."""
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
                except BrokenPipeError:  # the child was killed, so this process is no longer watched
                    return

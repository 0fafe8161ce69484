"""One run of the sweep's command, as a person would type it. Knows neither its rows nor faults."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from orchestrator.running.environment import LOOPBACK_VARIABLES
from tools.processes import below, gone

# Of every Ray in a campaign: it stays on the loopback device, and asks nobody for a token.
ALONE = {**LOOPBACK_VARIABLES, "RAY_AUTH_MODE": "disabled"}
GONE = 60.0  # seconds for what a dead command leaves behind
# Ray's own: they hold nothing of a sweep, and ask a dead server for a minute before they go.
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


class Command:
    """Started at birth, in a session of its own."""

    def __init__(self, arguments: Sequence[str], output: Path) -> None:
        self.began = time.monotonic()
        self._output = output
        with output.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "orchestrator.sweep", *arguments],
                env={**os.environ, **ALONE, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.poll()

    @property
    def text(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None if it has not ended by then."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> bool:
        """kill -9; whether everything it had started went with it, but for Ray's agents."""
        left = [pid for pid, name in below(self.pid).items() if not name.startswith(AGENTS)]
        self._process.kill()
        self._process.wait()
        if gone(left, within=GONE):
            return True
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return False

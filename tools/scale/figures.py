"""Measured figures with their bounds, and the cost of a command."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sampler.errors import InputError
from tools.processes import descendants

CHILDREN_POLL_SECONDS = 0.5  # between measurements of the child processes, which take a while


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A measured value. `bound` is an upper bound, or a lower bound if `at_least`."""

    what: str
    value: float
    unit: str
    bound: float | None = None
    at_least: bool = False

    @property
    def good(self) -> bool | None:
        if self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def line(self) -> str:
        verdict = ""
        if self.bound is not None:
            word = "at least" if self.at_least else "at most"
            verdict = f"  {'ok' if self.good else 'MISSED'} (bound: {word} {self.bound:g})"
        return f"{self.what:58} {self.value:10,.2f} {self.unit:9}{verdict}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandCost:
    """The cost of a command and its child processes."""

    wall_seconds: float
    cpu_seconds: float
    memory_mb: float  # peak


def measure_command(module: str, arguments: Sequence[str]) -> CommandCost:
    """Runs `python -m module`. If it fails, raises an InputError with the last line that it printed to stderr."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.DEVNULL, stderr=errors)
        memory, last_poll = 0.0, 0.0
        while (ended := os.wait4(child.pid, os.WNOHANG))[0] == 0:
            memory = max(memory, _proc_mb(child.pid, "status", "VmHWM"))
            if time.perf_counter() - last_poll > CHILDREN_POLL_SECONDS:
                last_poll = time.perf_counter()
                children = sum(map(_proportional_mb, descendants(child.pid)))
                memory = max(memory, _proc_mb(child.pid, "status", "VmRSS") + children)
            time.sleep(0.01)
        wall = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(ended[1])
        errors.seek(0)
        output = errors.read().decode(errors="replace").strip().splitlines()
    if child.returncode:
        last = (output or ["no error message"])[-1]
        raise InputError(f"{module} ended with exit code {child.returncode}: {last}")
    cpu = ended[2].ru_utime + ended[2].ru_stime
    return CommandCost(wall_seconds=wall, cpu_seconds=cpu, memory_mb=memory)


def _proportional_mb(pid: int) -> float:
    """Memory of a process; a page shared by n processes counts as 1/n of a page."""
    return _proc_mb(pid, "smaps_rollup", "Pss:")


def _proc_mb(pid: int, file: str, entry: str) -> float:
    """An entry of /proc, in MB. It replaces ru_maxrss, which would include the memory of this process before exec."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(entry)), 0.0)

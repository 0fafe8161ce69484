"""One measured number and what is wanted of it. Knows no sweeps."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sampler.errors import InputError
from tools.processes import below

HELPERS = 0.5  # seconds between looks at the processes that a command has started: a look takes a while


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """`wanted` is a bound: the most, or the least, that is good."""

    what: str
    value: float
    unit: str
    wanted: float | None = None
    at_least: bool = False

    @property
    def good(self) -> bool | None:
        if self.wanted is None:
            return None
        return self.value >= self.wanted if self.at_least else self.value <= self.wanted

    def line(self) -> str:
        bound = ""
        if self.wanted is not None:
            word = "at least" if self.at_least else "at most"
            bound = f"  {'ok' if self.good else 'MISSED'} (wanted: {word} {self.wanted:g})"
        return f"{self.what:58} {self.value:10,.2f} {self.unit:9}{bound}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What a command and its helpers cost: seconds by the clock, of the processor, and the most memory."""

    wall: float
    cpu: float
    memory: float  # MB


def spent_by(module: str, arguments: Sequence[str]) -> Spent:
    """Runs `python -m module`; InputError with its last line if it fails."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.DEVNULL, stderr=errors)
        memory, looked = 0.0, 0.0
        while (ended := os.wait4(child.pid, os.WNOHANG))[0] == 0:
            memory = max(memory, _told(child.pid, "status", "VmHWM"))
            if time.perf_counter() - looked > HELPERS:
                looked = time.perf_counter()
                memory = max(memory, _told(child.pid, "status", "VmRSS") + sum(map(_share, below(child.pid))))
            time.sleep(0.01)
        wall = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(ended[1])
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    if child.returncode:
        raise InputError(f"{module} ended with {child.returncode}: {(said or ['no reason given'])[-1]}")
    return Spent(wall=wall, cpu=ended[2].ru_utime + ended[2].ru_stime, memory=memory)


def _share(pid: int) -> float:
    """What it has now, in MB; of pages that several processes have, its part."""
    return _told(pid, "smaps_rollup", "Pss:")


def _told(pid: int, file: str, entry: str) -> float:
    """In MB, of a process that lives; what the kernel tells after its end would count this one before the start."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(entry)), 0.0)

"""One measured number and what is wanted of it. Knows no sweeps."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sampler.errors import InputError


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
    """What a command cost: seconds by the clock, of the processor, and the most memory."""

    wall: float
    cpu: float
    memory: float  # MB


def spent_by(module: str, arguments: Sequence[str]) -> Spent:
    """Runs `python -m module`; InputError with its last line if it fails."""
    began = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert child.stderr is not None
    said = child.stderr.read().decode(errors="replace").strip().splitlines()
    _, code, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(code)
    child.stderr.close()
    if child.returncode:
        raise InputError(f"{module} ended with {child.returncode}: {(said or ['no reason given'])[-1]}")
    wall = time.perf_counter() - began
    return Spent(wall=wall, cpu=usage.ru_utime + usage.ru_stime, memory=usage.ru_maxrss / 1024)

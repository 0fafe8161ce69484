"""The watchdog kills a process that hangs, but not one that works, waits or ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 3.0
PROGRAM = f"""
import sys, time
from orchestrator.running.stop import Watchdog
dog = Watchdog({SECONDS})
print("watched", flush=True)
{{act}}
print("done", flush=True)
"""
WORKS = f"list(dog.each(time.sleep({SECONDS} / 10) or 1 for _ in range(15)))"  # each item below the limit, all above it
USES_ITEM = f"for _ in dog.each(iter([1])): time.sleep({1.5 * SECONDS})"
WAITS = f"time.sleep({1.5 * SECONDS})"
HANGS = "with dog.working(): time.sleep(600)"


def start(act: str) -> subprocess.Popen[str]:
    code = PROGRAM.format(act=act)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "watched\n"
    return process


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("act", [WORKS, USES_ITEM, WAITS, "dog.close()"])
def test_working_and_waiting_processes_are_left_alone(act: str) -> None:
    process = start(act)
    output, _ = process.communicate(timeout=900)
    assert (output, process.returncode) == ("done\n", 0)


def test_work_that_takes_too_long_ends_the_process() -> None:
    process = start(HANGS)
    process.communicate(timeout=900)
    assert process.returncode == -signal.SIGKILL


def test_a_stopped_process_is_ended_and_its_watchdog_goes_with_it() -> None:
    process = start("time.sleep(600)")
    (dog,) = children(process.pid)
    process.send_signal(signal.SIGSTOP)
    process.communicate(timeout=900)
    assert process.returncode == -signal.SIGKILL
    until = time.monotonic() + 900
    while Path(f"/proc/{dog}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_watchdog_stopped_together_with_its_process_does_not_kill_it() -> None:
    process = start(f"time.sleep({2 * SECONDS})")
    (dog,) = children(process.pid)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in (process.pid, dog):
            os.kill(pid, number)
        time.sleep(2 * SECONDS if number == signal.SIGSTOP else 0)
    output, _ = process.communicate(timeout=900)
    assert (output, process.returncode) == ("done\n", 0)

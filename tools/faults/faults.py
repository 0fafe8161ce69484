"""The faults. Each function injects a fault into a running sweep and returns the problems found right away."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from orchestrator.store.compaction import COMPACTED_FOLDER, compacted_names, read_compacted
from orchestrator.store.trial_files import read_segment
from tools.faults.row_checker import Problem, other_problem
from tools.faults.sweep import (
    COMMAND_TIMEOUT_SECONDS,
    RESULT_PROCESS,
    WORKER_PROCESS,
    DisturbedSweep,
    SweepCommand,
    TooLate,
    traceback_problems,
)
from tools.processes import descendants, wait_until_gone

Inject = Callable[[DisturbedSweep, Random], list[Problem]]
ROW_FILES = ("rows-*.arrows", "rows.parquet")
MAX_TORN_BYTES = 2000
WATCHDOG_PROCESS = "kill_silent_parent"
IN_USE = "is in use"
DISK_FULL = (  # parts of the messages that report a full disk
    "No space left",  # while rows are written
    "cannot be written to",  # when the command starts
    "are free: ",  # in the preflight check
)


def kill_worker(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    return _kill(sweep.random_process(WORKER_PROCESS, rng))


def kill_result_actor(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    return _kill(sweep.random_process(RESULT_PROCESS, rng))


def kill_compaction(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    """Kills the result actor or the whole command as soon as it writes a compacted file, or has just written one."""
    folder = sweep.folder / COMPACTED_FOLDER
    before = set(os.listdir(folder)) if folder.is_dir() else set()
    until = time.monotonic() + COMMAND_TIMEOUT_SECONDS
    while not folder.is_dir() or set(os.listdir(folder)) <= before:
        if not sweep.running or time.monotonic() > until:
            raise TooLate
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.02))
    if rng.random() < 0.5:
        return sweep.kill_driver()
    return _kill(sweep.random_process(RESULT_PROCESS, rng))


def _kill(pid: int) -> list[Problem]:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, signal.SIGKILL)
    return []


def kill_driver(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    del rng
    return sweep.kill_driver()


def kill_node(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    del rng
    assert sweep.nodes is not None
    sweep.nodes.kill_second()
    problems = sweep.checker.check()
    sweep.nodes.wait_for_replacement()
    return problems


def stop_worker(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    """Stops a worker that has a watchdog with SIGSTOP; the watchdog must kill it."""
    pid = sweep.random_process(WORKER_PROCESS, rng)
    until = time.monotonic() + COMMAND_TIMEOUT_SECONDS
    while not any(WATCHDOG_PROCESS in name for name in descendants(pid).values()):
        if not sweep.running or time.monotonic() > until:
            raise TooLate
        pid = sweep.random_process(WORKER_PROCESS, rng)
        time.sleep(0.05)
    limit_seconds = 3 * sweep.case.worker_timeout_seconds
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        if not wait_until_gone([pid], timeout_seconds=limit_seconds + 10):
            os.kill(pid, signal.SIGCONT)
            return [other_problem(f"a worker that was stopped for {limit_seconds:.0f} s was not replaced")]
    return []


def fill_disk(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    del rng
    sweep.disk.fill()
    try:
        code = sweep.command.wait(COMMAND_TIMEOUT_SECONDS)
    finally:
        sweep.disk.free()
    if code is None:
        return [other_problem(f"a command ran for {COMMAND_TIMEOUT_SECONDS:.0f} s on a full disk")]
    if code == 0 or any(message in sweep.command.text for message in DISK_FULL):
        return traceback_problems(sweep.command)
    unreported = other_problem(f"ended with exit code {code} without reporting that the disk is full")
    return [*traceback_problems(sweep.command), unreported]


def slow_disk(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    until = time.monotonic() + rng.uniform(2, 5)
    while sweep.running and time.monotonic() < until:
        sweep.disk.freeze(rng.uniform(0.1, 0.8))
        time.sleep(rng.uniform(0, 0.2))
    return []


def tear_rows(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    """Truncates the file written last, as after a crash in which the disk loses writes that it had acknowledged."""
    problems = sweep.kill_driver()
    path = newest_file(trial_files(sweep.folder, ROW_FILES[:1]))
    if path is None:
        raise TooLate
    sweep.checker.allow_rerun(path.parent.name)
    if tear_file(path, rng):
        sweep.expect_quarantine(path)
    return problems


def flip_row_bit(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    return _flip_bit_of(ROW_FILES, sweep, rng)


def flip_trial_json_bit(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    return _flip_bit_of(("trial.json",), sweep, rng)


def _flip_bit_of(patterns: tuple[str, ...], sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    """Flips a bit of a random file: between two commands, or while the sweep runs and may rewrite the file."""
    stopped = rng.random() < 0.5
    problems = sweep.kill_driver() if stopped else []
    for _ in range(20):
        existing = trial_files(sweep.folder, patterns)
        if not existing:
            raise TooLate
        path = rng.choice(existing)
        if patterns == ROW_FILES:
            sweep.checker.allow_rerun(path.parent.name)
        with suppress(FileNotFoundError):  # compacted in the meantime
            flip_bit(path, rng)
            if stopped:
                sweep.expect_quarantine(path)
            return problems
    raise TooLate


def flip_compacted_bit(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    """Flips a bit of a compacted file between two commands; all trials of the file run again."""
    problems = sweep.kill_driver()
    names = compacted_names(sweep.folder / COMPACTED_FOLDER)
    if not names:
        raise TooLate
    path = sweep.folder / COMPACTED_FOLDER / rng.choice(names)
    for trial_id in read_compacted(path).trials["trial_id"].to_pylist():
        sweep.checker.allow_rerun(trial_id)
    flip_bit(path, rng)
    sweep.expect_quarantine(path)
    return problems


def start_second_driver(sweep: DisturbedSweep, rng: Random) -> list[Problem]:
    """One of the two commands must continue; the other must report that the folder is in use."""
    del rng
    first, second = sweep.command, sweep.new_command()
    until = time.monotonic() + COMMAND_TIMEOUT_SECONDS
    while first.exit_code is None and second.exit_code is None and time.monotonic() < until:
        time.sleep(0.1)
    if second.exit_code is None:
        sweep.commands.append(second)  # it locked the folder first
    loser = second if second.exit_code is not None else first
    if loser.exit_code is None:
        return [other_problem("two commands ran on one folder, and neither ended")]
    refused = loser.exit_code in (1, 2) and IN_USE in loser.text
    return traceback_problems(loser) if refused or loser.exit_code == 0 else [other_problem(_last_words(loser))]


def _last_words(command: SweepCommand) -> str:
    last = (command.text.strip().splitlines() or ["nothing"])[-1]
    return f"the second command ended with exit code {command.exit_code} and printed: {last}"


def trial_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files of all trials, sorted, so that the choice does not depend on the file system."""
    return sorted(path for pattern in patterns for path in (folder / "trials").glob(f"*/{pattern}"))


def newest_file(paths: Sequence[Path]) -> Path | None:
    return max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)


def tear_file(path: Path, rng: Random) -> bool:
    """Cuts off the last bytes. Returns whether that can be detected, which is not the case at a batch boundary."""
    size = path.stat().st_size
    os.truncate(path, size - rng.randint(1, min(size, MAX_TORN_BYTES)))
    return read_segment(path).problem is not None


def flip_bit(path: Path, rng: Random) -> int:
    """Flips one random bit; returns the offset of its byte."""
    with path.open("r+b") as file:
        offset = rng.randrange(os.fstat(file.fileno()).st_size)
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return offset


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    name: str
    inject: Inject
    needs: str = ""  # "nodes", or a disk that can be "full" or "slow"


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(name="worker killed", inject=kill_worker),
        Fault(name="result actor killed", inject=kill_result_actor),
        Fault(name="driver killed", inject=kill_driver),
        Fault(name="node killed", inject=kill_node, needs="nodes"),
        Fault(name="worker stopped", inject=stop_worker),
        Fault(name="disk full", inject=fill_disk, needs="full"),
        Fault(name="disk slow", inject=slow_disk, needs="slow"),
        Fault(name="last write torn", inject=tear_rows),
        Fault(name="bit of a row file changed", inject=flip_row_bit),
        Fault(name="bit of trial.json changed", inject=flip_trial_json_bit),
        Fault(name="bit of a compacted file changed", inject=flip_compacted_bit),
        Fault(name="compaction killed", inject=kill_compaction),
        Fault(name="second driver", inject=start_second_driver),
    )
}

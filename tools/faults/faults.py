"""The faults: each strikes a running sweep once and says what was wrong on the spot. The table of them is FAULTS."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from tools.faults import damage
from tools.faults.command import Command
from tools.faults.ledger import Problem, other
from tools.faults.scene import LONGEST, RESULTS, WORKER, Scene, TooLate, complaints
from tools.processes import below, gone

Strike = Callable[[Scene, Random], list[Problem]]
ROW_FILES = ("rows-*.arrows", "rows.parquet")
IN_USE = "is in use"
FULL = (
    "No space left",
    "cannot be written to",
    "are free; name another folder",
)  # while rows are written, at the start, before it


def kill_worker(scene: Scene, chance: Random) -> list[Problem]:
    return _kill(scene.victim(WORKER, chance))


def kill_results(scene: Scene, chance: Random) -> list[Problem]:
    return _kill(scene.victim(RESULTS, chance))


def _kill(pid: int) -> list[Problem]:
    with suppress(ProcessLookupError):  # it has just ended by itself
        os.kill(pid, signal.SIGKILL)
    return []


def kill_driver(scene: Scene, chance: Random) -> list[Problem]:
    del chance
    return scene.kill_driver()


def kill_node(scene: Scene, chance: Random) -> list[Problem]:
    del chance
    assert scene.nodes is not None
    scene.nodes.replace()
    problems = scene.ledger.look()
    scene.nodes.wait()
    return problems


def stop_worker(scene: Scene, chance: Random) -> list[Problem]:
    """Stops one that its watchdog watches already; it must be gone before it could go on."""
    pid = scene.victim(WORKER, chance)
    until = time.monotonic() + LONGEST
    while not any("kill_silent_parent" in name for name in below(pid).values()):
        if not scene.running or time.monotonic() > until:
            raise TooLate
        pid = scene.victim(WORKER, chance)
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        if not gone([pid], within=3 * scene.case.timeout + 10):
            os.kill(pid, signal.SIGCONT)
            return [other(f"a worker that was stopped for {3 * scene.case.timeout:.0f} s was not replaced")]
    return []


def fill_disk(scene: Scene, chance: Random) -> list[Problem]:
    del chance
    scene.disk.fill()
    try:
        code = scene.command.wait(LONGEST)
    finally:
        scene.disk.free()
    if code is None:
        return [other(f"a command went on for {LONGEST:.0f} s on a full disk")]
    if code == 0 or any(sentence in scene.command.text for sentence in FULL):
        return complaints(scene.command)
    return [*complaints(scene.command), other(f"ended with {code} and did not say that the disk is full")]


def slow_disk(scene: Scene, chance: Random) -> list[Problem]:
    until = time.monotonic() + chance.uniform(2, 5)
    while scene.running and time.monotonic() < until:
        scene.disk.freeze(chance.uniform(0.1, 0.8))
        time.sleep(chance.uniform(0, 0.2))
    return []


def tear_rows(scene: Scene, chance: Random) -> list[Problem]:
    """What a crash leaves if the disk had not written all it said."""
    problems = scene.kill_driver()
    path = damage.newest(damage.files(scene.folder, ROW_FILES[:1]))
    if path is None:
        raise TooLate
    scene.ledger.forgive(path.parent.name)
    if damage.tear(path, chance):
        scene.expect_set_aside(path)
    return problems


def flip_rows(scene: Scene, chance: Random) -> list[Problem]:
    return _flip(scene, chance, ROW_FILES)


def flip_facts(scene: Scene, chance: Random) -> list[Problem]:
    return _flip(scene, chance, ("trial.json",))


def _flip(scene: Scene, chance: Random, patterns: tuple[str, ...]) -> list[Problem]:
    """While the sweep runs, or between two commands; in the first case the file may be written anew at any time."""
    stopped = chance.random() < 0.5
    problems = scene.kill_driver() if stopped else []
    for _ in range(20):
        there = damage.files(scene.folder, patterns)
        if not there:
            raise TooLate
        path = chance.choice(there)
        if patterns == ROW_FILES:
            scene.ledger.forgive(path.parent.name)
        with suppress(FileNotFoundError):  # compacted meanwhile
            damage.flip(path, chance)
            if stopped:
                scene.expect_set_aside(path)
            return problems
    raise TooLate


def start_second(scene: Scene, chance: Random) -> list[Problem]:
    """One of the two must go on, and the other say that the folder is in use."""
    del chance
    first, second = scene.command, scene.another()
    until = time.monotonic() + LONGEST
    while first.code is None and second.code is None and time.monotonic() < until:
        time.sleep(0.1)
    if second.code is None:
        scene.commands.append(second)  # it came in between, and goes on
    loser = second if second.code is not None else first
    if loser.code is None:
        return [other("two commands on one folder, and neither ended")]
    refused = loser.code in (1, 2) and IN_USE in loser.text
    return complaints(loser) if refused or loser.code == 0 else [other(_said(loser))]


def _said(command: Command) -> str:
    last = (command.text.strip().splitlines() or ["nothing"])[-1]
    return f"the second command ended with {command.code} and said: {last}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What a person calls it, and how it is done."""

    name: str
    strike: Strike
    needs: str = ""  # of the scene: nodes, a disk that can be full, or slow


FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(name="worker killed", strike=kill_worker),
        Fault(name="result actor killed", strike=kill_results),
        Fault(name="driver killed", strike=kill_driver),
        Fault(name="node killed", strike=kill_node, needs="nodes"),
        Fault(name="worker stopped", strike=stop_worker),
        Fault(name="disk full", strike=fill_disk, needs="full"),
        Fault(name="disk slow", strike=slow_disk, needs="slow"),
        Fault(name="last write torn", strike=tear_rows),
        Fault(name="bit of a row file changed", strike=flip_rows),
        Fault(name="bit of trial.json changed", strike=flip_facts),
        Fault(name="second driver", strike=start_second),
    )
}

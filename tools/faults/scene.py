"""One sweep that is going to be disturbed: its folder, its command and its processes. Knows no faults."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from orchestrator.store import Store
from tools.faults.case import NAME, Case
from tools.faults.command import Command
from tools.faults.disk import SmallDisk
from tools.faults.ledger import Ledger, Problem, other
from tools.faults.nodes import TwoNodes
from tools.processes import below

WORKER, RESULTS = "ray::SweepWorker", "ray::Results"
LONGEST = 600.0  # seconds that a command may take
REPEATS = 8  # of the command, until a sweep must be finished
LOADING = 12.0  # seconds in which a fault may hit a command that has no rows yet
ROWS = 4  # most rows between two faults
LOOK = 0.2  # seconds between looks at a folder: reading it is work that the sweeps beside it wait for


class TooLate(Exception):
    """The sweep was finished before the fault could come."""


@dataclass(kw_only=True)
class Scene:
    """`start` begins the sweep or continues it; one command runs at a time."""

    case: Case
    out: Path
    outputs: Path  # what commands said
    disk: SmallDisk
    ledger: Ledger
    nodes: TwoNodes | None  # None: each command starts a Ray of its own
    commands: list[Command] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    damaged: list[tuple[Path, int]] = field(default_factory=list)  # and how many commands there had been

    @property
    def folder(self) -> Path:
        return self.out / NAME

    @property
    def command(self) -> Command:
        return self.commands[-1]

    @property
    def running(self) -> bool:
        return bool(self.commands) and self.command.code is None

    @property
    def finished(self) -> bool:
        return bool(self.commands) and self.command.code == 0

    def start(self) -> None:
        self.commands.append(self.another())

    def another(self) -> Command:
        """The same command once more, whether or not one is running."""
        flags = self.case.flags(self.out, address=None if self.nodes is None else self.nodes.address)
        return Command(flags, self.outputs / f"{self.out.name}-{next(self.numbers)}.txt")

    def rows(self) -> int:
        return len(Store(self.folder).rows(columns=["doc_id"], verify=False))

    def wait_for_a_moment(self, chance: Random) -> None:
        """A few rows later, or so early that the command may be loading still."""
        if chance.random() < 0.25:
            moment = self.command.began + chance.uniform(0, LOADING)
            self._until(lambda: time.monotonic() >= moment)
        else:
            rows = self.rows() + chance.randint(1, ROWS)
            self._until(lambda: self.rows() >= rows)
        time.sleep(chance.uniform(0, 0.3))
        if not self.running:
            raise TooLate

    def victims(self, name: str) -> list[int]:
        root = self.command.pid if self.nodes is None else self.nodes.pid
        return sorted(pid for pid, called in below(root).items() if called.startswith(name))

    def victim(self, name: str, chance: Random) -> int:
        """A process of the running sweep, as soon as there is one."""
        while True:
            self._until(lambda: bool(self.victims(name)))
            if found := self.victims(name):  # else it has just ended by itself
                return chance.choice(found)

    def _until(self, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + LONGEST
        while not reached():
            if not self.running or time.monotonic() > until:
                raise TooLate
            time.sleep(LOOK)

    def kill_driver(self) -> list[Problem]:
        """Until nobody of it is left, so that the folder can be taken over."""
        quiet = self.command.kill()
        until = time.monotonic() + LONGEST / 5
        while self.nodes is not None and (self.victims(WORKER) or self.victims(RESULTS)):
            if time.monotonic() > until:
                quiet = False
                break
            time.sleep(0.1)
        return [] if quiet else [other("processes of a killed command stayed")]

    def end(self) -> None:
        """Leaves no command behind."""
        if self.running:
            self.kill_driver()

    def expect_set_aside(self, path: Path) -> None:
        self.damaged.append((path, len(self.commands)))

    def finish(self) -> list[Problem]:
        """Repeats the command until all is done, as a person would; then looks at everything."""
        problems: list[Problem] = []
        for _ in range(REPEATS):
            if not self.running:
                self.start()
            code = self.command.wait(LONGEST)
            if code is None:
                problems += [other(f"a command had not ended after {LONGEST:.0f} s"), *self.kill_driver()]
            problems += complaints(self.command)
            if code == 0 and not Store(self.folder).check():
                break
        problems += self.ledger.look_at_the_end()
        return [*problems, *self._unnoticed()]

    def _unnoticed(self) -> list[Problem]:
        """Damage that no command has named, or that was not set aside."""
        problems = []
        for path, before in self.damaged:
            if not list((self.folder / "quarantine" / path.parent.name).glob(f"{path.name}*")):
                problems.append(other(f"{path} was damaged and not set aside"))
            later = self.commands[before:]
            cut_short = bool(later) and later[0].code != 0 and "trials to run" not in later[0].text
            if not cut_short and not any(str(path) in command.text for command in later):
                problems.append(other(f"{path} was damaged and not named"))
        return problems


def complaints(command: Command) -> list[Problem]:
    """What no command may show, whatever happened to it."""
    text = command.text
    if "Traceback" not in text and '  File "' not in text:
        return []
    said, _, _ = text.strip().splitlines()[-1].partition("; continue with")
    return [other(f"a traceback before: {said}")]

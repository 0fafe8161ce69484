"""A campaign: rounds of a few faults each, until there were enough. What strikes when is drawn from the seed.

A round is one sweep in a folder of its own; it gets each kind of fault once. In which order, and after how many rows or
seconds, follows from seed and round alone, so a round can be repeated; what the machine does in those moments is not in
our hands. In every second round each command starts a Ray of its own; the others run on two nodes that stay, and one of
these is killed too.
"""

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from orchestrator.chaos.case import NAME, Case
from orchestrator.chaos.disk import SmallDisk
from orchestrator.chaos.faults import FAULTS
from orchestrator.chaos.ledger import Key, Ledger, Problem, Row
from orchestrator.chaos.nodes import NodesGone, TwoNodes
from orchestrator.chaos.scene import Scene, TooLate
from orchestrator.running.stop import Aborted


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One fault that came in time, and what was wrong after it."""

    fault: str
    round: int
    problems: tuple[Problem, ...] = ()


@dataclass(kw_only=True)
class Campaign:
    """What all rounds share. `outcomes` grows; a campaign that is interrupted has those so far."""

    case: Case
    folder: Path
    disk: SmallDisk
    seed: int
    reference: dict[Key, Row]
    keep: bool = False  # folders of rounds without problems, too
    nodes: TwoNodes | None = None  # started when a round first needs it, and kept
    outcomes: list[Outcome] = field(default_factory=list)
    rows: int = 0  # compared so far

    def names(self) -> list[str]:
        """Faults that are possible here."""
        possible = {"": True, "nodes": True, "full": self.disk.can_be_full, "slow": self.disk.can_be_slow}
        return [name for name, fault in FAULTS.items() if possible[fault.needs]]

    def rounds(self, faults: int, *, seconds: float) -> Iterator[int]:
        """Rounds until so many faults came in time, or the time is over; the number of each when it has ended."""
        until = time.monotonic() + seconds
        for number in count():
            missing = faults - len(self.outcomes)
            if missing <= 0 or time.monotonic() > until:
                return
            self.run_round(number, plan(self.names(), self.seed, number)[:missing])
            yield number

    def run_round(self, number: int, names: Sequence[str]) -> None:
        chance = Random(f"{self.seed}:{number}:moments")
        scene = self._scene(number)
        struck: list[tuple[str, list[Problem]]] = []
        try:
            for name in names:
                struck += self._strike(scene, name, Random(chance.getrandbits(64)))
                if scene.finished:
                    break
            at_the_end = scene.finish()
        except NodesGone:
            print(f"round {number}: given up, since Ray's two nodes have ended", file=sys.stderr, flush=True)
            return
        finally:
            scene.end()
        self.rows += len(self.reference)
        if struck:
            struck[-1][1].extend(at_the_end)  # whatever comes out now counts for the last fault before it
        self.outcomes += [Outcome(fault=name, round=number, problems=tuple(found)) for name, found in struck]
        bad = any(found for _, found in struck)
        self._tell(number, struck)
        if not self.keep and not bad:
            shutil.rmtree(scene.out, ignore_errors=True)
        elif bad:
            shutil.copytree(scene.out, self.folder / f"bad-{number}", dirs_exist_ok=True)
            shutil.rmtree(scene.out, ignore_errors=True)

    def _strike(self, scene: Scene, name: str, chance: Random) -> list[tuple[str, list[Problem]]]:
        """The fault and what it did; nothing if the sweep was over before it could come."""
        if not scene.running:
            scene.start()
        try:
            scene.wait_for_a_moment(chance)
            found = scene.ledger.look()
            found += FAULTS[name].strike(scene, chance)
        except TooLate:
            return []
        return [(name, [*found, *scene.ledger.look()])]

    def _scene(self, number: int) -> Scene:
        if on_nodes(number) and (self.nodes is None or self.nodes.ended):
            self.nodes = _two_nodes()
        out = self.disk.folder / f"r{number}"
        shutil.rmtree(out, ignore_errors=True)
        return Scene(
            case=self.case,
            out=out,
            outputs=self.folder,
            disk=self.disk,
            ledger=Ledger(out / NAME, self.reference),
            nodes=self.nodes if on_nodes(number) else None,
        )

    def _tell(self, number: int, struck: Sequence[tuple[str, list[Problem]]]) -> None:
        told = ", ".join(name for name, _ in struck) or "no fault came in time"
        print(f"round {number}: {told} ({len(self.outcomes)} faults so far)", file=sys.stderr, flush=True)
        for name, found in struck:
            for problem in found:
                print(f"  PROBLEM after {name}: {problem.text}", file=sys.stderr, flush=True)


def _two_nodes(tries: int = 3) -> TwoNodes:
    try:
        return TwoNodes()
    except NodesGone:
        if tries == 1:
            raise Aborted("a Ray of two nodes cannot be started here") from None
        return _two_nodes(tries - 1)


def on_nodes(number: int) -> bool:
    return number % 2 == 1


def plan(names: Sequence[str], seed: int, number: int) -> list[str]:
    """The faults of a round, in their order."""
    possible = [name for name in names if FAULTS[name].needs != "nodes" or on_nodes(number)]
    return Random(f"{seed}:{number}:order").sample(possible, len(possible))

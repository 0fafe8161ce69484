"""A campaign's rounds, a few faults each. What strikes when is drawn from the seed.

A round is one sweep in a folder of its own; it gets each kind of fault once. In which order, and after how many rows or
seconds, follows from seed and round alone, so a round can be repeated; what the machine does in those moments is not in
our hands. In every second round each command starts a Ray of its own; the others run on two nodes that stay, and one of
these is killed too.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from orchestrator.running.stop import Aborted
from tools.faults.case import NAME, Case
from tools.faults.disk import SmallDisk
from tools.faults.faults import FAULTS
from tools.faults.ledger import Key, Ledger, Problem, Row
from tools.faults.nodes import NodesGone, TwoNodes
from tools.faults.scene import Scene, TooLate

NONE = "none came in time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One fault that came in time, and what was wrong after it."""

    fault: str
    round: int
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one sweep came to."""

    number: int
    outcomes: tuple[Outcome, ...] = ()
    rows: int = 0  # compared at its end


@dataclass(kw_only=True)
class Campaign:
    """What rounds share that come one after the other."""

    case: Case
    folder: Path
    disk: SmallDisk
    seed: int
    reference: dict[Key, Row]
    nodes: TwoNodes | None = None  # started when a round first needs it, and kept

    def names(self) -> list[str]:
        """Faults that are possible here."""
        possible = {"": True, "nodes": True, "full": self.disk.can_be_full, "slow": self.disk.can_be_slow}
        return [name for name, fault in FAULTS.items() if possible[fault.needs]]

    def run_round(self, number: int, most: int | None = None) -> Round:
        """All faults that the seed has for it, or the first so many."""
        chance = Random(f"{self.seed}:{number}:moments")
        scene = self.scene(number)
        struck: list[tuple[str, list[Problem]]] = []
        try:
            for name in plan(self.names(), self.seed, number)[:most]:
                struck += self._strike(scene, name, Random(chance.getrandbits(64)))
                if scene.finished:
                    break
            at_the_end = scene.finish()
        except NodesGone:
            print(f"round {number}: given up, since Ray's two nodes have ended", file=sys.stderr, flush=True)
            return Round(number=number)
        finally:
            scene.end()
        if at_the_end:  # whatever comes out now counts for the last fault before it
            struck = struck or [(NONE, [])]
            struck[-1][1].extend(at_the_end)
        outcomes = tuple(
            Outcome(fault=name, round=number, problems=tuple(map(self._tidied, found))) for name, found in struck
        )
        _tell(number, outcomes)
        if any(outcome.problems for outcome in outcomes):
            shutil.copytree(scene.out, self.folder / f"bad-{number}", dirs_exist_ok=True)
        shutil.rmtree(scene.out, ignore_errors=True)
        return Round(number=number, outcomes=outcomes, rows=len(self.reference))

    def _tidied(self, problem: Problem) -> Problem:
        """Without the campaign's own folder, which is another one each time."""
        return replace(problem, text=problem.text.replace(f"{self.disk.folder}/", ""))

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

    def scene(self, number: int) -> Scene:
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


def _tell(number: int, outcomes: Sequence[Outcome]) -> None:
    told = ", ".join(outcome.fault for outcome in outcomes) or "no fault came in time"
    print(f"round {number}: {told}", file=sys.stderr, flush=True)
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"  PROBLEM after {outcome.fault}: {problem.text}", file=sys.stderr, flush=True)


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

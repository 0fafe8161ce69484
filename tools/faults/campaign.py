"""The rounds of a campaign, a few faults each, run in parallel lanes. The seed decides which fault comes when.

A round is one sweep in its own folder; each kind of fault is injected into it once. Their order, and after how many
rows or seconds they come, follows from the seed and the round's number alone, so a round can be repeated; what the
machine does at those moments cannot be. In every second round each command starts its own Ray; the other rounds run
on a cluster of two nodes that outlives the commands, and one of the nodes is killed too.

A lane is a process with its own disk and nodes. Lanes help because rounds spend much of their time waiting: for
Python to start, for the processes of a killed command to end, for a hanging worker to be killed. Lane i of n runs the
rounds i, i + n, i + 2n, …, so what happens in a round does not depend on the number of lanes.
"""

import multiprocessing
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from types import FrameType

from orchestrator.running.stop import Aborted
from tools.faults.disk import SmallDisk
from tools.faults.faults import FAULTS
from tools.faults.nodes import NodesGone, TwoNodes
from tools.faults.row_checker import Key, Problem, Row, RowChecker
from tools.faults.sweep import NAME, DisturbedSweep, SweepCase, TooLate

NO_FAULT = "none came in time"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LANE_EXIT_TIMEOUT_SECONDS = 120.0  # for a lane to kill its command and unmount its disk


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One fault that was injected, and the problems found after it."""

    fault: str
    round: int
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """The result of one disturbed sweep."""

    number: int
    outcomes: tuple[Outcome, ...] = ()
    rows: int = 0  # compared at the end; 0 if the round was abandoned


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignSettings:
    """What all lanes share."""

    case: SweepCase
    folder: Path
    seed: int
    reference: dict[Key, Row]
    rounds_done: frozenset[int] = frozenset()  # in an earlier part of the campaign


@dataclass(kw_only=True)
class Lane:
    """Runs rounds one after the other on one disk."""

    settings: CampaignSettings
    disk: SmallDisk
    nodes: TwoNodes | None = None  # started when a round first needs them, then kept

    def possible_faults(self) -> list[str]:
        possible = {"": True, "nodes": True, "full": self.disk.can_be_full, "slow": self.disk.can_be_slow}
        return [name for name, fault in FAULTS.items() if possible[fault.needs]]

    def run_round(self, number: int, max_faults: int | None = None) -> Round:
        """Injects the faults that the seed plans for this round, at most `max_faults` of them."""
        rng = Random(f"{self.settings.seed}:{number}:moments")
        sweep = self.new_sweep(number)
        found: list[tuple[str, list[Problem]]] = []
        try:
            for name in plan_round(self.possible_faults(), self.settings.seed, number)[:max_faults]:
                found += _inject(name, sweep, Random(rng.getrandbits(64)))
                if sweep.finished:
                    break
            final_problems = sweep.finish()
        except NodesGone:
            print(f"round {number}: abandoned because the two Ray nodes have ended", file=sys.stderr, flush=True)
            return Round(number=number)
        finally:
            sweep.close()
        if final_problems:  # attributed to the last fault
            found = found or [(NO_FAULT, [])]
            found[-1][1].extend(final_problems)
        outcomes = tuple(
            Outcome(fault=name, round=number, problems=tuple(map(self._without_folder, problems)))
            for name, problems in found
        )
        _print_round(number, outcomes)
        if any(outcome.problems for outcome in outcomes):
            shutil.copytree(sweep.out, self.settings.folder / f"bad-{number}", dirs_exist_ok=True)
        shutil.rmtree(sweep.out, ignore_errors=True)
        return Round(number=number, outcomes=outcomes, rows=len(self.settings.reference))

    def _without_folder(self, problem: Problem) -> Problem:
        """The problem with paths relative to the campaign's temporary folder, which differs each time."""
        return replace(problem, text=problem.text.replace(f"{self.disk.folder}/", ""))

    def new_sweep(self, number: int) -> DisturbedSweep:
        if uses_nodes(number) and (self.nodes is None or self.nodes.ended):
            self.nodes = _start_nodes()
        out = self.disk.folder / f"r{number}"
        shutil.rmtree(out, ignore_errors=True)
        return DisturbedSweep(
            case=self.settings.case,
            out=out,
            outputs=self.settings.folder,
            disk=self.disk,
            checker=RowChecker(out / NAME, self.settings.reference),
            nodes=self.nodes if uses_nodes(number) else None,
        )


def _inject(name: str, sweep: DisturbedSweep, rng: Random) -> list[tuple[str, list[Problem]]]:
    """Injects a fault. Returns it with the problems found, or an empty list if the sweep finished first."""
    if not sweep.running:
        sweep.start()
    try:
        sweep.wait_for_random_moment(rng)
        problems = sweep.checker.check()
        problems += FAULTS[name].inject(sweep, rng)
    except TooLate:
        return []
    return [(name, [*problems, *sweep.checker.check()])]


def _print_round(number: int, outcomes: Sequence[Outcome]) -> None:
    names = ", ".join(outcome.fault for outcome in outcomes) or "the sweep finished before the first fault"
    print(f"round {number}: {names}", file=sys.stderr, flush=True)
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"  PROBLEM after {outcome.fault}: {problem.text}", file=sys.stderr, flush=True)


def _start_nodes(tries: int = 3) -> TwoNodes:
    try:
        return TwoNodes()
    except NodesGone:
        if tries == 1:
            raise Aborted("cannot start a Ray cluster of two nodes on this machine") from None
        return _start_nodes(tries - 1)


def uses_nodes(number: int) -> bool:
    return number % 2 == 1


def plan_round(names: Sequence[str], seed: int, number: int) -> list[str]:
    """The faults of a round, in order."""
    possible = [name for name in names if FAULTS[name].needs != "nodes" or uses_nodes(number)]
    return Random(f"{seed}:{number}:order").sample(possible, len(possible))


@contextmanager
def open_lane(settings: CampaignSettings, lane: int) -> Iterator[Lane]:
    """A lane with its own disk, which is removed at the end."""
    disk = SmallDisk(settings.folder / f"disk-{lane}", settings.folder / f"disk-{lane}.img")
    opened = Lane(settings=settings, disk=disk)
    try:
        yield opened
    finally:
        if opened.nodes is not None:
            opened.nodes.close()
        disk.close()


def run_rounds(settings: CampaignSettings, *, lanes: int, faults: int, seconds: float) -> Iterator[Round]:
    """Yields each round as it ends, until every lane has injected its share of the faults or the time is up."""
    context = multiprocessing.get_context("spawn")
    until = time.monotonic() + seconds
    running = {}
    try:
        for lane in range(lanes):
            receiver, sender = context.Pipe(duplex=False)
            share = faults // lanes + (lane < faults % lanes)
            running[receiver] = context.Process(target=_run_lane, args=(settings, sender, lane, lanes, share, until))
            running[receiver].start()
            sender.close()  # so that the receiver notices when the lane ends
        while running:
            ready = wait(list(running))
            for pipe in [pipe for pipe in running if pipe in ready]:
                try:
                    yield pipe.recv()
                except EOFError:
                    _check_exit(running.pop(pipe))
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join(LANE_EXIT_TIMEOUT_SECONDS)


def _check_exit(process: multiprocessing.context.SpawnProcess) -> None:
    process.join()
    if process.exitcode:
        raise Aborted(f"a lane of the campaign ended with exit code {process.exitcode}")


def _run_lane(settings: CampaignSettings, pipe: Connection, lane: int, lanes: int, share: int, until: float) -> None:
    exit_on_signals()
    with open_lane(settings, lane) as opened, pipe:
        for number in count(lane, lanes):
            if share <= 0 or time.monotonic() > until:
                return
            if number in settings.rounds_done:
                continue
            ended = opened.run_round(number, share)
            share -= len(ended.outcomes)
            pipe.send(ended)


def exit_on_signals() -> None:
    """Makes signals exit through every `finally`, so that the disk is unfrozen and unmounted."""
    for number in SIGNALS:
        signal.signal(number, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    del frame
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    sys.exit(128 + number)

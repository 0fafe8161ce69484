"""A campaign's rounds side by side, each lane a process with a disk and nodes of its own. Knows no faults.

Rounds spend much of their time waiting: for Python to start, for a dead command's processes to go, for a worker that
hangs to be ended. Lane i of n runs rounds i, i + n, i + 2n, …, so what is drawn does not depend on how many there are.
"""

import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType

from orchestrator.running.stop import Aborted
from tools.faults.campaign import Campaign, Round
from tools.faults.case import Case
from tools.faults.disk import SmallDisk
from tools.faults.ledger import Key, Row

SIGNALS = (signal.SIGINT, signal.SIGTERM)
CLEARED = 120.0  # seconds for a lane to end its command and unmount its disk


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What all lanes know."""

    case: Case
    folder: Path
    seed: int
    reference: dict[Key, Row]
    done: frozenset[int] = frozenset()  # rounds of an earlier part of the campaign


@contextmanager
def campaign(shared: Shared, lane: int) -> Iterator[Campaign]:
    """With a disk of its own, which goes at the end."""
    disk = SmallDisk(shared.folder / f"disk-{lane}", shared.folder / f"disk-{lane}.img")
    made = Campaign(case=shared.case, folder=shared.folder, disk=disk, seed=shared.seed, reference=shared.reference)
    try:
        yield made
    finally:
        if made.nodes is not None:
            made.nodes.close()
        disk.close()


def rounds(shared: Shared, *, lanes: int, faults: int, seconds: float) -> Iterator[Round]:
    """Each round as it ends, until every lane had its share of the faults, or the time is over."""
    context = multiprocessing.get_context("spawn")
    until = time.monotonic() + seconds
    running = {}
    try:
        for lane in range(lanes):
            here, there = context.Pipe(duplex=False)
            share = faults // lanes + (lane < faults % lanes)
            running[here] = context.Process(target=_run, args=(shared, there, lane, lanes, share, until))
            running[here].start()
            there.close()  # so that its end is heard here
        while running:
            heard = wait(list(running))
            for pipe in [pipe for pipe in running if pipe in heard]:
                try:
                    yield pipe.recv()
                except EOFError:
                    _ended(running.pop(pipe))
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join(CLEARED)


def _ended(process: multiprocessing.context.SpawnProcess) -> None:
    process.join()
    if process.exitcode:
        raise Aborted(f"a lane of the campaign ended with {process.exitcode}")


def _run(shared: Shared, pipe: Connection, lane: int, lanes: int, share: int, until: float) -> None:
    end_on_signals()
    with campaign(shared, lane) as made, pipe:
        for number in count(lane, lanes):
            if share <= 0 or time.monotonic() > until:
                return
            if number in shared.done:
                continue
            ended = made.run_round(number, share)
            share -= len(ended.outcomes)
            pipe.send(ended)


def end_on_signals() -> None:
    """By way of every `finally`: the disk is thawed and unmounted."""
    for number in SIGNALS:
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # once is enough, and must not interrupt the clearing up
    sys.exit(128 + number)

"""Writers killed at random moments: each acknowledged row is stored once, and the next writer need not wait."""

import random
import time
from pathlib import Path

import pytest

from orchestrator.store import Store
from tests.crashing_disk import TRIAL, tokens_by_key
from tests.store_processes import PROCESSES, append_for_ever


def kill_after(folder: Path, seconds: float, first: int) -> list[int]:
    """The numbers that a writer acknowledged before it was killed, some time after the first of them."""
    connection, says = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=append_for_ever, args=(folder, says, first))
    process.start()
    says.close()
    numbers = [connection.recv()]
    time.sleep(seconds)
    process.kill()
    process.join()
    try:
        while True:
            numbers.append(connection.recv())
    except EOFError:
        return numbers


def check_kills(folder: Path, kills: int) -> None:
    chance = random.Random(0)
    acknowledged: dict[tuple[str, str], int] = {}
    first = 0
    for _ in range(kills):
        numbers = kill_after(folder, chance.uniform(0, 0.15), first)
        acknowledged |= {(TRIAL, f"d{number}"): number for number in numbers}
        first = numbers[-1] + 1
        seen = tokens_by_key(Store(folder).rows())
        assert acknowledged.items() <= seen.items()
        assert len(seen) <= len(acknowledged) + 1, "at most the row that was being written"
        acknowledged = seen
        first = max(number for number in seen.values()) + 1


def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path: Path) -> None:
    check_kills(tmp_path / "sweep", 8)


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_by_kill_9_often(tmp_path: Path) -> None:
    check_kills(tmp_path / "sweep", 200)

"""Workers that do not start, or are not ready, are spoken of once and in words that help."""

import io
import queue
from typing import Any

import pytest

from orchestrator.planning.machine import Placement
from orchestrator.running import driver
from orchestrator.running.driver import LOAD_NOTICE_SECONDS, START_NOTICE_SECONDS, ProgressPoller
from orchestrator.running.waiting import asked_and_free
from orchestrator.watching.progress import Progress
from orchestrator.watching.view import SweepView

CORE = Placement(actors=2, gpus_per_actor=0, cpus_per_actor=1, threads_per_actor=1)
HALF = Placement(actors=2, gpus_per_actor=0.5, cpus_per_actor=1, threads_per_actor=1)
FREE, THERE = {"GPU": 2.0, "memory": 5.0}, {"CPU": 4.0, "GPU": 2.0}


def test_what_is_asked_and_what_is_there() -> None:
    assert asked_and_free(CORE, free=FREE, there=THERE) == "each asks for 1 CPU, and the cluster has 0 of 4 CPU free"
    assert asked_and_free(HALF, free=FREE, there=THERE) == (
        "each asks for 1 CPU and 0.5 GPU, and the cluster has 0 of 4 CPU and 2 of 2 GPU free"
    )


def told(monkeypatch: pytest.MonkeyPatch, *moments: tuple[float, int, int]) -> list[str]:
    """What is said at moments with so many workers started and warm."""
    monkeypatch.setattr(driver.ray, "available_resources", lambda: FREE)
    monkeypatch.setattr(driver.ray, "cluster_resources", lambda: THERE)
    now = [1000.0]
    monkeypatch.setattr(driver.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    results: Any = None
    poller = ProgressPoller(results, SweepView(stream=stream), queue.SimpleQueue(), CORE)
    for moment, started, warm in moments:
        now[0] = 1000.0 + moment
        poller._note_delay(Progress(sweep="s", totals=(), trials=1, actors=2, started=started, warm=warm))
    return stream.getvalue().splitlines()


def test_workers_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(
        monkeypatch, (1, 0, 0), (START_NOTICE_SECONDS + 1, 0, 0), (START_NOTICE_SECONDS + 2, 0, 0), (900, 0, 0)
    ) == ["no worker has started after 31 s: each asks for 1 CPU, and the cluster has 0 of 4 CPU free"]


def test_workers_that_are_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(
        monkeypatch, (START_NOTICE_SECONDS + 1, 2, 0), (LOAD_NOTICE_SECONDS + 1, 2, 0), (LOAD_NOTICE_SECONDS + 2, 2, 0)
    ) == ["2 workers have started, and none is ready after 2:01"]


def test_nothing_is_said_once_one_was_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, (5, 2, 1), (START_NOTICE_SECONDS + 1, 0, 0), (LOAD_NOTICE_SECONDS + 1, 2, 0)) == []

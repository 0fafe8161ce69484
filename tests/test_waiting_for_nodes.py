"""Nodes that are waited for, and workers that do not start or are not ready: what is printed, and when it ends."""

import io
import queue
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.planning.machine import Growth, Machine, Nodes, Placement
from orchestrator.planning.settings import SweepSettings
from orchestrator.progress.progress import Progress
from orchestrator.progress.view import SweepView
from orchestrator.running import driver
from orchestrator.running.autoscaler import (
    MAX_REFUSALS,
    AutoscalerReport,
    Prospect,
    add_expected_nodes,
    describe_shortage,
    wait_for_node,
)
from orchestrator.running.driver import LOAD_NOTICE_SECONDS, START_NOTICE_SECONDS, ProgressPoller
from orchestrator.running.stop import Aborted
from sampler import InputError

CORE = Placement(actors=2, gpus_per_actor=0, cpus_per_actor=1, threads_per_actor=1)
HALF = Placement(actors=2, gpus_per_actor=0.5, cpus_per_actor=1, threads_per_actor=1)
ONE = Placement(actors=1, gpus_per_actor=1, cpus_per_actor=1, threads_per_actor=1)
TYPED = Placement(
    actors=1, gpus_per_actor=1, cpus_per_actor=1, threads_per_actor=1, accelerator_type="A100", resources={"fast": 1}
)
FREE, THERE = {"GPU": 2.0, "memory": 5.0}, {"CPU": 4.0, "GPU": 2.0, "fast": 1.0}
HEAD = Machine(nodes=(Nodes(resources={"CPU": 0}),))
CPUS = Machine(nodes=(Nodes(resources={"CPU": 8}),))
GPUS = Machine(nodes=(Nodes(resources={"CPU": 8, "GPU": 1}),))
SILENT = AutoscalerReport(prospect=Prospect.UNKNOWN, starting={})
COMING = AutoscalerReport(prospect=Prospect.COMING, starting={"gpu": 1}, elastic=True)
NEVER = AutoscalerReport(prospect=Prospect.NEVER, starting={})


def test_what_is_asked_and_what_is_there() -> None:
    assert describe_shortage(CORE, free=FREE, total=THERE) == (
        "each actor asks for 1 CPU, and the cluster has 0 of 4 CPU free"
    )
    assert describe_shortage(HALF, free=FREE, total=THERE) == (
        "each actor asks for 0.5 GPU and 1 CPU, and the cluster has 2 of 2 GPU and 0 of 4 CPU free"
    )
    assert describe_shortage(TYPED, free=FREE, total=THERE) == (
        "each actor asks for 1 GPU (A100), 1 CPU and 1 fast, "
        "and the cluster has 2 of 2 GPU and 0 of 4 CPU and 0 of 1 fast free"
    )


def expected(machine: Machine, *reports: AutoscalerReport, **changes: Any) -> Growth:
    """What a sweep may wait for, if the autoscaler answers its requests with these reports."""
    answers = iter(reports)
    settings = SweepSettings(tasks=("gsm8k",), address="auto", **changes)
    growth = add_expected_nodes(settings, machine, report=lambda _: next(answers)).growth
    assert next(answers, None) is None, "fewer requests than expected"
    return growth


def test_a_cluster_that_has_gpus_is_not_asked_for_more() -> None:
    assert expected(GPUS) == Growth()
    assert expected(GPUS, gpus_per_actor=1.0) == Growth()
    assert expected(CPUS, gpus_per_actor=0.0) == Growth()


@pytest.mark.parametrize("machine", [HEAD, CPUS])
def test_gpus_that_are_coming_are_expected(machine: Machine) -> None:
    growth = expected(machine, COMING)
    assert growth.open_ended
    assert growth.actors(ONE.bundle) == 1
    typed = expected(machine, COMING, accelerator_type="A100", resources=("fast=1",))
    assert typed.actors(TYPED.bundle) == 1


def test_without_an_answer_gpus_are_expected_if_they_were_requested() -> None:
    assert expected(CPUS, SILENT) == Growth(), "its processors will do"
    for requested in ({"gpus_per_actor": 1.0}, {"gpus_per_actor": 0.5}, {"accelerator_type": "A100"}):
        assert expected(CPUS, SILENT, **requested).open_ended
        assert expected(CPUS, NEVER, **requested) == Growth()
        assert expected(CPUS, wait_for_nodes=0.0, **requested) == Growth()


def test_a_cluster_without_any_worker_may_get_one_without_gpus() -> None:
    assert expected(HEAD, NEVER, COMING).actors(CORE.bundle) == 1
    assert expected(HEAD, NEVER, SILENT).actors(CORE.bundle) == 1, "there is nothing else to run on"
    assert expected(HEAD, NEVER, NEVER) == Growth()
    assert expected(HEAD, COMING, gpus_per_actor=0.0).actors(CORE.bundle) == 1


def test_more_actors_than_fit_are_left_to_an_autoscaler() -> None:
    assert expected(GPUS, actors=1) == Growth()
    assert expected(GPUS, NEVER, actors=4) == Growth()
    assert expected(GPUS, COMING, actors=4).open_ended


class Time:
    """A clock that stands still but for those who sleep."""

    def __init__(self) -> None:
        self.now = 1000.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def waited(machines: Iterator[Machine], reports: AutoscalerReport, seconds: float = 1800.0) -> list[str]:
    messages: list[str] = []
    time = Time()
    wait_for_node(
        ONE,
        seconds=seconds,
        machine=lambda: next(machines),
        report=lambda: reports,
        note=messages.append,
        sleep=time.sleep,
        clock=time.clock,
    )
    return messages


def coming_after(polls: int) -> Iterator[Machine]:
    yield from [CPUS] * (polls + 1)
    yield from [GPUS] * 2


def test_a_node_that_is_there_is_not_waited_for() -> None:
    assert waited(iter([GPUS]), SILENT, seconds=0) == []


def test_a_line_every_thirty_seconds_until_the_node_is_there() -> None:
    assert waited(coming_after(45), COMING) == [
        "waiting for a node with 1 GPU and 1 CPU, 0 of 1800 s: starting 1 gpu",
        "waiting for a node with 1 GPU and 1 CPU, 30 of 1800 s: starting 1 gpu",
        "waiting for a node with 1 GPU and 1 CPU, 60 of 1800 s: starting 1 gpu",
    ]
    failing = AutoscalerReport(prospect=Prospect.UNKNOWN, starting={}, failures=("gpu: quota exceeded",))
    assert waited(coming_after(1), failing) == [
        "waiting for a node with 1 GPU and 1 CPU, 0 of 1800 s: the autoscaler has not started one yet "
        "(last failure: gpu: quota exceeded)"
    ]


def test_a_node_that_does_not_come_in_time() -> None:
    with pytest.raises(Aborted, match=r"1 GPU and 1 CPU was added within 60 seconds; increase --wait-for-nodes"):
        waited(coming_after(100), SILENT, seconds=60)


def test_a_node_that_will_never_come() -> None:
    with pytest.raises(Aborted, match=r"none can be added .the cluster has 8 CPU and 0 GPU"):
        waited(coming_after(100), NEVER)
    assert waited(coming_after(MAX_REFUSALS - 1), NEVER), "an autoscaler may say so before it has seen all its groups"


def test_no_time_to_wait() -> None:
    with pytest.raises(InputError, match=r"no node has 1 GPU and 1 CPU for an actor now \(the cluster has 8 CPU and"):
        waited(coming_after(5), COMING, seconds=0)


def notices(monkeypatch: pytest.MonkeyPatch, *moments: tuple[float, int, int]) -> list[str]:
    """The notices printed over time, given (seconds, started, warm) workers."""
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
    assert notices(
        monkeypatch, (1, 0, 0), (START_NOTICE_SECONDS + 1, 0, 0), (START_NOTICE_SECONDS + 2, 0, 0), (900, 0, 0)
    ) == ["no worker has started after 31 s: each actor asks for 1 CPU, and the cluster has 0 of 4 CPU free"]


def test_workers_that_are_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notices(
        monkeypatch, (START_NOTICE_SECONDS + 1, 2, 0), (LOAD_NOTICE_SECONDS + 1, 2, 0), (LOAD_NOTICE_SECONDS + 2, 2, 0)
    ) == ["2 workers have started, and none is ready after 2:01"]


def test_nothing_is_printed_once_a_worker_was_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    assert notices(monkeypatch, (5, 2, 1), (START_NOTICE_SECONDS + 1, 0, 0), (LOAD_NOTICE_SECONDS + 1, 2, 0)) == []

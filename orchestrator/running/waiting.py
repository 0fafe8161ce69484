"""Waiting for a node that can hold an actor: whether one may come, and what is printed meanwhile."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import ray

from orchestrator.planning.machine import Growth, Machine, Nodes, Placement, inventory, one_actor
from orchestrator.planning.settings import SweepSettings
from orchestrator.running.growth import AutoscalerReport, Prospect, report_on
from orchestrator.running.stop import Aborted
from sampler.errors import InputError

ANSWER_SECONDS = 30.0  # that an autoscaler has to say whether it can serve a request
PROGRESS_SECONDS = 30.0
POLL_SECONDS = 2.0
REFUSALS = 5  # polls in a row in which the autoscaler reports that a node will never come


def print_now(line: str) -> None:
    """Also where the output is a file or a pipe."""
    print(line, flush=True)


def asked_and_free(placement: Placement, *, free: Mapping[str, float], there: Mapping[str, float]) -> str:
    """each actor asks for 0.5 GPU and 1 CPU, and the cluster has 2 of 2 GPU and 0 of 4 CPU free"""
    names = [name for name in ("GPU", "CPU", *placement.resources) if name in placement.bundle]
    left = [f"{free.get(name, 0):g} of {there.get(name, 0):g} {name}" for name in names]
    return f"each actor asks for {placement.words}, and the cluster has {' and '.join(left)} free"


def with_expected_nodes(
    settings: SweepSettings,
    machine: Machine,
    *,
    report: Callable[[Placement], AutoscalerReport] | None = None,
) -> Machine:
    """The machine, grown by a node that may be waited for if no node of it can hold an actor.

    GPUs are asked for unless --gpus-per-actor is 0. Where the autoscaler does not say whether it can add them, they are
    waited for if they were requested explicitly. `report` is what it says of an actor's request.
    """
    if settings.wait_for_nodes == 0:
        return machine
    report = report or _requested_report
    explicit = bool(settings.gpus_per_actor) or settings.accelerator_type is not None
    for gpus in _gpu_shares(settings):
        actor = one_actor(settings, machine, gpus=gpus)
        capacity = machine.capacity(actor.bundle)
        if capacity:
            short = (settings.actors or 1) > capacity
            return _open_ended(machine) if short and report(actor).elastic else machine
        prospect = report(actor).prospect
        if prospect is Prospect.COMING or (prospect is Prospect.UNKNOWN and (explicit or gpus == 0)):
            return _open_ended(machine, Nodes(resources=actor.bundle))
    return machine


def _gpu_shares(settings: SweepSettings) -> tuple[float, ...]:
    """What an actor may have of a GPU, the preferred first."""
    if settings.gpus_per_actor is not None:
        return (settings.gpus_per_actor,)
    return (1.0,) if settings.accelerator_type is not None else (1.0, 0.0)


def _open_ended(machine: Machine, *expected: Nodes) -> Machine:
    groups = (*machine.growth.groups, *expected)
    most = machine.growth.max_nodes + len(expected)
    return replace(machine, growth=Growth(groups=groups, max_nodes=most, open_ended=True))


def wait_for_node(
    placement: Placement,
    *,
    seconds: float,
    machine: Callable[[], Machine],
    report: Callable[[], AutoscalerReport] | None = None,
    say: Callable[[str], None] = print_now,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once there is a node that can hold an actor; as long as it waits it requests one.

    Aborted if none has come in time, or the autoscaler reports that none will.
    """
    if machine().holds_now(placement.bundle):
        return
    if seconds == 0:
        raise InputError(
            f"no node has {placement.words} for an actor now ({inventory(machine())}); "
            "--wait-for-nodes SECONDS waits for one"
        )
    with nullcontext() if report is not None else _request(placement):
        ask = report or (lambda: report_on(placement.bundle))
        began, spoken, refusals = clock(), -PROGRESS_SECONDS, 0
        while not machine().holds_now(placement.bundle):
            now, waited = ask(), clock() - began
            refusals = refusals + 1 if now.prospect is Prospect.NEVER else 0
            if refusals == REFUSALS:
                raise Aborted(f"no node with {placement.words} will come: {inventory(machine())}, and cannot add one")
            if waited >= seconds:
                raise Aborted(_too_late(placement, seconds, now))
            if waited - spoken >= PROGRESS_SECONDS:
                spoken = waited
                say(f"waiting for a node with {placement.words}, {waited:.0f} of {seconds:g} s: {_news(now)}")
            sleep(POLL_SECONDS)


def _too_late(placement: Placement, seconds: float, report: AutoscalerReport) -> str:
    why = f" ({report.failures[-1]})" if report.failures else ""
    return (
        f"no node with {placement.words} has come in {seconds:g} seconds{why}; --wait-for-nodes sets the time, "
        "and `ray status` shows what the autoscaler does"
    )


def _news(report: AutoscalerReport) -> str:
    starting = ", ".join(f"{count} {kind or 'node'}" for kind, count in report.starting.items())
    news = f"starting {starting}" if starting else "the autoscaler has not started one yet"
    return f"{news} (failed before: {report.failures[-1]})" if report.failures else news


def _requested_report(actor: Placement) -> AutoscalerReport:
    """What the autoscaler says of an actor's request, which is made for as long as it takes to be answered."""
    began = time.monotonic()
    with _request(actor) as ready:
        while True:
            report = report_on(actor.bundle)
            if report.prospect is not Prospect.UNKNOWN or time.monotonic() - began > ANSWER_SECONDS:
                return report
            if ray.wait([ready], timeout=POLL_SECONDS / 2)[0]:  # a node has come meanwhile
                return replace(report, prospect=Prospect.COMING)


@contextmanager
def _request(placement: Placement) -> Iterator[Any]:
    """A task that waits for an actor's resources, so that the autoscaler knows of them."""
    custom = {name: amount for name, amount in placement.bundle.items() if name not in ("CPU", "GPU")}
    task = ray.remote(_idle).options(
        name="request a node",
        num_cpus=placement.cpus_per_actor,
        num_gpus=placement.gpus_per_actor,
        resources=custom,
        max_retries=0,
        enable_task_events=False,
    )
    ready = task.remote()
    try:
        yield ready
    finally:
        ray.cancel(ready)


def _idle() -> None:
    """Does nothing: only its resources matter."""

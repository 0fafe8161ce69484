"""Asks every node that can hold an actor for its devices, before anything is loaded there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.core.hardware import Device, common_dtype, visible_devices
from orchestrator.planning.dry_run import size
from orchestrator.planning.machine import Nodes, Placement
from orchestrator.planning.room import check_devices
from orchestrator.running.nodes import FailedSetup, Node, failure_sentences
from orchestrator.running.stop import Aborted
from orchestrator.running.waiting import print_now

PROBE_SECONDS = 180.0  # a node's first Python process reads torch from its disk, or from a shared one
Look = Callable[[bool], list[Device]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The devices of all nodes that answered."""

    devices: tuple[Device, ...]
    failures: tuple[FailedSetup, ...] = ()  # nodes that cannot run this project
    warnings: tuple[str, ...] = ()  # nodes that did not answer in time


def look(gpus: bool) -> list[Device]:
    """Runs on a node, in a process that Ray has given no GPU and hidden none from."""
    return visible_devices(gpus=gpus)


def probe_devices(placement: Placement, *, look: Look = look, seconds: float = PROBE_SECONDS) -> Probe:
    """All devices that an actor may get. Asks for no resources, so devices that are in use are seen too."""
    nodes = [
        node
        for node in ray.nodes()
        if node["Alive"] and Nodes(resources=node["Resources"]).actors_each(placement.bundle)
    ]
    # Its process ends with it (max_calls), and so does what CUDA keeps on each GPU; Ray must not hide GPUs from it.
    shows_gpus = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    probe = ray.remote(num_cpus=0, max_calls=1, runtime_env=shows_gpus)(look)
    answers = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        task = probe.options(scheduling_strategy=there, enable_task_events=False)
        answers[task.remote(placement.gpus_per_actor > 0)] = node
    ready, late = ray.wait(list(answers), num_returns=len(answers), timeout=seconds) if answers else ([], [])
    devices: list[Device] = []
    failures: list[FailedSetup] = []
    warnings = [f"{_name(answers[answer])} has not reported its devices in {seconds:.0f} seconds" for answer in late]
    for answer in ready:
        node = answers[answer]
        try:
            devices += [replace(device, node=_name(node)) for device in ray.get(answer)]
        except RayError as error:  # the node has gone, or cannot run this project
            reason = str(error).strip().splitlines()[-1]
            failed = Node(node_id=node["NodeID"], host=node["NodeManagerHostname"])
            failures.append(FailedSetup(node=failed, reason=reason))
    for answer in late:
        ray.cancel(answer, force=True)
    if nodes and not devices:
        raise Aborted(*warnings, *failure_sentences(failures))
    return Probe(devices=tuple(devices), failures=tuple(failures), warnings=tuple(warnings))


def _name(node: Mapping[str, Any]) -> str:
    return f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def sweep_dtype(probe: Probe, say: Callable[[str], None] = print_now) -> str:
    """What --dtype auto means for all actors."""
    dtype, why = common_dtype(probe.devices)
    if why is not None:
        say(why)
    return dtype


def check_probed(needed: int, probe: Probe, placement: Placement, say: Callable[[str], None] = print_now) -> None:
    """Prints a warning for each node that is too small or silent; an InputError if no device can hold an actor."""
    share = min(1.0, placement.gpus_per_actor or 1.0)
    in_use = ray.available_resources().get("GPU", 0) < ray.cluster_resources().get("GPU", 0)
    small = check_devices(needed, probe.devices, share=share, in_use=bool(placement.gpus_per_actor) and in_use)
    for warning in (*probe.warnings, *too_small(small, needed)):
        say(f"warning: {warning}")


def too_small(devices: Sequence[Device], needed: int) -> list[str]:
    """One sentence for each node with devices that cannot hold an actor."""
    by_node = {device.node: device for device in devices}
    return [
        f"{node} is too small for an actor, which needs about {size(needed)} of memory ({device.name} has "
        f"{size(device.free)} free of {size(device.total)})"
        for node, device in by_node.items()
    ]

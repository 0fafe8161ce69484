"""What the autoscaler of a joined cluster may add, and what it says about a request that no node can serve yet.

The largest size of a cluster is known in two cases: the platform has stored its configuration in Ray's control store
(GCS), or this process runs on a head that `ray up` has made. Every autoscaler, KubeRay's too, reports to GCS what it
is starting and which requests it cannot serve. None of this has a documented API, so whatever cannot be read counts
as unknown.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.exceptions import RayError

from orchestrator.planning.machine import Growth, Machine, Nodes, Placement, Resources, inventory, one_actor
from orchestrator.planning.settings import SweepSettings
from orchestrator.running.stop import Aborted
from sampler.errors import InputError

FILE = Path("~/ray_bootstrap_config.yaml")  # `ray up` leaves it on the head
RPC_TIMEOUT_SECONDS = 5.0
UNLIMITED = 10**6  # nodes or units of a resource, where a configuration sets no limit
STATUS_KEY = b"__autoscaling_status"  # what `ray status` prints, from autoscalers before version 2
CONFIG_KEY, CONFIG_NAMESPACE = b"__autoscaler_cluster_config", b"__autoscaler"
STATIC_NODE = "node_"  # how Ray calls the types of nodes that no autoscaler has started


class Prospect(Enum):
    """What becomes of a request that no node can serve now."""

    COMING = "nodes are being started"
    NEVER = "the autoscaler cannot serve it, or there is no autoscaler"
    UNKNOWN = "no answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscalerReport:
    """What an autoscaler has told GCS."""

    prospect: Prospect
    starting: Mapping[str, int]  # nodes that are being started, by type
    failures: tuple[str, ...] = ()  # launches that failed, with their reasons
    elastic: bool = False  # there is an autoscaler that has node types of its own


def growth_of(*, on_head: bool) -> Growth:
    """The largest size of the joined cluster, where that is known."""
    return _growth_in_gcs() or (growth_in_file(FILE) if on_head else Growth())


def growth_in_file(path: Path) -> Growth:
    """From a cluster file as `ray up` leaves it; nothing if it is missing or is not one."""
    try:
        described = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return Growth()
    if not isinstance(described, dict) or not isinstance(described.get("available_node_types"), dict):
        return Growth()
    head, workers = described.get("head_node_type"), int(described.get("max_workers") or 0)
    groups = [_group(each, workers) for name, each in described["available_node_types"].items() if name != head]
    return Growth(groups=tuple(groups), max_nodes=workers)


def _group(described: Mapping[str, Any], workers: int) -> Nodes:
    most = described.get("max_workers")
    return Nodes(resources=described.get("resources") or {}, count=workers if most is None else int(most))


def growth_in_config(config: Any) -> Growth:
    """From Ray's ClusterConfig message; -1 means that there is no limit."""
    groups = tuple(
        Nodes(
            resources={name: amount if amount >= 0 else UNLIMITED for name, amount in group.resources.items()},
            count=group.max_count if group.max_count >= 0 else UNLIMITED,
        )
        for group in config.node_group_configs
    )
    return Growth(groups=groups, max_nodes=min(UNLIMITED, sum(group.count for group in groups)))


def report_on(bundle: Resources) -> AutoscalerReport:
    """What the autoscaler has reported last; `bundle` must have been requested before, by a task that waits for it."""
    try:
        state, kinds = _state_in_gcs()
        status = _status_in_gcs()
    except (ImportError, AttributeError, RayError):
        return AutoscalerReport(prospect=Prospect.UNKNOWN, starting={})
    if state is not None and state.autoscaler_state_version:
        return _report_of_state(state, bundle, elastic=any(kinds))
    return _report_of_status(status)


def _report_of_state(state: Any, bundle: Resources, *, elastic: bool) -> AutoscalerReport:
    """Of an autoscaler of version 2."""
    starting: dict[str, int] = {}
    for request in state.pending_instance_requests:
        starting[request.ray_node_type_name] = starting.get(request.ray_node_type_name, 0) + request.count
    for instance in state.pending_instances:
        starting[instance.ray_node_type_name] = starting.get(instance.ray_node_type_name, 0) + 1
    refused = any(_is(request, bundle) for request in _infeasible(state))
    prospect = Prospect.NEVER if refused else Prospect.COMING if starting else Prospect.UNKNOWN
    failures = tuple(f"{failed.ray_node_type_name}: {failed.reason}" for failed in state.failed_instance_requests)
    return AutoscalerReport(
        prospect=prospect, starting=starting, failures=failures, elastic=elastic or bool(starting or failures)
    )


def _infeasible(state: Any) -> Iterator[Any]:
    yield from state.infeasible_resource_requests
    for gang in state.infeasible_gang_resource_requests:
        yield from gang.requests


def _is(request: Any, bundle: Resources) -> bool:
    asked = dict(request.resources_bundle)
    return asked.keys() == bundle.keys() and all(abs(asked[name] - bundle[name]) < 1e-6 for name in asked)


def _report_of_status(status: Mapping[str, Any] | None) -> AutoscalerReport:
    """Of an autoscaler before version 2, which does not say what it cannot serve."""
    report = (status or {}).get("autoscaler_report")
    if not report:
        return AutoscalerReport(prospect=Prospect.UNKNOWN, starting={})
    starting = dict(report.get("pending_launches") or {})
    for _, kind, _ in report.get("pending_nodes") or ():
        starting[kind] = starting.get(kind, 0) + 1
    kinds = {**(report.get("active_nodes") or {}), **starting}
    mapped = (report.get("node_type_mapping") or {}).values()
    static = bool(kinds or mapped) and all(kind.startswith(STATIC_NODE) for kind in (*kinds, *mapped))
    prospect = Prospect.NEVER if static else Prospect.COMING if starting else Prospect.UNKNOWN
    return AutoscalerReport(prospect=prospect, starting=starting, elastic=bool(kinds or mapped) and not static)


def _gcs() -> Any:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    return GcsClient(address=ray.get_runtime_context().gcs_address)


def _state_in_gcs() -> tuple[Any, list[str]]:
    """The autoscaler's last report, and the node types of the nodes that are there."""
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

    reply = GetClusterStatusReply.FromString(_gcs().get_cluster_status(timeout_s=RPC_TIMEOUT_SECONDS))
    return reply.autoscaling_state, [node.ray_node_type_name for node in reply.cluster_resource_state.node_states]


def _status_in_gcs() -> Mapping[str, Any] | None:
    text = _gcs().internal_kv_get(STATUS_KEY, None, timeout=RPC_TIMEOUT_SECONDS)
    return json.loads(text) if text else None


def _growth_in_gcs() -> Growth | None:
    """As Anyscale stores it; open-source autoscalers do not."""
    try:
        from ray.core.generated.autoscaler_pb2 import ClusterConfig

        text = _gcs().internal_kv_get(CONFIG_KEY, CONFIG_NAMESPACE, timeout=RPC_TIMEOUT_SECONDS)
    except (ImportError, AttributeError, RayError):
        return None
    return growth_in_config(ClusterConfig.FromString(text)) if text else None


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

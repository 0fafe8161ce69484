"""A joined cluster that can grow: its maximum size, and waiting for a node that can hold an actor.

The maximum size is known if the platform stores its configuration in Ray's control store (GCS), or if this process runs
on a head node started by `ray up`. Every autoscaler, including KubeRay's, reports to GCS which nodes it is starting and
which requests it cannot serve. None of this is a documented API, so anything that cannot be read counts as unknown.
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

CLUSTER_FILE = Path("~/ray_bootstrap_config.yaml")  # `ray up` leaves it on the head
RPC_TIMEOUT_SECONDS = 5.0
UNLIMITED = 10**6  # nodes or units of a resource, where a configuration sets no limit
STATUS_KEY = b"__autoscaling_status"  # what `ray status` prints, from autoscalers before version 2
CONFIG_KEY, CONFIG_NAMESPACE = b"__autoscaler_cluster_config", b"__autoscaler"
STATIC_NODE_PREFIX = "node_"  # Ray's name for the type of a node that no autoscaler has started
REPORT_TIMEOUT_SECONDS = 30.0  # for an autoscaler to report whether it can serve a request
PROGRESS_SECONDS = 30.0  # between two lines printed while waiting
POLL_SECONDS = 2.0
MAX_REFUSALS = 5  # reports in a row that a request cannot be served; the first may come before all groups are known


class Prospect(Enum):
    """Whether a request that no present node can serve will be served later."""

    COMING = "nodes are being started"
    NEVER = "the autoscaler cannot serve it, or there is no autoscaler"
    UNKNOWN = "no answer"


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoscalerReport:
    """The parts of the autoscaler's last report that concern one request."""

    prospect: Prospect
    starting: Mapping[str, int]  # number of nodes being started, by type
    failures: tuple[str, ...] = ()  # failed launches, with their reasons
    elastic: bool = False  # there is an autoscaler with node types of its own


def read_growth(*, on_head: bool) -> Growth:
    """The largest size of the joined cluster, if it is known."""
    return _growth_in_gcs() or (growth_from_file(CLUSTER_FILE) if on_head else Growth())


def growth_from_file(path: Path) -> Growth:
    """Reads the cluster file that `ray up` leaves on the head; no growth if it is missing or not a cluster file."""
    try:
        cluster = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return Growth()
    if not isinstance(cluster, dict) or not isinstance(cluster.get("available_node_types"), dict):
        return Growth()
    head, max_workers = cluster.get("head_node_type"), int(cluster.get("max_workers") or 0)
    groups = []
    for name, group in cluster["available_node_types"].items():
        if name != head:
            limit = group.get("max_workers")
            count = max_workers if limit is None else int(limit)
            groups.append(Nodes(resources=group.get("resources") or {}, count=count))
    return Growth(groups=tuple(groups), max_nodes=max_workers)


def growth_from_config(config: Any) -> Growth:
    """Converts Ray's ClusterConfig message, in which -1 means no limit."""
    groups = tuple(
        Nodes(
            resources={name: amount if amount >= 0 else UNLIMITED for name, amount in group.resources.items()},
            count=group.max_count if group.max_count >= 0 else UNLIMITED,
        )
        for group in config.node_group_configs
    )
    return Growth(groups=groups, max_nodes=min(UNLIMITED, sum(group.count for group in groups)))


def read_report(bundle: Resources) -> AutoscalerReport:
    """The autoscaler's last report. `bundle` must have been requested before, by a task that waits for it."""
    try:
        state, node_types = _state_in_gcs()
        status = _status_in_gcs()
    except (ImportError, AttributeError, RayError):
        return AutoscalerReport(prospect=Prospect.UNKNOWN, starting={})
    if state is not None and state.autoscaler_state_version:
        return _report_of_state(state, bundle, elastic=any(node_types))
    return _report_of_status(status)


def _report_of_state(state: Any, bundle: Resources, *, elastic: bool) -> AutoscalerReport:
    """The report of an autoscaler of version 2."""
    starting: dict[str, int] = {}
    for request in state.pending_instance_requests:
        starting[request.ray_node_type_name] = starting.get(request.ray_node_type_name, 0) + request.count
    for instance in state.pending_instances:
        starting[instance.ray_node_type_name] = starting.get(instance.ray_node_type_name, 0) + 1
    infeasible = any(_is_bundle(request, bundle) for request in _infeasible_requests(state))
    prospect = Prospect.NEVER if infeasible else Prospect.COMING if starting else Prospect.UNKNOWN
    failures = tuple(f"{failed.ray_node_type_name}: {failed.reason}" for failed in state.failed_instance_requests)
    elastic = elastic or bool(starting or failures)
    return AutoscalerReport(prospect=prospect, starting=starting, failures=failures, elastic=elastic)


def _infeasible_requests(state: Any) -> Iterator[Any]:
    yield from state.infeasible_resource_requests
    for gang in state.infeasible_gang_resource_requests:
        yield from gang.requests


def _is_bundle(request: Any, bundle: Resources) -> bool:
    requested = dict(request.resources_bundle)
    return requested.keys() == bundle.keys() and all(abs(requested[name] - bundle[name]) < 1e-6 for name in requested)


def _report_of_status(status: Mapping[str, Any] | None) -> AutoscalerReport:
    """The report of an autoscaler before version 2, which does not say what it cannot serve."""
    report = (status or {}).get("autoscaler_report")
    if not report:
        return AutoscalerReport(prospect=Prospect.UNKNOWN, starting={})
    starting = dict(report.get("pending_launches") or {})
    for _, node_type, _ in report.get("pending_nodes") or ():
        starting[node_type] = starting.get(node_type, 0) + 1
    node_types = [*(report.get("active_nodes") or {}), *starting, *(report.get("node_type_mapping") or {}).values()]
    static = bool(node_types) and all(node_type.startswith(STATIC_NODE_PREFIX) for node_type in node_types)
    prospect = Prospect.NEVER if static else Prospect.COMING if starting else Prospect.UNKNOWN
    return AutoscalerReport(prospect=prospect, starting=starting, elastic=bool(node_types) and not static)


def _gcs() -> Any:
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    return GcsClient(address=ray.get_runtime_context().gcs_address)


def _state_in_gcs() -> tuple[Any, list[str]]:
    """The autoscaler's last report, and the types of the present nodes."""
    from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

    reply = GetClusterStatusReply.FromString(_gcs().get_cluster_status(timeout_s=RPC_TIMEOUT_SECONDS))
    return reply.autoscaling_state, [node.ray_node_type_name for node in reply.cluster_resource_state.node_states]


def _status_in_gcs() -> Mapping[str, Any] | None:
    text = _gcs().internal_kv_get(STATUS_KEY, None, timeout=RPC_TIMEOUT_SECONDS)
    return json.loads(text) if text else None


def _growth_in_gcs() -> Growth | None:
    """The cluster's configuration in GCS, where Anyscale stores it; None with open-source autoscalers, which do not."""
    try:
        from ray.core.generated.autoscaler_pb2 import ClusterConfig

        text = _gcs().internal_kv_get(CONFIG_KEY, CONFIG_NAMESPACE, timeout=RPC_TIMEOUT_SECONDS)
    except (ImportError, AttributeError, RayError):
        return None
    return growth_from_config(ClusterConfig.FromString(text)) if text else None


def print_now(line: str) -> None:
    """Prints at once, even to a file or a pipe."""
    print(line, flush=True)


def describe_shortage(placement: Placement, *, free: Mapping[str, float], total: Mapping[str, float]) -> str:
    """For example: each actor asks for 0.5 GPU and 1 CPU, and the cluster has 2 of 2 GPU and 0 of 4 CPU free."""
    names = [name for name in ("GPU", "CPU", *placement.resources) if name in placement.bundle]
    free_of_total = [f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}" for name in names]
    return f"each actor asks for {placement.words}, and the cluster has {' and '.join(free_of_total)} free"


def add_expected_nodes(
    settings: SweepSettings,
    machine: Machine,
    *,
    report: Callable[[Placement], AutoscalerReport] | None = None,
) -> Machine:
    """If no node can hold an actor, adds a node that the autoscaler may start, so that the sweep waits for it.

    Actors get GPUs unless --gpus-per-actor is 0. If the autoscaler does not report whether it can add GPUs, the sweep
    waits for them only if they were requested explicitly. `report` asks the autoscaler about an actor's request.
    """
    if settings.wait_for_nodes == 0:
        return machine
    report = report or _request_report
    explicit = bool(settings.gpus_per_actor) or settings.accelerator_type is not None
    for gpus in _gpu_shares(settings):
        actor = one_actor(settings, gpus=gpus)
        capacity = machine.capacity(actor.bundle)
        if capacity:
            too_few = (settings.actors or 1) > capacity
            return _grown(machine) if too_few and report(actor).elastic else machine
        prospect = report(actor).prospect
        if prospect is Prospect.COMING or (prospect is Prospect.UNKNOWN and (explicit or gpus == 0)):
            return _grown(machine, Nodes(resources=actor.bundle))
    return machine


def _gpu_shares(settings: SweepSettings) -> tuple[float, ...]:
    """GPUs that an actor may have, the preferred number first."""
    if settings.gpus_per_actor is not None:
        return (settings.gpus_per_actor,)
    return (1.0,) if settings.accelerator_type is not None else (1.0, 0.0)


def _grown(machine: Machine, *expected: Nodes) -> Machine:
    groups = (*machine.growth.groups, *expected)
    max_nodes = machine.growth.max_nodes + len(expected)
    return replace(machine, growth=Growth(groups=groups, max_nodes=max_nodes, open_ended=True))


def wait_for_node(
    placement: Placement,
    *,
    seconds: float,
    machine: Callable[[], Machine],
    report: Callable[[], AutoscalerReport] | None = None,
    note: Callable[[str], None] = print_now,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once a node can hold an actor, and keeps requesting one until then.

    Raises Aborted if none arrives in time, or if the autoscaler reports that none will.
    """
    if machine().holds_now(placement.bundle):
        return
    if seconds == 0:
        raise InputError(
            f"no node has {placement.words} for an actor now ({inventory(machine())}); "
            "--wait-for-nodes SECONDS waits for one"
        )
    with nullcontext() if report is not None else _requested(placement):
        ask = report or (lambda: read_report(placement.bundle))
        began, last_note, refusals = clock(), -PROGRESS_SECONDS, 0
        while not machine().holds_now(placement.bundle):
            current, waited = ask(), clock() - began
            refusals = refusals + 1 if current.prospect is Prospect.NEVER else 0
            if refusals == MAX_REFUSALS:
                raise Aborted(f"no node has {placement.words}, and none can be added ({inventory(machine())})")
            if waited >= seconds:
                reason = f" ({current.failures[-1]})" if current.failures else ""
                raise Aborted(
                    f"no node with {placement.words} was added within {seconds:g} seconds{reason}; increase "
                    "--wait-for-nodes, and see `ray status` for what the autoscaler does"
                )
            if waited - last_note >= PROGRESS_SECONDS:
                last_note = waited
                note(f"waiting for a node with {placement.words}, {waited:.0f} of {seconds:g} s: {_describe(current)}")
            sleep(POLL_SECONDS)


def _describe(report: AutoscalerReport) -> str:
    starting = ", ".join(f"{count} {node_type or 'node'}" for node_type, count in report.starting.items())
    text = f"starting {starting}" if starting else "the autoscaler has not started one yet"
    return f"{text} (last failure: {report.failures[-1]})" if report.failures else text


def _request_report(actor: Placement) -> AutoscalerReport:
    """Requests an actor's resources until the autoscaler has reported on them."""
    began = time.monotonic()
    with _requested(actor) as ready:
        while True:
            report = read_report(actor.bundle)
            if report.prospect is not Prospect.UNKNOWN or time.monotonic() - began > REPORT_TIMEOUT_SECONDS:
                return report
            if ray.wait([ready], timeout=POLL_SECONDS / 2)[0]:  # a node has been added meanwhile
                return replace(report, prospect=Prospect.COMING)


@contextmanager
def _requested(placement: Placement) -> Iterator[Any]:
    """Runs a task that waits for an actor's resources, so that the autoscaler sees the request."""

    def do_nothing() -> None: ...

    custom = {name: amount for name, amount in placement.bundle.items() if name not in ("CPU", "GPU")}
    task = ray.remote(do_nothing).options(
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

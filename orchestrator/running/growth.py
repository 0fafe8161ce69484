"""What the autoscaler of a joined cluster may add, and what it says about a request that no node can serve yet.

The largest size of a cluster is known in two cases: the platform has stored its configuration in Ray's control store
(GCS), or this process runs on a head that `ray up` has made. Every autoscaler, KubeRay's too, reports to GCS what it
is starting and which requests it cannot serve. None of this has a documented API, so whatever cannot be read counts
as unknown.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.exceptions import RayError

from orchestrator.planning.machine import Growth, Nodes, Resources

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

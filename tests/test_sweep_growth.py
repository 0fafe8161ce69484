"""What an autoscaler may add: from the file of `ray up`, and from what autoscalers report to Ray's control store."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_variants import FILE, GOOGLE, MACHINES, variant_config
from ray.autoscaler._private.util import prepare_config
from ray.core.generated.autoscaler_pb2 import AutoscalingState, ClusterConfig

from orchestrator.planning.machine import Growth, Machine, Nodes
from orchestrator.running import autoscaler
from orchestrator.running.autoscaler import (
    AutoscalerReport,
    Prospect,
    growth_from_config,
    growth_from_file,
    read_report,
)
from orchestrator.running.cluster import WAITING_ACTORS, actors_to_request

TYPES: dict[str, dict[str, Any]] = {
    "head": {"resources": {"CPU": 64, "GPU": 8}, "max_workers": 9},
    "small": {"resources": {"CPU": 8, "GPU": 1}, "max_workers": 10},
    "large": {"resources": {"CPU": 96, "GPU": 8}, "max_workers": 2},
    "none": {"resources": {"CPU": 200}, "max_workers": 0},
}
BUNDLE = {"CPU": 1.0, "GPU": 1.0}
NODE = "node_4bb5a6c143c8fa98ed16fe7654161cba176920e3fb507665a5e7570f"


def grown(path: Path, text: str) -> Machine:
    path.write_text(text, encoding="utf-8")
    return Machine(nodes=(), growth=growth_from_file(path))


def test_the_largest_machines_count_first_and_no_more_than_there_may_be(tmp_path: Path) -> None:
    described = {"max_workers": 4, "head_node_type": "head", "available_node_types": TYPES}
    machine = grown(tmp_path / "it.yaml", json.dumps(described))
    assert (machine.most("GPU"), machine.largest("GPU")) == (2 * 8 + 2 * 1, 8)
    assert (machine.most("CPU"), machine.largest("CPU")) == (2 * 96 + 2 * 8, 96)
    assert machine.capacity({"CPU": 8, "GPU": 1}) == 2 * 8 + 2 * 1
    assert machine.capacity({"CPU": 16, "GPU": 1}) == 2 * 6


def test_a_type_without_a_limit_has_that_of_all(tmp_path: Path) -> None:
    types = {"head": {}, "gpu": {"resources": {"GPU": 4}}}
    described = {"max_workers": 3, "head_node_type": "head", "available_node_types": types}
    assert grown(tmp_path / "it.yaml", json.dumps(described)).most("GPU") == 12


@pytest.mark.parametrize("text", ["", "a list: [", "- 1", "available_node_types: 3", "\x00"])
def test_what_describes_no_cluster_brings_nothing(tmp_path: Path, text: str) -> None:
    machine = grown(tmp_path / "it.yaml", text)
    assert (machine.most("GPU"), machine.largest("GPU")) == (0, 0)
    assert growth_from_file(tmp_path / "none.yaml") == Growth()


def test_our_own_file_brings_eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a machine is there: a sweep on a new cluster has to know that they may come."""
    monkeypatch.chdir(FILE.parent)
    own = Machine(nodes=(), growth=growth_from_file(FILE))
    assert (own.most("GPU"), own.largest("GPU"), own.largest("CPU")) == (8, 1, 8)
    google = grown(tmp_path / "google.yaml", yaml.safe_dump(prepare_config(variant_config(GOOGLE))))
    assert google.most("GPU") == 8
    machines = grown(tmp_path / "machines.yaml", yaml.safe_dump(prepare_config(variant_config(MACHINES))))
    assert machines.most("GPU") == 0, "those are there, and Ray counts them itself"


def test_a_configuration_in_the_control_store() -> None:
    config = ClusterConfig()
    config.node_group_configs.add(name="gpu", max_count=3).resources.update({"CPU": 8, "GPU": 2})
    config.node_group_configs.add(name="cpu", max_count=0).resources.update({"CPU": 64})
    machine = Machine(nodes=(), growth=growth_from_config(config))
    assert (machine.most("GPU"), machine.most("CPU")) == (6, 24)
    config.node_group_configs.add(name="spot", max_count=-1).resources.update({"GPU": 1})
    assert Machine(nodes=(), growth=growth_from_config(config)).most("GPU") > 10**5, "no limit"


def state(**changes: Any) -> AutoscalingState:
    return AutoscalingState(autoscaler_state_version=3, **changes)


def infeasible(**resources: float) -> dict[str, Any]:
    return {"infeasible_resource_requests": [{"resources_bundle": resources}]}


GANG = {"infeasible_gang_resource_requests": [{"requests": [{"resources_bundle": BUNDLE}]}]}
LAUNCH = {"pending_instance_requests": [{"ray_node_type_name": "gpu", "count": 2}]}
BOOTING = {"pending_instances": [{"ray_node_type_name": "gpu"}]}


def reported(
    monkeypatch: pytest.MonkeyPatch, state: Any, kinds: list[str] | None = None, status: Any = None
) -> AutoscalerReport:
    monkeypatch.setattr(autoscaler, "_state_in_gcs", lambda: (state, kinds or []))
    monkeypatch.setattr(autoscaler, "_status_in_gcs", lambda: status)
    return read_report(BUNDLE)


@pytest.mark.parametrize(
    ("state", "prospect", "starting"),
    [
        (state(), Prospect.UNKNOWN, {}),
        (state(**infeasible(CPU=1, GPU=1)), Prospect.NEVER, {}),
        (state(**GANG), Prospect.NEVER, {}),
        (state(**infeasible(CPU=1, GPU=2)), Prospect.UNKNOWN, {}),
        (state(**infeasible(CPU=1, GPU=1, highmem=1)), Prospect.UNKNOWN, {}),
        (state(**LAUNCH, **BOOTING), Prospect.COMING, {"gpu": 3}),
        (state(**LAUNCH, **infeasible(CPU=1, GPU=1)), Prospect.NEVER, {"gpu": 2}),
    ],
)
def test_what_an_autoscaler_reports_of_a_request(
    monkeypatch: pytest.MonkeyPatch, state: Any, prospect: Prospect, starting: dict[str, int]
) -> None:
    report = reported(monkeypatch, state, ["", "headgroup"])
    assert (report.prospect, report.starting) == (prospect, starting)
    assert report.elastic


def test_launches_that_failed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {"failed_instance_requests": [{"ray_node_type_name": "gpu", "reason": "quota exceeded"}]}
    assert reported(monkeypatch, state(**failed)).failures == ("gpu: quota exceeded",)


def test_a_cluster_without_an_autoscaler_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not reported(monkeypatch, state(), ["", ""]).elastic
    static = {"autoscaler_report": {"active_nodes": {NODE: 1}, "node_type_mapping": {NODE[5:]: NODE}}}
    report = reported(monkeypatch, AutoscalingState(), [""], static)
    assert (report.prospect, report.elastic) == (Prospect.NEVER, False)


@pytest.mark.parametrize(
    ("pending", "prospect"),
    [
        ({}, Prospect.UNKNOWN),
        ({"pending_launches": {"gpu": 1}}, Prospect.COMING),
        ({"pending_nodes": [["10.0.0.2", "gpu", "setting-up"]]}, Prospect.COMING),
    ],
)
def test_an_autoscaler_before_version_2(
    monkeypatch: pytest.MonkeyPatch, pending: dict[str, Any], prospect: Prospect
) -> None:
    status = {"autoscaler_report": {"active_nodes": {}, "node_type_mapping": {"f": "ray.head.default"}, **pending}}
    report = reported(monkeypatch, AutoscalingState(), [""], status)
    assert (report.prospect, report.elastic) == (prospect, True)


@pytest.mark.parametrize("status", [None, {}, {"autoscaler_report": None}])
def test_nothing_is_reported_yet(monkeypatch: pytest.MonkeyPatch, status: Any) -> None:
    report = reported(monkeypatch, AutoscalingState(), [], status)
    assert (report.prospect, report.elastic) == (Prospect.UNKNOWN, False)


def test_a_ray_that_has_no_such_interface_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise AttributeError("'GcsClient' object has no attribute 'get_cluster_status'")

    monkeypatch.setattr(autoscaler, "_state_in_gcs", missing)
    assert read_report(BUNDLE).prospect is Prospect.UNKNOWN
    monkeypatch.setattr(autoscaler, "_gcs", missing)
    assert autoscaler.read_growth(on_head=False) == Growth()


def test_actors_wait_for_nodes_where_an_autoscaler_may_add_some() -> None:
    two = Machine(nodes=(Nodes(resources={"CPU": 8, "GPU": 2}),))
    silent = AutoscalerReport(prospect=Prospect.UNKNOWN, starting={})
    elastic = AutoscalerReport(prospect=Prospect.UNKNOWN, starting={}, elastic=True)
    full = AutoscalerReport(prospect=Prospect.NEVER, starting={}, elastic=True)
    assert actors_to_request(two, BUNDLE, silent) == 2
    assert actors_to_request(two, BUNDLE, elastic) == 2 + WAITING_ACTORS
    assert actors_to_request(two, BUNDLE, full) == 2, "it has reached its limit"
    limit = Growth(groups=(Nodes(resources={"CPU": 8, "GPU": 2}, count=3),), max_nodes=3)
    assert actors_to_request(Machine(nodes=two.nodes, growth=limit), BUNDLE, elastic) == 6

"""A cluster that starts without workers gets them when a sweep needs them, and gives them back. `make test-cluster`.

Ray's own autoscaler runs on the head, and each machine that it asks for is a new node of `node_namespaces`. The nodes
share the Python environment, the project, the model and the documents. The file that describes the cluster lies where
`ray up` leaves it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_variants import shipped_config
from demand_provider import Cloud, DemandProvider
from node_namespaces import ROOT, Machines, machines, reason_against_nodes
from ray.autoscaler._private.util import prepare_config
from ray_nodes import PORT, NodeSweep, attempts, hosts_at_work, model_loads, start_head
from small_sweep import write_model_and_data
from sweep_process import SweepProcess, grid_flags, stored_rows

REASON = reason_against_nodes()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
FLAGS = grid_flags(max_new_tokens=200, shard_size=2)
HEAD = "f" * 51 + "00000"  # id of the head in Ray's provider for tests
SWITCHES = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",  # for the provider, which imports tools
}


def description() -> dict[str, Any]:
    """cluster.yaml with another provider, smaller machines, and less patience with idle ones."""
    config = prepare_config(shipped_config())
    types = config["available_node_types"]
    types["ray.head.default"] = types.pop(config["head_node_type"]) | {"node_config": {}, "max_workers": 0}
    types["gpu"] |= {"resources": {"CPU": 1, "GPU": 1}, "node_config": {}, "max_workers": 2}
    config |= {"head_node_type": "ray.head.default", "max_workers": 2, "idle_timeout_minutes": 1, "file_mounts": {}}
    provider = f"{DemandProvider.__module__}.{DemandProvider.__qualname__}"
    config["provider"] = {"type": "external", "module": provider, "launch_multiple": True, "head_node_id": HEAD}
    return config


@pytest.fixture
def case(tmp_path: Path) -> Path:
    return write_model_and_data(tmp_path / "case")


@pytest.fixture
def cluster(tmp_path: Path, case: Path) -> Iterator[Machines]:
    with machines(tmp_path / "nodes", read_only=[case]) as made:
        yield made


def test_machines_come_by_demand_and_go_when_idle(cluster: Machines, case: Path, tmp_path: Path) -> None:
    plain = SweepProcess(case, tmp_path / "undisturbed", *FLAGS, "--actors", "2", "--no-dashboard")
    plain.wait()
    head = cluster.add("head")
    head.path("~/ray_bootstrap_config.yaml").write_text(json.dumps(description()), encoding="utf-8")
    with Cloud(cluster, head, f"{head.address}:{PORT}") as cloud:
        start_head(head, "--autoscaling-config=~/ray_bootstrap_config.yaml", **SWITCHES)
        where = ("--model", str(case / "model"), "--data", str(case / "data"), "--address", "auto")
        sweep = NodeSweep(head, tmp_path, *where, *FLAGS)
        output = sweep.wait()
        assert "on 2 actors" in output, "as many as may come, though none was there"
        assert "Traceback" not in output
        assert stored_rows(sweep.folder) == stored_rows(plain.folder)
        assert hosts_at_work(sweep.folder) == {"machine-1", "machine-2"}
        assert {attempt["actor"] for attempt in attempts(sweep.folder)} == {"worker-1", "worker-2"}
        assert model_loads(sweep.folder) == 2
        cloud.until_empty(seconds=300)

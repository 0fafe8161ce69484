"""A cluster that begins without workers brings them when a sweep asks, and lets them go. `make test-cluster`.

Ray's own autoscaler with a provider that starts its machines as processes, in a cage; the file that describes it lies
where `ray up` leaves it.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cage import ADDRESSES, Cage, reason_against
from cluster_variants import as_it_is
from ray.autoscaler._private.util import prepare_config
from sweep_cases import write_case
from sweep_runs import Run, outcome

from orchestrator.store import Store

REASON = reason_against()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
FLAGS = ("--tasks", "gsm8k", "--policies", "k1,k2_middle,k3_last", "--max-new-tokens", "200", "--shard-size", "2")
HEAD = "f" * 51 + "00000"  # the id this provider knows the head by
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
SWITCHES = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
NODES = """
import ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()))
"""


def description() -> dict[str, Any]:
    """cluster.yaml, but for whose machines they are, how large and how many, and how soon they go."""
    config = prepare_config(as_it_is())
    types = config["available_node_types"]
    types["ray.head.default"] = types.pop(config["head_node_type"]) | {"node_config": {}, "max_workers": 0}
    small = {"CPU": 1, "GPU": 1, "object_store_memory": 80 * 2**20}
    types["gpu"] |= {"resources": small, "node_config": {}, "max_workers": 2}
    config |= {"head_node_type": "ray.head.default", "max_workers": 2, "idle_timeout_minutes": 0.2, "file_mounts": {}}
    config["provider"] = {"type": "external", "module": PROVIDER, "launch_multiple": True, "head_node_id": HEAD}
    return config


@pytest.fixture
def cage(tmp_path: Path) -> Iterator[Cage]:
    made = Cage(tmp_path / "cage")
    try:
        yield made
    finally:
        made.close()


def test_machines_come_by_demand_and_go_when_idle(cage: Cage, tmp_path: Path) -> None:
    case = write_case(tmp_path / "case")
    plain = Run(case, tmp_path / "undisturbed", *FLAGS, "--actors", "2", "--no-dashboard")
    plain.wait()
    (cage.home / "ray_bootstrap_config.yaml").write_text(json.dumps(description()), encoding="utf-8")
    ray = str(Path(sys.executable).parent / "ray")
    cage.run(ray, "get-auth-token", "--generate")
    size = ("--num-cpus=0", "--num-gpus=0", "--object-store-memory=100000000", f"--node-ip-address={ADDRESSES[0]}")
    start = ("--head", "--autoscaling-config=~/ray_bootstrap_config.yaml", "--include-dashboard=false", *size)
    started = cage.run(ray, "start", *start, **SWITCHES)
    assert started.returncode == 0, started.stderr
    where = ["--model", str(case / "model"), "--data", str(case / "data"), "--out", str(tmp_path / "r"), "--name", "s"]
    swept = cage.run(sys.executable, "-m", "orchestrator.sweep", "--address", "auto", *where, *FLAGS, seconds=900)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert "on 2 actors" in swept.stdout, "as many as may come, though none was there"
    assert outcome(tmp_path / "r" / "s") == outcome(plain.folder)
    attempts = [attempt for facts in Store(tmp_path / "r" / "s").trials().values() for attempt in facts["attempts"]]
    assert len({attempt["node_id"] for attempt in attempts}) == 2
    until = time.monotonic() + 180
    while cage.run(sys.executable, "-c", NODES).stdout.strip() != "1":
        assert time.monotonic() < until, "idle machines stay"
        time.sleep(2)

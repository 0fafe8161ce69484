"""Every node that can hold an actor is asked for its devices; here two nodes, whose devices are made up."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from many_nodes import ManyNodes

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
PROBE = """
import json, sys
from dataclasses import asdict
from orchestrator.running.environment import prepare
prepare(local=True)
import ray
from orchestrator.planning.devices import DeviceFacts
from orchestrator.planning.machine import Placement
from orchestrator.running.probing import check_probed, probe_devices, sweep_dtype
from sampler import InputError

address, ampere, needed, share = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
ray.init(address=address, log_to_driver=False, logging_level="ERROR")

class Holder:
    def here(self):
        return 1

taken = ray.remote(Holder).options(num_gpus=1, num_cpus=1).remote()  # one of the two nodes has nothing left
ray.get(taken.here.remote())

def look(gpus):
    import os
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert visible is None, visible
    assert gpus
    if ray.get_runtime_context().get_node_id() == ampere:
        return [DeviceFacts(kind="cuda", name="A100", dtype="bfloat16", free=90, total=100)] * 2
    return [DeviceFacts(kind="cuda", name="T4", dtype="float16", free=10, total=16)]

placement = Placement(actors=2, gpus_per_actor=share, cpus_per_actor=1, threads_per_actor=1)
said = []
probe = probe_devices(placement, look=look)
try:
    check_probed(needed, probe, placement, said.append)
except InputError as error:
    said.append(f"error: {error}")
print(json.dumps({
    "devices": sorted(device.name for device in probe.devices),
    "dtype": sweep_dtype(probe, said.append),
    "said": said,
}))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ManyNodes]:
    made = ManyNodes(2)
    try:
        yield made
    finally:
        made.close()


def probed(cluster: ManyNodes, needed: int, share: float = 1.0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, cluster.address, cluster.nodes[0], str(needed), str(share)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_all_devices_are_seen_also_those_in_use(cluster: ManyNodes) -> None:
    found = probed(cluster, needed=16)
    assert found["devices"] == ["A100", "A100", "T4"], "and not the head, which has no GPU"
    assert found["dtype"] == "float16"
    (sentence,) = found["said"]
    assert sentence.startswith("--dtype auto is float16 for the whole sweep: T4 on node ")


def test_a_node_that_is_too_small_is_named(cluster: ManyNodes) -> None:
    found = probed(cluster, needed=17)
    warning, _ = found["said"]
    assert warning.startswith("warning: node ")
    assert warning.endswith("which needs about 17 bytes of memory (T4 has 10 bytes free of 16 bytes)")
    error, _ = probed(cluster, needed=51, share=0.5)["said"]
    assert error.startswith("error: each actor needs about 51 bytes of memory, and the largest device (A100 on node ")

"""Every node that can hold an actor is asked for its devices; here two nodes, whose devices are made up."""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from node_namespaces import machines, reason_against_nodes
from ray_nodes import ENVIRONMENT, start_head, start_worker

REASON = reason_against_nodes()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
Probe = Callable[..., dict[str, Any]]
PROBE = """
import json, sys
from orchestrator.running.environment import prepare
prepare(local=False)
import ray
from orchestrator.core.system import Device
from orchestrator.planning.machine import Placement
from orchestrator.running.cluster import check_device_memory, probe_devices, choose_dtype
from sampler import InputError

address, needed, share = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ray.init(address=address, log_to_driver=False, logging_level="ERROR")

class Holder:
    def here(self):
        return 1

taken = ray.remote(Holder).options(num_gpus=1, num_cpus=1).remote()  # one of the two nodes has nothing left
ray.get(taken.here.remote())

def look(gpus):
    import os, socket
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert visible is None, visible
    assert gpus
    if socket.gethostname() == "ampere":
        return [Device(name="A100", dtype="bfloat16", free=90, total=100)] * 2
    return [Device(name="T4", dtype="float16", free=10, total=16)]

placement = Placement(actors=2, gpus_per_actor=share, cpus_per_actor=1, threads_per_actor=1)
messages = []
probe = probe_devices(placement, list_devices=look)
try:
    check_device_memory(needed, probe, placement, remedy="buy more", note=messages.append)
except InputError as error:
    messages.append(f"error: {error}")
print(json.dumps({
    "devices": sorted(device.name for device in probe.devices),
    "dtype": choose_dtype(probe, messages.append),
    "messages": messages,
}))
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    """What a driver prints that needs so much memory and so much of a GPU for each actor."""
    with machines(tmp_path_factory.mktemp("nodes")) as cluster:
        driver = cluster.add("driver")
        head = start_head(driver)
        for name in ("ampere", "turing"):
            start_worker(cluster.add(name), head, gpus=1)

        def run(needed: int, share: float = 1.0) -> dict[str, Any]:
            done = driver.run(sys.executable, "-c", PROBE, head, str(needed), str(share), **ENVIRONMENT)
            assert done.returncode == 0, done.stderr
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return found

        yield run


def test_all_devices_are_seen_also_those_in_use(probed: Probe) -> None:
    found = probed(needed=16)
    assert found["devices"] == ["A100", "A100", "T4"], "and not the head, which has no GPU"
    assert found["dtype"] == "float16"
    (sentence,) = found["messages"]
    assert sentence.startswith("--dtype auto is float16 for the whole sweep: T4 on node ")


def test_a_node_that_is_too_small_is_named(probed: Probe) -> None:
    found = probed(needed=17)
    warning, _ = found["messages"]
    assert warning.startswith("warning: node ")
    assert warning.endswith("which needs about 17 bytes of memory (T4 has 10 bytes free of 16 bytes)")
    error, _ = probed(needed=51, share=0.5)["messages"]
    assert "each actor needs about 51 bytes of memory" in error
    assert "A100 on node " in error

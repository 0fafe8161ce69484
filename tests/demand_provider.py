"""A node provider for Ray's autoscaler whose machines are nodes of `node_namespaces`.

The autoscaler runs on the head and cannot reach outside its namespaces. There, `DemandProvider` writes a file for every
machine that it wants, and deletes the file to give the machine back: these are the calls of a cloud's API. `Cloud`, in
the process of the test, starts and ends machines accordingly.
"""

import json
import threading
import time
from pathlib import Path
from typing import Any

from node_namespaces import Machines, Node
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)
from ray_nodes import start_worker

REQUESTS = Path("/run/cloud")
POLL_SECONDS = 0.2


class DemandProvider(FakeMultiNodeProvider):  # type: ignore[misc]
    """Ray's provider for tests, except that its machines are not processes on the head."""

    def _create_node_with_resources_and_labels(
        self, node_config: Any, tags: dict[str, str], count: int, resources: dict[str, float], labels: dict[str, str]
    ) -> None:
        del node_config, count, labels
        with self.lock:
            machine = self._next_hex_node_id()
            kind = tags[TAG_RAY_USER_NODE_TYPE]
            unfinished = REQUESTS.with_name(machine)
            unfinished.write_text(json.dumps({"kind": kind, "resources": resources}), encoding="ascii")
            unfinished.rename(REQUESTS / machine)
            own = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER, TAG_RAY_USER_NODE_TYPE: kind, TAG_RAY_NODE_NAME: machine}
            self._nodes[machine] = {"name": machine, "tags": {**own, TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE, **tags}}

    def _terminate_node(self, node: dict[str, Any]) -> None:
        (REQUESTS / node["name"]).unlink()


class Cloud:
    """Gives the head the machines that it asks for, while entered."""

    def __init__(self, machines: Machines, head: Node, address: str) -> None:
        self._machines, self._address = machines, address
        self._requests = head.path(REQUESTS)
        self._requests.mkdir()
        self.running: dict[str, Node] = {}
        self.started = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="cloud")

    def __enter__(self) -> "Cloud":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def until_empty(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self.running:
            assert time.monotonic() < until, f"idle machines are still running: {sorted(self.running)}"
            time.sleep(POLL_SECONDS)

    def _serve(self) -> None:
        while not self._end.wait(POLL_SECONDS):
            wanted = {path.name: path for path in self._requests.iterdir()}
            for name in wanted.keys() - self.running.keys():
                self._start(name, json.loads(wanted[name].read_text(encoding="ascii")))
            for name in self.running.keys() - wanted.keys():
                self.running.pop(name).kill()

    def _start(self, name: str, request: dict[str, Any]) -> None:
        self.started += 1
        node = self._machines.add(f"machine-{self.started}")
        resources = request["resources"]
        identity = {
            "RAY_CLOUD_INSTANCE_ID": name,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": name,
            "RAY_NODE_TYPE_NAME": request["kind"],
        }
        start_worker(node, self._address, cpus=resources["CPU"], gpus=resources["GPU"], **identity)
        self.running[name] = node

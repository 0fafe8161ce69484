"""A Ray of many nodes on this machine, each with a core and a GPU that exist only by name; nodes come and go as told.

Run as a program it obeys its input, a word a line, and answers: `add` names the new node's id; `kill ID` ends that node
with all its processes. It ends, with its nodes, when its input does.
"""

import subprocess
import sys
from pathlib import Path

from orchestrator.running import environment

HERE = "127.0.0.1"
ROOT = Path(__file__).parents[1]


class ManyNodes:
    """The program, started with so many nodes beside a head that has neither cores nor GPUs."""

    def __init__(self, nodes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.address = self._heard()
        self.nodes = [self.add() for _ in range(nodes)]

    def add(self) -> str:
        return self._told("add")

    def kill(self, node: str) -> None:
        self._told(f"kill {node}")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(180)
        self._process.stdout.close()

    def _told(self, what: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ").strip()
        raise AssertionError("the Ray of many nodes has ended")


def main() -> None:
    environment.prepare(local=True)
    from ray.cluster_utils import Cluster  # only now: the environment is prepared

    head = {"num_cpus": 0, "node_ip_address": HERE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    print("answer", cluster.address, flush=True)
    nodes = {}
    for line in sys.stdin:
        what, _, node_id = line.strip().partition(" ")
        if what == "add":
            node = cluster.add_node(num_cpus=1, num_gpus=1, node_ip_address=HERE, object_store_memory=80 * 2**20)
            nodes[node.node_id] = node
            print("answer", node.node_id, flush=True)
        else:
            cluster.remove_node(nodes.pop(node_id), allow_graceful=False)
            print("answer gone", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()

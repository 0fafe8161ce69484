"""A Ray of two nodes on this machine, one of which can be killed. Knows no sweeps.

Run as a program it is told on its input what to do: "replace" kills the second node with all its processes and puts a
new one in its place. It ends, with its nodes, when its input does.
"""

import os
import subprocess
import sys

from orchestrator.running import environment
from tools.faults.command import ALONE

START = 180.0  # seconds
HERE = "127.0.0.1"


class NodesGone(Exception):
    """The Ray of two nodes could not be started, or has ended; a machine with too much to do is a reason."""


class TwoNodes:
    """The program, started, and its address."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.faults.nodes"],
            env={**os.environ, **ALONE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.address = self._heard("ready ")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def replace(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("replace\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise NodesGone from None
        self._heard("killed")

    def wait(self) -> None:
        """Until the new node is there."""
        self._heard("ready ")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(START)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _heard(self, beginning: str) -> str:
        """The rest of the next line that begins so."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line.removeprefix(beginning).strip()
        raise NodesGone


def main() -> None:
    environment.prepare(local=True)
    from ray.cluster_utils import Cluster  # only now: the environment is prepared

    head = {"num_cpus": 1, "node_ip_address": HERE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1, node_ip_address=HERE)
    print("ready", cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "replace":
            cluster.remove_node(second, allow_graceful=False)
            print("killed", flush=True)
            second = cluster.add_node(num_cpus=1, node_ip_address=HERE)
            print("ready", cluster.address, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

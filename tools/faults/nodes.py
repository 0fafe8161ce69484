"""A Ray cluster of two nodes on this machine, one of which can be killed and replaced.

The nodes share this machine's file system. The program (`python -m tools.faults.nodes`) reads commands from its
standard input: "replace" kills the second node with all its processes and starts a new one. It shuts the cluster down
when its input ends.
"""

import os
import subprocess
import sys

from orchestrator.running import environment
from orchestrator.running.environment import LOOPBACK_VARIABLES

# Environment of every Ray cluster of a campaign: it listens on the loopback device only and needs no token.
RAY_VARIABLES = {**LOOPBACK_VARIABLES, "RAY_AUTH_MODE": "disabled"}
SHUTDOWN_SECONDS = 180.0
LOOPBACK_ADDRESS = "127.0.0.1"


class NodesGone(Exception):
    """The two-node cluster could not be started, or has ended; an overloaded machine can be the reason."""


class TwoNodes:
    """A running instance of this program, and the address of its cluster."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.faults.nodes"],
            env={**os.environ, **RAY_VARIABLES},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self.address = self._read_line("ready ")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill_second(self) -> None:
        """Kills the second node; a new one starts right after."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("replace\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise NodesGone from None
        self._read_line("killed")

    def wait_for_replacement(self) -> None:
        self._read_line("ready ")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _read_line(self, prefix: str) -> str:
        """The rest of the next line with this prefix."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(prefix):
                return line.removeprefix(prefix).strip()
        raise NodesGone


def main() -> None:
    environment.prepare(local=True)
    from ray.cluster_utils import Cluster  # after environment.prepare, which sets variables that Ray reads on import

    head = {"num_cpus": 1, "node_ip_address": LOOPBACK_ADDRESS, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    second = cluster.add_node(num_cpus=1, node_ip_address=LOOPBACK_ADDRESS)
    print("ready", cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "replace":
            cluster.remove_node(second, allow_graceful=False)
            print("killed", flush=True)
            second = cluster.add_node(num_cpus=1, node_ip_address=LOOPBACK_ADDRESS)
            print("ready", cluster.address, flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

"""Ray on the nodes of `node_namespaces`, and sweeps that are started on one of them."""

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node_namespaces import Node
from sweep_runs import SECRET, Run

from orchestrator.store import Store

PORT = 6379
RAY = (sys.executable, "-m", "ray.scripts.scripts")
# The network ends at this machine and carries nobody else's packets.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
SIZE = ("--object-store-memory=100000000", "--disable-usage-stats")


def start_head(node: Node, *, cpus: int = 0) -> str:
    """Starts Ray's head there; its address."""
    _start_ray(node, "--head", f"--port={PORT}", "--include-dashboard=false", f"--num-cpus={cpus}")
    return f"{node.address}:{PORT}"


def start_worker(node: Node, head: str, *, cpus: int = 1, gpus: int = 0) -> None:
    _start_ray(node, f"--address={head}", f"--num-cpus={cpus}", f"--num-gpus={gpus}")


def keep_worker(node: Node, head: str, *, output: Path, cpus: int = 1) -> None:
    """Starts Ray there again whenever it has ended, as a service manager or a Slurm job would."""
    start = " ".join((*RAY, "start", "--block", f"--address={head}", f"--num-cpus={cpus}", *SIZE))
    node.start("sh", "-c", f"while true; do {start}; sleep 1; done", output=output, **ENVIRONMENT)


def _start_ray(node: Node, *arguments: str) -> None:
    done = node.run(*RAY, "start", f"--node-ip-address={node.address}", *arguments, *SIZE, **ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr


class NodeSweep(Run):
    """One `python -m orchestrator.sweep` on a node, with its results in the home directory of that node."""

    def __init__(self, node: Node, logs: Path, *flags: str) -> None:
        self.folder = node.path("~/results/s")
        self.output = Path(tempfile.mkdtemp(prefix=f"sweep-{node.name}-", dir=logs)) / "output"
        self.arguments = ["--out", f"{node.home}/results", "--name", "s", "--no-dashboard", *flags]
        self.began = time.monotonic()
        command = (sys.executable, "-m", "orchestrator.sweep", *self.arguments)
        self.process = node.start(*command, output=self.output, HF_TOKEN=SECRET, **ENVIRONMENT)


def attempts(folder: Path) -> list[Mapping[str, Any]]:
    """Attempts at trials that a worker has begun."""
    trials = Store(folder).trials().values()
    return [attempt for facts in trials for attempt in facts["attempts"] if "node" in attempt]


def hosts_at_work(folder: Path) -> set[str]:
    return {attempt["node"] for attempt in attempts(folder)}


def model_loads(folder: Path) -> int:
    return len({(attempt["actor"], attempt["load_seconds"]) for attempt in attempts(folder)})

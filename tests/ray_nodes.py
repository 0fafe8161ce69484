"""Ray on the nodes of `node_namespaces`, and sweeps that are started on one of them."""

import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node_namespaces import Node
from sweep_process import SECRET, SweepProcess

from orchestrator.store import Store

PORT = 6379
RAY = (sys.executable, "-m", "ray.scripts.scripts")
# The network exists only on this machine and is not shared.
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
COUNT_NODES = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print("alive:", sum(node["Alive"] for node in ray.nodes()))
"""


def start_head(node: Node, *arguments: str, cpus: int = 0, **variables: str) -> str:
    """Starts Ray's head there; its address."""
    size = (f"--num-cpus={cpus}", "--num-gpus=0")
    _start_ray(node, "--head", f"--port={PORT}", "--include-dashboard=false", *size, *arguments, **variables)
    return f"{node.address}:{PORT}"


def start_worker(node: Node, head: str, *, cpus: float = 1, gpus: float = 0, **variables: str) -> None:
    _start_ray(node, f"--address={head}", f"--num-cpus={cpus}", f"--num-gpus={gpus}", **variables)


def keep_worker(node: Node, head: str, *, output: Path, cpus: int = 1) -> None:
    """Starts Ray there again whenever it has ended, as a service manager or a Slurm job would."""
    start = " ".join((*RAY, "start", "--block", f"--address={head}", f"--num-cpus={cpus}", *_own_options(node)))
    node.start("sh", "-c", f"while true; do {start}; sleep 1; done", output=output, **ENVIRONMENT)


def _start_ray(node: Node, *arguments: str, **variables: str) -> None:
    done = node.run(*RAY, "start", *arguments, *_own_options(node), **{**ENVIRONMENT, **variables})
    assert done.returncode == 0, done.stdout + done.stderr


def _own_options(node: Node) -> tuple[str, ...]:
    """Without a directory of its own a worker creates one with the path of the head's."""
    return (f"--temp-dir={node.tmpdir}/ray", "--object-store-memory=100000000", "--disable-usage-stats")


class NodeSweep(SweepProcess):
    """One `python -m orchestrator.sweep` on a node, with its results in the home directory of that node."""

    def __init__(self, node: Node, logs: Path, *flags: str, **variables: str) -> None:
        self.folder = node.path("~/results/s")
        self.output = Path(tempfile.mkdtemp(prefix=f"sweep-{node.name}-", dir=logs)) / "output"
        self.arguments = ["--out", f"{node.home}/results", "--name", "s", "--no-dashboard", *flags]
        command = (sys.executable, "-m", "orchestrator.sweep", *self.arguments)
        self.process = node.start(*command, output=self.output, HF_TOKEN=SECRET, **ENVIRONMENT, **variables)


def attempts(folder: Path) -> list[Mapping[str, Any]]:
    """Attempts at trials that a worker has begun."""
    trials = Store(folder).trials().values()
    return [attempt for facts in trials for attempt in facts["attempts"] if "node" in attempt]


def hosts_at_work(folder: Path) -> set[str]:
    return {attempt["node"] for attempt in attempts(folder)}


def model_loads(folder: Path) -> int:
    return len({(attempt["actor"], attempt["load_seconds"]) for attempt in attempts(folder)})


def trial_in_progress(folder: Path, host: str, documents: int) -> str | None:
    """A trial of so many documents that is running on this host, and has some rows but not half of them yet."""
    store = Store(folder)
    for trial_id, facts in store.trials().items():
        running = facts["status"] == "running" and facts["attempts"] and facts["attempts"][-1].get("node") == host
        if running and 0 < len(store.rows([trial_id], columns=["doc_id"], verify=False)) < documents / 2:
            return str(trial_id)
    return None


def ray_nodes_alive(node: Node, address: str) -> int:
    """How many nodes Ray's head takes for alive, asked on a node that can reach it."""
    done = node.run(sys.executable, "-c", COUNT_NODES, address, **ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return int(re.findall("alive: ([0-9]+)", done.stdout)[-1])  # on a busy machine Ray prints warnings there too

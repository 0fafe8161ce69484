"""python -m orchestrator.slurm.gather ADDRESS NODES FOLDER: waits, for a limited time, until a job's sweep can start.

A sweep can start with one node, and later nodes get trials too; with all nodes present it is planned for all of them. A
previous job that was killed on another machine may still look alive in the sweep's directory for a minute.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.running import environment
from orchestrator.store.lock import STALE_SECONDS, writer_of

NODES_SECONDS = 120.0
FOLDER_SECONDS = 1.5 * STALE_SECONDS


def main() -> None:
    address, nodes, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    environment.prepare(local=False)
    import ray  # after the environment is prepared: Ray reads it at import

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    wait_until(lambda: alive(ray.nodes()) >= nodes, NODES_SECONDS)
    print(f"Ray on {alive(ray.nodes())} of {nodes} nodes", flush=True)
    ray.shutdown()
    wait_until(lambda: writer_of(folder) is None, FOLDER_SECONDS)


def wait_until(reached: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not reached() and time.monotonic() < until:
        time.sleep(1)


def alive(nodes: list[dict[str, Any]]) -> int:
    return sum(bool(node["Alive"]) for node in nodes)


if __name__ == "__main__":
    main()

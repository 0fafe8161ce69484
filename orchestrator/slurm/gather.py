"""python -m orchestrator.slurm.gather ADDRESS NODES: waits in a job until its nodes have joined Ray, or long enough.

A sweep needs no node but the first; those that come later get trials too. Waiting lets it plan with all of them.
"""

import sys
import time

from orchestrator.running import environment

LONGEST = 120.0  # seconds


def main() -> None:
    address, nodes = sys.argv[1], int(sys.argv[2])
    environment.prepare(local=False)
    import ray  # only now: the environment is prepared

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    until = time.monotonic() + LONGEST
    while (there := _alive(ray.nodes())) < nodes and time.monotonic() < until:
        time.sleep(1)
    print(f"Ray on {there} of {nodes} nodes", flush=True)
    ray.shutdown()


def _alive(nodes: list[dict[str, object]]) -> int:
    return sum(bool(node["Alive"]) for node in nodes)


if __name__ == "__main__":
    main()

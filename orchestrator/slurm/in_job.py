"""Commands that the batch script of a job runs: finding free ports, and waiting until the sweep can start."""

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import sample
from typing import Any

from orchestrator.running import environment
from orchestrator.store.lock import STALE_SECONDS, active_writer
from sampler.errors import InputError

FIRST_PORT = 10_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_EPHEMERAL_START = 32_768
NODES_TIMEOUT_SECONDS = 120.0
LOCK_TIMEOUT_SECONDS = 1.5 * STALE_SECONDS


def free_ports(count: int) -> list[int]:
    """Free ports below the kernel's ephemeral range, for servers that need a fixed port.

    Most processes of a starting Ray take an ephemeral port, and could take one of these before its server is up. Ports
    are chosen at random: jobs that share a node would otherwise choose the same ones.
    """
    end = _ephemeral_start()
    found: list[int] = []
    with ExitStack() as held:
        for port in sample(range(FIRST_PORT, end), end - FIRST_PORT):
            if len(found) == count:
                break
            try:
                held.enter_context(socket.create_server(("", port)))
            except OSError:  # in use
                continue
            found.append(port)
    if len(found) < count:
        raise InputError(f"{len(found)} of the ports {FIRST_PORT} to {end - 1} are free and {count} are needed")
    return found


def _ephemeral_start() -> int:
    """Start of the kernel's ephemeral range, if that leaves enough ports below it."""
    try:
        start = int(EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
    except OSError:
        return USUAL_EPHEMERAL_START
    return max(start, 2 * FIRST_PORT)


def wait_until_ready(address: str, nodes: int, folder: Path) -> None:
    """Waits, for a limited time, until all nodes have joined and no other process writes to the sweep's directory.

    A sweep can start with one node, but it is planned for the nodes that are present. A previous job that was killed on
    another machine may look alive in the directory for a minute.
    """
    environment.prepare(local=False)
    import ray  # after the environment is prepared: Ray reads it at import

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    _wait_until(lambda: _alive(ray.nodes()) >= nodes, NODES_TIMEOUT_SECONDS)
    print(f"Ray on {_alive(ray.nodes())} of {nodes} nodes", flush=True)
    ray.shutdown()
    _wait_until(lambda: active_writer(folder) is None, LOCK_TIMEOUT_SECONDS)


def _wait_until(reached: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not reached() and time.monotonic() < until:
        time.sleep(1)


def _alive(nodes: list[dict[str, Any]]) -> int:
    return sum(bool(node["Alive"]) for node in nodes)

"""python -m orchestrator.slurm.free_ports N: prints N free ports, for servers that need a fixed one.

The ports are below the kernel's ephemeral range. Most processes of a starting Ray take an ephemeral port, and could
otherwise take one of these before its server is up.
"""

import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from random import sample

FIRST = 10_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_EPHEMERAL_START = 32_768


def main() -> None:
    print(*free_ports(int(sys.argv[1])))


def free_ports(count: int) -> list[int]:
    """Chosen at random, because jobs that share a node would choose the same ones otherwise."""
    found: list[int] = []
    with ExitStack() as held:
        for port in sample(range(FIRST, _end()), _end() - FIRST):
            if len(found) == count:
                break
            try:
                held.enter_context(socket.create_server(("", port)))
            except OSError:  # in use
                continue
            found.append(port)
    if len(found) < count:
        sys.exit(f"error: {len(found)} of the ports {FIRST} to {_end() - 1} are free and {count} are needed")
    return found


def _end() -> int:
    """Start of the kernel's ephemeral range, if that leaves enough ports."""
    try:
        start = int(EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
    except OSError:
        return USUAL_EPHEMERAL_START
    return max(start, 2 * FIRST)


if __name__ == "__main__":
    main()

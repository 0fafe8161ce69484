"""python -m orchestrator.slurm.free_ports N: so many ports that nobody uses, for servers that must be told theirs.

They lie below those that the kernel gives away itself. Most processes of a starting Ray ask it for any port, and could
otherwise get one of these before its server is up.
"""

import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from random import sample

FIRST = 10_000
GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUALLY_FROM = 32_768


def main() -> None:
    print(*free_ports(int(sys.argv[1])))


def free_ports(count: int) -> list[int]:
    """Drawn by lot, since jobs that share a node would take the same otherwise."""
    found: list[int] = []
    with ExitStack() as held:
        for port in sample(range(FIRST, _end()), _end() - FIRST):
            if len(found) == count:
                break
            try:
                held.enter_context(socket.create_server(("", port)))
            except OSError:  # somebody has it
                continue
            found.append(port)
    if len(found) < count:
        sys.exit(f"error: of the ports from {FIRST} to {_end() - 1}, {len(found)} are free and {count} are needed")
    return found


def _end() -> int:
    """Where the kernel's own begin, if that leaves enough."""
    try:
        given_from = int(GIVEN_AWAY.read_text(encoding="ascii").split()[0])
    except OSError:
        return USUALLY_FROM
    return max(given_from, 2 * FIRST)


if __name__ == "__main__":
    main()

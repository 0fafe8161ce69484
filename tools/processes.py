"""The processes of this machine, read from /proc."""

import time
from collections.abc import Collection, Iterator
from pathlib import Path


def list_processes() -> Iterator[tuple[int, int, str]]:
    """Id, parent id and command line of every living process."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text(encoding="utf-8", errors="replace")
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        fields = stat.rpartition(")")[2].split()
        if fields[0] not in "ZX":
            yield int(path.name), int(fields[1]), command


def descendants(root: int) -> dict[int, str]:
    """Ids and command lines of all processes started by `root`, directly or indirectly."""
    children: dict[int, list[int]] = {}
    commands = {}
    for pid, parent, command in list_processes():
        children.setdefault(parent, []).append(pid)
        commands[pid] = command
    below: dict[int, str] = {}
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            below[pid] = commands[pid]
            waiting.append(pid)
    return below


def wait_until_gone(pids: Collection[int], *, timeout_seconds: float) -> bool:
    """Waits for these processes to end. Returns whether all of them ended before the timeout."""
    until = time.monotonic() + timeout_seconds
    while set(pids) & {pid for pid, _, _ in list_processes()}:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True

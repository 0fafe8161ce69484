"""The processes of this machine, read from /proc."""

import time
from collections.abc import Collection, Iterator
from pathlib import Path


def list_processes() -> Iterator[tuple[int, int, str]]:
    """Id, parent id and command line of every living process."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text(encoding="utf-8", errors="replace")
            name = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        fields = stat.rpartition(")")[2].split()
        if fields[0] not in "ZX":
            yield int(path.name), int(fields[1]), name


def descendants(root: int) -> dict[int, str]:
    """Ids and command lines of all processes started by `root` and its children."""
    children: dict[int, list[int]] = {}
    names = {}
    for pid, parent, name in list_processes():
        children.setdefault(parent, []).append(pid)
        names[pid] = name
    found: dict[int, str] = {}
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            found[pid] = names[pid]
            waiting.append(pid)
    return found


def wait_until_gone(pids: Collection[int], *, timeout_seconds: float) -> bool:
    """Whether all these processes ended before the timeout."""
    until = time.monotonic() + timeout_seconds
    while set(pids) & {pid for pid, _, _ in list_processes()}:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True

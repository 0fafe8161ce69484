"""Processes of this machine, as the kernel lists them. Ends none."""

import time
from collections.abc import Collection, Iterator
from pathlib import Path


def listed() -> Iterator[tuple[int, int, str]]:
    """Each living process: its id, its parent's, and what it calls itself."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text(encoding="utf-8", errors="replace")
            name = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # ended meanwhile
        fields = stat.rpartition(")")[2].split()
        if fields[0] not in "ZX":
            yield int(path.name), int(fields[1]), name


def below(root: int) -> dict[int, str]:
    """Descendants of a process, by their names."""
    children: dict[int, list[int]] = {}
    names = {}
    for pid, parent, name in listed():
        children.setdefault(parent, []).append(pid)
        names[pid] = name
    found: dict[int, str] = {}
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            found[pid] = names[pid]
            waiting.append(pid)
    return found


def gone(pids: Collection[int], *, within: float) -> bool:
    """Whether all of them have ended in so many seconds."""
    until = time.monotonic() + within
    while set(pids) & {pid for pid, _, _ in listed()}:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True

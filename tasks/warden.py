"""The cage from the outside: starts an untrusted program, keeps its clock, reports how it ended. Standard library only.

Reads a JSON order from stdin and writes one JSON verdict to stdout. A process of its own, so that nothing of the run
(environment, descriptors, memory) is anywhere near the program.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tasks.inmate import NOBODY, PR_SET_CHILD_SUBREAPER, ROLES, Order, attempt, call, die_with_parent

SETUP_SECONDS = 60
PATIENCE = 6  # on a busy machine a program may take this many times its seconds, if it spent them waiting for a core


def map_users(pid: int) -> None:
    """Who the cage's users are outside. Root becomes nobody, whose processes the kernel counts; root's it does not."""
    user, group = os.geteuid(), os.getegid()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/setgroups", "w") as file:
        file.write("allow" if user == 0 else "deny")
    for kind, own in (("uid", user), ("gid", group)):
        choices = [f"0 0 1\n{NOBODY} {NOBODY} 1"] if user == 0 and group == 0 else []
        for choice in [*choices, f"{NOBODY} {own} 1"]:
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/{kind}_map", "w") as file:
                    file.write(choice)
                break


def family(pid: int) -> Iterator[int]:
    """A process and all its descendants, as seen from out here. Orphans of a pid namespace belong to its process 1."""
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                for child in file.read().split():
                    yield from family(int(child))


@dataclass(slots=True)
class Usage:
    """What a cage holds at a moment: processes, bytes, seconds of computing, and its longest wait for a core."""

    processes: int = 0
    memory: int = 0
    computed: float = 0.0
    waited: float = 0.0


def usage(pid: int) -> Usage:
    total = Usage()
    for member in family(pid):
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{member}/statm") as file:
                total.memory += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            with open(f"/proc/{member}/stat") as file:
                ticks = file.read().rpartition(")")[2].split()[11:15]  # own and reaped children's, user and system
            total.computed += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            with open(f"/proc/{member}/schedstat") as file:
                total.waited = max(total.waited, int(file.read().split()[1]) / 1e9)
            total.processes += 1
    return total


def excess(order: Order, pid: int, since: float, before: Usage) -> str | None:
    """What the program has too much of, if anything. Its seconds pass while it computes, sleeps or waits for itself."""
    now, wall = usage(pid), time.monotonic() - since
    alone = wall - (now.waited - before.waited)
    if max(alone, now.computed - before.computed, wall / PATIENCE) > order["seconds"]:
        return "time"
    if now.memory > order["memory"]:
        return "memory"
    return "processes" if now.processes > order["processes"] + 2 else None  # the porter and bwrap's own are no inmates


def heard(report: socket.socket) -> Iterator[bytes]:
    """The messages that have come in; the last one may lie there after its sender is gone."""
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while data := report.recv(256, socket.MSG_DONTWAIT):
            yield data


def watch(order: Order, pid: int, report: socket.socket, output: int) -> dict[str, str]:
    """Waits for the program's end or for its first excess."""
    key, tail, written = secrets.token_bytes(32), b"", 0
    started, ready, before, ended = time.monotonic(), 0.0, Usage(), False
    if order["cage"] != "namespaces":
        report.send(key)
    while True:
        # Not reaped yet: until it is cleared away its number is nobody else's.
        ended = ended or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        for message in heard(report):
            if message.startswith(b"failed "):
                return {"ended": "failed" if ready else "no cage", "why": message[7:].decode(errors="replace")}
            if message == b"entered" and not ready:
                map_users(pid)
                report.send(b"mapped")
                report.send(key)
            elif message == b"ready" and not ready:
                ready, before = time.monotonic(), usage(pid)
            elif ready and message == key:
                return {"ended": "passed"}
        if select.select([output], [], [], 0)[0] and (data := os.read(output, 65536)):
            written, tail = written + len(data), (tail + data)[-2000:]
        elif ended:
            return {"ended": "failed", "why": tail.decode(errors="replace").strip().rpartition("\n")[2]}
        else:
            select.select([report], [], [], 0.01)
        if written > order["output"]:
            return {"ended": "failed", "why": "output"}
        if not ready and time.monotonic() - started > SETUP_SECONDS:
            return {"ended": "no cage", "why": f"it did not start within {SETUP_SECONDS} s"}
        if ready and not ended and (why := excess(order, pid, ready, before)):
            return {"ended": "failed", "why": why}


def clear(pid: int) -> None:
    """Ends what is left. The kernel empties a cage whose process 1 died; without a cage each process is looked for."""
    deadline = time.monotonic() + 10
    os.kill(pid, signal.SIGKILL)  # before anything is looked for: looking takes longer than forking
    while time.monotonic() < deadline:
        for member in family(os.getpid()):
            if member != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def main() -> None:
    die_with_parent()
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.umask(0o022)
    order = json.load(sys.stdin)
    # Packets keep the few messages apart; each side has its own end.
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output, printed = os.pipe()
    pid = os.fork()
    if pid == 0:
        mine.close()
        attempt(ROLES[order["cage"]], order, theirs.fileno(), printed)
    theirs.close()
    os.close(printed)
    verdict = watch(order, pid, mine, output)
    clear(pid)
    json.dump(verdict, sys.stdout)

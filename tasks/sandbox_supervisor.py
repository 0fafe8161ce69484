"""Start a candidate's and a tester's sandbox, enforce the limits, print the result. Uses the standard library only.

Runs as a separate process for each program, so that sandboxes inherit no environment variables, descriptors or memory
of the sweep. It reads a JSON job from stdin and writes a JSON result to stdout. If it dies, the kernel kills the
sandboxes.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Job = dict[str, Any]
Result = dict[str, str]

SETUP_TIMEOUT_SECONDS = 60
WALL_TIME_FACTOR = 6  # wall time may be this many times the limit: on a busy machine, programs wait for a core
CLEANUP_TIMEOUT_SECONDS = 10
POLL_MILLISECONDS = 10
MAX_REPORT_BYTES = 4096
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FREE_DESCRIPTOR = 20  # above all descriptors that a sandbox starts with

libc = ctypes.CDLL(None, use_errno=True)


def set_process_option(option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


@dataclass(slots=True)
class StartedSandbox:
    """A started sandbox. `report` is what its runner has written: ready or a failure, then the tester's result."""

    pid: int
    report_descriptor: int
    report: bytes = b""
    is_open: bool = True  # the runner may still write to its report

    @property
    def lines(self) -> list[bytes]:
        return self.report.split(b"\n")[:-1]

    @property
    def is_ready(self) -> bool:
        return self.lines[:1] == [b"ready"]


def start_sandbox(job: Job, role: str, *, reader: int, writer: int, output: int, cgroup: str | None) -> StartedSandbox:
    report_reader, report_writer = os.pipe()
    files = [file_with(json.dumps(job[role]).encode()), output, output, reader, writer, report_writer]
    if job["filter"]:
        files.append(file_with(bytes.fromhex(job["filter"])))
    pid = os.fork()
    if pid == 0:
        try:
            files = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FREE_DESCRIPTOR) for descriptor in files]
            for target, descriptor in enumerate(files):
                os.dup2(descriptor, target)
            become_sandbox(job, cgroup)
        except OSError as error:
            os.write(report_writer, f"failed {error}\n".encode())
        finally:
            os._exit(1)
    os.close(report_writer)
    return StartedSandbox(pid=pid, report_descriptor=report_reader)


def file_with(data: bytes) -> int:
    """A read-only descriptor of a deleted file with this content."""
    with open("data", "wb") as file:
        file.write(data)
    descriptor = os.open("data", os.O_RDONLY)
    os.unlink("data")
    return descriptor


def become_sandbox(job: Job, cgroup: str | None) -> None:
    if cgroup is not None:
        with contextlib.suppress(OSError):
            write(f"{cgroup}/cgroup.procs", "0")
    if (user := job["supervisor_drops_to"]) is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    set_process_option(PR_SET_PDEATHSIG, int(signal.SIGKILL))  # after the change of user, which resets it
    os.setsid()  # otherwise kill(0, …) would reach the supervisor
    os.execve(job["command"][0], job["command"], job["environment"])  # closes all other descriptors


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def create_cgroup(job: Job, root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> str | None:
    """A cgroup (version 2) that limits memory and processes of both sandboxes; None if it cannot be created here."""
    with contextlib.suppress(OSError), open(own) as file:
        paths = [line.strip()[3:] for line in file if line.startswith("0::")]
        for parent in (place for path in paths for place in (path, os.path.dirname(path))):
            folder = f"{root}{parent.rstrip('/')}"
            path = f"{folder}/program-{secrets.token_hex(8)}"
            with contextlib.suppress(OSError):
                with open(f"{folder}/cgroup.subtree_control") as control:
                    if not {"memory", "pids"} <= set(control.read().split()):
                        continue
                os.mkdir(path)
                try:
                    write(f"{path}/memory.max", str(job["memory_bytes"]))
                    write(f"{path}/pids.max", str(2 * job["threads"] + 6))  # 6: of bwrap, in both sandboxes
                    return path
                except OSError:
                    os.rmdir(path)
    return None


def process_tree(pid: int) -> Iterator[int]:
    """A process and all its descendants. Orphans in a pid namespace are children of its process 1."""
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                for member in file.read().split():
                    yield from process_tree(int(member))


@dataclass(slots=True)
class Usage:
    """Resources of the processes in both sandboxes."""

    threads: int = 0
    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    core_wait_seconds: float = 0.0  # how long the two sandboxes waited for a core: the longest wait in each
    files: int = 0

    def add(self, sandbox: StartedSandbox) -> "Usage":
        waits = [0.0]
        for member in process_tree(sandbox.pid):
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{member}/statm") as file:
                    self.memory_bytes += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                with open(f"/proc/{member}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                # User and system time, also of reaped children. The filter refuses new processes, so there are no
                # other children whose time would be missing.
                self.cpu_seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                self.threads += int(fields[17])
                with open(f"/proc/{member}/schedstat") as file:
                    waits.append(int(file.read().split()[1]) / 1e9)
        self.core_wait_seconds += max(waits)
        return self

    def add_files(self, sandbox: StartedSandbox, folder: str) -> "Usage":
        """Count the files in the sandbox's folder, as its process 1 sees it. bwrap can limit only their total size."""
        for member in list(process_tree(sandbox.pid))[1:2] if folder else ():
            with contextlib.suppress(OSError):
                seen = os.statvfs(f"/proc/{member}/root{folder}")
                self.files += seen.f_files - seen.f_ffree
        return self


def exceeded_limit(job: Job, now: Usage, before: Usage, wall_seconds: float) -> str | None:
    """The limit that the program exceeds, if any. Computing and sleeping count as time, waiting for a core does not."""
    own_seconds = wall_seconds - (now.core_wait_seconds - before.core_wait_seconds)
    if max(own_seconds, now.cpu_seconds - before.cpu_seconds, wall_seconds / WALL_TIME_FACTOR) > job["seconds"]:
        return "time"
    if now.memory_bytes > job["memory_bytes"]:
        return "memory"
    if now.files > job["files"]:
        return "files"
    return "threads" if now.threads > 2 * job["threads"] + 6 else None


def supervise(job: Job, candidate: StartedSandbox, tester: StartedSandbox, output: int) -> Result:
    """Wait for the tester's result or until a limit is exceeded. Each step reads a bounded number of bytes."""
    tail, output_bytes = b"", 0
    created, before, started = time.monotonic(), None, None
    sandboxes = {sandbox.report_descriptor: sandbox for sandbox in (candidate, tester)}
    poller = select.poll()
    for descriptor in (output, *sandboxes):
        poller.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll(POLL_MILLISECONDS):
            data = os.read(descriptor, 65536)
            if not data:
                poller.unregister(descriptor)
            if descriptor == output:
                output_bytes, tail = output_bytes + len(data), (tail + data)[-2000:]
            else:
                sandbox = sandboxes[descriptor]
                sandbox.report, sandbox.is_open = (sandbox.report + data)[:MAX_REPORT_BYTES], bool(data)
        for sandbox in (candidate, tester):
            if sandbox.lines and not sandbox.is_ready:
                return {"ended": "no sandbox", "reason": sandbox.lines[0].decode(errors="replace")}
            if not sandbox.is_ready and not sandbox.is_open:
                if select.select([output], [], [], 0)[0]:
                    tail += os.read(output, 65536)
                return {"ended": "no sandbox", "reason": tail.decode(errors="replace").strip().rpartition("\n")[2]}
        if len(tester.lines) > 1:
            result = json.loads(tester.lines[1])
            return {"ended": "passed" if result["passed"] else "failed", "reason": result["reason"]}
        if tester.is_ready and not tester.is_open:
            return {"ended": "failed", "reason": "the tests were killed"}
        if output_bytes > job["output_bytes"]:
            return {"ended": "failed", "reason": "output"}
        if candidate.is_ready:
            now = Usage().add(candidate).add(tester).add_files(candidate, job["folder"])
            before = before or now
            started = started or (time.monotonic() if tester.is_ready else None)
            wall_seconds = time.monotonic() - started if started else 0.0
            if limit := exceeded_limit(job, now, before, wall_seconds):
                return {"ended": "failed", "reason": limit}
        if started is None and time.monotonic() - created > SETUP_TIMEOUT_SECONDS:
            return {"ended": "failed", "reason": f"the sandboxes did not start within {SETUP_TIMEOUT_SECONDS} s"}


def kill_all(pids: list[int], cgroup: str | None) -> None:
    """Kill the remaining processes, for a limited time. With process 1 of a pid namespace, all others in it die."""
    deadline = time.monotonic() + CLEANUP_TIMEOUT_SECONDS
    for pid in pids:
        os.kill(pid, signal.SIGKILL)  # first, because finding processes takes longer than creating new ones
    while time.monotonic() < deadline:
        for member in process_tree(os.getpid()):
            if member != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.002)
        except ChildProcessError:
            break
    if cgroup is not None:
        with contextlib.suppress(OSError):
            os.rmdir(cgroup)


def main() -> None:
    set_process_option(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    write("/proc/self/oom_score_adj", "1000")  # when memory runs out, the kernel kills programs first, not the worker
    os.umask(0o022)
    job = json.load(sys.stdin)
    cgroup = create_cgroup(job)
    output_reader, output_writer = os.pipe()
    (calls_reader, calls_writer), (replies_reader, replies_writer) = os.pipe(), os.pipe()
    shared: dict[str, Any] = {"output": output_writer, "cgroup": cgroup}
    candidate = start_sandbox(job, "candidate", reader=calls_reader, writer=replies_writer, **shared)
    tester = start_sandbox(job, "tester", reader=replies_reader, writer=calls_writer, **shared)
    for descriptor in (output_writer, calls_reader, calls_writer, replies_reader, replies_writer):
        os.close(descriptor)
    result = supervise(job, candidate, tester, output_reader)
    kill_all([candidate.pid, tester.pid], cgroup)
    json.dump(result, sys.stdout)

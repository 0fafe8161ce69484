"""Run generated programs in a sandbox built from kernel namespaces.

Restricting Python itself does not contain a program (`posix.system`, `importlib.reload(os)` and ctypes get around it):
each program gets a process in its own namespaces: no network, no other processes, no environment, a read-only system
without home directories, and limits on time, memory, processes, files and output.
"""

import functools
import json
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

SANDBOXES = ("namespaces", "bubblewrap")  # in order of preference
MAX_PROGRAM_CHARACTERS = 60_000  # longer than any answer we let a model write
MB = 1024 * 1024

PACKAGE_ROOT = Path(__file__).parents[1]
SUPERVISOR_CODE = "import sys; sys.path.insert(0, sys.argv[1]); from tasks.sandbox_supervisor import main; main()"
# Longer than the supervisor's own limits: it normally exits by itself.
SUPERVISOR_WALL_FACTOR, SUPERVISOR_SETUP_SECONDS = 6, 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a program may use. Time spent waiting for a busy core does not count towards `seconds`."""

    seconds: int = 10
    memory_bytes: int = 1024 * MB  # of all its processes together
    processes: int = 16
    file_bytes: int = 4 * MB
    folder_bytes: int = 16 * MB
    output_bytes: int = 1 * MB


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    passed: bool  # the program ran to its end without an exception
    reason: str = ""  # the exceeded limit, or the last line of output


class SandboxError(RuntimeError):
    """The sandbox could not be created; the program did not run."""


def run_program(program: str, *, kind: str, limits: Limits | None = None) -> ProgramResult:
    """Run `program` until it ends or exceeds a limit. `kind` is one of SANDBOXES, or "none" for limits alone."""
    if len(program) > MAX_PROGRAM_CHARACTERS:
        return ProgramResult(passed=False, reason=f"longer than {MAX_PROGRAM_CHARACTERS} characters")
    limits = limits or Limits()
    job = {"program": program, "sandbox": kind, "filter": seccomp_filter().hex(), "bwrap": shutil.which("bwrap")}
    job |= asdict(limits) | _interpreter_paths()
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        # A new session that inherits no environment, no descriptors and no working directory.
        supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SUPERVISOR_CODE, str(PACKAGE_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd=folder,
            start_new_session=True,
        )
        timeout_seconds = SUPERVISOR_WALL_FACTOR * limits.seconds + SUPERVISOR_SETUP_SECONDS
        try:
            output, errors = supervisor.communicate(json.dumps(job).encode(), timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(supervisor.pid, signal.SIGKILL)
            supervisor.communicate()
            raise SandboxError(f"the supervisor did not exit within {timeout_seconds} s") from None
    if supervisor.returncode != 0:
        raise SandboxError(errors.decode(errors="replace").strip().rpartition("\n")[2] or "the supervisor was killed")
    outcome = json.loads(output)
    if outcome["ended"] == "no sandbox":
        raise SandboxError(outcome["reason"])
    return ProgramResult(passed=outcome["ended"] == "passed", reason=outcome.get("reason", ""))


@functools.cache
def find_sandbox() -> str:
    """The first kind of sandbox that works on this machine; a SandboxError says why none does."""
    reasons = []
    for kind in SANDBOXES:
        if kind == "bubblewrap" and not shutil.which("bwrap"):
            reasons.append("bubblewrap: not installed")
            continue
        try:
            if run_program("assert 1 + 1 == 2", kind=kind).passed:
                return kind
            reasons.append(f"{kind}: a trivial program failed")
        except SandboxError as error:
            reasons.append(f"{kind}: {error}")
    raise SandboxError("; ".join(reasons))


@functools.cache
def _interpreter_paths() -> dict[str, object]:
    """The interpreter without its virtual environment, the environment's packages, and all paths these need."""
    python = os.path.realpath(sys.executable)
    packages = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    prefixes = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
    # Sorted: a directory comes before its contents, which are then visible already.
    visible = sorted(path for path in {python, *packages, *prefixes} if os.path.exists(path))
    return {"python": python, "packages": sorted(packages), "visible_paths": visible}


# The seccomp filter denies system calls that get around namespaces and limits: memory that no limit counts (SysV
# segments, memory files, io_uring, keys), sockets, signals to and memory of other processes, further namespaces.
DENIED_CALLS = (  # noqa: SIM905 - as in the manual
    "socket shmget msgget mq_open memfd_create memfd_secret io_uring_setup add_key request_key keyctl bpf "
    "perf_event_open userfaultfd ptrace process_vm_readv process_vm_writev unshare setns mount umount2 pivot_root "
    "kill pidfd_send_signal rt_sigqueueinfo"
).split()
MACHINES = {  # machine: (audit architecture, call numbers in the order of DENIED_CALLS)
    "x86_64": (
        0xC000003E,
        "41 29 68 240 319 447 425 248 249 250 321 298 323 101 310 311 272 308 165 166 155 62 424 129",
    ),
    "aarch64": (
        0xC00000B7,
        "198 194 186 180 279 447 425 217 218 219 280 241 282 117 270 271 97 268 40 39 41 129 424 138",
    ),
}
EPERM = 1
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_OFFSET, ARCHITECTURE_OFFSET = 0, 4
X32_CALL_BIT = 0x40000000  # x32 calls: the same machine code with other call numbers


def seccomp_filter() -> bytes:
    """The filter in the kernel's format; empty on machines whose call numbers are not listed."""
    if platform.machine() not in MACHINES:
        return b""
    architecture, listed = MACHINES[platform.machine()]
    numbers = [int(number) for number in listed.split()]
    assert len(numbers) == len(DENIED_CALLS)
    instructions = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_OFFSET),
        (JUMP_AT_LEAST, len(numbers) + 1, 0, X32_CALL_BIT),
        *((JUMP_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERROR | EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)

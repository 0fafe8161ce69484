"""Runs generated programs in a cage made by the kernel. Knows nothing of tasks, models or lm-eval.

Taking functions away from Python does not hold a program (`posix.system`, `importlib.reload(os)`, ctypes all lead
around it), so each one gets its own process in its own namespaces: no network, no other process to see, no
environment, a read-only system without homes, and limits on time, memory, processes, files and output.
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

ROOT = Path(__file__).parents[1]


LAUNCHER = "import sys; sys.path.insert(0, sys.argv[1]); from tasks.sandbox_supervisor import main; main()"


CAGES = ("namespaces", "bubblewrap")


MAX_PROGRAM = 60_000  # characters; longer than any answer we let a model write


MB = 1024 * 1024


PATIENCE, SETUP = 6, 120  # the launcher's own, and more: it ends by itself


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a program may use. Seconds are its own: waiting for a core that others hold does not count."""

    seconds: int = 10
    memory: int = 1024 * MB  # of all its processes together
    processes: int = 16
    file_size: int = 4 * MB
    folder_size: int = 16 * MB
    output: int = 1 * MB


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How a program ended: it ran to its end without an exception, or not."""

    passed: bool
    why: str = ""  # the limit it met or the last line it printed


class NoCage(RuntimeError):
    """This machine gave no cage; nothing was run."""


def run(program: str, *, cage: str, limits: Limits | None = None) -> Verdict:
    """Runs `program` to its end or its first excess. `cage` is one of CAGES, or "none" for limits alone."""
    if len(program) > MAX_PROGRAM:
        return Verdict(passed=False, why=f"longer than {MAX_PROGRAM} characters")
    limits = limits or Limits()
    order = {"program": program, "cage": cage, "filter": refusal_filter().hex(), "bwrap": shutil.which("bwrap")}
    order |= asdict(limits) | _interpreter()
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        # A session of its own and nothing inherited: no environment, no descriptors, not even a working folder.
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LAUNCHER, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd=folder,
            start_new_session=True,
        )
        try:
            answer, errors = process.communicate(json.dumps(order).encode(), timeout=PATIENCE * limits.seconds + SETUP)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise NoCage("its launcher did not come back") from None
    if process.returncode != 0:
        raise NoCage(errors.decode(errors="replace").strip().rpartition("\n")[2] or "its launcher was killed")
    verdict = json.loads(answer)
    if verdict["ended"] == "no cage":
        raise NoCage(verdict["why"])
    return Verdict(passed=verdict["ended"] == "passed", why=verdict.get("why", ""))


@functools.cache
def find_cage() -> str:
    """The first kind of cage in which a program starts here; NoCage says what stood against each."""
    reasons = []
    for cage in CAGES:
        if cage == "bubblewrap" and not shutil.which("bwrap"):
            reasons.append("bubblewrap: not installed")
            continue
        try:
            if run("assert 1 + 1 == 2", cage=cage).passed:
                return cage
            reasons.append(f"{cage}: a program that does nothing did not end well")
        except NoCage as error:
            reasons.append(f"{cage}: {error}")
    raise NoCage("; ".join(reasons))


@functools.cache
def _interpreter() -> dict[str, object]:
    """The interpreter without its virtual environment, and the packages of that environment, as plain paths."""
    python = os.path.realpath(sys.executable)
    packages = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    homes = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
    shown = sorted(path for path in {python, *packages, *homes} if os.path.exists(path))
    # A folder comes before what lies in it, and what lies in a folder that is shown needs no showing.
    return {"python": python, "packages": sorted(packages), "shown": shown}


EPERM = 1


LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06


ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000


NUMBER_OFFSET, ARCHITECTURE_OFFSET = 0, 4


FOREIGN = 0x40000000  # x32 calls: the same machine code under other numbers


# machine: (audit architecture, numbers in the order of NAMES)
NAMES = (  # noqa: SIM905 - as they stand in the manual
    "socket shmget msgget mq_open memfd_create memfd_secret io_uring_setup add_key request_key keyctl bpf "
    "perf_event_open userfaultfd ptrace process_vm_readv process_vm_writev unshare setns mount umount2 pivot_root "
    "kill pidfd_send_signal rt_sigqueueinfo"
).split()


MACHINES = {
    "x86_64": (
        0xC000003E,
        "41 29 68 240 319 447 425 248 249 250 321 298 323 101 310 311 272 308 165 166 155 62 424 129",
    ),
    "aarch64": (
        0xC00000B7,
        "198 194 186 180 279 447 425 217 218 219 280 241 282 117 270 271 97 268 40 39 41 129 424 138",
    ),
}


def refusal_filter() -> bytes:
    """The filter for this machine as the kernel reads it; empty where its call numbers are not known here."""
    if platform.machine() not in MACHINES:
        return b""
    architecture, listed = MACHINES[platform.machine()]
    numbers = [int(number) for number in listed.split()]
    assert len(numbers) == len(NAMES)
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_OFFSET),
        (JUMP_AT_LEAST, len(numbers) + 1, 0, FOREIGN),
        *((JUMP_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, ERROR | EPERM),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)

"""Runs generated programs in a cage made by the kernel. Knows nothing of tasks, models or lm-eval.

Taking functions away from Python does not hold a program (`posix.system`, `importlib.reload(os)`, ctypes all lead
around it), so each one gets its own process in its own namespaces: no network, no other process to see, no
environment, a read-only system without homes, and limits on time, memory, processes, files and output.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.syscalls import refusal_filter

ROOT = Path(__file__).parents[1]
LAUNCHER = "import sys; sys.path.insert(0, sys.argv[1]); from tasks.warden import main; main()"
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

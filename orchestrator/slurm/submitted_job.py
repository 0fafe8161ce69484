"""A submitted job: the commands that its batch script runs (free ports, waiting for nodes), and its status."""

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import sample
from typing import Any

from orchestrator.core.untrusted import name_problem
from orchestrator.running import environment
from orchestrator.store.files import CorruptedFile, open_regular, read_regular
from orchestrator.store.lock import STALE_SECONDS, active_writer
from orchestrator.store.reader import SLURM_FOLDER
from sampler.errors import InputError, counted

FIRST_PORT = 10_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_EPHEMERAL_START = 32_768
NODES_TIMEOUT_SECONDS = 120.0
LOCK_TIMEOUT_SECONDS = 1.5 * STALE_SECONDS
SQUEUE_TIMEOUT_SECONDS = 60
SQUEUE_FORMAT = "%i|%T|%M|%l|%D|%R"  # number, state, time used, limit, nodes, reason or node list
SQUEUE_LINE = re.compile(r"([0-9]+)\|(.*)")


def free_ports(count: int) -> list[int]:
    """Free ports below the kernel's ephemeral range, for servers that need a fixed port.

    Most processes of a starting Ray take an ephemeral port, and could take one of these before its server is up. Ports
    are chosen at random: jobs that share a node would otherwise choose the same ones.
    """
    end = _ephemeral_start()
    found: list[int] = []
    with ExitStack() as held:
        for port in sample(range(FIRST_PORT, end), end - FIRST_PORT):
            if len(found) == count:
                break
            try:
                held.enter_context(socket.create_server(("", port)))
            except OSError:  # in use
                continue
            found.append(port)
    if len(found) < count:
        raise InputError(f"{len(found)} of the ports {FIRST_PORT} to {end - 1} are free and {count} are needed")
    return found


def _ephemeral_start() -> int:
    """Start of the kernel's ephemeral range, if that leaves enough ports below it."""
    try:
        start = int(EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
    except OSError:
        return USUAL_EPHEMERAL_START
    return max(start, 2 * FIRST_PORT)


def wait_until_ready(address: str, nodes: int, folder: Path) -> None:
    """Waits, for a limited time, until all nodes have joined and no other process writes to the sweep's directory.

    A sweep can start with one node, but it is planned for the nodes that are present. A previous job that was killed on
    another machine may look alive in the directory for a minute.
    """
    environment.prepare(local=False)
    import ray  # after the environment is prepared: Ray reads it at import

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    _wait_until(lambda: _alive(ray.nodes()) >= nodes, NODES_TIMEOUT_SECONDS)
    print(f"Ray on {_alive(ray.nodes())} of {counted(nodes, 'node')}", flush=True)
    ray.shutdown()
    _wait_until(lambda: active_writer(folder) is None, LOCK_TIMEOUT_SECONDS)


def _wait_until(reached: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not reached() and time.monotonic() < until:
        time.sleep(1)


def _alive(nodes: list[dict[str, Any]]) -> int:
    return sum(bool(node["Alive"]) for node in nodes)


# Status


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmittedJob:
    """A script that was submitted to Slurm."""

    script: Path
    job: str
    at: str

    @property
    def log(self) -> Path:
        return self.script.with_name(f"{self.script.stem}-{self.job}.log")


def submitted_jobs(folder: Path) -> list[SubmittedJob]:
    found = []
    for path in sorted((folder / SLURM_FOLDER).glob("*.json")):
        try:
            record = json.loads(read_regular(path))
            job = SubmittedJob(script=path.with_suffix(".sh"), job=str(record["job"]), at=str(record["submitted"]))
        except (OSError, CorruptedFile, ValueError, KeyError, TypeError, RecursionError):  # being written, or another
            continue
        if name_problem(job.log.name) is None:
            found.append(job)
    return found


def query_squeue(jobs: list[str]) -> Mapping[str, str] | None:
    """What squeue prints for the jobs that it still knows; None if it cannot be run."""
    if shutil.which("squeue") is None:
        return None
    command = ["squeue", "--noheader", f"--format={SQUEUE_FORMAT}", "--me", "--states=all"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    if ended.returncode:
        return None
    known = {found[1]: found[2] for line in ended.stdout.splitlines() if (found := SQUEUE_LINE.fullmatch(line.strip()))}
    return {job: known[job] for job in jobs if job in known}


def status_lines(jobs: list[SubmittedJob], known: Mapping[str, str] | None) -> Iterator[str]:
    for job in jobs:
        yield f"job {job.job}, submitted {job.at}: {_state(job, known)}"
        if job.log.exists():
            yield f"  {job.log}: {_last_line(job.log)}"


def _state(job: SubmittedJob, known: Mapping[str, str] | None) -> str:
    if known is None:
        return "squeue cannot be run here"
    if job.job not in known:
        return "no longer in the queue"
    state, time, limit, nodes, why = (known[job.job].split("|", 4) + [""] * 5)[:5]
    return f"{state.lower()}, {time} of {limit}, {nodes} node{'s' * (nodes != '1')} {why}".rstrip()


def _last_line(log: Path) -> str:
    """The last non-empty line, from the last 4000 bytes."""
    try:
        with open_regular(log) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4000))
            text = file.read().decode(errors="replace").splitlines()
    except (OSError, CorruptedFile) as error:
        return f"cannot be read ({error})"
    return next((line.strip() for line in reversed(text) if line.strip()), "empty")

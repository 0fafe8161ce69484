"""The state of a sweep's Slurm jobs, from the records of `submit`, squeue and the jobs' logs."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.core.untrusted import name_problem
from orchestrator.store.files import CorruptedFile, open_regular, read_regular
from orchestrator.store.reader import SLURM_FOLDER

SQUEUE_TIMEOUT_SECONDS = 60
SQUEUE_FORMAT = "%i|%T|%M|%l|%D|%R"  # number, state, time used, limit, nodes, reason or node list
SQUEUE_LINE = re.compile(r"([0-9]+)\|(.*)")


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
    return f"{state.lower()}, {time} of {limit}, {nodes} nodes {why}".rstrip()


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

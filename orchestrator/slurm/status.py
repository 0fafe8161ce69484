"""How a sweep's jobs stand: what Slurm says of them, and behind that the sweep's own folder. Changes nothing."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.status import show
from orchestrator.store import folder_checks
from orchestrator.watching.overview import look
from sampler.errors import InputError

SECONDS_TO_ANSWER = 60
FIELDS = "%i|%T|%M|%l|%D|%R"  # number, state, time, limit, nodes, why it waits or where it runs
ANSWER = re.compile(r"([0-9]+)\|(.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A script that was handed to Slurm."""

    script: Path
    job: str
    at: str

    @property
    def log(self) -> Path:
        return self.script.with_name(f"{self.script.stem}-{self.job}.log")


def print_status(folder: Path) -> None:
    jobs = submitted(folder)
    if not jobs:
        raise InputError(
            f"{folder} has no job of Slurm's: name the folder of a sweep that was submitted, such as results/x"
        )
    print(*lines(jobs, queue([job.job for job in jobs])), "", sep="\n")
    if folder_checks.read_request(folder) is None:
        print("the sweep has not begun")
        return
    overview = look(folder)
    show(overview, overview.damage)


def submitted(folder: Path) -> list[Submitted]:
    found = []
    for path in sorted((folder / folder_checks.SLURM).glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            found.append(Submitted(script=path.with_suffix(".sh"), job=str(record["job"]), at=str(record["submitted"])))
        except (OSError, ValueError, KeyError, TypeError):  # being written, or not ours
            continue
    return found


def queue(jobs: list[str]) -> Mapping[str, str] | None:
    """What squeue says of those it still knows; None where it cannot be asked."""
    if shutil.which("squeue") is None:
        return None
    asked = ["squeue", "--noheader", f"--format={FIELDS}", "--me", "--states=all"]
    try:
        ended = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER, check=False)
    except subprocess.TimeoutExpired:
        return None
    if ended.returncode:
        return None
    known = {found[1]: found[2] for line in ended.stdout.splitlines() if (found := ANSWER.fullmatch(line.strip()))}
    return {job: known[job] for job in jobs if job in known}


def lines(jobs: list[Submitted], known: Mapping[str, str] | None) -> Iterator[str]:
    for job in jobs:
        yield f"job {job.job}, submitted {job.at}: {_state(job, known)}"
        if job.log.exists():
            yield f"  {job.log}: {_last_line(job.log)}"


def _state(job: Submitted, known: Mapping[str, str] | None) -> str:
    if known is None:
        return "squeue cannot be asked here"
    if job.job not in known:
        return "no longer in the queue"
    state, time, limit, nodes, why = (known[job.job].split("|", 4) + [""] * 5)[:5]
    return f"{state.lower()}, {time} of {limit}, {nodes} nodes {why}".rstrip()


def _last_line(log: Path) -> str:
    """Of the last few thousand bytes: logs may be long."""
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 4000))
        said = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(said) if line.strip()), "empty")

"""Writes a sweep's batch script into its folder and hands it to sbatch. Knows nothing of Ray."""

import json
import re
import shlex
import shutil
import subprocess
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from orchestrator.slurm.flags import Submission
from orchestrator.slurm.foresee import foresee
from orchestrator.slurm.job import seconds
from orchestrator.slurm.script import directives_of, script_of
from orchestrator.store import Store, folder_checks
from sampler.errors import InputError

SECONDS_TO_ANSWER = 120
NUMBER = re.compile(r"([0-9]+)\.sh")


def submit(submission: Submission) -> str:
    """What there is to tell."""
    if not submission.dry_run and shutil.which("sbatch") is None:
        raise InputError(
            "sbatch is not on the path: submit where Slurm's commands are, or see the script with --dry-run"
        )
    foresee(submission.settings, submission.machine, Store(submission.folder).read_request())
    if submission.dry_run:
        return _script(submission, submission.folder / folder_checks.SLURM / "001.sh")
    path = _new_script(submission)
    job_id = _sbatch(path, submission)
    record = {"job": job_id, "submitted": datetime.now(UTC).isoformat(timespec="seconds")}
    path.with_suffix(".json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    log = path.with_name(f"{path.stem}-{job_id}.log")
    status = f"python -m orchestrator.slurm status {shlex.quote(str(submission.folder))}"
    most = timedelta(seconds=seconds(submission.job.time))  # 12:00 are minutes, which not everybody knows
    return f"job {job_id}; its log: {log}\nit may take {most} (h:min:s) at a time; how it stands: {status}"


def _script(submission: Submission, path: Path) -> str:
    return script_of(
        submission.job,
        submission.arguments,
        name=submission.name,
        path=path,
        here=Path.cwd(),
        dashboard=submission.settings.dashboard,
    )


def _new_script(submission: Submission) -> Path:
    """The next number that nobody has."""
    folder = submission.folder / folder_checks.SLURM
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [int(found[1]) for path in folder.iterdir() if (found := NUMBER.fullmatch(path.name))]
        path = folder / f"{max(taken, default=0) + 1:03d}.sh"
        with path.open("x", encoding="utf-8") as file:
            file.write(_script(submission, path))
    except OSError as error:
        raise InputError(f"{folder} cannot be written to: {error.strerror}; name another --out") from None
    return path


def _sbatch(path: Path, submission: Submission) -> str:
    """The job's number; of what was refused nothing is kept."""
    # The script says it all; told again, nobody's SBATCH_PARTITION and the like come before what was asked for.
    told = directives_of(submission.job, name=submission.name, path=path, here=Path.cwd())
    command = ["sbatch", "--parsable", *(f"--{directive}" for directive in told), str(path)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"sbatch gave no answer in {SECONDS_TO_ANSWER} s; is Slurm running here?") from None
    if ended.returncode:
        path.unlink()
        with suppress(OSError):  # somebody else's files are in them
            path.parent.rmdir()
            submission.folder.rmdir()
        asked = " ".join(f"--{flag}" for flag in submission.job.directives())
        raise InputError(f"Slurm refuses the job: {_reason(ended.stderr)} (asked for: {asked})")
    return ended.stdout.strip().partition(";")[0]


def _reason(said: str) -> str:
    """sbatch's own words, the last ones, without its prefixes."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["no reason given"]
    return lines[-1].removeprefix("sbatch: ").removeprefix("error: ").removeprefix("Batch job submission failed: ")

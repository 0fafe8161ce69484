"""`reuse-sweep slurm`: submits a sweep to Slurm, and shows the status of its jobs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.console import Parser, parse_options, parse_values, say
from orchestrator.cli.sweep import parse_sweep
from orchestrator.planning.fields import setting, settings_of
from orchestrator.slurm.job import (
    UNSAFE,
    Job,
    free_ports,
    parse_gpus,
    query_squeue,
    status_lines,
    submitted_jobs,
    wait_until_ready,
)
from sampler.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from orchestrator.slurm.submit import Submission

USAGE = """usage: reuse-sweep slurm submit --nodes N --time T [flags] -- FLAGS_OF_THE_SWEEP
       reuse-sweep slurm status DIR

example:
  reuse-sweep slurm submit --nodes 4 --gpus-per-node 2 --time 12:00:00 -- --tasks gsm8k

See submit --help and status --help."""
SUBMIT_EXAMPLES = """examples:
  reuse-sweep slurm submit --nodes 4 --gpus-per-node a100:2 --time 12:00:00 -- --tasks gsm8k,mmlu
  reuse-sweep slurm submit --nodes 2 --gpus-per-node 8 --time 2-00 --account a --partition gpu --requeue \\
      --setup modules.sh --sbatch mail-type=END --sbatch exclusive -- --config sweep.yaml --name full
  reuse-sweep slurm submit --nodes 2 --gpus-per-node 4 --time 12:00:00 --container reuse-sweep.sif \\
      -- --tasks gsm8k
  reuse-sweep slurm submit --nodes 1 --time 30 --dry-run -- --tasks gsm8k --model tiny
The flags after -- are those of `reuse-sweep sweep`. Submit the same command again to continue the sweep. Several jobs
of one sweep wait for each other, and each continues where the one before it stopped. The job gets the environment of
this shell, including HF_TOKEN, and the token of Ray's dashboard, which is created in ~/.ray/auth_token if needed.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitOptions:
    """Flags of a submission in addition to those of the job."""

    gpus_per_node: str | None = setting(
        None, metavar="[TYPE:]N", default_text="0", help="GPUs per node, such as 4 or a100:4"
    )
    dry_run: bool = setting(False, help="print the plan and the batch script, and submit nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatusOptions:
    folder: Path = setting(positional=True, metavar="DIR", help="directory of a sweep, such as results/demo")


def slurm(arguments: Sequence[str]) -> None:
    """Runs submit or status; the batch script also calls free-ports and wait-until-ready."""
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
    elif command == "submit":
        submission = parse_submission(rest)
        from orchestrator.slurm.submit import submit

        print(submit(submission))
    elif command == "status":
        print_job_status(_status_folder(rest))
    elif command == "free-ports" and len(rest) == 1 and rest[0].isdecimal():
        print(*free_ports(int(rest[0])))
    elif command == "wait-until-ready" and len(rest) == 3 and rest[1].isdecimal():
        wait_until_ready(rest[0], int(rest[1]), Path(rest[2]))
    elif command in ("free-ports", "wait-until-ready"):
        raise InputError(f"slurm {command} is for the batch script, which calls it with other arguments")
    else:
        hint = did_you_mean(command, ["submit", "status"], otherwise="use submit or status, see --help")
        raise InputError(f"unknown command {f'slurm {command}'!r}; {hint}")


def parse_submission(arguments: Sequence[str]) -> "Submission":
    """Parses the flags of the job and, after --, those of the sweep. Checks both now, not when the job starts."""
    job_flags, sweep_flags = _split(arguments)
    parser = Parser(
        prog="reuse-sweep slurm submit",
        description="Submits a sweep to Slurm as one job. Its nodes form a Ray cluster while the job runs.",
        examples=SUBMIT_EXAMPLES,
    )
    parser.usage = f"{parser.prog} --nodes N --time T [flags] -- FLAGS_OF_THE_SWEEP"
    values = parse_values(parser, {**settings_of(Job), **settings_of(SubmitOptions)}, job_flags)
    options = SubmitOptions(**{name: values.pop(name) for name in settings_of(SubmitOptions)})
    count, gpu_type = parse_gpus(options.gpus_per_node or "0")
    job = Job(**values, gpus_per_node=count, gpu_type=gpu_type)
    from orchestrator.planning.machine import SLURM_ADDRESS, place
    from orchestrator.planning.preflight import sweep_folder
    from orchestrator.slurm.submit import Submission, check_gpus_requested, job_machine

    machine = job_machine(job)
    command = parse_sweep(sweep_flags)
    if command.settings.address is not None:
        raise InputError("--address must not be used with Slurm: the job starts its own Ray cluster")
    if command.dry_run:
        raise InputError("--dry-run must come before the --: it prints the batch script without submitting it")
    if command.force is not None and job.requeue:
        raise InputError("--force and --requeue must not be used together: every requeue would start over")
    if options.gpus_per_node is None:
        check_gpus_requested(command.settings.model, job.partition)
    settings = replace(command.settings, address=SLURM_ADDRESS)
    place(settings, machine)
    submission = Submission(
        job=job,
        settings=settings,
        arguments=tuple(sweep_flags),
        folder=sweep_folder(settings, machine),
        dry_run=options.dry_run,
    )
    for problem in _path_problems(submission):
        raise InputError(problem)
    return submission


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments and not {"-h", "--help"} & set(arguments):
        raise InputError("the flags of the sweep are missing: add them after --, for example -- --tasks gsm8k")
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


def _path_problems(submission: "Submission") -> Iterator[str]:
    for label, path in (("--out", submission.folder), ("the working directory", Path.cwd())):
        if UNSAFE.search(str(path)):
            yield f"{label} must be a path without %, double quotes and backslashes on Slurm (got {str(path)!r})"
    for path in submission.binds if submission.job.container is not None else ():
        if any(character in str(path) for character in ":,"):
            yield f"--container needs paths without colons and commas, which Apptainer cannot bind (got {str(path)!r})"


def _status_folder(arguments: Sequence[str]) -> Path:
    parser = Parser(
        prog="reuse-sweep slurm status",
        description="Shows the state of a sweep's Slurm jobs, and of the sweep.",
        examples="example:\n  reuse-sweep slurm status results/demo",
    )
    return parse_options(parser, JobStatusOptions, arguments).folder


def print_job_status(folder: Path) -> None:
    from orchestrator.cli.reports import print_status
    from orchestrator.progress.status import read_status
    from orchestrator.store import Store

    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory: give the directory of a submitted sweep, such as results/demo")
    jobs = submitted_jobs(folder)
    if not jobs:
        raise InputError(f"{folder} has no Slurm jobs: give the directory of a submitted sweep, such as results/demo")
    say(*status_lines(jobs, query_squeue([job.number for job in jobs])), "", sep="\n")
    if Store(folder).read_sweep_record() is None:
        print("the sweep has not started yet")
        return
    print_status(read_status(folder))

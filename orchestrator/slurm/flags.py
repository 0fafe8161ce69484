"""The command line of a submission: Slurm's part, then -- and the sweep's own flags. Submits nothing."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.planning import flags as sweep_flags
from orchestrator.planning import values
from orchestrator.planning.machine import Machine, Nodes, place
from orchestrator.planning.preflight import sweep_folder
from orchestrator.planning.settings import SweepSettings
from orchestrator.slurm.job import UNSAFE, Job
from sampler.cli import Parser
from sampler.errors import InputError

EXAMPLES = """examples:
  python -m orchestrator.slurm submit --nodes 4 --gpus-per-node 2 --time 12:00:00 -- --tasks gsm8k,mmlu
  python -m orchestrator.slurm submit --nodes 2 --gpus-per-node 8 --time 2-00 --account a --partition gpu --requeue \\
      --setup modules.sh -- --config sweep.yaml --name full
  python -m orchestrator.slurm submit --nodes 1 --time 30 --dry-run -- --tasks gsm8k --model tiny
Behind -- stand the flags of python -m orchestrator.sweep. The same command again continues the sweep; so does the next
of several jobs submitted at once, which wait for each other. HF_TOKEN and the rest of the environment go with the job.
"""
READERS = {
    "nodes": values.whole,
    "time": values.text,
    "gpus_per_node": values.whole,
    "cpus_per_node": values.whole,
    "account": values.text,
    "partition": values.text,
    "qos": values.text,
    "constraint": values.text,
    "mem": values.text,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job, the sweep it runs, and where that lies."""

    job: Job
    settings: SweepSettings
    arguments: tuple[str, ...]  # the sweep's, as typed
    folder: Path
    dry_run: bool

    @property
    def machine(self) -> Machine:
        """What the job will have."""
        return _machine(self.job)

    @property
    def name(self) -> str:
        """Of the job: one for each folder, so that jobs of one sweep wait for each other."""
        return f"{self.folder.name}-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:6]}"


def parse(arguments: Sequence[str]) -> Submission:
    ours, theirs = _split(arguments)
    given = vars(_parser().parse_args(ours))
    dry_run, requeue, setup = (given.pop(name) for name in ("dry_run", "requeue", "setup"))
    read: dict[str, Any] = {
        name: READERS[name](f"--{name.replace('_', '-')}", raw) for name, raw in given.items() if raw is not None
    }
    job = Job(**read, requeue=requeue, setup=None if setup is None else Path(setup))
    settings = _settings(theirs, job)
    folder = sweep_folder(settings, _machine(job))
    for label, path in (("--out", folder), ("the working directory", Path.cwd())):
        if UNSAFE.search(str(path)):
            raise InputError(f"{label} {str(path)!r}: a path without %, quotes and backslashes is allowed on Slurm")
    return Submission(job=job, settings=settings, arguments=tuple(theirs), folder=folder, dry_run=dry_run)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments and not {"-h", "--help"} & set(arguments):
        raise InputError(
            "the sweep's flags are missing: -- and, for instance, --tasks gsm8k have to follow (see --help)"
        )
    place_of = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:place_of]), list(arguments[place_of + 1 :])


def _settings(arguments: Sequence[str], job: Job) -> SweepSettings:
    """Checked as far as that goes without a model: nobody should wait in a queue to hear of a typing error."""
    command = sweep_flags.parse(arguments)
    if command.settings.address is not None:
        raise InputError("--address names a Ray cluster; on Slurm each job starts its own, so leave it out")
    if command.dry_run:
        raise InputError(
            "--dry-run belongs before the --: it shows the script; what a sweep would do, the sweep itself says"
        )
    if command.force is not None and job.requeue:
        raise InputError("--force with --requeue would run everything again each time: leave one of them out")
    settings = replace(command.settings, address="slurm")
    place(settings, _machine(job))
    return settings


def _machine(job: Job) -> Machine:
    resources = {"CPU": job.cpus, "GPU": job.gpus_per_node}
    return Machine(nodes=(Nodes(resources=resources, count=job.nodes),), names_all=False)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m orchestrator.slurm submit",
        description="Submits a sweep to Slurm: one job whose nodes form a Ray cluster for as long as it runs.",
        examples=EXAMPLES,
    )
    parser.usage = f"{parser.prog} --nodes N --time T [flags] -- <flags of the sweep>"
    parser.add_argument("--nodes", metavar="N", required=True, help="machines; each runs as many actors as fit")
    parser.add_argument(
        "--time", metavar="T", required=True, help="most time, as 12:00:00 or 2-00; the next job goes on"
    )
    parser.add_argument("--gpus-per-node", metavar="N", help="GPUs of each (default: 0)")
    parser.add_argument("--cpus-per-node", metavar="N", help="cores of each (default: 2 for each GPU, else 1)")
    parser.add_argument("--mem", metavar="M", help="memory of each, such as 64G")
    for name in ("account", "partition", "qos", "constraint"):
        parser.add_argument(f"--{name}", metavar="X", help="as sbatch has it")
    parser.add_argument("--setup", metavar="FILE", help="shell commands run first: modules, an environment, PYTHON=…")
    parser.add_argument("--requeue", action="store_true", help="continue by itself when the time is over")
    parser.add_argument("--dry-run", action="store_true", help="only print the script")
    return parser

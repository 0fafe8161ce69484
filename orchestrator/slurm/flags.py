"""The command line of a submission: options of the Slurm job, then -- and the flags of the sweep."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.planning import flags as sweep_flags
from orchestrator.planning import values
from orchestrator.planning.machine import Machine, Nodes, place
from orchestrator.planning.preflight import sweep_folder
from orchestrator.planning.settings import SweepSettings
from orchestrator.slurm.job import UNSAFE, Job, parse_gpus
from sampler.cli import Parser
from sampler.errors import InputError

EXAMPLES = """examples:
  python -m orchestrator.slurm submit --nodes 4 --gpus-per-node a100:2 --time 12:00:00 -- --tasks gsm8k,mmlu
  python -m orchestrator.slurm submit --nodes 2 --gpus-per-node 8 --time 2-00 --account a --partition gpu --requeue \\
      --setup modules.sh --sbatch mail-type=END --sbatch exclusive -- --config sweep.yaml --name full
  python -m orchestrator.slurm submit --nodes 2 --gpus-per-node 4 --time 12:00:00 --container reuse-sweep.sif \\
      -- --tasks gsm8k
  python -m orchestrator.slurm submit --nodes 1 --time 30 --dry-run -- --tasks gsm8k --model tiny
The flags after -- are those of python -m orchestrator.sweep. The same command again continues the sweep. Several jobs
of one sweep wait for each other, and each continues where the one before it stopped. The job gets the environment of
this shell, including HF_TOKEN, and the token of Ray's dashboard, which is created in ~/.ray/auth_token if needed.
"""
READERS = {
    "nodes": values.whole,
    "time": values.text,
    "cpus_per_node": values.whole,
    "account": values.text,
    "partition": values.text,
    "qos": values.text,
    "constraint": values.text,
    "mem": values.text,
    "container": values.text,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job, the sweep it runs, and the directory of that sweep."""

    job: Job
    settings: SweepSettings
    arguments: tuple[str, ...]  # of the sweep, as typed
    folder: Path
    dry_run: bool

    @property
    def machine(self) -> Machine:
        """The resources of the job."""
        return _machine(self.job)

    @property
    def name(self) -> str:
        """Name of the job: one per sweep directory, so that jobs of one sweep wait for each other."""
        return f"{self.folder.name}-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:6]}"

    @property
    def binds(self) -> tuple[Path, ...]:
        """Paths that a container needs: the working directory, the sweep's directory, and paths among its flags."""
        here = Path.cwd()
        named = [self.settings.model, self.settings.data, *(word.split("=", 1)[-1] for word in self.arguments)]
        paths = [os.path.abspath(os.path.expanduser(word)) for word in named if word]
        wanted = [here, self.folder, *(Path(path) for path in paths if os.path.exists(path) and path != "/")]
        return tuple(path for path in dict.fromkeys(wanted) if not any(other in path.parents for other in wanted))


def parse(arguments: Sequence[str]) -> Submission:
    ours, theirs = _split(arguments)
    given = vars(_parser().parse_args(ours))
    dry_run, requeue, setup, sbatch, gpus = (
        given.pop(name) for name in ("dry_run", "requeue", "setup", "sbatch", "gpus_per_node")
    )
    read: dict[str, Any] = {
        name: READERS[name](f"--{name.replace('_', '-')}", raw) for name, raw in given.items() if raw is not None
    }
    count, gpu_type = (0, None) if gpus is None else parse_gpus(gpus)
    job = Job(
        **read,
        gpus_per_node=count,
        gpu_type=gpu_type,
        requeue=requeue,
        setup=None if setup is None else Path(setup),
        sbatch=tuple(sbatch or ()),
    )
    settings = _settings(theirs, job)
    folder = sweep_folder(settings, _machine(job))
    made = Submission(job=job, settings=settings, arguments=tuple(theirs), folder=folder, dry_run=dry_run)
    for problem in _path_problems(made):
        raise InputError(problem)
    return made


def _path_problems(made: Submission) -> Iterator[str]:
    for label, path in (("--out", made.folder), ("the working directory", Path.cwd())):
        if UNSAFE.search(str(path)):
            yield f"{label} must be a path without %, double quotes and backslashes on Slurm (got {str(path)!r})"
    for path in made.binds if made.job.container is not None else ():
        if any(character in str(path) for character in ":,"):
            yield f"--container needs paths without colons and commas, which Apptainer cannot bind (got {str(path)!r})"


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments and not {"-h", "--help"} & set(arguments):
        raise InputError(
            "the sweep's flags are missing: add -- and its flags, for example -- --tasks gsm8k (see --help)"
        )
    place_of = list(arguments).index("--") if "--" in arguments else len(arguments)
    return list(arguments[:place_of]), list(arguments[place_of + 1 :])


def _settings(arguments: Sequence[str], job: Job) -> SweepSettings:
    """The sweep's settings, checked as far as possible without its model: typos fail here, not after the queue."""
    command = sweep_flags.parse(arguments)
    if command.settings.address is not None:
        raise InputError("--address names a running Ray cluster, but a Slurm job starts its own: leave it out")
    if command.dry_run:
        raise InputError("--dry-run must come before the --: it prints the batch script without submitting it")
    if command.force is not None and job.requeue:
        raise InputError("--force with --requeue would start over after every requeue: leave one of them out")
    settings = replace(command.settings, address="slurm")
    place(settings, _machine(job))
    return settings


def _machine(job: Job) -> Machine:
    resources = {"CPU": job.cpus, "GPU": job.gpus_per_node}
    return Machine(nodes=(Nodes(resources=resources, count=job.nodes),), names_all=False)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m orchestrator.slurm submit",
        description="Submits a sweep to Slurm as one job. Its nodes form a Ray cluster while the job runs.",
        examples=EXAMPLES,
    )
    parser.usage = f"{parser.prog} --nodes N --time T [flags] -- <flags of the sweep>"
    parser.add_argument("--nodes", metavar="N", required=True, help="number of nodes; each runs as many actors as fit")
    parser.add_argument(
        "--time", metavar="T", required=True, help="time limit, such as 12:00:00 or 2-00; the next job continues"
    )
    parser.add_argument("--gpus-per-node", metavar="[TYPE:]N", help="GPUs per node, such as 4 or a100:4 (default: 0)")
    parser.add_argument("--cpus-per-node", metavar="N", help="cores per node (default: 2 per GPU, or 1)")
    parser.add_argument("--mem", metavar="M", help="memory per node, such as 64G")
    for name in ("account", "partition", "qos", "constraint"):
        parser.add_argument(f"--{name}", metavar="X", help=f"passed to sbatch as --{name}")
    parser.add_argument(
        "--sbatch",
        metavar="KEY[=VALUE]",
        action="append",
        help="any other sbatch option, such as reservation=R or exclusive (repeatable)",
    )
    parser.add_argument(
        "--setup",
        metavar="FILE",
        help="shell commands to source first: load modules, activate an environment, PYTHON=…",
    )
    parser.add_argument(
        "--container",
        metavar="IMAGE",
        help="run every Python process in this image with Apptainer: a .sif file or a URI",
    )
    parser.add_argument("--requeue", action="store_true", help="requeue the job when its time is over, and continue")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script and submit nothing")
    return parser

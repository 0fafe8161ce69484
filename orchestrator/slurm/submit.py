"""Writes the batch script of a sweep to the sweep's directory and submits it with sbatch."""

import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from orchestrator.core.system import ANY_GPU, GPU_PROFILES, command_output, format_bytes
from orchestrator.core.untrusted import path_below
from orchestrator.planning.forecast import describe_plan
from orchestrator.planning.machine import Machine, Nodes, resolve_model
from orchestrator.planning.preflight import prepare
from orchestrator.planning.prepared import PreparedSweep
from orchestrator.planning.settings import SweepSettings
from orchestrator.planning.sweep_record import SweepRecord, adopt_resolved
from orchestrator.running.environment import (
    MAX_TEMPORARY_CHARACTERS,
    OBJECT_STORE_BYTES,
    RAY_DIRECTORY,
    RAY_VARIABLES,
    private_token,
    token_path,
)
from orchestrator.slurm.job import Job, parse_time_limit
from orchestrator.store import Store
from orchestrator.store.reader import SLURM_FOLDER
from sampler.config import BUNDLED_MODEL, KNOWN_CHECKPOINTS
from sampler.errors import InputError, Problems
from sampler.loading import find_model
from tasks.documents import resolve_data
from tasks.lookup import find_task_spec
from tasks.sources import choose_source

SBATCH_TIMEOUT_SECONDS = 120
SCRIPT_NAME = re.compile(r"([0-9]+)\.sh")
GRES_GPU = re.compile(r"\bgpu:(?:([A-Za-z][\w.-]*):)?([0-9]+)")  # gpu:4, gpu:a100:4(S:0-1)
HOST_BYTES_PER_GPU = 6 * 10**9  # of an actor: Python, torch with CUDA and, while it loads, the largest tensors
HOST_BYTES_OF_RAY = 4 * 10**9  # driver, result actor and Ray's own processes
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?(@.+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job and the sweep it runs. Created from the command line, read by `submit`."""

    job: Job
    settings: SweepSettings
    arguments: tuple[str, ...]  # of the sweep, as typed
    folder: Path
    dry_run: bool

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


def job_machine(job: Job) -> Machine:
    """The resources of a job."""
    resources = {"CPU": job.cpus, "GPU": job.gpus_per_node}
    return Machine(nodes=(Nodes(resources=resources, count=job.nodes),), names_all=False)


def check_gpus_requested(model: str, partition: str | None) -> None:
    """For a job without --gpus-per-node: only the bundled model may run without GPUs on a cluster that has some."""
    listed = command_output(
        ["sinfo", "--noheader", "--format=%G", *([f"--partition={partition}"] if partition else [])]
    )
    gpus = list(dict.fromkeys(GRES_GPU.findall(listed or "")))
    if gpus and model != BUNDLED_MODEL:
        each = [f"{kind}:{count}" if kind else count for kind, count in gpus]
        raise InputError(
            f"--gpus-per-node is missing, and this cluster has GPUs ({', '.join(each)} per node): add for example "
            f"--gpus-per-node {each[0]}, or --gpus-per-node 0 --model tiny to run the bundled model on CPUs"
        )


def submit(submission: Submission) -> str:
    """Submits the job and returns the message for the user; with --dry-run, the script with the plan at its top."""
    if not submission.dry_run and shutil.which("sbatch") is None:
        raise InputError(
            "sbatch is not on the path: submit on a machine with Slurm's commands, or print the script with --dry-run"
        )
    stored = Store(submission.folder).read_sweep_record()
    prepared = check_sweep(submission.settings, job_machine(submission.job), stored)
    if submission.dry_run:
        shebang, _, script = _script(submission, submission.folder / SLURM_FOLDER / "001.sh").partition("\n")
        return "\n".join([shebang, *(f"# {line}" for line in plan_lines(submission, prepared)), script])
    token = token_environment()
    path = _new_script(submission)
    job_id = _sbatch(path, submission, token)
    record = {"job": job_id, "submitted": datetime.now(UTC).isoformat(timespec="seconds")}
    path.with_suffix(".json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    log = path.with_name(f"{path.stem}-{job_id}.log")
    status = f"reuse-sweep slurm status {shlex.quote(str(submission.folder))}"
    limit = timedelta(seconds=parse_time_limit(submission.job.time))  # spelled out: 12:00 means minutes
    return f"job {job_id}; its log: {log}\ntime limit {limit} (h:min:s); status: {status}"


def plan_lines(submission: Submission, prepared: PreparedSweep | None) -> list[str]:
    """The plan of the job: hours, and memory of devices and nodes. Reads nothing from the Hub."""
    job, machine = submission.job, job_machine(submission.job)
    if prepared is None:
        model = resolve_model(submission.settings.model, machine, submission.settings.address)
        if model.partition("@")[0] not in KNOWN_CHECKPOINTS or not job.gpus_per_node:
            return [f"no estimate for {model}: only the known checkpoints on GPUs are planned without their files"]
        profile = next(
            (known for name, known in GPU_PROFILES.items() if name.startswith((job.gpu_type or "-").lower())), None
        )
        try:
            prepared = prepare(submission.settings, machine.with_profile(profile or ANY_GPU))
        except InputError as error:
            return [f"no estimate: {error}"]
    needed = _host_memory(prepared, job.nodes)
    return [
        *describe_plan(prepared),
        f"--time     {timedelta(seconds=parse_time_limit(job.time))} (h:min:s)"
        + ("" if job.requeue else "; --requeue continues a longer sweep by itself"),
        f"--mem      {job.mem or 'not given'}; a node needs about {format_bytes(needed)}: --mem {-(-needed // 2**30)}G",
    ]


def _host_memory(prepared: PreparedSweep, nodes: int) -> int:
    """Memory in bytes that the first node needs; it needs the most, because it also runs the driver."""
    placement = prepared.placement
    actors = -(-placement.actors // nodes)
    each = HOST_BYTES_PER_GPU * placement.gpus_per_actor if placement.gpus_per_actor else prepared.memory
    return round(actors * each) + OBJECT_STORE_BYTES + HOST_BYTES_OF_RAY


def token_environment() -> dict[str, str]:
    """Environment variables that pass Ray's token to the job. Ray's dashboard and all of its processes require it.

    A file would not do: nodes may not have the submitting host's home directory. The token is read from where Ray looks
    for it: RAY_AUTH_TOKEN, the file named by RAY_AUTH_TOKEN_PATH, or else ~/.ray/auth_token, created if needed.
    """
    value, source = os.environ.get("RAY_AUTH_TOKEN", "").strip(), "RAY_AUTH_TOKEN of the shell that submitted the job"
    if not value:
        path = token_path()
        private_token(lambda warning: print(warning, file=sys.stderr))
        try:
            value = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise InputError(f"Ray's token cannot be read from {path} ({reason}): set RAY_AUTH_TOKEN instead") from None
        if not value:
            raise InputError(f"Ray's token file {path} is empty: remove it, or set RAY_AUTH_TOKEN")
        source = f"{path} on {socket.gethostname()}"
    return {"RAY_AUTH_TOKEN": value, "REUSE_SWEEP_TOKEN_SOURCE": source}


def sbatch_options(job: Job, *, name: str, path: Path, here: Path) -> list[str]:
    """All sbatch options of the script at `path`, without the leading dashes."""
    return [
        f"job-name={name}",
        "dependency=singleton",  # a sweep has one writer: a second job waits for the first
        *job.directives(),
        "no-kill",  # trials of a node that fails run on the others
        "export=ALL",
        "open-mode=append",
        f"output={path.with_suffix('')}-%j.log",
        f"chdir={here}",
    ]


def render_script(
    job: Job, flags: Sequence[str], *, name: str, path: Path, here: Path, dashboard: bool, binds: Sequence[Path] = ()
) -> str:
    """The batch script that will be stored at `path`, in the sweep's directory.

    Relative paths among the sweep's `flags` are relative to `here`. `binds` are the paths that a container can see.
    The script contains no values from this shell's environment, some of which are secret: sbatch passes those on.
    """
    stem = path.with_suffix("")
    template = Environment(
        loader=PackageLoader("orchestrator.slurm"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,
        comment_start_string="{##",  # {# is a length in bash
        comment_end_string="##}",
    ).get_template("job.sh.j2")
    return template.render(
        script=shlex.quote(str(path)),
        directives=[_quoted(directive) for directive in sbatch_options(job, name=name, path=path, here=here)],
        python="python" if job.container else shlex.quote(sys.executable),
        setup=None if job.setup is None else shlex.quote(str(job.setup.resolve())),
        image=None if job.image is None else shlex.quote(job.image),
        binds=[shlex.quote(str(bind)) for bind in binds],
        gpus=job.gpus_per_node > 0,
        exports=shlex.join(f"{switch}={value}" for switch, value in RAY_VARIABLES.items()),
        logs=shlex.quote(str(stem)),
        folder=shlex.quote(str(path.parent.parent)),
        longest=MAX_TEMPORARY_CHARACTERS,
        ray_directory=RAY_DIRECTORY,
        object_store=OBJECT_STORE_BYTES,
        dashboard=dashboard,
        flags=shlex.join(flags),
        requeue=job.requeue,
    )


def _quoted(directive: str) -> str:
    """A directive, quoted where sbatch needs it in a script. Values contain no double quotes."""
    option, equals, value = directive.partition("=")
    return f'{option}="{value}"' if equals and re.search(r"[\s'#]", value) else directive


def _script(submission: Submission, path: Path) -> str:
    return render_script(
        submission.job,
        submission.arguments,
        name=submission.name,
        path=path,
        here=Path.cwd(),
        dashboard=submission.settings.dashboard,
        binds=submission.binds,
    )


def _new_script(submission: Submission) -> Path:
    """Writes the script to a file with the next free number."""
    folder = path_below(submission.folder, f"{SLURM_FOLDER}/001.sh").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [int(match[1]) for path in folder.iterdir() if (match := SCRIPT_NAME.fullmatch(path.name))]
        path = folder / f"{max(taken, default=0) + 1:03d}.sh"
        with path.open("x", encoding="utf-8") as file:
            file.write(_script(submission, path))
    except OSError as error:
        raise InputError(f"{folder} cannot be written to ({error.strerror}): choose another --out") from None
    return path


def _sbatch(path: Path, submission: Submission, token: Mapping[str, str]) -> str:
    """Submits the script and returns the job's number. If Slurm rejects it, the script is removed."""
    # The script has these options too. On the command line they take precedence over SBATCH_* variables.
    options = sbatch_options(submission.job, name=submission.name, path=path, here=Path.cwd())
    command = ["sbatch", "--parsable", *(f"--{option}" for option in options), str(path)]
    try:
        ended = subprocess.run(
            command,
            env={**os.environ, **token},
            capture_output=True,
            text=True,
            timeout=SBATCH_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"sbatch did not answer within {SBATCH_TIMEOUT_SECONDS} s: is Slurm running here?") from None
    if ended.returncode:
        path.unlink()
        with suppress(OSError):  # not empty: other files are in them
            path.parent.rmdir()
            submission.folder.rmdir()
        requested = " ".join(f"--{option}" for option in submission.job.directives())
        raise InputError(f"Slurm rejected the job: {_reason(ended.stderr)} (requested: {requested})")
    return ended.stdout.strip().partition(";")[0]


def _reason(output: str) -> str:
    """The last line of sbatch's error output, without its prefixes."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no reason given"]
    return lines[-1].removeprefix("sbatch: ").removeprefix("error: ").removeprefix("Batch job submission failed: ")


def check_sweep(settings: SweepSettings, machine: Machine, stored: SweepRecord | None) -> PreparedSweep | None:
    """Checks the sweep and raises an InputError with all problems. `stored` is the directory's sweep.json, if any.

    Returns the prepared sweep, or None if its model or documents are on the Hub. These are not checked: compute nodes
    may reach what a login node cannot, and the reverse.
    """
    adopted = adopt_resolved(settings, stored)
    model = os.path.expanduser(resolve_model(adopted.model, machine, adopted.address))
    data = os.path.expanduser(resolve_data(adopted.data, model))
    if _is_local(model) and data != "hub":
        return prepare(settings, machine, stored)
    problems = Problems()
    if _is_local(model):
        with problems.collect():
            find_model(model, family=adopted.family, block_size=adopted.block_size, weights=False)
    with problems.collect():
        choose_source(data)
    for name in () if settings.skip_unavailable else settings.tasks:
        with problems.collect():
            find_task_spec(name)
    problems.check()
    return None


def _is_local(model: str) -> bool:
    """Whether the model is a directory, not a Hub id. A name that cannot be a Hub id must be a directory."""
    return model == BUNDLED_MODEL or os.path.exists(model) or HUB_ID.fullmatch(model) is None

"""The Slurm job of a sweep: its resources and options, the sbatch options they become, and its batch script."""

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from orchestrator.planning.fields import problems_of, setting
from orchestrator.running.environment import MAX_TEMPORARY_CHARACTERS, OBJECT_STORE_BYTES, RAY_DIRECTORY, RAY_VARIABLES
from sampler.errors import InputError, InputErrors

TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
TIME_FORMATS = "minutes, hours:minutes:seconds or days-hours:minutes:seconds, such as 12:00:00"
WORD = re.compile(r"[A-Za-z0-9._+:@/&|*()\[\],=-]+")  # characters of Slurm's names and constraints
MEMORY = re.compile(r"[0-9]+[KMGT]?")
GPUS = re.compile(r"(?:(?P<type>[A-Za-z0-9][A-Za-z0-9_.-]*):)?(?P<count>-?[0-9]+)")
UNSAFE = re.compile(r"[%\"\\\x00-\x1f]")  # characters with a special meaning in the paths of a batch script
WARNING_SECONDS = 120  # between the signal and the time limit; a sweep needs about ten to stop

OPTION = re.compile(r"[a-z][a-z0-9-]+")
UNSAFE_VALUE = re.compile(r"[\"\\\x00-\x1f\x7f]")  # sbatch reads quoted values of a script without escapes
# Options of sbatch that --sbatch refuses, with the reason. Options without a flag of ours are set by the script.
OWN_FLAGS = ("nodes", "time", "gpus-per-node", "account", "partition", "qos", "constraint", "mem", "requeue")
REFUSED_OPTIONS = {
    **dict.fromkeys(OWN_FLAGS, "use --{key}"),
    "no-requeue": "it is the default; --requeue turns it off",
    "cpus-per-task": "use --cpus-per-node",
    "gpus": "use --gpus-per-node",
    "gpus-per-task": "use --gpus-per-node",
    "job-name": "jobs of one sweep find each other by their name",
    "dependency": "jobs of one sweep wait for each other with it",
    "output": "the log is written to the sweep's directory",
    "error": "the log is written to the sweep's directory",
    "open-mode": "a requeued job appends to its log",
    "chdir": "a job runs in the directory it was submitted from",
    "signal": "it stops the sweep before the time limit",
    "no-kill": "the job sets it: a lost node does not end the sweep",
    "export": "a job gets the whole environment; its token is in it",
    "export-file": "a job gets the whole environment; its token is in it",
    "array": "a sweep is one job; its trials run on all nodes",
    "ntasks": "the job runs one task per node",
    "ntasks-per-node": "the job runs one task per node",
    "ntasks-per-gpu": "the job runs one task per node",
    "wrap": "the job has a script of its own",
    **dict.fromkeys(("parsable", "test-only", "wait", "help", "usage", "version"), "it is not an option of a job"),
}
LISTS = (  # options whose value is a comma-separated list, so that several values can be joined
    *("clusters", "exclude", "gres", "licenses", "mail-type", "nodelist", "propagate", "reservation"),
    *("container-env", "container-mounts"),  # Pyxis
)


def _check_time(time: str) -> str | None:
    try:
        parse_time_limit(time)
    except InputError as error:
        return str(error).removeprefix("--time ")
    return None


def _check_word(name: str) -> str | None:
    return (
        None if WORD.fullmatch(name) else f"must be a name as sinfo prints it, without spaces and quotes (got {name!r})"
    )


def _check_memory(mem: str) -> str | None:
    return None if MEMORY.fullmatch(mem) else f"must be the memory of a node, such as 64G (got {mem!r})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """An allocation. A field that is None is left to the cluster's defaults."""

    nodes: int = setting(minimum=1, help="number of nodes; each runs as many actors as fit")
    time: str = setting(metavar="T", check=_check_time, help="time limit, such as 12:00:00 or 2-00")
    gpus_per_node: int = 0
    gpu_type: str | None = None
    cpus_per_node: int | None = setting(None, minimum=1, default_text="2 per GPU, or 1", help="cores per node")
    mem: str | None = setting(None, metavar="M", check=_check_memory, help="memory per node, such as 64G")
    account: str | None = setting(None, check=_check_word, help="passed to sbatch as --account")
    partition: str | None = setting(None, check=_check_word, help="passed to sbatch as --partition")
    qos: str | None = setting(None, check=_check_word, help="passed to sbatch as --qos")
    constraint: str | None = setting(None, check=_check_word, help="passed to sbatch as --constraint")
    sbatch: tuple[str, ...] = setting(
        (),
        metavar="KEY[=VALUE]",
        repeatable=True,
        verbatim=True,
        help="any other sbatch option, such as reservation=R or exclusive (repeatable)",
    )
    setup: Path | None = setting(
        None, metavar="FILE", help="shell commands to source first: load modules, activate an environment, PYTHON=…"
    )
    container: str | None = setting(
        None,
        metavar="IMAGE",
        help="run every Python process in this image with Apptainer: a .sif file or a URI",
    )
    requeue: bool = setting(False, help="requeue the job at its time limit, and continue")

    def __post_init__(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise InputErrors(problems)

    def _problems(self) -> Iterator[str]:
        yield from problems_of(self)
        if self.gpus_per_node < 0:
            yield f"--gpus-per-node must be at least 0 (got {self.gpus_per_node})"
        if self.gpu_type is not None and self.gpus_per_node == 0:
            yield f"--gpus-per-node {self.gpu_type}:0 asks for no GPU: leave it out, or give a count of at least 1"
        if self.setup is not None and not self.setup.is_file():
            yield f"--setup {self.setup} does not exist or is not a file; it must be a file of shell commands"
        if self.setup is not None and UNSAFE.search(str(self.setup)):
            yield f"--setup must be a path without %, double quotes and backslashes (got {str(self.setup)!r})"
        yield from self._container_problems()
        yield from _sbatch_problems(self.sbatch)

    def _container_problems(self) -> Iterator[str]:
        if self.container is None:
            return
        if UNSAFE.search(self.container) or not self.container.strip():
            yield f"--container must be an image without %, double quotes and backslashes (got {self.container!r})"
        elif "://" not in self.container and not Path(self.container).expanduser().exists():
            yield f"--container {self.container} does not exist; it must be an image file or a URI such as docker://…"

    @property
    def cpus(self) -> int:
        """Cores per node: for each GPU one for the actor and one for the processes that feed it."""
        return self.cpus_per_node or max(1, 2 * self.gpus_per_node)

    @property
    def warning(self) -> int:
        """Seconds before the time limit at which Slurm signals the sweep to stop."""
        return max(1, min(WARNING_SECONDS, parse_time_limit(self.time) // 4))

    @property
    def image(self) -> str | None:
        """The container image as every node can name it: absolute, or a URI."""
        if self.container is None or "://" in self.container:
            return self.container
        return str(Path(self.container).expanduser().absolute())

    def directives(self) -> list[str]:
        """The options of sbatch, without the leading dashes."""
        gpus = f"{self.gpu_type}:{self.gpus_per_node}" if self.gpu_type else self.gpus_per_node or None
        given = {
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self.cpus,
            "gpus-per-node": gpus,
            "time": self.time,
            "signal": f"B:USR1@{self.warning}",
            **{name: getattr(self, name) for name in ("account", "partition", "qos", "constraint", "mem")},
        }
        flags = [f"{name}={value}" for name, value in given.items() if value is not None]
        return [*flags, "requeue" if self.requeue else "no-requeue", *_joined(self.sbatch)]


def parse_gpus(raw: str) -> tuple[int, str | None]:
    """Count and type of a node's GPUs: 4, or a100:4."""
    found = GPUS.fullmatch(raw.strip())
    if found is None:
        raise InputError(f"--gpus-per-node must be a number or TYPE:NUMBER, such as 4 or a100:4 (got {raw!r})")
    return int(found["count"]), found["type"]


def parse_time_limit(time: str) -> int:
    """Length of a time in Slurm's notation: 12:30 is minutes and seconds, 1-12:30 is days, hours and minutes."""
    found = TIME.fullmatch(time.strip())
    if found is None:
        raise InputError(f"--time must be {TIME_FORMATS} (got {time!r})")
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if max(parts[1:], default=0) > 59 or (days is not None and parts[0] > 23):  # Slurm would accept 99:99:99
        raise InputError(
            f"--time must have at most 59 after a colon and 23 hours after days: {TIME_FORMATS} (got {time!r})"
        )
    units = (60, 1) if days is None and len(parts) < 3 else (3600, 60, 1)
    whole = 86400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))
    if not whole:
        raise InputError(f"--time must be longer than 0: {TIME_FORMATS} (got {time!r})")
    return whole


def _split(option: str) -> tuple[str, str | None]:
    """Key and value of an --sbatch option; leading dashes are optional."""
    key, equals, value = option.strip().removeprefix("--").partition("=")
    return key, value.strip() if equals else None


def _sbatch_problems(options: tuple[str, ...]) -> Iterator[str]:
    seen: dict[str, str | None] = {}
    for option in options:
        key, value = _split(option)
        if not OPTION.fullmatch(key):
            yield f"--sbatch must be KEY=VALUE or KEY with the long name of an sbatch option (got {option!r})"
        elif key in REFUSED_OPTIONS:
            yield f"--sbatch {key} is not allowed: {REFUSED_OPTIONS[key].format(key=key)}"
        elif value == "":
            yield f"--sbatch {key}= has no value: write --sbatch KEY=VALUE, or --sbatch KEY for an option without one"
        elif value is not None and UNSAFE_VALUE.search(value):
            yield f"--sbatch {key} must have a value without double quotes, backslashes and line breaks (got {value!r})"
        elif key == "gres" and value is not None and re.search(r"(^|,)(gres/)?gpu\b", value):
            yield f"--sbatch gres={value} asks for GPUs: use --gpus-per-node, so that the sweep is planned with them"
        elif key in seen and (key not in LISTS or None in (value, seen[key])):
            yield f"--sbatch {key} is given more than once, and Slurm takes one value for it"
        seen[key] = value


def _joined(options: tuple[str, ...]) -> list[str]:
    """As sbatch options, with the values of a repeated option in one list."""
    values: dict[str, list[str]] = {}
    for key, value in map(_split, options):
        values.setdefault(key, []).extend([] if value is None else [value])
    return [f"{key}={','.join(value)}" if value else key for key, value in values.items()]


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
    Nothing of the environment is written into the script: sbatch passes it on, with HF_TOKEN and Ray's token.
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
    """A directive as sbatch reads it in a script. Values contain no double quotes."""
    option, equals, value = directive.partition("=")
    return f'{option}="{value}"' if equals and re.search(r"[\s'#]", value) else directive

"""The Slurm job of a sweep: its resources and sbatch options, the commands that its script runs, and its status.

The command line imports this for --help, so modules that import pyarrow or Ray are imported where they are used.
"""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import sample
from time import monotonic, sleep
from typing import Any

from orchestrator.core.untrusted import name_problem
from orchestrator.planning.fields import problems_of, setting
from orchestrator.running import environment
from sampler.errors import InputError, InputErrors, counted

TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
TIME_FORMATS = "minutes, hours:minutes:seconds or days-hours:minutes:seconds, such as 12:00:00"
WORD = re.compile(r"[A-Za-z0-9._+:@/&|*()\[\],=-]+")  # characters allowed in Slurm's names and constraints
MEMORY = re.compile(r"[0-9]+[KMGT]?")
GPUS = re.compile(r"(?:(?P<type>[A-Za-z0-9][A-Za-z0-9_.-]*):)?(?P<count>-?[0-9]+)")
UNSAFE = re.compile(r"[%\"\\\x00-\x1f]")  # characters with a special meaning in the paths of a batch script
WARNING_SECONDS = 120  # between the signal and the time limit; a sweep needs about ten to stop

OPTION = re.compile(r"[a-z][a-z0-9-]+")
UNSAFE_VALUE = re.compile(r"[\"\\\x00-\x1f\x7f]")  # sbatch reads quoted values of a script without escapes
# Options that --sbatch refuses, with the reason: each has its own flag or is set by the script.
OWN_FLAGS = ("nodes", "time", "gpus-per-node", "account", "partition", "qos", "constraint", "mem", "requeue")
REFUSED_OPTIONS = {
    **dict.fromkeys(OWN_FLAGS, "use --{key}"),
    "no-requeue": "it is the default; --requeue turns it off",
    "cpus-per-task": "use --cpus-per-node",
    "gpus": "use --gpus-per-node",
    "gpus-per-task": "use --gpus-per-node",
    "job-name": "jobs of the same sweep recognize each other by name",
    "dependency": "jobs of the same sweep use it to wait for each other",
    "output": "the log is written to the sweep's directory",
    "error": "the log is written to the sweep's directory",
    "open-mode": "a requeued job appends to its log",
    "chdir": "a job runs in the directory it was submitted from",
    "signal": "the script uses it to stop the sweep before the time limit",
    "no-kill": "the job sets it, so that a lost node does not end the sweep",
    "export": "the job needs the whole environment, which includes its token",
    "export-file": "the job needs the whole environment, which includes its token",
    "array": "a sweep is one job; its trials run on all nodes",
    "ntasks": "the job runs one task per node",
    "ntasks-per-node": "the job runs one task per node",
    "ntasks-per-gpu": "the job runs one task per node",
    "wrap": "the job has its own script",
    **dict.fromkeys(("parsable", "test-only", "wait", "help", "usage", "version"), "it is not an option of a job"),
}
LISTS = (  # options whose value is a comma-separated list, so that several values can be joined
    *("clusters", "exclude", "gres", "licenses", "mail-type", "nodelist", "propagate", "reservation"),
    *("container-env", "container-mounts"),  # Pyxis
)

FIRST_PORT = 10_000
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_EPHEMERAL_START = 32_768
NODES_TIMEOUT_SECONDS = 120.0
SQUEUE_TIMEOUT_SECONDS = 60
SQUEUE_FORMAT = "%i|%T|%M|%l|%D|%R"  # number, state, time used, limit, nodes, reason or node list
SQUEUE_LINE = re.compile(r"([0-9]+)\|(.*)")


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
    """The resources and options of a job. For a field that is None, the cluster's default applies."""

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
        None,
        metavar="FILE",
        help="shell file to source first, to load modules, activate an environment or set PYTHON=…",
    )
    container: str | None = setting(
        None,
        metavar="IMAGE",
        help="run every Python process in this image with Apptainer: a .sif file or a URI",
    )
    requeue: bool = setting(False, help="requeue the job at its time limit, so that the sweep continues")

    def __post_init__(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise InputErrors(problems)

    def _problems(self) -> Iterator[str]:
        yield from problems_of(self)
        if self.gpus_per_node < 0:
            yield f"--gpus-per-node must be at least 0 (got {self.gpus_per_node})"
        if self.gpu_type is not None and self.gpus_per_node == 0:
            yield f"--gpus-per-node {self.gpu_type}:0 requests no GPU: leave it out, or give a count of at least 1"
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
    def warning_seconds(self) -> int:
        """Seconds before the time limit at which Slurm signals the sweep to stop."""
        return max(1, min(WARNING_SECONDS, parse_time_limit(self.time) // 4))

    @property
    def image(self) -> str | None:
        """The container image as an absolute path or a URI, which are valid on every node."""
        if self.container is None or "://" in self.container:
            return self.container
        return str(Path(self.container).expanduser().absolute())

    def directives(self) -> list[str]:
        """The options of sbatch, without the leading dashes."""
        gpus = f"{self.gpu_type}:{self.gpus_per_node}" if self.gpu_type else self.gpus_per_node or None
        values = {
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self.cpus,
            "gpus-per-node": gpus,
            "time": self.time,
            "signal": f"B:USR1@{self.warning_seconds}",
            **{name: getattr(self, name) for name in ("account", "partition", "qos", "constraint", "mem")},
        }
        flags = [f"{name}={value}" for name, value in values.items() if value is not None]
        return [*flags, "requeue" if self.requeue else "no-requeue", *_joined(self.sbatch)]


def parse_gpus(raw: str) -> tuple[int, str | None]:
    """Count and type of a node's GPUs: 4, or a100:4."""
    match = GPUS.fullmatch(raw.strip())
    if match is None:
        raise InputError(f"--gpus-per-node must be a number or TYPE:NUMBER, such as 4 or a100:4 (got {raw!r})")
    return int(match["count"]), match["type"]


def parse_time_limit(time: str) -> int:
    """Seconds of a time limit as Slurm reads it: 12:30 is minutes and seconds, 1-12:30 is days, hours and minutes."""
    match = TIME.fullmatch(time.strip())
    if match is None:
        raise InputError(f"--time must be {TIME_FORMATS} (got {time!r})")
    days, *rest = match.groups()
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
            yield f"--sbatch gres={value} requests GPUs: use --gpus-per-node, so that the sweep is planned with them"
        elif key in seen and (key not in LISTS or None in (value, seen[key])):
            yield f"--sbatch {key} must be given only once: Slurm accepts one value for it"
        seen[key] = value


def _joined(options: tuple[str, ...]) -> list[str]:
    """The --sbatch options, with the values of a repeated option joined by commas."""
    values: dict[str, list[str]] = {}
    for key, value in map(_split, options):
        values.setdefault(key, []).extend([] if value is None else [value])
    return [f"{key}={','.join(value)}" if value else key for key, value in values.items()]


def free_ports(count: int) -> list[int]:
    """Free ports below the kernel's ephemeral range, for servers that need a fixed port.

    While Ray starts, most of its processes take ephemeral ports, and would compete with the servers for these. The
    ports are chosen at random, so that jobs on the same node do not choose the same ones.
    """
    end = _ephemeral_start()
    ports: list[int] = []
    with ExitStack() as sockets:
        for port in sample(range(FIRST_PORT, end), end - FIRST_PORT):
            if len(ports) == count:
                break
            try:
                sockets.enter_context(socket.create_server(("", port)))
            except OSError:  # in use
                continue
            ports.append(port)
    if len(ports) < count:
        raise InputError(f"{count} ports from {FIRST_PORT} to {end - 1} are needed, but only {len(ports)} are free")
    return ports


def _ephemeral_start() -> int:
    """First port of the kernel's ephemeral range, or a higher port if the range starts too low."""
    try:
        start = int(EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
    except OSError:
        return USUAL_EPHEMERAL_START
    return max(start, 2 * FIRST_PORT)


def wait_until_ready(address: str, nodes: int, folder: Path) -> None:
    """Waits, for a limited time, until all nodes have joined and no other process writes to the sweep's directory.

    A sweep could start with one node, but it is planned for the nodes that are present when it starts. If a previous
    job was killed on another machine, its lock on the directory looks active for up to STALE_SECONDS.
    """
    environment.prepare(local=False)
    import ray  # after the environment is prepared: Ray reads it at import

    from orchestrator.store.lock import STALE_SECONDS, active_writer

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    _wait_until(lambda: _alive(ray.nodes()) >= nodes, NODES_TIMEOUT_SECONDS)
    print(f"Ray on {_alive(ray.nodes())} of {counted(nodes, 'node')}", flush=True)
    ray.shutdown()
    _wait_until(lambda: active_writer(folder) is None, 1.5 * STALE_SECONDS)  # until the lock of a killed job is stale


def _wait_until(reached: Callable[[], bool], seconds: float) -> None:
    until = monotonic() + seconds
    while not reached() and monotonic() < until:
        sleep(1)


def _alive(nodes: list[dict[str, Any]]) -> int:
    return sum(bool(node["Alive"]) for node in nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmittedJob:
    """A batch script that was submitted to Slurm, with the number of its job."""

    script: Path
    number: str
    submitted_at: str

    @property
    def log(self) -> Path:
        return self.script.with_name(f"{self.script.stem}-{self.number}.log")


def submitted_jobs(folder: Path) -> list[SubmittedJob]:
    """The jobs of a sweep's directory, in order of submission."""
    from orchestrator.store.files import CorruptedFile, read_regular
    from orchestrator.store.reader import SLURM_FOLDER

    jobs = []
    for path in sorted((folder / SLURM_FOLDER).glob("*.json")):
        try:
            record = json.loads(read_regular(path))
            number, submitted_at = str(record["job"]), str(record["submitted"])
        except (OSError, CorruptedFile, ValueError, KeyError, TypeError, RecursionError):
            continue  # still being written, or not a file of ours
        job = SubmittedJob(script=path.with_suffix(".sh"), number=number, submitted_at=submitted_at)
        if name_problem(job.log.name) is None:
            jobs.append(job)
    return jobs


def query_squeue(numbers: list[str]) -> Mapping[str, str] | None:
    """squeue's line for each of these jobs that Slurm still knows; None if squeue cannot be run."""
    if shutil.which("squeue") is None:
        return None
    command = ["squeue", "--noheader", f"--format={SQUEUE_FORMAT}", "--me", "--states=all"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    if ended.returncode:
        return None
    known = {match[1]: match[2] for line in ended.stdout.splitlines() if (match := SQUEUE_LINE.fullmatch(line.strip()))}
    return {number: known[number] for number in numbers if number in known}


def status_lines(jobs: list[SubmittedJob], known: Mapping[str, str] | None) -> Iterator[str]:
    """For each job its state and the last line of its log. `known` is the result of `query_squeue`."""
    for job in jobs:
        yield f"job {job.number}, submitted {job.submitted_at}: {_state(job, known)}"
        if job.log.exists():
            yield f"  {job.log}: {_last_line(job.log)}"


def _state(job: SubmittedJob, known: Mapping[str, str] | None) -> str:
    if known is None:
        return "squeue cannot be run here"
    if job.number not in known:
        return "no longer in the queue"
    state, time, limit, nodes, why = (known[job.number].split("|", 4) + [""] * 5)[:5]
    return f"{state.lower()}, {time} of {limit}, {nodes} node{'s' * (nodes != '1')} {why}".rstrip()


def _last_line(log: Path) -> str:
    """The last non-empty line, from the last 4000 bytes."""
    from orchestrator.store.files import CorruptedFile, open_regular

    try:
        with open_regular(log) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4000))
            text = file.read().decode(errors="replace").splitlines()
    except (OSError, CorruptedFile) as error:
        return f"cannot be read ({error})"
    return next((line.strip() for line in reversed(text) if line.strip()), "empty")

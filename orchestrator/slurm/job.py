"""What a person may ask Slurm for, checked at birth. Knows no sweep and no command line."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sampler.errors import InputError, InputErrors

TIME = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
TIMES = "minutes, hours:minutes:seconds or days-hours:minutes:seconds, such as 12:00:00"
WORD = re.compile(r"[A-Za-z0-9._+:@/&|*()\[\],=-]+")  # what Slurm's names and constraints consist of
MEMORY = re.compile(r"[0-9]+[KMGT]?")
UNSAFE = re.compile(r"[%\"\\\x00-\x1f]")  # in a path, Slurm would take them for something else
WARNING = 120  # seconds before the time limit; a sweep needs about ten of them


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """An allocation. What is None is left to the cluster's own defaults."""

    nodes: int
    time: str
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mem: str | None = None  # of each node
    setup: Path | None = None
    requeue: bool = False

    def __post_init__(self) -> None:
        problems = [*self._problems()]
        if problems:
            raise InputErrors(problems)

    def _problems(self) -> Iterator[str]:
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("cpus_per_node", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                yield f"--{name.replace('_', '-')} {value}: a whole number of at least {least} is allowed"
        try:
            seconds(self.time)
        except InputError as error:
            yield str(error)
        for name in ("account", "partition", "qos", "constraint"):
            value = getattr(self, name)
            if value is not None and not WORD.fullmatch(value):
                yield f"--{name} {value!r}: a name without spaces and quotes is allowed, as sinfo or sacctmgr show it"
        if self.mem is not None and not MEMORY.fullmatch(self.mem):
            yield f"--mem {self.mem!r}: memory of each node such as 64G is allowed"
        if self.setup is not None and not self.setup.is_file():
            yield f"--setup {self.setup}: a file with shell commands is needed, and there is none"
        if self.setup is not None and UNSAFE.search(str(self.setup)):
            yield f"--setup {str(self.setup)!r}: a path without %, quotes and backslashes is allowed"

    @property
    def cpus(self) -> int:
        """Of each node: an actor and what feeds it for each GPU."""
        return self.cpus_per_node or max(1, 2 * self.gpus_per_node)

    @property
    def warning(self) -> int:
        """Seconds before the time limit at which the sweep is told to stop."""
        return max(1, min(WARNING, seconds(self.time) // 4))

    def directives(self) -> list[str]:
        """sbatch's flags for it, without the leading dashes."""
        given = {
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self.cpus,
            "gpus-per-node": self.gpus_per_node or None,
            "time": self.time,
            "signal": f"B:USR1@{self.warning}",
            **{name: getattr(self, name) for name in ("account", "partition", "qos", "constraint", "mem")},
        }
        flags = [f"{name}={value}" for name, value in given.items() if value is not None]
        return [*flags, "requeue" if self.requeue else "no-requeue"]


def seconds(time: str) -> int:
    """Of a time as Slurm writes it: two parts are minutes and seconds, or behind days hours and minutes."""
    found = TIME.fullmatch(time.strip())
    if found is None:
        raise InputError(f"--time {time!r}: {TIMES} are allowed")
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if max(parts[1:], default=0) > 59 or (days is not None and parts[0] > 23):  # Slurm would take 99:99:99
        raise InputError(f"--time {time!r}: at most 59 behind a colon and 23 hours behind days are allowed, {TIMES}")
    units = (60, 1) if days is None and len(parts) < 3 else (3600, 60, 1)
    whole = 86400 * int(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))
    if not whole:
        raise InputError(f"--time {time!r}: a time above 0 is allowed, {TIMES}")
    return whole

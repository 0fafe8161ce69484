"""What there is to run on: which model fits it by default, and how many actors it holds. Asks nobody; facts come in."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from orchestrator.planning.settings import SweepSettings
from orchestrator.running.provenance import all_memory, cores
from sampler.errors import InputError, InputErrors
from sampler.loading import pick_device, pick_dtype
from sampler.tiny import BUNDLED_MODEL

FULL_MODEL = "Efficient-Large-Model/Fast_dLLM_v2_7B"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """This machine, or the cluster that --address names. `most` counts what its autoscaler may bring as well."""

    cpus: float
    gpus: float = 0
    most_cpus: float | None = None  # None: no more than there is
    most_gpus: float | None = None
    node_cpus: float | None = None  # of the largest node there is or may come; None: one node has it all
    node_gpus: float | None = None
    driver_gpus: int = 0  # where the command was typed
    dtype: str = "float32"  # what auto means on its devices
    memory: int | None = None  # bytes that actors without a GPU may take; None: only their own machine can say

    @classmethod
    def here(cls) -> "Machine":
        device = pick_device("auto")
        dtype = str(pick_dtype("auto", device)).removeprefix("torch.")
        gpus = torch.cuda.device_count()
        return cls(cpus=cores(), gpus=gpus, driver_gpus=gpus, dtype=dtype, memory=free_memory())

    @property
    def all_cpus(self) -> float:
        return max(self.cpus, self.most_cpus or 0)

    @property
    def all_gpus(self) -> float:
        return max(self.gpus, self.most_gpus or 0)


def free_memory() -> int:
    """Bytes that programs of this machine may still take; where the kernel does not say, all it has."""
    try:
        told = Path("/proc/meminfo").read_text(encoding="ascii")
    except FileNotFoundError:
        return all_memory()
    fields = dict(line.split(":") for line in told.splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def resolve_model(model: str, machine: Machine, address: str | None) -> str:
    """The model that `auto` means: the full one where GPUs are or may come, else the bundled one, but on a cluster."""
    if model != "auto":
        return model
    if machine.driver_gpus or machine.all_gpus:
        return FULL_MODEL
    if address is None:
        return BUNDLED_MODEL
    raise InputError(
        f"--model auto: the cluster at {address} has no GPU and can bring none; name a model that runs without"
    )


def notice_of(asked: SweepSettings, settings: SweepSettings, machine: Machine) -> list[str]:
    """A line for whoever named no model: which one it is, and why."""
    if asked.model != "auto" or settings.model not in (BUNDLED_MODEL, FULL_MODEL):
        return []
    known = {"bundled": "the bundled documents", "hub": "documents from the Hub or its cache"}
    documents = known.get(settings.data, f"documents from {settings.data}")
    if settings.model == BUNDLED_MODEL:
        why = f"no GPU here (torch {torch.__version__} finds none)"
        return [f"{why}: running the small bundled model on {documents}; --model {FULL_MODEL} runs the real one"]
    return [f"{gpus_of(machine, asked.address)}: running {FULL_MODEL} on {documents}; --model tiny runs the small one"]


def gpus_of(machine: Machine, address: str | None) -> str:
    """What made auto the full model."""
    count = machine.all_gpus or machine.driver_gpus
    many = f"{count:g} GPU{'' if count == 1 else 's'}"
    if not machine.all_gpus or address is None:
        return f"{many} here"
    return f"{'' if machine.gpus else 'up to '}{many} in the cluster at {address}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What each actor gets, and how many there are. All ask for the same, or a warm one could not be used again."""

    actors: int
    gpus_per_actor: float
    cpus_per_actor: float
    threads_per_actor: int

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for each actor."""
        return {"CPU": self.cpus_per_actor, "GPU": self.gpus_per_actor}

    @property
    def each(self) -> str:
        return _each(self.gpus_per_actor, self.cpus_per_actor)


def place(settings: SweepSettings, machine: Machine) -> Placement:
    """As asked, else as many actors as the machine holds; what it cannot hold is an error now, not a wait."""
    gpus = settings.gpus_per_actor
    if gpus is None:
        gpus = 1.0 if machine.all_gpus else 0.0
    threads = settings.threads_per_actor or (1 if gpus == 0 else max(1, int(settings.cpus_per_actor or 1)))
    cpus = settings.cpus_per_actor
    if cpus is None:  # threads share cores where there are not enough for each
        node = machine.all_cpus if machine.node_cpus is None else machine.node_cpus
        cpus = float(threads) if gpus == 0 and threads <= node else 1.0
    problems = list(_too_much(machine, gpus, cpus))
    room = 0 if problems else room_in(machine, gpus, cpus)
    if not problems and (settings.actors or 1) > room:
        problems.append(f"--actors {settings.actors or 1}: with {_each(gpus, cpus)} there is room for {room}")
    if problems:
        raise InputErrors(problems)
    return Placement(
        actors=settings.actors or room, gpus_per_actor=gpus, cpus_per_actor=cpus, threads_per_actor=threads
    )


def _each(gpus: float, cpus: float) -> str:
    return f"{gpus:g} GPU and {cpus:g} CPU each" if gpus else f"{cpus:g} CPU each"


def _too_much(machine: Machine, gpus: float, cpus: float) -> Iterator[str]:
    """What no node has, nor will."""
    for what, asked, node, everything in (
        ("gpus", gpus, machine.node_gpus, machine.all_gpus),
        ("cpus", cpus, machine.node_cpus, machine.all_cpus),
    ):
        most = everything if node is None else node
        if asked > most:
            yield f"--{what}-per-actor {asked:g}: no machine here has more than {most:g}"


def room_in(machine: Machine, gpus: float, cpus: float) -> int:
    """Actors that fit, with so much for each; a fraction of a GPU is never made of two."""
    by_cpu = math.floor(machine.all_cpus / cpus + 1e-9)
    if gpus == 0:
        return by_cpu
    by_gpu = math.floor(machine.all_gpus) * math.floor(1 / gpus + 1e-9) if gpus < 1 else machine.all_gpus // gpus
    return min(by_cpu, int(by_gpu))

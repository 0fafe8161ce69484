"""The machine or cluster that a sweep runs on: its resources, the default model for it, and how many actors fit."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from orchestrator.core.system import (
    ANY_GPU,
    CORE,
    Device,
    DeviceProfile,
    common_dtype,
    devices_here,
    free_memory,
    usable_cores,
)
from orchestrator.planning.settings import SweepSettings
from sampler.config import BUNDLED_MODEL, FULL_MODEL
from sampler.device import BFLOAT16_CAPABILITY
from sampler.errors import InputError, InputErrors, counted

Resources = Mapping[str, float]  # by Ray's names: CPU, GPU, accelerator_type:A100, custom resources
ACCELERATOR = "accelerator_type:"  # a node with A100s has one unit of `accelerator_type:A100` in Ray,
ACCELERATOR_AMOUNT = 0.001  # of which an actor with `accelerator_type="A100"` takes this much
SLURM_ADDRESS = "slurm"  # of the cluster that a Slurm job will start
BUILT_IN = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Nodes with the same resources."""

    resources: Resources
    count: int = 1

    def actors_each(self, bundle: Resources) -> int:
        """Actors that fit on one of these nodes. A fraction of a GPU is never split over two devices."""
        return min(_times(self.resources.get(name, 0), name, amount) for name, amount in bundle.items())


def _times(available: float, name: str, amount: float) -> int:
    if name == "GPU" and amount < 1:
        return math.floor(available) * math.floor(1 / amount + 1e-9)
    return math.floor(available / amount + 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The nodes that an autoscaler may provide at a time, including running ones.

    `open_ended`: nodes are expected, but only the autoscaler knows how many; `groups` has the least that one provides.
    """

    groups: tuple[Nodes, ...] = ()
    max_nodes: int = 0  # of all groups together
    open_ended: bool = False

    def total(self, name: str) -> float:
        """The most of this resource that all these nodes can have together."""
        return self._sum([(group.count, group.resources.get(name, 0)) for group in self.groups])

    def actors(self, bundle: Resources) -> int:
        """The most actors that fit on these nodes."""
        return int(self._sum([(group.count, group.actors_each(bundle)) for group in self.groups]))

    def _sum(self, amounts: list[tuple[int, float]]) -> float:
        """The sum over at most `max_nodes` nodes of (number of nodes, amount on each), largest amounts first."""
        total, left = 0.0, self.max_nodes
        for count, each in sorted(amounts, key=lambda pair: pair[1], reverse=True):
            taken = min(count, left)
            total, left = total + taken * each, left - taken
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """This machine, or the cluster at --address."""

    nodes: tuple[Nodes, ...]
    growth: Growth = field(default_factory=Growth)
    names_all: bool = True  # False if the GPU types and custom resources of the nodes are not known yet
    driver_gpus: int = 0  # on the machine where the command runs
    dtype: str = "float32"  # what --dtype auto means here
    memory: int | None = None  # bytes available to actors without a GPU; None: unknown
    devices: tuple[Device, ...] = ()  # of the nodes that were probed
    profile: DeviceProfile | None = None  # of a machine that is only planned for

    @classmethod
    def here(cls) -> "Machine":
        devices = devices_here()
        gpus = sum(device.capability is not None for device in devices)
        nodes = (Nodes(resources={"CPU": usable_cores(), "GPU": gpus}),)
        dtype, _ = common_dtype(devices)
        return cls(nodes=nodes, driver_gpus=gpus, dtype=dtype, memory=free_memory(), devices=tuple(devices))

    @classmethod
    def planned(cls, profile: DeviceProfile, settings: SweepSettings) -> "Machine":
        """A machine that is not here, with GPUs of this profile for as many actors as requested."""
        actors, share = settings.actors or 1, settings.gpus_per_actor or 1.0
        cores = max(settings.cpus_per_actor or 1, settings.threads_per_actor or 1) * actors
        nodes = (Nodes(resources={"CPU": cores, "GPU": math.ceil(actors / math.floor(1 / share))}),)
        return cls(nodes=nodes).with_profile(profile)

    def with_profile(self, profile: DeviceProfile) -> "Machine":
        """This machine, only planned for, with GPUs of this profile."""
        dtype = "bfloat16" if (profile.capability or (0, 0)) >= BFLOAT16_CAPABILITY else "float16"
        device = Device(
            name=profile.label,
            dtype=dtype,
            free=profile.memory,
            total=profile.memory,
            node=f"the planned machine ({profile.name})",
            capability=profile.capability,
        )
        return replace(self, dtype=dtype, devices=(device,), profile=profile)

    def device(self, gpus_per_actor: float) -> DeviceProfile:
        """What estimates assume that an actor runs on."""
        return (self.profile or ANY_GPU) if gpus_per_actor else CORE

    def present(self, name: str) -> float:
        """The amount of a resource on the present nodes."""
        return sum(group.count * group.resources.get(name, 0) for group in self.nodes)

    def most(self, name: str) -> float:
        """The amount of a resource after the cluster has grown as far as it can."""
        return max(self.present(name), self.growth.total(name))

    def largest(self, name: str) -> float:
        """The most of a resource that one present or expected node has."""
        every = (*self.nodes, *self.growth.groups)
        return max((group.resources.get(name, 0) for group in every if group.count), default=0)

    def holds_now(self, bundle: Resources) -> int:
        """Actors that fit on the present nodes."""
        return sum(group.count * group.actors_each(bundle) for group in self.nodes)

    def capacity(self, bundle: Resources) -> int:
        """Actors that fit after the cluster has grown as far as it can."""
        return max(self.holds_now(bundle), self.growth.actors(bundle))


def resolve_model(model: str, machine: Machine, address: str | None) -> str:
    """The model itself. `auto` is the 7B model if there are or may be GPUs, else, on this machine, the bundled one."""
    if model != "auto":
        return model
    if machine.driver_gpus or machine.most("GPU"):
        return FULL_MODEL
    if address is None:
        return BUNDLED_MODEL
    if address == SLURM_ADDRESS:
        raise InputError(
            "--model auto needs a GPU, and the job requests none: add --gpus-per-node N, or choose a model for CPUs, "
            "such as --model tiny"
        )
    raise InputError(
        f"--model auto needs a GPU, and the cluster at {address} has none and, as far as is known, cannot add one; "
        "choose a model for CPUs, such as --model tiny, or wait for GPUs with --gpus-per-actor 1"
    )


def describe_auto_model(requested: SweepSettings, settings: SweepSettings, machine: Machine) -> list[str]:
    """For a sweep without --model: a line with the model that runs, and why. Otherwise nothing."""
    if requested.model != "auto" or settings.model not in (BUNDLED_MODEL, FULL_MODEL) or machine.profile:
        return []
    known = {"bundled": "the bundled documents", "hub": "documents from the Hub or its cache"}
    documents = known.get(settings.data, f"documents from {settings.data}")
    if settings.model == BUNDLED_MODEL:
        why = f"no GPU here (torch {torch.__version__} finds none)"
        return [
            f"{why}: running the small bundled model on {documents}; --model {FULL_MODEL} runs the real one, and "
            "--dry-run --device-profile a100-80 plans it"
        ]
    return [
        f"{gpus_of(machine, requested.address)}: running {FULL_MODEL} on {documents}; --model tiny runs the small one"
    ]


def gpus_of(machine: Machine, address: str | None) -> str:
    """Describes the GPUs because of which --model auto selects the 7B model."""
    count = machine.most("GPU") or machine.driver_gpus
    many = counted(int(count), "GPU") if count == int(count) else f"{count:g} GPUs"
    if not machine.most("GPU") or address is None:
        return f"{many} here"
    if not machine.present("GPU") and machine.growth.open_ended:
        return f"GPUs that the autoscaler of the cluster at {address} adds"
    return f"{'' if machine.present('GPU') else 'up to '}{many} in the cluster at {address}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How many actors run and what each reserves. All reserve the same, so that any warm actor can run any trial."""

    actors: int
    gpus_per_actor: float
    cpus_per_actor: float
    threads_per_actor: int
    accelerator_type: str | None = None
    resources: Resources = field(default_factory=dict)  # custom resources by name

    @property
    def bundle(self) -> dict[str, float]:
        """What an actor requests from Ray: the single bundle of its placement group."""
        requested = {"CPU": self.cpus_per_actor, "GPU": self.gpus_per_actor}
        if self.accelerator_type is not None:
            requested[f"{ACCELERATOR}{self.accelerator_type}"] = ACCELERATOR_AMOUNT
        return {name: amount for name, amount in (requested | dict(self.resources)).items() if amount}

    @property
    def words(self) -> str:
        """1 GPU (A100), 1 CPU and 1 highmem"""
        kind = f" ({self.accelerator_type})" if self.accelerator_type is not None else ""
        parts = [f"{self.gpus_per_actor:g} GPU{kind}"] if self.gpus_per_actor else []
        parts += [f"{self.cpus_per_actor:g} CPU", *(f"{amount:g} {name}" for name, amount in self.resources.items())]
        return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)

    @property
    def each(self) -> str:
        return f"{self.words} each"


def one_actor(settings: SweepSettings, *, gpus: float) -> Placement:
    """A single actor as requested, with this share of a GPU."""
    threads = settings.threads_per_actor or (1 if gpus == 0 else max(1, int(settings.cpus_per_actor or 1)))
    cpus = settings.cpus_per_actor
    if cpus is None:
        cpus = float(threads) if gpus == 0 else 1.0
    return Placement(
        actors=1,
        gpus_per_actor=gpus,
        cpus_per_actor=cpus,
        threads_per_actor=threads,
        accelerator_type=settings.accelerator_type,
        resources=settings.custom_resources,
    )


def place(settings: SweepSettings, machine: Machine) -> Placement:
    """As many actors as requested, else as many as fit; an InputError if they can never fit."""
    gpus = settings.gpus_per_actor
    if gpus is None:
        gpus = 1.0 if machine.most("GPU") or settings.accelerator_type else 0.0
    placement = one_actor(settings, gpus=gpus)
    problems = list(_unplaceable(placement, settings, machine))
    bundle = placement.bundle if machine.names_all else {"CPU": placement.cpus_per_actor, "GPU": gpus}
    capacity = 0 if problems else machine.capacity({name: amount for name, amount in bundle.items() if amount})
    if not problems and capacity == 0:
        problems.append(f"no node has the {placement.words} that an actor needs; {inventory(machine)}")
    elif not problems and (settings.actors or 1) > capacity and not machine.growth.open_ended:
        problems.append(f"--actors must be at most {capacity} with {placement.each} (got {settings.actors or 1})")
    if problems:
        raise InputErrors(problems)
    return replace(placement, actors=settings.actors or capacity)


def _unplaceable(placement: Placement, settings: SweepSettings, machine: Machine) -> Iterator[str]:
    """Requests that no present or expected node can fulfil."""
    threads = settings.threads_per_actor or 0  # each reserves a core if --cpus-per-actor is not given
    needs = {
        "--gpus-per-actor": ("GPU", placement.gpus_per_actor),
        "--cpus-per-actor": ("CPU", placement.cpus_per_actor if settings.cpus_per_actor or not threads else 0),
        "--threads-per-actor": ("CPU", threads),
    }
    for flag, (what, amount) in needs.items():
        if amount > machine.largest(what):
            yield f"{flag} must be at most {machine.largest(what):g}, the {what}s of the largest node (got {amount:g})"
    named = [f"--accelerator-type {placement.accelerator_type}"] if placement.accelerator_type is not None else []
    named += [f"--resources {name}={amount:g}" for name, amount in placement.resources.items()]
    if named and settings.address is None:
        flag = named[0].partition(" ")[0]
        yield f"{named[0]} selects nodes of a Ray cluster: add --address HOST:PORT, or omit {flag}"
    elif machine.names_all:
        resources = [name for name in placement.bundle if name not in ("CPU", "GPU")]
        for flag, name in zip(named, resources, strict=True):
            if placement.bundle[name] > machine.largest(name):
                yield f"{flag}: no node of the cluster has it; {inventory(machine)}"


def inventory(machine: Machine) -> str:
    """the cluster has 8 CPU, 2 GPU (A100, T4) and 1 highmem"""
    every = (*machine.nodes, *machine.growth.groups)
    names = sorted({name for group in every for name in group.resources})
    kinds = ", ".join(name.removeprefix(ACCELERATOR) for name in names if name.startswith(ACCELERATOR))
    custom = [name for name in names if name not in BUILT_IN and not name.startswith((ACCELERATOR, "node:"))]
    parts = [f"{machine.most('CPU'):g} CPU", f"{machine.most('GPU'):g} GPU{f' ({kinds})' if kinds else ''}"]
    parts += [f"{machine.most(name):g} {name}" for name in custom]
    return f"the cluster has {', '.join(parts[:-1])} and {parts[-1]}"

"""What a sweep runs on: nodes and their resources, the model that suits them, and how many actors they hold."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from orchestrator.core.errors import InputErrors
from orchestrator.core.hardware import common_dtype, free_memory, usable_cores, visible_devices
from orchestrator.planning.settings import SweepSettings
from sampler.errors import InputError
from sampler.tiny import BUNDLED_MODEL

FULL_MODEL = "Efficient-Large-Model/Fast_dLLM_v2_7B"
Resources = Mapping[str, float]  # by the names that Ray has for them: CPU, GPU, accelerator_type:A100, custom ones
ACCELERATOR = "accelerator_type:"  # Ray gives a node one unit of `accelerator_type:A100` if its GPUs are A100s …
ACCELERATOR_AMOUNT = 0.001  # … and takes this much of it for `accelerator_type="A100"`
BUILT_IN = ("CPU", "GPU", "memory", "object_store_memory")


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Nodes that have the same resources."""

    resources: Resources
    count: int = 1

    def actors_each(self, bundle: Resources) -> int:
        """Actors that one of these nodes holds. A fraction of a GPU never comes from two devices."""
        return min(_times(self.resources.get(name, 0), name, amount) for name, amount in bundle.items())


def _times(available: float, name: str, amount: float) -> int:
    if name == "GPU" and amount < 1:
        return math.floor(available) * math.floor(1 / amount + 1e-9)
    return math.floor(available / amount + 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The workers that an autoscaler may have at a time, running ones included.

    `open_ended`: nodes are expected, but only the autoscaler knows how many; `groups` then says what one has at least.
    """

    groups: tuple[Nodes, ...] = ()
    max_nodes: int = 0  # in all groups together
    open_ended: bool = False

    def total(self, name: str) -> float:
        """The most there may be of this resource, if the nodes that have most of it are taken first."""
        return self._sum([(group.count, group.resources.get(name, 0)) for group in self.groups])

    def actors(self, bundle: Resources) -> int:
        return int(self._sum([(group.count, group.actors_each(bundle)) for group in self.groups]))

    def _sum(self, counted: list[tuple[int, float]]) -> float:
        total, left = 0.0, self.max_nodes
        for count, each in sorted(counted, key=lambda pair: pair[1], reverse=True):
            taken = min(count, left)
            total, left = total + taken * each, left - taken
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """This machine, or the cluster that --address names."""

    nodes: tuple[Nodes, ...]
    growth: Growth = field(default_factory=Growth)
    names_all: bool = True  # False where only Ray will know the types of GPUs and custom resources
    driver_gpus: int = 0  # where the command was typed
    dtype: str = "float32"  # what auto means on its devices
    memory: int | None = None  # bytes that actors without a GPU may take; None: only their own machine can say

    @classmethod
    def here(cls) -> "Machine":
        gpus = torch.cuda.device_count()
        nodes = (Nodes(resources={"CPU": usable_cores(), "GPU": gpus}),)
        dtype, _ = common_dtype(visible_devices())
        return cls(nodes=nodes, driver_gpus=gpus, dtype=dtype, memory=free_memory())

    def present(self, name: str) -> float:
        """How much of a resource there is now."""
        return sum(group.count * group.resources.get(name, 0) for group in self.nodes)

    def most(self, name: str) -> float:
        """How much of a resource there is, or may be once the cluster has grown."""
        return max(self.present(name), self.growth.total(name))

    def largest(self, name: str) -> float:
        """The most that one node has of a resource, or may have."""
        every = (*self.nodes, *self.growth.groups)
        return max((group.resources.get(name, 0) for group in every if group.count), default=0)

    def holds_now(self, bundle: Resources) -> int:
        """Actors that fit on the nodes that are there."""
        return sum(group.count * group.actors_each(bundle) for group in self.nodes)

    def capacity(self, bundle: Resources) -> int:
        """Actors that fit on the nodes that are there, or may come."""
        return max(self.holds_now(bundle), self.growth.actors(bundle))


def resolve_model(model: str, machine: Machine, address: str | None) -> str:
    """The model that `auto` means: the full one where GPUs are or may come, else the bundled one, but on a cluster."""
    if model != "auto":
        return model
    if machine.driver_gpus or machine.most("GPU"):
        return FULL_MODEL
    if address is None:
        return BUNDLED_MODEL
    raise InputError(
        f"--model auto: the cluster at {address} has no GPU, and as far as is known it cannot add one; "
        "name a model that runs on CPUs, such as --model tiny, or wait for GPUs with --gpus-per-actor 1"
    )


def describe_auto_model(requested: SweepSettings, settings: SweepSettings, machine: Machine) -> list[str]:
    """A line for a sweep without --model: which one it is, and why."""
    if requested.model != "auto" or settings.model not in (BUNDLED_MODEL, FULL_MODEL):
        return []
    known = {"bundled": "the bundled documents", "hub": "documents from the Hub or its cache"}
    documents = known.get(settings.data, f"documents from {settings.data}")
    if settings.model == BUNDLED_MODEL:
        why = f"no GPU here (torch {torch.__version__} finds none)"
        return [f"{why}: running the small bundled model on {documents}; --model {FULL_MODEL} runs the real one"]
    return [
        f"{gpus_of(machine, requested.address)}: running {FULL_MODEL} on {documents}; --model tiny runs the small one"
    ]


def gpus_of(machine: Machine, address: str | None) -> str:
    """What made auto the full model."""
    count = machine.most("GPU") or machine.driver_gpus
    many = f"{count:g} GPU{'' if count == 1 else 's'}"
    if not machine.most("GPU") or address is None:
        return f"{many} here"
    if not machine.present("GPU") and machine.growth.open_ended:
        return f"GPUs that the autoscaler of the cluster at {address} adds"
    return f"{'' if machine.present('GPU') else 'up to '}{many} in the cluster at {address}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """What each actor gets, and how many there are. All ask for the same, or a warm one could not be used again."""

    actors: int
    gpus_per_actor: float
    cpus_per_actor: float
    threads_per_actor: int
    accelerator_type: str | None = None
    resources: Resources = field(default_factory=dict)  # custom ones, by name

    @property
    def bundle(self) -> dict[str, float]:
        """What an actor asks Ray for: the one bundle of its placement group."""
        asked = {"CPU": self.cpus_per_actor, "GPU": self.gpus_per_actor}
        if self.accelerator_type is not None:
            asked[f"{ACCELERATOR}{self.accelerator_type}"] = ACCELERATOR_AMOUNT
        return {name: amount for name, amount in (asked | dict(self.resources)).items() if amount}

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


def one_actor(settings: SweepSettings, machine: Machine, *, gpus: float) -> Placement:
    """A single actor as asked for, with this much of a GPU."""
    threads = settings.threads_per_actor or (1 if gpus == 0 else max(1, int(settings.cpus_per_actor or 1)))
    cpus = settings.cpus_per_actor
    if cpus is None:  # threads share cores where there are not enough for each
        cpus = float(threads) if gpus == 0 and threads <= machine.largest("CPU") else 1.0
    return Placement(
        actors=1,
        gpus_per_actor=gpus,
        cpus_per_actor=cpus,
        threads_per_actor=threads,
        accelerator_type=settings.accelerator_type,
        resources=settings.custom_resources,
    )


def place(settings: SweepSettings, machine: Machine) -> Placement:
    """As asked, else as many actors as the machine holds; what it cannot hold is an error now, not a wait."""
    gpus = settings.gpus_per_actor
    if gpus is None:
        gpus = 1.0 if machine.most("GPU") or settings.accelerator_type else 0.0
    placement = one_actor(settings, machine, gpus=gpus)
    problems = list(_unplaceable(placement, settings, machine))
    bundle = placement.bundle if machine.names_all else {"CPU": placement.cpus_per_actor, "GPU": gpus}
    capacity = 0 if problems else machine.capacity({name: amount for name, amount in bundle.items() if amount})
    if not problems and capacity == 0:
        problems.append(f"no node has {placement.words} for an actor; {inventory(machine)}")
    elif not problems and (settings.actors or 1) > capacity and not machine.growth.open_ended:
        problems.append(f"--actors {settings.actors or 1}: with {placement.each} there is room for {capacity}")
    if problems:
        raise InputErrors(problems)
    return replace(placement, actors=settings.actors or capacity)


def _unplaceable(placement: Placement, settings: SweepSettings, machine: Machine) -> Iterator[str]:
    """What no node has, nor will."""
    for what, asked in (("GPU", placement.gpus_per_actor), ("CPU", placement.cpus_per_actor)):
        if asked > machine.largest(what):
            yield f"--{what.lower()}s-per-actor {asked:g}: no machine here has more than {machine.largest(what):g}"
    named = [f"--accelerator-type {placement.accelerator_type}"] if placement.accelerator_type is not None else []
    named += [f"--resources {name}={amount:g}" for name, amount in placement.resources.items()]
    if named and settings.address is None:
        yield f"{named[0]} selects nodes of a Ray cluster: give its --address, or leave the flag out"
    elif machine.names_all:
        asked_of = [name for name in placement.bundle if name not in ("CPU", "GPU")]
        for flag, name in zip(named, asked_of, strict=True):
            if placement.bundle[name] > machine.largest(name):
                yield f"{flag}: no node of the cluster has that; {inventory(machine)}"


def inventory(machine: Machine) -> str:
    """the cluster has 8 CPU, 2 GPU (A100, T4) and 1 highmem"""
    every = (*machine.nodes, *machine.growth.groups)
    names = sorted({name for group in every for name in group.resources})
    kinds = ", ".join(name.removeprefix(ACCELERATOR) for name in names if name.startswith(ACCELERATOR))
    custom = [name for name in names if name not in BUILT_IN and not name.startswith((ACCELERATOR, "node:"))]
    parts = [f"{machine.most('CPU'):g} CPU", f"{machine.most('GPU'):g} GPU{f' ({kinds})' if kinds else ''}"]
    parts += [f"{machine.most(name):g} {name}" for name in custom]
    return f"the cluster has {', '.join(parts[:-1])} and {parts[-1]}"

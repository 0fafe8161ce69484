"""What one denoising pass does in each layer: plans as values. Knows no tensors, no policy names, no model.

A policy looks at a `StepContext` and asks for a `LayerPlan`; `resolve` applies the rules that no policy may
break; the layer loop obeys. Plans are hashable, so rows of a batch that share one run together.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class PassKind(Enum):
    """Prefill and commit write clean tokens into the prefix cache; full and small passes denoise."""

    PREFILL = "prefill"
    FULL = "full"
    SMALL = "small"
    COMMIT = "commit"


class LayerStep(Enum):
    """One layer's part in a pass: what its attention and its MLP do."""

    COMPUTE = "compute"
    REPLAY = "replay"
    REPLAY_ATTENTION = "replay attention, compute the MLP"
    REPLAY_MLP = "compute attention, replay the MLP"
    PARTIAL = "compute the plan's selected positions, replay the others"
    SKIP = "hand the input on"

    @property
    def runs_attention(self) -> bool:
        return self not in (LayerStep.REPLAY, LayerStep.REPLAY_ATTENTION, LayerStep.SKIP)

    @property
    def runs_mlp(self) -> bool:
        return self not in (LayerStep.REPLAY, LayerStep.REPLAY_MLP, LayerStep.SKIP)


COMPUTE, REPLAY, PARTIAL, SKIP = LayerStep.COMPUTE, LayerStep.REPLAY, LayerStep.PARTIAL, LayerStep.SKIP
REPLAY_ATTENTION, REPLAY_MLP = LayerStep.REPLAY_ATTENTION, LayerStep.REPLAY_MLP


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Per layer what to do; `selected` are the positions in the block that partial layers compute.

    A `stale` plan runs no layer at all: each position's final state is that of the last pass that computed it.
    """

    steps: tuple[LayerStep, ...]
    selected: tuple[int, ...] = ()
    stale: bool = False

    def __post_init__(self) -> None:
        assert (PARTIAL in self.steps) == bool(self.selected), "selected positions belong to partial layers"

    @property
    def replays(self) -> bool:
        return self.stale or any(step is not COMPUTE for step in self.steps)

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for plans that can run as one batch; which positions are selected, and how many, may differ."""
        return self.steps, self.stale


def compute_all(depth: int) -> LayerPlan:
    return LayerPlan(steps=(COMPUTE,) * depth)


def in_layers(step: LayerStep, layers: Collection[int], depth: int, selected: tuple[int, ...] = ()) -> LayerPlan:
    """The plan that does `step` in these layers and computes the others; with no layers it computes everything."""
    return LayerPlan(tuple(step if layer in layers else COMPUTE for layer in range(depth)), selected=selected)


class Unit(Enum):
    """Whose contribution to the residual stream is cached and replayed."""

    LAYER = "layer"
    ATTENTION = "attention"
    MLP = "mlp"


@dataclass(frozen=True, slots=True)
class Keeps:
    """What passes must leave behind for a policy's later replays, and what is to be measured on the way."""

    layers: tuple[int, ...] = ()
    unit: Unit = Unit.LAYER
    final_states: bool = False
    watched: int | None = None  # the layer before which each pass measures how far its input moved
    drifts: bool = False  # measure too how far the contribution of each of `layers` moved


INPUT = -2  # the key under which movements have the watched layer's input; contributions have their layer's index
# L1 norms at one position: of the change since it was last forwarded, of what was there, and behind a contribution's
# layer of the residual stream.
Norms = Sequence[float]
Movements = Mapping[int, Sequence[Norms]]  # of the positions of a pass; empty where nothing is measured


@dataclass(frozen=True, kw_only=True, slots=True)
class PastPass:
    """A denoising pass of the block that has run: its positions, its plan as executed, and what it measured."""

    window: range
    plan: LayerPlan
    moved: Movements = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """The facts of a row's block before a denoising pass; positions count from the block's start."""

    step: int  # denoising passes of this block so far, full and small alike
    kind: PassKind
    window: range  # the positions this pass forwards
    revealed_at: tuple[int | None, ...]  # per position: after which step its token stood (-1: given), None: masked
    past: tuple[PastPass, ...] = ()  # the block's passes so far, the last one at the end


class Policy(Protocol):
    """A policy bound to a model's depth: facts in, a plan out, no memory of its own.

    `period` is None where steps do not follow a fixed rhythm.
    """

    @property
    def keeps(self) -> Keeps: ...

    @property
    def period(self) -> int | None: ...

    def plan(self, context: StepContext) -> LayerPlan: ...


def resolve(requested: LayerPlan, context: StepContext, layers: int) -> LayerPlan:
    """The plan that is executed: the first pass of a block has nothing cached, so it computes everything.

    Prefill and commit passes never ask a policy; they compute everything by construction.
    """
    return compute_all(layers) if context.step == 0 else requested


def input_change(done: PastPass) -> float:
    """The relative L1 change of the watched input over a pass's positions together; 0 where nothing was measured."""
    norms = done.moved.get(INPUT, ())
    before = sum(size for _, size in norms)
    return sum(change for change, _ in norms) / before if before else 0.0


def input_changes(past: Sequence[PastPass]) -> dict[int, float]:
    """The relative L1 change at each position, as measured in the last pass that forwarded it a second time."""
    found: dict[int, float] = {}
    for done in past:
        for position, (change, size) in zip(done.window, done.moved.get(INPUT, ()), strict=False):
            found[position] = change / size if size else 0.0
    return found


def computed_at(past: Sequence[PastPass]) -> dict[int, int]:
    """The last step in which each position went through every layer."""
    found: dict[int, int] = {}
    for step, done in enumerate(past):
        for position in done.plan.selected if done.plan.replays else done.window:
            found[position] = step
    return found

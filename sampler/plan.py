"""Plans: what each layer does in one denoising pass, and the facts a policy decides on.

Before each pass a policy gets a `StepContext` and returns a `LayerPlan`; `resolve` applies the rules that no policy may
break, and the forward pass executes the result. Plans are hashable, so that rows with equal plans can share a batch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class PassKind(Enum):
    """Prefill and commit passes write finished tokens into the prefix cache; full and small passes denoise."""

    PREFILL = "prefill"
    FULL = "full"
    SMALL = "small"
    COMMIT = "commit"


class LayerStep(Enum):
    """What one layer does in a pass."""

    COMPUTE = "compute"
    REPLAY = "replay"
    REPLAY_ATTENTION = "replay attention, compute the MLP"
    REPLAY_MLP = "compute attention, replay the MLP"
    PARTIAL = "compute the plan's selected positions, replay the others"
    SKIP = "return the input unchanged"

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
    """One step per layer. `selected` lists the positions in the block that partial layers compute.

    A `stale` plan runs no layer: each position keeps the final state of the last pass that computed it.
    """

    steps: tuple[LayerStep, ...]
    selected: tuple[int, ...] = ()
    stale: bool = False

    def __post_init__(self) -> None:
        assert (PARTIAL in self.steps) == bool(self.selected), "selected positions require partial layers"

    @property
    def replays(self) -> bool:
        return self.stale or self.steps.count(COMPUTE) < len(self.steps)

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Equal for plans that can run in one batch; their selected positions may differ."""
        return self.steps, self.stale


def compute_all(depth: int) -> LayerPlan:
    return LayerPlan(steps=(COMPUTE,) * depth)


def in_layers(step: LayerStep, layers: Collection[int], depth: int, selected: tuple[int, ...] = ()) -> LayerPlan:
    """A plan that applies `step` to the given layers and computes all others."""
    return LayerPlan(tuple(step if layer in layers else COMPUTE for layer in range(depth)), selected=selected)


class Unit(Enum):
    """The part of a layer whose contribution to the residual stream is cached and replayed."""

    LAYER = "layer"
    ATTENTION = "attention"
    MLP = "mlp"


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What passes must cache for a policy's later replays, and what they must measure."""

    layers: tuple[int, ...] = ()
    unit: Unit = Unit.LAYER
    final_states: bool = False
    watched_layer: int | None = None  # each pass measures how much the input of this layer changed
    measures_contributions: bool = False  # also measure how much the contribution of each of `layers` changed


WATCHED_INPUT = -2  # key of the watched layer's input in `Measurements`; contributions have their layer's index
# L1 norms at one position: of the change since the position was last forwarded, of the previous value and, for a
# contribution, of the residual stream after its layer.
Norms = Sequence[float]
Measurements = Mapping[int, Sequence[Norms]]  # norms at each position of a pass; empty if nothing is measured


@dataclass(frozen=True, kw_only=True, slots=True)
class PastPass:
    """A completed denoising pass of the block: its positions, the executed plan, and its measurements."""

    window: range
    plan: LayerPlan
    measured: Measurements = field(default_factory=dict)

    @property
    def input_change(self) -> float:
        """Relative L1 change of the watched input over all positions; 0 if it was not measured."""
        norms = self.measured.get(WATCHED_INPUT, ())
        before = sum(size for _, size in norms)
        return sum(change for change, _ in norms) / before if before else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """What is known about a block before a denoising pass. Positions count from the block's start."""

    step: int  # number of denoising passes of this block so far, full and small
    kind: PassKind
    window: range  # the positions that this pass forwards
    revealed_at: tuple[int | None, ...]  # step that revealed each position; -1: part of the prompt, None: masked
    past: tuple[PastPass, ...] = ()  # earlier passes of this block, oldest first


def input_changes(past: Sequence[PastPass]) -> dict[int, float]:
    """Relative L1 change of the watched input at each position, from the last pass that measured it."""
    found: dict[int, float] = {}
    for done in past:
        for position, (change, size) in zip(done.window, done.measured.get(WATCHED_INPUT, ()), strict=False):
            found[position] = change / size if size else 0.0
    return found


def computed_at(past: Sequence[PastPass]) -> dict[int, int]:
    """The last step in which each position went through every layer."""
    found: dict[int, int] = {}
    for step, done in enumerate(past):
        for position in done.plan.selected if done.plan.replays else done.window:
            found[position] = step
    return found


class BoundPolicy(Protocol):
    """A policy for a model of known depth. It is stateless: the plan depends on the context only."""

    @property
    def cache_spec(self) -> CacheSpec: ...

    @property
    def period(self) -> int | None:
        """Passes from one fully computed pass to the next; None if there is no fixed period."""

    def plan(self, context: StepContext) -> LayerPlan: ...


def resolve(requested: LayerPlan, context: StepContext, depth: int) -> LayerPlan:
    """The plan to execute: the first pass of a block has nothing cached, so it computes every layer.

    Prefill and commit passes always compute every layer and are never planned by a policy.
    """
    return compute_all(depth) if context.step == 0 else requested

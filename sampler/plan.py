"""Plans: what each layer does in one denoising pass, and the facts a policy decides on.

Before each pass a policy gets a `StepContext` and returns a `LayerPlan`; `resolve` applies the rules that no policy may
break, and the forward pass executes the result. Plans are hashable, so that rows with equal plans can share a batch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    PARTIAL = "compute the positions that were selected, by the plan or at a checkpoint, and replay the others"
    SKIP = "return the input unchanged"

    @property
    def runs_attention(self) -> bool:
        return self not in (LayerStep.REPLAY, LayerStep.REPLAY_ATTENTION, LayerStep.SKIP)

    @property
    def runs_mlp(self) -> bool:
        return self not in (LayerStep.REPLAY, LayerStep.REPLAY_MLP, LayerStep.SKIP)


COMPUTE, REPLAY, PARTIAL, SKIP = LayerStep.COMPUTE, LayerStep.REPLAY, LayerStep.PARTIAL, LayerStep.SKIP
REPLAY_ATTENTION, REPLAY_MLP = LayerStep.REPLAY_ATTENTION, LayerStep.REPLAY_MLP


class CheckpointSignal(Enum):
    """What a checkpoint measures at each position of a pass; it is not known before the pass."""

    INPUT_CHANGE = "relative L1 change of the layer's input since the position was last forwarded"
    VALUE_CHANGE = "minus the cosine of the layer's values and those in the cache"
    ATTENTION = "attention that the position receives from the pass's positions, relative to all attention between them"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Before `layer`, selects the `keep` positions with the highest score, which the following partial layers compute.

    A position's score is weight × signal + prior. `priors` has what the policy knows about each position of the pass;
    inf keeps a position, -inf drops it. The selection is made on the device, and the host does not wait for it.
    """

    layer: int
    keep: int
    signal: CheckpointSignal
    weight: float
    priors: tuple[float, ...]

    def __post_init__(self) -> None:
        assert 0 < self.keep < len(self.priors), "a checkpoint keeps some positions and drops others"

    @property
    def batch_key(self) -> tuple[object, ...]:
        return self.layer, self.keep, self.signal, self.weight, len(self.priors)


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One step per layer. Partial layers compute the positions in `selected`, or those that `checkpoints` select.

    Positions count from the block's start.
    A `stale` plan runs no layer: each position keeps the final state of the last pass that computed it.
    """

    steps: tuple[LayerStep, ...]
    selected: tuple[int, ...] = ()
    stale: bool = False
    checkpoints: tuple[Checkpoint, ...] = ()  # by layer; each selects from the positions that the one before kept

    def __post_init__(self) -> None:
        chosen = bool(self.selected) + bool(self.checkpoints)
        assert chosen == (PARTIAL in self.steps), "partial layers need selected positions or checkpoints"
        first = self.checkpoints[0].layer if self.checkpoints else 0
        assert PARTIAL not in self.steps[:first], "the first checkpoint comes before all partial layers"

    @property
    def replays(self) -> bool:
        return self.stale or self.steps.count(COMPUTE) < len(self.steps)

    @property
    def priors(self) -> tuple[tuple[float, ...], ...]:
        return tuple(checkpoint.priors for checkpoint in self.checkpoints)

    def positions(self, layer: int, window: int) -> int:
        """How many positions a layer computes, if it runs, in a pass over `window` positions."""
        if self.steps[layer] is not PARTIAL:
            return window
        kept = [checkpoint.keep for checkpoint in self.checkpoints if checkpoint.layer <= layer]
        return kept[-1] if kept else len(self.selected)

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Equal for plans that can run in one batch; their selected positions and priors may differ."""
        return self.steps, self.stale, *(checkpoint.batch_key for checkpoint in self.checkpoints)

    @property
    def template(self) -> "LayerPlan":
        """This plan with placeholders for its selected positions and priors, which a compiled graph gets as tensors."""
        checkpoints = (replace(point, priors=(0.0,) * len(point.priors)) for point in self.checkpoints)
        return replace(self, selected=self.selected[:1], checkpoints=tuple(checkpoints))


def compute_all(depth: int) -> LayerPlan:
    """The plan that computes all of `depth` layers."""
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
    compared_inputs: tuple[int, ...] = ()  # layers whose input is cached, for checkpoints that measure how it changed


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
    confidence: Mapping[int, float] = field(default_factory=dict)  # of the predictions, by position in the block

    @property
    def computed_positions(self) -> Sequence[int]:
        """The positions that went through every layer; empty if a checkpoint selected them on the device."""
        return self.plan.selected if self.plan.replays else self.window

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
    changes: dict[int, float] = {}
    for done in past:
        for position, (change, size) in zip(done.window, done.measured.get(WATCHED_INPUT, ()), strict=False):
            changes[position] = change / size if size else 0.0
    return changes


def computed_at(past: Sequence[PastPass]) -> dict[int, int]:
    """The last step in which each position went through every layer."""
    return {position: step for step, done in enumerate(past) for position in done.computed_positions}


class BoundPolicy(Protocol):
    """A policy for a model of known depth. It is stateless: the plan depends on the context only."""

    @property
    def cache_spec(self) -> CacheSpec: ...

    @property
    def period(self) -> int | None:
        """Passes from one fully computed pass to the next; None if there is no fixed period."""

    def plan(self, context: StepContext) -> LayerPlan: ...


def resolve(requested: LayerPlan, context: StepContext, depth: int) -> LayerPlan:
    """The plan to execute: the requested one, except that the first pass of a block never replays.

    Nothing is cached before the first pass, so it computes all layers unless the requested plan needs no cached value.
    Prefill and commit passes always compute every layer and are not planned by a policy.
    """
    needs_nothing = not requested.stale and set(requested.steps) <= {COMPUTE, SKIP}
    return requested if context.step or needs_nothing else compute_all(depth)

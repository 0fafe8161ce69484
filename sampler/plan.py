"""What one denoising pass does in each layer: plans as values. Knows no tensors, no policy names, no model.

A policy looks at a `StepContext` and asks for a `LayerPlan`; `resolve` applies the rules that no policy may
break; the layer loop obeys. Plans are hashable, so rows of a batch that share one run together.
"""

from dataclasses import dataclass
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

    @property
    def runs_attention(self) -> bool:
        return self not in (LayerStep.REPLAY, LayerStep.REPLAY_ATTENTION)

    @property
    def runs_mlp(self) -> bool:
        return self not in (LayerStep.REPLAY, LayerStep.REPLAY_MLP)


COMPUTE, REPLAY, PARTIAL = LayerStep.COMPUTE, LayerStep.REPLAY, LayerStep.PARTIAL
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
        """Equal for plans that can run as one batch: which positions are selected may differ, how many may not."""
        return self.steps, len(self.selected), self.stale


def compute_all(layers: int) -> LayerPlan:
    return LayerPlan(steps=(COMPUTE,) * layers)


class Unit(Enum):
    """Whose contribution to the residual stream is cached and replayed."""

    LAYER = "layer"
    ATTENTION = "attention"
    MLP = "mlp"


@dataclass(frozen=True, slots=True)
class Keeps:
    """What computed passes must leave behind for a policy's later replays."""

    layers: tuple[int, ...] = ()
    unit: Unit = Unit.LAYER
    final_states: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """The facts of a row's block before a denoising pass; positions count from the block's start."""

    step: int  # denoising passes of this block so far, full and small alike
    kind: PassKind
    window: range  # the positions this pass forwards
    revealed_at: tuple[int | None, ...]  # per position: after which step its token stood (-1: given), None: masked


class Policy(Protocol):
    """A policy bound to a model's depth. `period` is None where steps do not follow a fixed rhythm."""

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

"""`kK_layers[.output][.small]`: the fixed grid. Every K-th pass of a block computes, those between replay the layers.

Idea: what a layer adds to the residual stream changes little from one denoising step to the next, so its cached
contribution can stand for it. With `.output` the last logits are repeated instead; with `.small` full passes compute.
Source: the experiment this project grew out of; DeepCache (Ma et al., 2023) and FORA (Selvaraju et al., 2024) do the
same in image diffusion.
"""

from dataclasses import dataclass, field

from sampler.errors import InputError
from sampler.plan import REPLAY, Keeps, LayerPlan, PassKind, Policy, StepContext, compute_all, in_layers
from sampler.policies.rule import Rule

OPTIONS = ("output", "small")


@dataclass(frozen=True, kw_only=True, slots=True)
class Periodic:
    """Computes all layers on each `period`-th pass of a block and does as `replay` says in between."""

    period: int
    replay: LayerPlan
    keeps: Keeps
    small_only: bool = False
    compute: LayerPlan = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", compute_all(len(self.replay.steps)))

    def plan(self, context: StepContext) -> LayerPlan:
        due = context.step % self.period == 0
        held_back = self.small_only and context.kind is not PassKind.SMALL
        return self.compute if due or held_back else self.replay


def repeating(period: int, depth: int, *, small_only: bool = False) -> Policy:
    """Repeats the last logits between computed passes: no layer runs, so it does not matter which are named."""
    stale = LayerPlan(compute_all(depth).steps, stale=period > 1)
    return Periodic(period=period, replay=stale, keeps=Keeps(final_states=period > 1), small_only=small_only)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodicRule(Rule):
    k: int
    output: bool = False
    small_only: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError("k must be at least 1 (k1 computes every layer on every pass)")

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        unknown = [option for option in options if option not in OPTIONS]
        if unknown:
            raise InputError(f"no option .{unknown[0]}, only .output and .small")
        if len(set(options)) < len(options):
            raise InputError("an option is given twice, once is allowed")
        return cls(k=int(value), output="output" in options, small_only="small" in options)

    def __str__(self) -> str:
        return f"k{self.k}"

    @property
    def needs_layers(self) -> bool:
        return self.k > 1

    @property
    def mode(self) -> str:
        return "output" if self.output else "residual"

    @property
    def grid_period(self) -> int:
        return self.k

    @property
    def options(self) -> tuple[str, ...]:
        return (*(("output",) if self.output else ()), *(("small",) if self.small_only else ()))

    def bind(self, layers: tuple[int, ...], depth: int) -> Policy:
        if self.output:
            return repeating(self.k, depth, small_only=self.small_only)
        named = layers if self.k > 1 else ()
        replay = in_layers(REPLAY, named, depth)
        return Periodic(period=self.k, replay=replay, keeps=Keeps(named), small_only=self.small_only)

"""`adaptive=T_layers[.N]`: replays until the input of its layers has drifted by T; N passes in a row at most (3).

Idea: replay as long as little has changed. Before a pass the drift is the sum of the relative L1 changes of the first
named layer's input that the passes since the last computed one measured, plus the share of this pass's positions that
were revealed just before it: what is known already of the change that will be measured only then, one pass late.
Source: TeaCache (Liu et al., 2024), whose accumulated relative change this is; the lag is ours, and part of it.
"""

from dataclasses import dataclass
from typing import ClassVar

from sampler.errors import InputError
from sampler.plan import REPLAY, LayerPlan, StepContext, compute_all, in_layers, input_change
from sampler.policies.base import PlanningRule, Rule, real, shown, whole

MOST_REPLAYS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveRule(PlanningRule):
    """Drift of at least `enough` is computed; so is what follows `most` replays. Both counts begin anew with it."""

    watches: ClassVar[bool] = True
    unscored: ClassVar[str | None] = (
        "it decides by how far a block's earlier passes moved, and a state to be scored has no such passes"
    )
    enough: float
    most: int = MOST_REPLAYS

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        if len(options) > 1:
            raise InputError("adaptive has one option, the most replays in a row, as in adaptive=0.2_middle.3")
        most = whole(options[0], "the most replays in a row") if options else MOST_REPLAYS
        return cls(enough=real(value, "the T of adaptive=T"), most=most)

    def __str__(self) -> str:
        return f"adaptive={shown(self.enough)}"

    @property
    def mode(self) -> str:
        return "adaptive"

    @property
    def options(self) -> tuple[str, ...]:
        return () if self.most == MOST_REPLAYS else (str(self.most),)

    def plan(self, context: StepContext) -> LayerPlan:
        if not context.past:
            return compute_all(self.depth)
        just_revealed = sum(context.revealed_at[p] == context.step - 1 for p in context.window)
        drift, replays = just_revealed / len(context.window), 0
        for done in reversed(context.past):
            if not done.plan.replays:
                break
            drift += input_change(done)
            replays += 1
        computes = drift >= self.enough or replays >= self.most
        return compute_all(self.depth) if computes else in_layers(REPLAY, self.layers, self.depth)

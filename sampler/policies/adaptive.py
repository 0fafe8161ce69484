"""`adaptive=T_layers[.N]`: replays until the input of its layers has drifted by T, at most N passes in a row (3).

Idea: replay as long as little has changed. The drift before a pass is the sum of the relative L1 changes of the first
layer's input, as measured by the passes since the last computed one, plus the share of this pass's positions that the
previous pass revealed. (A pass measures the effect of a revealed token only after it has run, one pass late.)
Source: TeaCache (Liu et al., 2024), which accumulates the relative change; the term for revealed positions is ours.
"""

from dataclasses import dataclass
from typing import ClassVar

from sampler.errors import InputError
from sampler.plan import REPLAY, LayerPlan, StepContext, compute_all, in_layers
from sampler.policies.base import PlanningRule, Rule, format_decimal, parse_decimal, parse_integer

DEFAULT_MAX_REPLAYS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveRule(PlanningRule):
    """Computes when the drift reaches `threshold` or after `max_replays` replays; both counts then restart."""

    mode: ClassVar[str] = "adaptive"
    watches_input: ClassVar[bool] = True
    no_scoring_reason: ClassVar[str | None] = (
        "it decides by how much earlier passes of the block changed, and a scored state has no such passes"
    )
    threshold: float
    max_replays: int = DEFAULT_MAX_REPLAYS

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        if len(options) > 1:
            raise InputError("adaptive takes one option, the maximum number of replays, as in adaptive=0.2_middle.3")
        replays = parse_integer(options[0], "the maximum number of replays") if options else DEFAULT_MAX_REPLAYS
        return cls(threshold=parse_decimal(value, "T in adaptive=T"), max_replays=replays)

    def __str__(self) -> str:
        return f"adaptive={format_decimal(self.threshold)}"

    @property
    def options(self) -> tuple[str, ...]:
        return () if self.max_replays == DEFAULT_MAX_REPLAYS else (str(self.max_replays),)

    def plan(self, context: StepContext) -> LayerPlan:
        if not context.past:
            return compute_all(self.depth)
        just_revealed = sum(context.revealed_at[p] == context.step - 1 for p in context.window)
        drift, replays = just_revealed / len(context.window), 0
        for done in reversed(context.past):
            if not done.plan.replays:
                break
            drift += done.input_change
            replays += 1
        computes = drift >= self.threshold or replays >= self.max_replays
        return compute_all(self.depth) if computes else in_layers(REPLAY, self.layers, self.depth)

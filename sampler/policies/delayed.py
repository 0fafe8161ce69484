"""`delayed=N_layers`: the layers run for masked positions and for tokens that were revealed a short time ago.

Idea: a token changes its keys and values most when it is revealed, and hardly afterwards. So the layers compute the
masked positions and those that have been computed fewer than N times since they were revealed; for the others they
replay, and keep their keys and values. The position before a masked one is computed too: with token shift its state
predicts the masked token.
Source: dKV-Cache (Ma et al., 2025, arXiv 2505.15781), whose delayed caching is N = 1; also the baseline of FOCUS (Liang
et al., 2026, arXiv 2601.23278).
What differs: dKV-Cache is defined for models with full attention and refreshes everything every few steps. Here a
block sees only itself and finished blocks, whose keys and values are exact, and the commit pass recomputes the block.
Limits: N = inf is k1. There is no budget: how many positions run follows from what is revealed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sampler.errors import InputError
from sampler.plan import PARTIAL, REPLAY, LayerPlan, StepContext, compute_all, in_layers
from sampler.policies.base import PlanningRule, Rule, check_options, format_decimal, parse_decimal


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedRule(PlanningRule):
    mode: ClassVar[str] = "delayed"
    no_scoring_reason: ClassVar[str | None] = (
        "it depends on when each position was revealed, and a scored state has no such steps"
    )
    refreshes: float

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        check_options(options, (), "delayed")
        refreshes = parse_decimal(value, "N in delayed=N")
        if not math.isinf(refreshes) and refreshes != int(refreshes):
            raise InputError(f"N in delayed=N must be a whole number or inf (got {value})")
        return cls(refreshes=refreshes)

    def __str__(self) -> str:
        return f"delayed={format_decimal(self.refreshes)}"

    def plan(self, context: StepContext) -> LayerPlan:
        masked = {position for position, step in enumerate(context.revealed_at) if step is None}
        computed = [done.computed_positions for done in context.past]
        chosen = [p for p in context.window if {p, p + 1} & masked or self._is_fresh(p, context, computed)]
        if not context.past or len(chosen) == len(context.window):
            return compute_all(self.depth)
        if not chosen:
            return in_layers(REPLAY, self.layers, self.depth)
        return in_layers(PARTIAL, self.layers, self.depth, tuple(chosen))

    def _is_fresh(self, position: int, context: StepContext, computed: Sequence[Sequence[int]]) -> bool:
        """Whether fewer than `refreshes` passes computed this position since the step that revealed it."""
        revealed = context.revealed_at[position]
        assert revealed is not None
        return sum(position in positions for positions in computed[revealed + 1 :]) < self.refreshes

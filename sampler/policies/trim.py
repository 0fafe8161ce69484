"""`trim=R_layers[.random]`: after a block's first pass the layers run for some positions only, the others replay.

Idea: refresh what changed. The layers run for positions revealed since their contribution was cached, those next to
them, and the share R of the pass's positions whose input moved most in the last pass, against keys and values of the
rest as cached. `.random` is the control: as many positions, drawn by lot (the same lot for the same block's state).
Source: token-level reuse, the seeds' TRIM; dLLM-Cache (Liu et al., 2025) refreshes the tokens whose values moved most.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from sampler.errors import InputError
from sampler.plan import PARTIAL, REPLAY, LayerPlan, StepContext, compute_all, computed_at, in_layers, input_changes
from sampler.policies.base import PlanningRule, Rule, real, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class TrimRule(PlanningRule):
    """Decides per pass which positions the layers run for: all of them is a computed pass, none a replay."""

    watches: ClassVar[bool] = True
    unscored: ClassVar[str | None] = (
        "it chooses positions by how far they moved between passes, and only one pass precedes a state to be scored"
    )
    share: float
    random: bool = False

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        if options not in ([], ["random"]):
            raise InputError(f"no option .{options[0]}, only .random")
        share = real(value, "the R of trim=R")
        if not share <= 1:
            raise InputError(f"the R of trim=R is {shown(share)}, a share from 0 to 1 is allowed")
        return cls(share=share, random=bool(options))

    def __str__(self) -> str:
        return f"trim={shown(self.share)}"

    @property
    def mode(self) -> str:
        return "trim"

    @property
    def options(self) -> tuple[str, ...]:
        return ("random",) if self.random else ()

    def plan(self, context: StepContext) -> LayerPlan:
        if not context.past:
            return compute_all(self.depth)
        chosen = self._outdated(context) | self._moved(context)
        if len(chosen) == len(context.window):
            return compute_all(self.depth)
        if not chosen:
            return in_layers(REPLAY, self.layers, self.depth)
        if self.random:
            lot = Random(f"{context.step} {context.window} {context.revealed_at}")
            chosen = set(lot.sample(context.window, len(chosen)))
        return in_layers(PARTIAL, self.layers, self.depth, tuple(sorted(chosen)))

    def _outdated(self, context: StepContext) -> set[int]:
        """Positions whose contribution was made for a mask that is a token now, and their neighbours."""
        cached, stood = computed_at(context.past), context.revealed_at
        changed = [p for p, at in enumerate(stood) if at is not None and at >= cached[p]]
        return {near for p in changed for near in (p - 1, p, p + 1)} & set(context.window)

    def _moved(self, context: StepContext) -> set[int]:
        change = input_changes(context.past)
        most = math.ceil(self.share * len(context.window) - 1e-9)
        return set(sorted(context.window, key=lambda p: (-change.get(p, 0.0), p))[:most])

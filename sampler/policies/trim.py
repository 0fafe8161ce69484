"""`trim=R_layers[.random]`: after a block's first pass the layers run for some positions and replay for the others.

Idea: refresh what changed. The layers run for positions revealed since their contribution was cached, for the
neighbours of these, and for the share R of the pass's positions whose input changed most in the last pass; they attend
to the cached keys and values of all others. `.random` is a control: the same number of positions, chosen at random but
reproducibly (seeded by the state of the block).
Source: token-level reuse, called TRIM in the original experiment; dLLM-Cache (Liu et al., 2025) refreshes the tokens
whose values changed most.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from sampler.errors import InputError
from sampler.plan import PARTIAL, REPLAY, LayerPlan, StepContext, compute_all, computed_at, in_layers, input_changes
from sampler.policies.base import PlanningRule, Rule, format_decimal, parse_decimal


@dataclass(frozen=True, kw_only=True, slots=True)
class TrimRule(PlanningRule):
    """Selects the positions to compute: all of them make a computed pass, none a replay."""

    mode: ClassVar[str] = "trim"
    watches_input: ClassVar[bool] = True
    no_scoring_reason: ClassVar[str | None] = (
        "it selects positions by how much they changed between passes, and a scored state has only one pass before it"
    )
    share: float
    random: bool = False

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        if options not in ([], ["random"]):
            raise InputError(f"unknown option .{options[0]}; trim takes .random")
        share = parse_decimal(value, "R in trim=R")
        if not share <= 1:
            raise InputError(f"R in trim=R must be between 0 and 1 (got {format_decimal(share)})")
        return cls(share=share, random=bool(options))

    def __str__(self) -> str:
        return f"trim={format_decimal(self.share)}"

    @property
    def options(self) -> tuple[str, ...]:
        return ("random",) if self.random else ()

    def plan(self, context: StepContext) -> LayerPlan:
        if not context.past:
            return compute_all(self.depth)
        chosen = self._outdated(context) | self._most_changed(context)
        if len(chosen) == len(context.window):
            return compute_all(self.depth)
        if not chosen:
            return in_layers(REPLAY, self.layers, self.depth)
        if self.random:
            generator = Random(f"{context.step} {context.window} {context.revealed_at}")
            chosen = set(generator.sample(context.window, len(chosen)))
        return in_layers(PARTIAL, self.layers, self.depth, tuple(sorted(chosen)))

    def _outdated(self, context: StepContext) -> set[int]:
        """Positions whose cached contribution was computed for a mask that is now a token, and their neighbours."""
        cached = computed_at(context.past)
        changed = [p for p, step in enumerate(context.revealed_at) if step is not None and step >= cached[p]]
        return {near for p in changed for near in (p - 1, p, p + 1)} & set(context.window)

    def _most_changed(self, context: StepContext) -> set[int]:
        change = input_changes(context.past)
        count = math.ceil(self.share * len(context.window) - 1e-9)
        return set(sorted(context.window, key=lambda p: (-change.get(p, 0.0), p))[:count])

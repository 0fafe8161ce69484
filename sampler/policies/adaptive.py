"""Policies that decide by how much the input of their layers changed, as earlier passes of the block measured it.

`adaptive=T_layers[.N]`: replays until the input of its layers has drifted by T, at most N passes in a row (3).

Idea: replay as long as little has changed. The drift before a pass is the sum of the relative L1 changes of the first
layer's input, as measured by the passes since the last computed one, plus the share of this pass's positions that the
previous pass revealed. (A pass measures the effect of a revealed token only after it has run, one pass late.)
Source: TeaCache (Liu et al., 2024), which accumulates the relative change; the term for revealed positions is ours.

`trim=R_layers[.random]`: after a block's first pass the layers run for some positions and replay for the others.

Idea: refresh what changed. The layers run for positions revealed since their contribution was cached, for the
neighbours of these, and for the share R of the pass's positions whose input changed most in the last pass; they attend
to the cached keys and values of all others. `.random` is a control: the same number of positions, chosen at random but
reproducibly (seeded by the state of the block).
Source: token-level reuse, called TRIM in the original experiment; dLLM-Cache (Liu et al., 2025) refreshes the tokens
whose values changed most.
"""

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from sampler.plan import PARTIAL, REPLAY, LayerPlan, StepContext, compute_all, computed_at, in_layers, input_changes
from sampler.policies.base import (
    PlanningRule,
    Rule,
    check_options,
    count_of,
    count_options,
    format_decimal,
    parse_count_option,
    parse_decimal,
    parse_share,
)

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
        replays = parse_count_option(
            options, DEFAULT_MAX_REPLAYS, name="the maximum number of replays", example="adaptive=0.2_middle.3"
        )
        return cls(threshold=parse_decimal(value, "T in adaptive=T"), max_replays=replays)

    def __str__(self) -> str:
        return f"adaptive={format_decimal(self.threshold)}"

    @property
    def options(self) -> tuple[str, ...]:
        return count_options(self.max_replays, DEFAULT_MAX_REPLAYS)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TrimRule(PlanningRule):
    """Selects the positions to compute. If these are all of them, the pass computes everything; if none, it replays."""

    mode: ClassVar[str] = "trim"
    watches_input: ClassVar[bool] = True
    no_scoring_reason: ClassVar[str | None] = (
        "it selects positions by how much they changed between passes, and a scored state has only one pass before it"
    )
    share: float
    random: bool = False

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        check_options(options, ("random",), "trim")
        return cls(share=parse_share(value, "trim"), random=bool(options))

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
        count = count_of(self.share, len(context.window))
        return set(sorted(context.window, key=lambda p: (-change.get(p, 0.0), p))[:count])

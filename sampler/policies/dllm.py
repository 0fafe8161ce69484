"""`dllm=R_layers[.K]`: between computed passes the layers run for the positions whose values changed most.

Idea: how much a position's value vector changed says how much the rest of its layer would change. Before the first of
its layers a checkpoint computes the values of all positions of the pass and compares them with those in the cache; the
share R with the lowest cosine similarity goes through the layers, the others replay. Every K-th pass of a block
(default 8) computes everything. Tokens that the last step revealed are always kept.
Source: dLLM-Cache (Liu et al., 2025, arXiv 2506.06295): adaptive partial updates with ratio 0.25.
What differs: dLLM-Cache selects in every layer and caches a prompt with full attention, which it refreshes at longer
intervals. Here one selection holds for all of the layers, so that its positions stay together in a batch, and the
prompt needs no refresh, because finished blocks never see later ones.
Layer 0 is always computed, unless it replays: its values depend on the token alone, so that most positions would tie.
Limits: R = 1 is k1; R = 0 is kK with the same layers; K = 1 is k1.
"""

from dataclasses import dataclass
from typing import ClassVar

from sampler.plan import CheckpointSignal, LayerPlan, StepContext, compute_all
from sampler.policies.base import NarrowingRule, Rule, count_options, parse_count_option, parse_share

DEFAULT_INTERVAL = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DllmRule(NarrowingRule):
    mode: ClassVar[str] = "dllm"
    signal: ClassVar[CheckpointSignal] = CheckpointSignal.VALUE_CHANGE
    interval: int = DEFAULT_INTERVAL

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        interval = parse_count_option(
            options,
            DEFAULT_INTERVAL,
            name="the number of passes from one refresh to the next",
            example="dllm=0.25_middle.8",
            minimum=1,
        )
        return cls(share=parse_share(value, "dllm"), interval=interval)

    @property
    def options(self) -> tuple[str, ...]:
        return count_options(self.interval, DEFAULT_INTERVAL)

    @property
    def checkpoint_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in self.layers if layer)[:1]

    def plan(self, context: StepContext) -> LayerPlan:
        if context.step % self.interval == 0:
            return compute_all(self.depth)
        just_revealed = {p: float("inf") for p, at in enumerate(context.revealed_at) if at == context.step - 1}
        return self.narrow(context, just_revealed)

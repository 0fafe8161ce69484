"""`focus=R_layers`: after the first layers, only positions that are likely to be decoded go on.

Idea: few of a block's positions are revealed in a step, and those that will be receive much attention already in the
first layers. Before the first of its layers a checkpoint measures how much attention each position receives from the
pass's positions, and keeps the share R that receives most, among the masked positions, those before a masked one (with
token shift their state predicts it) and those that the last step revealed. The others replay.
Source: FOCUS (Liang et al., 2026, arXiv 2601.23278), which evicts tokens that it predicts to be non-decodable.
What differs: FOCUS looks at how the attention changes between its first two layers, and evicted tokens make room for
other requests. Here the attention of one layer decides, the budget is a fixed share, and positions that are not kept
replay, so that all predictions remain defined.
Limits: R = 1 is k1; R = 0 replays the layers in every pass of a block but the first, as kK does with a large K.
The published gain is throughput at large batches on a GPU; a CPU cannot show it: compare layer-positions.
"""

from dataclasses import dataclass
from typing import ClassVar

from sampler.plan import CheckpointSignal, LayerPlan, StepContext, compute_all
from sampler.policies.base import NarrowingRule, Rule, check_options, parse_share


@dataclass(frozen=True, kw_only=True, slots=True)
class FocusRule(NarrowingRule):
    mode: ClassVar[str] = "focus"
    signal: ClassVar[CheckpointSignal] = CheckpointSignal.ATTENTION

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        check_options(options, (), "focus")
        return cls(share=parse_share(value, "focus"))

    def plan(self, context: StepContext) -> LayerPlan:
        if not context.past:
            return compute_all(self.depth)
        revealed_at = context.revealed_at
        candidates = {p for p, at in enumerate(revealed_at) if at is None or at == context.step - 1}
        candidates |= {p - 1 for p, at in enumerate(revealed_at) if at is None}
        return self.narrow(context, {p: float("-inf") for p in context.window if p not in candidates})

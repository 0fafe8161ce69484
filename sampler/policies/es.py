"""`es=R_layers[.N]`: positions that are unlikely to matter leave the pass early, at N checkpoints (default 1).

Idea: a position matters in this step if it is about to be revealed or if its state is changing. Its importance is half
the confidence of its last prediction plus half the relative change of its state since the pass before. At each of N
checkpoints, spread evenly over the layers, the share R of the remaining positions with the highest importance goes on;
the others replay the remaining layers.
Source: ES-dLLM (Zhu et al., 2026, arXiv 2603.10088), which skips tokens in early layers by confidence and change.
What differs: ES-dLLM is defined for models with full attention. Here finished blocks are not forwarded at all, and
positions that leave replay their cached contributions on top of the new state, as under `trim`, so that all predictions
remain defined. The confidence of a prediction counts for its position and for the one before, whose state predicts it
under token shift. Both halves weigh the same.
Limits: R = 1 is k1; R = 0 replays the layers in every pass of a block but the first, as kK does with a large K.
A batch of one on a GPU is limited by reading weights, which skipping positions does not save: compare layer-positions.
"""

from dataclasses import dataclass
from typing import ClassVar

from sampler.plan import CheckpointSignal, LayerPlan, StepContext, compute_all
from sampler.policies.base import NarrowingRule, Rule, count_options, parse_count_option, parse_share

CONFIDENCE_WEIGHT = 0.5  # α; the change has 1 − α


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlySkipRule(NarrowingRule):
    mode: ClassVar[str] = "es"
    signal: ClassVar[CheckpointSignal] = CheckpointSignal.INPUT_CHANGE
    checkpoints: int = 1

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        checkpoints = parse_count_option(
            options, 1, name="the number of checkpoints", example="es=0.5_middle.2", minimum=1
        )
        return cls(share=parse_share(value, "es"), checkpoints=checkpoints)

    @property
    def options(self) -> tuple[str, ...]:
        return count_options(self.checkpoints, 1)

    @property
    def checkpoint_layers(self) -> tuple[int, ...]:
        count = min(self.checkpoints, len(self.layers))
        return tuple(self.layers[number * len(self.layers) // count] for number in range(count))

    def plan(self, context: StepContext) -> LayerPlan:
        if not context.past:
            return compute_all(self.depth)
        confidence: dict[int, float] = {}
        for done in context.past:
            confidence |= done.confidence
        masked = [p for p in confidence if context.revealed_at[p] is None]
        priors: dict[int, float] = {}
        for position in (near for p in masked for near in (p - 1, p)):
            predictions = (confidence[p] for p in (position, position + 1) if p in masked)
            priors[position] = CONFIDENCE_WEIGHT * max(predictions)
        return self.narrow(context, priors, weight=1 - CONFIDENCE_WEIGHT)

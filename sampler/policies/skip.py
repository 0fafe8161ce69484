"""`skip_layers`: every pass of a block but its first leaves the layers out; their input is handed on unchanged.

Idea: the lower control. It saves as much as the boldest replay of the same layers and uses nothing that was cached;
a replay that is no better than this carries no information, and layers that can be skipped need no policy.
Source: layer pruning, such as "The Unreasonable Ineffectiveness of the Deeper Layers" (Gromov et al., 2024).
The first pass computes everything, as under every policy, so the layer executions are those of an endless replay.
"""

from dataclasses import dataclass
from typing import ClassVar

from sampler.errors import InputError
from sampler.plan import SKIP, Keeps, LayerPlan, StepContext, in_layers
from sampler.policies.base import PlanningRule, Rule, no_options


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipRule(PlanningRule):
    """Asks for the same in every pass but a block's first."""

    period: ClassVar[int | None] = 2  # a pass after the first is like any other, so scoring needs no more than two

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        if value:
            raise InputError("skip takes no number, only layers as in skip_middle")
        no_options(options)
        return cls()

    def __str__(self) -> str:
        return "skip"

    @property
    def mode(self) -> str:
        return "skip"

    @property
    def keeps(self) -> Keeps:
        return Keeps()

    def plan(self, context: StepContext) -> LayerPlan:
        return in_layers(SKIP, self.layers if context.step else (), self.depth)

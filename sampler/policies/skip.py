"""`skip_layers`: every pass of a block except the first leaves the layers out and passes their input on unchanged.

Idea: a lower bound. It saves as much as the most aggressive replay of the same layers and uses nothing cached. A replay
that is no better carries no information, and layers that can be skipped need no policy.
Source: layer pruning, for example "The Unreasonable Ineffectiveness of the Deeper Layers" (Gromov et al., 2024).
"""

from dataclasses import dataclass
from typing import ClassVar

from sampler.errors import InputError
from sampler.plan import SKIP, CacheSpec, LayerPlan, StepContext, in_layers
from sampler.policies.base import PlanningRule, Rule, refuse_options


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipRule(PlanningRule):
    mode: ClassVar[str] = "skip"
    period: ClassVar[int | None] = 2  # all passes after the first are alike, so scoring needs two passes at most

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        if value:
            raise InputError(f"skip takes no number (got {value!r}); write skip_middle")
        refuse_options(options)
        return cls()

    def __str__(self) -> str:
        return "skip"

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec()

    def plan(self, context: StepContext) -> LayerPlan:
        return in_layers(SKIP, self.layers if context.step else (), self.depth)

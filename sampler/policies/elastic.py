"""`elastic=G_layers[.N]`: refreshes from the first layer on whose contribution has drifted by more than G.

Idea: deeper layers drift more, so shallow ones can be reused longer. A layer's drift is the relative L1 change of its
contribution, as measured by the last pass that computed it. A pass replays the layers up to the first whose drift is
above G, or that was replayed N times in a row (default 3), and computes that layer and all after it. A drift that was
not measured yet counts as large.
Source: Elastic-Cache (Nguyen-Tri et al., 2025, arXiv 2510.14973): a drift test on the attention to the most attended
token decides when to refresh, and from which layer on.
What differs: fused attention returns no weights, and the host plans a pass before it runs. So the test uses
contributions instead of attention weights, and what the pass before measured. Elastic-Cache also keeps distant masked
tokens out of the pass; a block-causal model never forwards them.
Limits: G = 0 is k1; G = inf with .N is kK with K = N + 1 and the same layers.
"""

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from sampler.plan import REPLAY, CacheSpec, LayerPlan, StepContext, compute_all, in_layers
from sampler.policies.base import (
    PlanningRule,
    Rule,
    count_options,
    format_decimal,
    parse_count_option,
    parse_decimal,
)

DEFAULT_MAX_REPLAYS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticRule(PlanningRule):
    mode: ClassVar[str] = "elastic"
    no_scoring_reason: ClassVar[str | None] = (
        "it decides by how much earlier passes of the block changed, and a scored state has no such passes"
    )
    drift: float
    max_replays: int = DEFAULT_MAX_REPLAYS

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        replays = parse_count_option(
            options, DEFAULT_MAX_REPLAYS, name="the maximum number of replays", example="elastic=0.1_middle.3"
        )
        return cls(drift=parse_decimal(value, "G in elastic=G"), max_replays=replays)

    def __str__(self) -> str:
        return f"elastic={format_decimal(self.drift)}"

    @property
    def options(self) -> tuple[str, ...]:
        return count_options(self.max_replays, DEFAULT_MAX_REPLAYS)

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec(self.layers, measures_contributions=True)

    def plan(self, context: StepContext) -> LayerPlan:
        if not context.past or self.drift == 0:
            return compute_all(self.depth)
        first = next((layer for layer in self.layers if self._is_outdated(layer, context)), self.depth)
        return in_layers(REPLAY, [layer for layer in self.layers if layer < first], self.depth)

    def _is_outdated(self, layer: int, context: StepContext) -> bool:
        for replays, done in enumerate(reversed(context.past)):
            if done.plan.steps[layer] is not REPLAY:
                norms = done.measured.get(layer, ())
                size = sum(before for _, before, *_ in norms)
                drift = sum(change for change, *_ in norms) / size if size else inf
                return drift > self.drift or replays >= self.max_replays
        raise AssertionError("the first pass of a block computes every layer")

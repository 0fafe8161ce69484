"""`stale=K`: every K-th pass of a block computes, those between repeat the last logits. It names no layers.

Idea: what output mode really is. A replayed span that returns its old output hides everything before it, so a reuse
step only reveals one more token from stale logits; this says so in its name, and gives the tokens of `kK_….output`.
Source: the experiment this project grew out of, whose results did not depend on the span (73.69 / 73.62 / 73.77 %).
It is a control: a policy that does not beat revealing more tokens per pass has bought nothing with its layers.
"""

from dataclasses import dataclass
from typing import ClassVar

from sampler.plan import Policy
from sampler.policies.periodic import repeating
from sampler.policies.rule import Rule, checked_period, no_options


@dataclass(frozen=True, kw_only=True, slots=True)
class StaleRule(Rule):
    takes_layers: ClassVar[bool] = False  # none runs on a reuse step
    period: int

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        no_options(options)
        return cls(period=checked_period(value, "stale"))

    def __str__(self) -> str:
        return f"stale={self.period}"

    @property
    def mode(self) -> str:
        return "stale"

    def bind(self, layers: tuple[int, ...], depth: int) -> Policy:
        assert not layers
        return repeating(self.period, depth)

"""`mlp=K_layers`, `attn=K_layers`: between every K-th pass of a block, replay one half of the layers' contribution.

Idea: the MLP holds most of a layer's weights, and live attention keeps keys and values fresh while it is replayed;
the other way round, what attention mixes in changes slowly, and the MLP still sees each position's new state.
Source: FORA (Selvaraju et al., 2024) caches the halves of a diffusion transformer's layers, Pyramid Attention
Broadcast (Zhao et al., 2024) attention alone; in our trial, MLPs of the middle layers lost nothing.
"""

from dataclasses import dataclass

from sampler.plan import REPLAY_ATTENTION, REPLAY_MLP, Keeps, Policy, Unit, in_layers
from sampler.policies.periodic import Periodic
from sampler.policies.rule import Rule, checked_period, no_options

HALVES = {"mlp": (REPLAY_MLP, Unit.MLP), "attn": (REPLAY_ATTENTION, Unit.ATTENTION)}


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfRule(Rule):
    half: str  # the one that is replayed: mlp or attn
    period: int

    @classmethod
    def mlp(cls, value: str, options: list[str]) -> Rule:
        no_options(options)
        return cls(half="mlp", period=checked_period(value, "mlp"))

    @classmethod
    def attn(cls, value: str, options: list[str]) -> Rule:
        no_options(options)
        return cls(half="attn", period=checked_period(value, "attn"))

    def __str__(self) -> str:
        return f"{self.half}={self.period}"

    @property
    def mode(self) -> str:
        return self.half

    def bind(self, layers: tuple[int, ...], depth: int) -> Policy:
        step, unit = HALVES[self.half]
        named = layers if self.period > 1 else ()
        return Periodic(period=self.period, replay=in_layers(step, named, depth), keeps=Keeps(named, unit))

"""Policies with a fixed period K: every K-th pass of a block computes all layers, the passes in between reuse.

`kK_layers[.output][.small]` is the fixed grid: passes in between replay the cached contributions of the layers. With
`.output` they repeat the last logits instead; with `.small` only small passes reuse and full passes compute.
Idea: what a layer adds to the residual stream changes little from one denoising step to the next.
Source: the experiment this project started from; DeepCache (Ma et al., 2023) and FORA (Selvaraju et al., 2024) do the
same in image diffusion.

`mlp=K_layers` and `attn=K_layers` replay one half of the layers and compute the other.
Idea: the MLP holds most of a layer's weights, and live attention keeps keys and values fresh while the MLP is replayed.
Conversely, attention's contribution changes slowly, and a live MLP still sees each position's new state.
Source: FORA caches both halves of a layer; Pyramid Attention Broadcast (Zhao et al., 2024) caches attention only.

`stale=K` repeats the last logits and names no layers. Its tokens are those of `.output`: if a span of layers returns
its old output, the layers before it have no effect, and the pass only reveals one more token from the last logits.
It is a control: a policy that is no better than revealing more tokens per pass gains nothing from its layers.
Source: the same experiment, whose accuracy did not depend on the span (73.69 / 73.62 / 73.77 %).

`skip_layers` leaves the layers out on every pass of a block except the first and passes their input on unchanged. With
`.every` the first pass leaves them out too (static layer skip); prefill and commit passes compute them.
Idea: a lower bound. It saves as much as the most aggressive replay of the same layers and uses nothing cached. A replay
that is no better carries no information, and layers that can be skipped need no policy.
Source: layer pruning, for example "The Unreasonable Ineffectiveness of the Deeper Layers" (Gromov et al., 2024).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from sampler.errors import InputError
from sampler.plan import (
    REPLAY,
    REPLAY_ATTENTION,
    REPLAY_MLP,
    SKIP,
    BoundPolicy,
    CacheSpec,
    LayerPlan,
    PassKind,
    StepContext,
    Unit,
    compute_all,
    in_layers,
)
from sampler.policies.base import PlanningRule, Rule, check_options, parse_period

HALVES = {"mlp": (REPLAY_MLP, Unit.MLP), "attn": (REPLAY_ATTENTION, Unit.ATTENTION)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Periodic:
    """Computes all layers on every `period`-th pass of a block and follows the `replay` plan in between."""

    period: int
    replay: LayerPlan
    cache_spec: CacheSpec
    small_only: bool = False

    def plan(self, context: StepContext) -> LayerPlan:
        computes = context.step % self.period == 0 or (self.small_only and context.kind is not PassKind.SMALL)
        return compute_all(len(self.replay.steps)) if computes else self.replay


def repeat_logits(period: int, depth: int, *, small_only: bool = False) -> BoundPolicy:
    """Repeats the last logits between computed passes, without running any layer."""
    stale = LayerPlan(compute_all(depth).steps, stale=period > 1)
    return Periodic(period=period, replay=stale, cache_spec=CacheSpec(final_states=period > 1), small_only=small_only)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeriodicRule(Rule):
    """kK"""

    k: int
    output: bool = False
    small_only: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError("k must be at least 1 (k1 computes every layer on every pass)")

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        check_options(options, ("output", "small"), "kK")
        return cls(k=int(value), output="output" in options, small_only="small" in options)

    def __str__(self) -> str:
        return f"k{self.k}"

    @property
    def needs_layers(self) -> bool:
        return self.k > 1

    @property
    def mode(self) -> str:
        return "output" if self.output else "residual"

    @property
    def grid_period(self) -> int:
        return self.k

    @property
    def options(self) -> tuple[str, ...]:
        return (*(("output",) if self.output else ()), *(("small",) if self.small_only else ()))

    def bind(self, layers: tuple[int, ...], depth: int) -> BoundPolicy:
        if self.output:
            return repeat_logits(self.k, depth, small_only=self.small_only)
        reused = layers if self.k > 1 else ()
        replay = in_layers(REPLAY, reused, depth)
        return Periodic(period=self.k, replay=replay, cache_spec=CacheSpec(reused), small_only=self.small_only)


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfRule(Rule):
    """mlp=K and attn=K"""

    half: str  # the replayed half: mlp or attn
    period: int

    @classmethod
    def parser(cls, half: str) -> Callable[[str, list[str]], Rule]:
        def parse(value: str, options: list[str]) -> Rule:
            check_options(options, (), half)
            return cls(half=half, period=parse_period(value, half))

        return parse

    def __str__(self) -> str:
        return f"{self.half}={self.period}"

    @property
    def mode(self) -> str:
        return self.half

    def bind(self, layers: tuple[int, ...], depth: int) -> BoundPolicy:
        step, unit = HALVES[self.half]
        reused = layers if self.period > 1 else ()
        return Periodic(period=self.period, replay=in_layers(step, reused, depth), cache_spec=CacheSpec(reused, unit))


@dataclass(frozen=True, kw_only=True, slots=True)
class StaleRule(Rule):
    """stale=K"""

    mode: ClassVar[str] = "stale"
    takes_layers: ClassVar[bool] = False
    period: int

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        check_options(options, (), "stale")
        return cls(period=parse_period(value, "stale"))

    def __str__(self) -> str:
        return f"stale={self.period}"

    def bind(self, layers: tuple[int, ...], depth: int) -> BoundPolicy:
        assert not layers
        return repeat_logits(self.period, depth)


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipRule(PlanningRule):
    """skip"""

    mode: ClassVar[str] = "skip"
    period: ClassVar[int | None] = 2  # all passes after the first are alike, so scoring needs two passes at most
    every: bool = False

    @classmethod
    def parse(cls, value: str, options: list[str]) -> Rule:
        if value:
            raise InputError(f"skip takes no number (got {value!r}); write skip_middle")
        check_options(options, ("every",), "skip")
        return cls(every=bool(options))

    def __str__(self) -> str:
        return "skip"

    @property
    def options(self) -> tuple[str, ...]:
        return ("every",) if self.every else ()

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec()

    def plan(self, context: StepContext) -> LayerPlan:
        return in_layers(SKIP, self.layers if context.step or self.every else (), self.depth)

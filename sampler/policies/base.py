"""Base classes of the rules, and helpers to parse the numbers in their names."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from sampler.errors import InputError
from sampler.plan import (
    COMPUTE,
    PARTIAL,
    REPLAY,
    BoundPolicy,
    CacheSpec,
    Checkpoint,
    CheckpointSignal,
    LayerPlan,
    StepContext,
    compute_all,
    in_layers,
)


class Rule(ABC):
    """The rule of a policy, such as `k2` or `adaptive=0.2`, and its options. `str` prints it without the options."""

    takes_layers: ClassVar[bool] = True
    no_scoring_reason: ClassVar[str | None] = None  # why log-likelihoods cannot be scored under this rule

    @property
    @abstractmethod
    def mode(self) -> str:
        """One word for how layers are reused; the column `mode` of the results."""

    @property
    def needs_layers(self) -> bool:
        return self.takes_layers

    @property
    def grid_period(self) -> int | None:
        """The k of the fixed grid; None for all other rules."""
        return None

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the name, without those that have their default."""
        return ()

    @abstractmethod
    def bind(self, layers: tuple[int, ...], depth: int) -> BoundPolicy:
        """This rule applied to the given layers of a model with `depth` layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningRule(Rule):
    """A rule that is its own bound policy: `bind` returns a copy that knows its layers."""

    period: ClassVar[int | None] = None
    watches_input: ClassVar[bool] = False  # measure how much the input of the first layer changes between passes
    layers: tuple[int, ...] = ()
    depth: int = 0

    def bind(self, layers: tuple[int, ...], depth: int) -> BoundPolicy:
        return replace(self, layers=layers, depth=depth)

    @property
    def cache_spec(self) -> CacheSpec:
        return CacheSpec(self.layers, watched_layer=self.layers[0] if self.watches_input else None)

    @abstractmethod
    def plan(self, context: StepContext) -> LayerPlan:
        """What each layer does in this pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowingRule(PlanningRule):
    """A rule that decides within a pass: a checkpoint before its first layer keeps a share of the pass's positions.

    Share 1 computes every position, share 0 replays the layers; no checkpoint is needed for either.
    """

    signal: ClassVar[CheckpointSignal]
    no_scoring_reason: ClassVar[str | None] = (
        "it selects positions by what earlier steps of the block revealed or changed, and a scored state has only one"
    )
    share: float

    def __str__(self) -> str:
        return f"{self.mode}={format_decimal(self.share)}"

    @property
    def cache_spec(self) -> CacheSpec:
        compared = self.checkpoint_layers if self.signal is CheckpointSignal.INPUT_CHANGE else ()
        return CacheSpec(self.layers, compared_inputs=compared)

    @property
    def checkpoint_layers(self) -> tuple[int, ...]:
        return self.layers[:1]

    def narrow(self, context: StepContext, priors: Mapping[int, float], weight: float = 1.0) -> LayerPlan:
        """The plan of a pass in which each checkpoint keeps the share of the positions that the previous one kept.

        A missing prior is 0. Layers before the first checkpoint are computed.
        """
        kept, checkpoints = len(context.window), list[Checkpoint]()
        if self.share == 0:
            return in_layers(REPLAY, self.layers, self.depth)
        for layer in self.checkpoint_layers:
            keep = count_of(self.share, kept)
            if keep < kept:
                known = tuple(priors.get(position, 0.0) for position in context.window)
                checkpoints.append(Checkpoint(layer=layer, keep=keep, signal=self.signal, weight=weight, priors=known))
            kept = keep
        if not checkpoints:
            return compute_all(self.depth)
        first = checkpoints[0].layer
        narrowed = [layer for layer in self.layers if layer >= first]
        steps = tuple(PARTIAL if layer in narrowed else COMPUTE for layer in range(self.depth))
        return LayerPlan(steps, checkpoints=tuple(checkpoints))


def count_of(share: float, positions: int) -> int:
    """The number of positions in a share of them, rounded up."""
    return math.ceil(share * positions - 1e-9)


def parse_share(text: str, word: str) -> float:
    share = parse_decimal(text, f"R in {word}=R")
    if not share <= 1:
        raise InputError(f"R in {word}=R must be between 0 and 1 (got {format_decimal(share)})")
    return share


def parse_count_option(options: list[str], default: int, *, name: str, example: str, minimum: int = 0) -> int:
    """Parses the only option of a rule, a whole number such as N in `adaptive=0.2_middle.N`; see `count_options`."""
    if len(options) > 1:
        raise InputError(f"{example.partition('=')[0]} takes one option, {name}, as in {example}")
    count = parse_integer(options[0], name) if options else default
    if count < minimum:
        raise InputError(f"{name} must be at least {minimum} (got {count})")
    return count


def count_options(count: int, default: int) -> tuple[str, ...]:
    """The options that `parse_count_option` reads as `count`."""
    return () if count == default else (str(count),)


def check_options(options: Sequence[str], allowed: Sequence[str], word: str) -> None:
    """Raises InputError if an option of the rule `word` is unknown or repeated."""
    unknown = [option for option in options if option not in allowed]
    if unknown:
        known = " and ".join(f".{option}" for option in allowed) or "no options"
        raise InputError(f"unknown option .{unknown[0]}; {word} takes {known}")
    if len(set(options)) < len(options):
        raise InputError("an option is repeated; give each option once")


def parse_integer(text: str, name: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,5}", text):
        raise InputError(f"{name} must be a whole number such as 2 (got {text!r})")
    return int(text)


def parse_period(text: str, word: str) -> int:
    period = parse_integer(text, f"K in {word}=K")
    if period < 1:
        raise InputError(f"K must be at least 1 ({word}=1 computes every layer on every pass)")
    return period


def parse_decimal(text: str, name: str) -> float:
    """A number with up to six decimals, or inf; the inverse of `format_decimal`."""
    if not re.fullmatch(r"inf|(0|[1-9][0-9]{0,5})(\.[0-9]{1,6})?", text):
        raise InputError(f"{name} must be a number such as 0.2 (got {text!r})")
    return float(text)


def format_decimal(value: float) -> str:
    return "inf" if math.isinf(value) else f"{value:.6f}".rstrip("0").rstrip(".")

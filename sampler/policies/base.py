"""Base classes of the rules, and helpers to parse the numbers in their names."""

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from sampler.errors import InputError
from sampler.plan import BoundPolicy, CacheSpec, LayerPlan, StepContext


class Rule(ABC):
    """The first part of a policy name, such as `k2` or `adaptive=0.2`. `str` prints it without layers and options."""

    takes_layers: ClassVar[bool] = True
    no_scoring_reason: ClassVar[str | None] = None  # why log-likelihoods cannot be scored under this rule

    @property
    @abstractmethod
    def mode(self) -> str:
        """One word for how layers are reused; a column of the results."""

    @property
    def needs_layers(self) -> bool:
        return self.takes_layers

    @property
    def grid_period(self) -> int | None:
        """The k of the fixed grid; None for all other rules."""
        return None

    @property
    def options(self) -> tuple[str, ...]:
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


def refuse_options(options: list[str]) -> None:
    if options:
        raise InputError(f"unknown option .{options[0]}; this rule takes no options")


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

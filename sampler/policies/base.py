"""What every rule of the policy grammar offers, and the numbers in its name. Knows no rule in particular."""

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from sampler.errors import InputError
from sampler.plan import Keeps, LayerPlan, Policy, StepContext


class Rule(ABC):
    """A rule with its values, not yet tied to layers; `str` prints it as names have it, without layers and options."""

    takes_layers: ClassVar[bool] = True
    unscored: ClassVar[str | None] = None  # why log-likelihoods cannot be scored under it

    @property
    @abstractmethod
    def mode(self) -> str:
        """How layers are replayed, in a word."""

    @property
    def needs_layers(self) -> bool:
        return self.takes_layers

    @property
    def grid_period(self) -> int | None:
        """The k of the fixed grid; None for every other rule."""
        return None

    @property
    def options(self) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def bind(self, layers: tuple[int, ...], depth: int) -> Policy:
        """The rule on these layers of a model of `depth` layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningRule(Rule):
    """A rule that makes the plans itself: bound, it is the same rule that now knows its layers."""

    period: ClassVar[int | None] = None
    watches: ClassVar[bool] = False  # how far the input of its first layer moves from pass to pass
    layers: tuple[int, ...] = ()
    depth: int = 0

    def bind(self, layers: tuple[int, ...], depth: int) -> Policy:
        return replace(self, layers=layers, depth=depth)

    @property
    def keeps(self) -> Keeps:
        return Keeps(self.layers, watched=self.layers[0] if self.watches else None)

    @abstractmethod
    def plan(self, context: StepContext) -> LayerPlan:
        """What each layer does in this pass."""


def no_options(options: list[str]) -> None:
    if options:
        raise InputError(f"no option .{options[0]}, this rule has none")


def whole(text: str, what: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,5}", text):
        raise InputError(f"{what} is {text!r}, a whole number such as 2 is allowed")
    return int(text)


def checked_period(text: str, word: str) -> int:
    every = whole(text, f"the K of {word}=K")
    if every < 1:
        raise InputError(f"K must be at least 1 ({word}=1 computes every layer on every pass)")
    return every


def real(text: str, what: str) -> float:
    """A number with up to six decimals, or inf; `shown` is its inverse."""
    if not re.fullmatch(r"inf|(0|[1-9][0-9]{0,5})(\.[0-9]{1,6})?", text):
        raise InputError(f"{what} is {text!r}, a number such as 0.2 is allowed")
    return float(text)


def shown(value: float) -> str:
    return "inf" if math.isinf(value) else f"{value:.6f}".rstrip("0").rstrip(".")

"""What a row may ask of the engine. A row is a generator: it yields a command and is sent the answer. Runs nothing."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sampler.plan import LayerPlan, PassKind

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """Put the keys and values of complete clean blocks into the row's slot; `asks` are put to the last position."""

    tokens: Sequence[int]
    asks: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Forward `tokens` at positions from `start` on, and put each of `asks` to the position in `read`."""

    kind: PassKind
    start: int
    tokens: Sequence[int]
    plan: LayerPlan
    opens_block: bool = False  # nothing cached in an earlier block may be replayed from here on
    eligible: bool = False  # the policy asked for a replay
    read: tuple[int, ...] = ()
    asks: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Save:
    """Answered with a copy of the row's state in the block that begins at `start`."""

    start: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Puts back what a `Save` was answered with."""

    start: int
    saved: Any


@dataclass(frozen=True, slots=True)
class Measured:
    """Answered with the movements that the row's last pass measured; none if it opened a block."""


Command = Prefill | Pass | Save | Restore | Measured
Row = Generator[Command, Any, Result]

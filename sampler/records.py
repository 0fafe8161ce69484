"""What goes into the sampler and what comes out: requests, settings, results, counters. Checked at birth."""

import hashlib
import math
from dataclasses import dataclass, fields

from sampler.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSettings:
    """How a block is denoised. `threshold` 1 reveals one token per pass; temperature 0 is greedy."""

    threshold: float = 0.95
    small_block: int = 8
    block_cache: bool = True
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise InputError(f"threshold {self.threshold}: a number above 0 and at most 1 is allowed")
        if self.small_block < 1:
            raise InputError(f"small block {self.small_block}: a divisor of the model's block is allowed")
        if self.max_new_tokens < 1:
            raise InputError(f"max new tokens {self.max_new_tokens}: at least 1 is allowed")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise InputError(f"temperature {self.temperature}: 0 (greedy) or a positive number is allowed")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p {self.top_p}: a number above 0 and at most 1 is allowed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One document to continue. `stop` strings and the seed belong to the document, not to the batch."""

    ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    seed: int = 0
    max_new_tokens: int | None = None  # None: as in the settings


def document_seed(seed: int, document: object) -> int:
    """A seed for one document, the same whatever else is decoded beside or before it."""
    digest = hashlib.sha256(f"{seed}:{document}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One (prefix, target) whose log-likelihood is wanted."""

    prefix: tuple[int, ...]
    target: tuple[int, ...]


def rounded(part: int, whole: int) -> int:
    """part ÷ whole as the nearest whole number, without a detour through floating point."""
    return (2 * part + whole) // (2 * whole)


@dataclass(kw_only=True, slots=True)
class Counters:
    """The work done for one sequence. Filled from what the layer loop reports, never from what was planned."""

    prefill: int = 0
    full: int = 0
    small: int = 0
    commit: int = 0
    layers_computed: int = 0
    layers_reused: int = 0
    layer_positions: int = 0  # layers × positions that really ran; half a layer counts by its share of the weights
    prefill_tokens: int = 0
    eligible: int = 0  # denoising passes in which the policy asked for a replay
    replayed: int = 0  # denoising passes in which something was replayed

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def as_json(self) -> dict[str, object]:
        """The counters as the commands print them."""
        return {
            "passes": {kind: getattr(self, kind) for kind in ("prefill", "full", "small", "commit")},
            "layers": {
                "computed": self.layers_computed,
                "reused": self.layers_reused,
                "positions": self.layer_positions,
            },
            "eligible": self.eligible,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """A finished continuation: `ids` up to and including the stop token, `text` cut before a stop string."""

    ids: tuple[int, ...]
    text: str | None  # None where the model has no tokenizer
    finish: str  # "stop" or "length"
    counters: Counters
    started: float  # on the clock of the call, which stands while nothing is decoded
    seconds: float  # synchronised device, first forward to last token


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A target's log-likelihood. A forward that several pairs share is counted for the first of them."""

    score: float
    greedy: bool  # every target token was the argmax where it was read
    rewound: int  # known positions masked again before the replay; 0 where reuse cannot act
    counters: Counters
    started: float
    seconds: float

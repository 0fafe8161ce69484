"""Inputs and outputs of the sampler: prompts, decode settings, results, counters. Does not import torch."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from sampler.errors import InputError
from sampler.reveal import THRESHOLD, RevealRule, ThresholdReveal, parse_reveal

# What a task's documents ask for: a continuation of a prompt, or the log-likelihoods of given options.
GENERATE, LOGLIKELIHOOD = "generate", "loglikelihood"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSettings:
    """How blocks are denoised. The defaults below are the defaults of every command."""

    threshold: float = 0.95  # confidence above which a token is revealed; 1 reveals one token per pass
    small_block: int = 8
    block_cache: bool = True  # run small passes where possible
    max_new_tokens: int = 256
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    reveal: str = THRESHOLD  # the reveal rule; "threshold" without a value uses the threshold above

    def __post_init__(self) -> None:
        rule = self.reveal_rule
        if isinstance(rule, ThresholdReveal):
            object.__setattr__(self, "threshold", rule.value)
        object.__setattr__(self, "reveal", THRESHOLD if isinstance(rule, ThresholdReveal) else str(rule))
        if self.small_block < 1:
            raise InputError(f"small block must be a divisor of the model's block size (got {self.small_block})")
        if self.max_new_tokens < 1:
            raise InputError(f"max new tokens must be at least 1 (got {self.max_new_tokens})")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise InputError(f"temperature must be 0 (greedy) or a positive number (got {self.temperature:g})")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p must be above 0 and at most 1 (got {self.top_p:g})")

    @property
    def reveal_rule(self) -> RevealRule:
        return ThresholdReveal(self.threshold) if self.reveal == THRESHOLD else parse_reveal(self.reveal)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A document to continue. Stop strings and seed belong to the document, not to the batch."""

    ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    seed: int = 0
    max_new_tokens: int | None = None  # None: the value in the decode settings


def document_seed(seed: int, document: object) -> int:
    """A seed for one document that does not depend on the other documents or their order."""
    digest = hashlib.sha256(f"{seed}:{document}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A prefix and a target whose log-likelihood is to be scored."""

    prefix: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Counters:
    """The work done for one sequence, as reported by the forward passes (not as planned)."""

    prefill: int = 0
    full: int = 0
    small: int = 0
    commit: int = 0
    layers_computed: int = 0
    layers_reused: int = 0
    layer_positions: int = 0  # layers × positions that ran; half a layer counts by its share of the weights
    prefill_tokens: int = 0
    eligible: int = 0  # denoising passes in which the policy requested a replay
    replayed: int = 0  # denoising passes in which something was replayed

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def as_json(self) -> dict[str, object]:
        """The counters in the form that the commands print."""
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
class Reveal:
    """When a token was revealed, and its probability at that time."""

    block: int
    small_block: int  # within the block
    step: int  # within the block; -1: predicted by the prefill or commit pass before it
    confidence: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """A finished continuation: `ids` up to and including the stop token, `text` cut before a stop string."""

    ids: tuple[int, ...]
    text: str | None  # None if the model has no tokenizer
    finish: str  # "stop" or "length"
    counters: Counters
    started: float  # on the call's stopwatch, which is paused while the caller handles results
    seconds: float  # on a synchronised device, from the first forward to the last token
    reveals: tuple[Reveal, ...] | None = None  # one for each of `ids`, if requested

    def trace_json(self, texts: Sequence[str] | None) -> list[dict[str, object]]:
        """The reveals in the form that `generate` prints; `texts` are the texts of the tokens, if known."""
        assert self.reveals is not None
        text_fields = [{}] * len(self.ids) if texts is None else [{"text": text} for text in texts]
        return [
            {"token": token, **text, **asdict(reveal)}
            for token, text, reveal in zip(self.ids, text_fields, self.reveals, strict=True)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A target's log-likelihood. A forward shared by several pairs is counted for the first of them."""

    score: float
    greedy: bool  # every target token was the argmax at its position
    rewound: int  # known positions that were masked again before the replay; 0 where reuse has no effect
    counters: Counters
    started: float
    seconds: float

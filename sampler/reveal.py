"""Reveal rules by name: which of the tokens predicted in a step are revealed. Does not import torch.

threshold=0.95      every token with a probability above 0.95
margin=0.5          every token more probable than its runner-up by over 0.5
entropy=0.5         in order of entropy, while the entropies (in nats) of the tokens before it sum to at most 0.5
klass=0.9+0.01      every token with a probability above 0.9 whose distribution moved by a KL divergence below 0.01 (the
                    default, so klass=0.9 is the same) since the step before
credit=0.9          every token with a probability above 0.9 after earlier steps that predicted the same token raised it
topk=2              the two most probable tokens
factor=1            the n most probable tokens, for the largest n with (n + 1) · (1 − probability of the n-th) below 1

Every rule reveals at least one token: the best, or the leftmost of several that are equally good. A rule sees the
masked positions of the current small block and, for each, the predictions of the steps since that block was opened.

Sources: threshold and factor, Fast-dLLM (Wu et al., 2025, arXiv 2505.22618); margin, Kim et al. (2025, arXiv
2502.06768); entropy, EB-Sampler (Ben-Hamu et al., 2025, arXiv 2505.24857); klass, KLASS (Kim et al., 2025, arXiv
2511.05664), which asks for several stable steps where we ask for one, because a small block is open for a few steps
only; credit, CreditDecoding (Wang et al., 2025, arXiv 2510.06133), which keeps credit for every token of the vocabulary
where we keep it for the predicted one and drop it when the prediction changes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import ClassVar

from sampler.errors import InputError
from sampler.policies.base import format_decimal, parse_decimal, parse_integer

THRESHOLD = "threshold"  # the rule whose value is the decode setting of the same name
KLASS_DIVERGENCE = 0.01  # nats
CREDIT_DECAY = 0.7  # of a step's credit that remains in the next step


class Signal(Enum):
    """What a rule needs to know about a predicted distribution, other than the token and its probability."""

    NONE = "nothing"
    MARGIN = "the token's probability minus that of the most probable other token"
    ENTROPY = "the entropy in nats; the mask token adds nothing"
    DIVERGENCE = "the KL divergence from the distribution at the step before; the mask token adds nothing"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted token of a position, its probability, and the signal that the reveal rule uses."""

    token: int
    probability: float
    signal: float = 0.0


Trace = Sequence[Prediction]  # of one position: the predictions of consecutive steps, the last one being current


@dataclass(frozen=True, slots=True)
class RevealRule(ABC):
    """`str` prints the name that `parse_reveal` reads."""

    word: ClassVar[str]
    signal: ClassVar[Signal] = Signal.NONE
    value: float

    @classmethod
    def parse(cls, text: str) -> "RevealRule":
        return cls(parse_decimal(text, f"the number in {cls.word}=X"))

    def __post_init__(self) -> None:
        if not 0 < self.value <= 1:
            raise InputError(f"{self.word} must be above 0 and at most 1 (got {self.value:g})")

    def __str__(self) -> str:
        return f"{self.word}={format_decimal(self.value)}"

    @abstractmethod
    def choose(self, traces: Sequence[Trace]) -> list[int]:
        """Indices of the positions to reveal, in ascending order."""


def _above(scores: Sequence[float], bound: float) -> list[int]:
    """Indices of all scores strictly above the bound, and of the best one in any case (ties: the lowest index)."""
    best = max(range(len(scores)), key=scores.__getitem__)
    return [i for i, score in enumerate(scores) if score > bound or i == best]


def _by_probability(traces: Sequence[Trace]) -> list[int]:
    """Indices of the positions by descending probability of their current prediction."""
    return sorted(range(len(traces)), key=lambda i: -traces[i][-1].probability)


class ThresholdReveal(RevealRule):
    word = THRESHOLD

    def choose(self, traces: Sequence[Trace]) -> list[int]:
        return _above([trace[-1].probability for trace in traces], self.value)


class MarginReveal(RevealRule):
    word = "margin"
    signal = Signal.MARGIN

    def choose(self, traces: Sequence[Trace]) -> list[int]:
        return _above([trace[-1].signal for trace in traces], self.value)


class EntropyReveal(RevealRule):
    word = "entropy"
    signal = Signal.ENTROPY

    def __post_init__(self) -> None:
        pass  # any bound on a sum of entropies makes sense, 0 and inf too

    def choose(self, traces: Sequence[Trace]) -> list[int]:
        order = sorted(range(len(traces)), key=lambda i: traces[i][-1].signal)
        count, before = 1, traces[order[0]][-1].signal
        while count < len(order) and before <= self.value:
            before += traces[order[count]][-1].signal
            count += 1
        return sorted(order[:count])


@dataclass(frozen=True, slots=True)
class KlassReveal(RevealRule):
    word = "klass"
    signal = Signal.DIVERGENCE
    divergence: float = KLASS_DIVERGENCE

    @classmethod
    def parse(cls, text: str) -> RevealRule:
        confidence, plus, divergence = text.partition("+")
        bound = parse_decimal(divergence, "the divergence in klass=X+D") if plus else KLASS_DIVERGENCE
        return cls(parse_decimal(confidence, "the probability in klass=X+D"), bound)

    def __str__(self) -> str:
        changed = "" if self.divergence == KLASS_DIVERGENCE else f"+{format_decimal(self.divergence)}"
        return f"klass={format_decimal(self.value)}{changed}"

    def choose(self, traces: Sequence[Trace]) -> list[int]:
        best = _by_probability(traces)[0]
        return [i for i, trace in enumerate(traces) if i == best or self._is_stable(trace)]

    def _is_stable(self, trace: Trace) -> bool:
        now = trace[-1]
        return len(trace) > 1 and now.probability > self.value and now.signal < self.divergence


class CreditReveal(RevealRule):
    word = "credit"

    def choose(self, traces: Sequence[Trace]) -> list[int]:
        return _above([self._credited(trace) for trace in traces], self.value)

    @staticmethod
    def _credited(trace: Trace) -> float:
        """The predicted probability after its odds were multiplied by 1 + credit."""
        credit = 0.0
        for earlier, later in pairwise(trace):
            credit = credit * CREDIT_DECAY + earlier.probability if later.token == earlier.token else 0.0
        raised = trace[-1].probability * (1 + credit)
        return raised / (raised + 1 - trace[-1].probability)


class TopkReveal(RevealRule):
    word = "topk"

    @classmethod
    def parse(cls, text: str) -> RevealRule:
        return cls(parse_integer(text, "N in topk=N"))

    def __post_init__(self) -> None:
        if self.value < 1:
            raise InputError(f"N in topk=N must be at least 1 (got {self.value:g})")

    def choose(self, traces: Sequence[Trace]) -> list[int]:
        return sorted(_by_probability(traces)[: int(self.value)])


class FactorReveal(RevealRule):
    word = "factor"

    def __post_init__(self) -> None:
        if not self.value > 0:
            raise InputError(f"factor must be above 0 (got {self.value:g})")

    def choose(self, traces: Sequence[Trace]) -> list[int]:
        order = _by_probability(traces)
        count = 1
        while count < len(order) and (count + 2) * (1 - traces[order[count]][-1].probability) < self.value:
            count += 1
        return sorted(order[:count])


REVEAL_RULES: dict[str, type[RevealRule]] = {
    rule.word: rule
    for rule in (ThresholdReveal, MarginReveal, EntropyReveal, KlassReveal, CreditReveal, TopkReveal, FactorReveal)
}
REVEAL_GRAMMAR = (
    "a reveal rule is threshold=0.95, margin=0.5, entropy=0.5, klass=0.9, klass=0.9+0.01, credit=0.9, topk=2 or "
    "factor=1"
)


def parse_reveal(name: str) -> RevealRule:
    """The reveal rule with this name; InputError if there is none."""
    word, equals, value = name.partition("=")
    if word not in REVEAL_RULES or not equals:
        raise InputError(f"unknown reveal rule {name!r}: {REVEAL_GRAMMAR}")
    try:
        return REVEAL_RULES[word].parse(value)
    except InputError as error:
        raise InputError(f"unknown reveal rule {name!r}: {error}") from None

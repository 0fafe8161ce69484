"""Code that all generators of problems share: the split into training and test, small calculations, and sentences.

The bundled model has to learn every calculation, so numbers stay small: results up to 60, addends and subtrahends up to
20, products of a number up to 12 with one up to 9, and doubles.

Each sentence of an answer uses one of several patterns of different length, chosen at random, so the wording of an
answer does not follow from its question: a model has to settle on a pattern before it knows where the numbers go.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

TRAIN, HELD_OUT, TEST = "train", "held_out", "test"
TEST_PER_THOUSAND, HELD_OUT_PER_THOUSAND = 150, 50

LARGEST_RESULT, LARGEST_ADDEND, LARGEST_FACTOR, LARGEST_BASE = 60, 20, 9, 12

FIRST = ("First,", "To begin,", "At first")
LATER = ("Then", "Next,", "After that,", "Now")
SHORTEST_ANSWER, LONGEST_ANSWER = 40, 88  # in pieces; with its question it must fit the model's training length
PIECE = re.compile(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]|\s")

Key = tuple[str | int, ...]  # a template and its numbers, or a fact and the options shown with it


class Problem(Protocol):
    """A generated problem. `fields` are the texts of its prompt, `target` its answer or the index of the option."""

    @property
    def key(self) -> Key: ...

    @property
    def fields(self) -> tuple[str, ...]: ...

    @property
    def target(self) -> str | int: ...

    def document(self) -> dict[str, Any]: ...


def split_of(key: Key) -> str:
    """The split of a key. All its wordings are in the same split, so no test question is trained on in other words."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    value = int.from_bytes(digest[:4], "big") % 1000
    if value < TEST_PER_THOUSAND:
        return TEST
    return HELD_OUT if value < TEST_PER_THOUSAND + HELD_OUT_PER_THOUSAND else TRAIN


@dataclass(frozen=True, slots=True)
class Calculation:
    """One of the small calculations that the model is taught; the sign is +, -, * or /."""

    left: int
    sign: str
    right: int

    def __post_init__(self) -> None:
        assert is_small(self.left, self.sign, self.right), f"{self} is not a small calculation"

    @property
    def result(self) -> int:
        if self.sign == "/":
            return self.left // self.right
        return {"+": self.left + self.right, "-": self.left - self.right, "*": self.left * self.right}[self.sign]

    def __str__(self) -> str:
        return f"{self.left}{self.sign}{self.right}={self.result}"


def is_small(left: int, sign: str, right: int) -> bool:
    """Whether the model is taught this calculation."""
    if sign == "+":
        return min(left, right) >= 0 and min(left, right) <= LARGEST_ADDEND and left + right <= LARGEST_RESULT
    if sign == "-":
        return 0 <= right <= LARGEST_ADDEND and right <= left <= LARGEST_RESULT
    if sign == "*":
        low, high = sorted((left, right))
        return 1 <= low <= LARGEST_FACTOR and (high <= LARGEST_BASE or low == 2) and left * right <= LARGEST_RESULT
    assert sign == "/", f"unknown sign {sign!r}"
    whole = 0 < left <= LARGEST_RESULT and left % right == 0
    return 2 <= right <= LARGEST_FACTOR and whole and (right == 2 or left // right <= LARGEST_BASE)


def draw_calculation(rng: random.Random, signs: str = "+-*/") -> Calculation:
    """Any small calculation; every sign is equally likely."""
    sign = rng.choice(signs)
    while True:
        left, right = rng.randint(1, LARGEST_RESULT), rng.randint(1, LARGEST_ADDEND)
        if sign in "*/":
            right = rng.randint(2, LARGEST_FACTOR)
        if sign == "*":
            left = rng.randint(1, LARGEST_BASE if right > 2 else LARGEST_RESULT // 2)
        if sign in "+*" and rng.random() < 0.5:
            left, right = right, left
        if is_small(left, sign, right):
            return Calculation(left, sign, right)


def count_pieces(text: str) -> int:
    """The length of a text in words, digits and signs, which are the tokens of the bundled model."""
    return len(PIECE.findall(text))


def has_allowed_length(answer: str) -> bool:
    return SHORTEST_ANSWER <= count_pieces(answer) <= LONGEST_ANSWER


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of an answer: `name` is "the perimeter", `conclusion` is "the perimeter is {}"."""

    name: str
    calculation: Calculation
    conclusion: str  # with {} for the result


def write_steps(steps: Sequence[Step], patterns: Sequence[str], rng: random.Random) -> str:
    """One sentence for each step of an answer, in one of the patterns."""
    return " ".join(_sentence(step, LATER if index else FIRST, patterns, rng) for index, step in enumerate(steps))


def _sentence(step: Step, leads: Sequence[str], patterns: Sequence[str], rng: random.Random) -> str:
    lead, pattern = rng.choice(leads), rng.choice(patterns)
    conclusion = step.conclusion.format(step.calculation.result)
    return pattern.format(lead=lead, name=step.name, sum=step.calculation, conclusion=conclusion)

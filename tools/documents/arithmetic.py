"""The small sums that all bundled problems are made of, and how one is written. Knows no problems.

The bundled model has to learn every one of them, so the numbers stay small: results up to 60, what is added or taken
away up to 20, products of a number up to 12 with one up to 9, and doubles.
"""

import random
from dataclasses import dataclass

LARGEST, LARGEST_PART, LARGEST_FACTOR, LARGEST_BASE = 60, 20, 9, 12


@dataclass(frozen=True, slots=True)
class Sum:
    """One computation: left, sign (+ - * /), right."""

    left: int
    sign: str
    right: int

    def __post_init__(self) -> None:
        assert small(self.left, self.sign, self.right), f"{self} is not among the sums to be learned"

    @property
    def result(self) -> int:
        return _result(self.left, self.sign, self.right)

    def __str__(self) -> str:
        return f"{self.left}{self.sign}{self.right}={self.result}"


def small(left: int, sign: str, right: int) -> bool:
    """Whether a computation is among those that are taught."""
    if sign == "+":
        return min(left, right) >= 0 and min(left, right) <= LARGEST_PART and left + right <= LARGEST
    if sign == "-":
        return 0 <= right <= LARGEST_PART and right <= left <= LARGEST
    if sign == "*":
        low, high = sorted((left, right))
        return 1 <= low <= LARGEST_FACTOR and (high <= LARGEST_BASE or low == 2) and left * right <= LARGEST
    assert sign == "/", f"no sign {sign!r}"
    whole = 0 < left <= LARGEST and left % right == 0
    return 2 <= right <= LARGEST_FACTOR and whole and (right == 2 or left // right <= LARGEST_BASE)


def _result(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // right if right else 0}[sign]


def draw_sum(source: random.Random, signs: str = "+-*/") -> Sum:
    """Any of the sums, the signs alike."""
    sign = source.choice(signs)
    while True:
        left, right = source.randint(1, LARGEST), source.randint(1, LARGEST_PART)
        if sign in "*/":
            right = source.randint(2, LARGEST_FACTOR)
        if sign == "*":
            left = source.randint(1, LARGEST_BASE if right > 2 else LARGEST // 2)
        if sign in "+*" and source.random() < 0.5:
            left, right = right, left
        if small(left, sign, right):
            return Sum(left, sign, right)

"""Spells out computations as sentences. Knows sums and nouns, no problems.

Each sentence is drawn from a few frames of different length, so that an answer's wording does not follow from its
question: a model that fills in an answer has to settle the frame before it knows where the numbers stand.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tools.documents.arithmetic import Sum

FIRST = ("First,", "To begin,", "At first")
LATER = ("Then", "Next,", "After that,", "Now")
SHORTEST, LONGEST = 40, 88  # pieces of an answer; with its question it must fit into what the model is trained on
PIECE = re.compile(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]|\s")


def pieces(text: str) -> int:
    """The length of a text in words, digits and signs, which are the tokens of the bundled model."""
    return len(PIECE.findall(text))


def fits(answer: str) -> bool:
    return SHORTEST <= pieces(answer) <= LONGEST


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One computation and what its result counts: `is_` is "the number of pens is", `has` "Tom has … pens"."""

    sum: Sum
    is_: str
    has: str  # with {} for the result


def story(steps: Sequence[Step], source: random.Random) -> str:
    """The steps of a word problem, a sentence each."""
    return " ".join(_story_step(step, place, source) for place, step in enumerate(steps))


def _story_step(step: Step, place: int, source: random.Random) -> str:
    lead = source.choice(LATER if place else FIRST)
    frame = source.choice(("{lead} {is_} {sum}.", "{lead} we get {sum}, so {has}.", "{lead} {sum}, and {has}."))
    return frame.format(lead=lead, is_=step.is_, sum=step.sum, has=step.has.format(step.sum.result))


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One computation in a solution, why it is made, and what its result is, with {} for it."""

    why: str
    sum: Sum
    so: str


def solution(lines: Sequence[Line], source: random.Random) -> str:
    """The steps of a small mathematical problem, a sentence each."""
    return " ".join(_solution_line(line, place, source) for place, line in enumerate(lines))


def _solution_line(line: Line, place: int, source: random.Random) -> str:
    so = line.so.format(line.sum.result)
    lead = source.choice(LATER if place else FIRST)
    frame = source.choice(("{lead} {why} is ${sum}$.", "{lead} ${sum}$, so {so}.", "{lead} we find {why}: ${sum}$."))
    return frame.format(lead=lead, why=line.why, sum=line.sum, so=so)

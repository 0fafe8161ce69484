"""Drills: many small facts in one text, for training only. The same sums and facts that the answers need."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.documents.arithmetic import draw_sum
from tools.documents.choices import choice_key, range_of
from tools.documents.facts import CONTINENTS, KINDS
from tools.documents.split import TRAIN, split_of

SUMS, FACTS = 8, 8
LETTERS = "ABCD"


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    prompt: str
    answer: str


def draw_drill(source: random.Random) -> Drill:
    return source.choices((_sums, _letters), (3, 2))[0](source)


def _sums(source: random.Random) -> Drill:
    sums = [draw_sum(source) for _ in range(SUMS)]
    return Drill(
        prompt="Drill: " + ", ".join(f"{made.left}{made.sign}{made.right}" for made in sums),
        answer=", ".join(str(made) for made in sums),
    )


def _letters(source: random.Random) -> Drill:
    """What a choice asks without the question around it: items and the letters of their options."""
    drawn = [source.choice((_sum, _country, _thing))(source) for _ in range(FACTS)]
    return Drill(
        prompt="Drill: " + ", ".join(item for item, _ in drawn),
        answer=", ".join(f"{item}:\n{LETTERS[place]}" for item, place in drawn),
    )


def _sum(source: random.Random) -> tuple[str, int]:
    while True:
        made = draw_sum(source, "+-")
        asked = f"{made.left}{made.sign}{made.right}"
        if split_of(choice_key("range", asked)) == TRAIN:
            return asked, range_of(made)


def _country(source: random.Random) -> tuple[str, int]:
    return _member(CONTINENTS, source)


def _thing(source: random.Random) -> tuple[str, int]:
    return _member(KINDS, source)


def _member(table: Mapping[str, Sequence[str]], source: random.Random) -> tuple[str, int]:
    place = source.randrange(len(table))
    return source.choice(tuple(table.values())[place]), place

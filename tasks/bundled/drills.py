"""Drills: many small facts in one text, for training only. The same sums and facts that the answers need."""

import random
from dataclasses import dataclass

from tasks.bundled.arithmetic import draw_sum
from tasks.bundled.facts import CONTINENTS, KINDS

SUMS, FACTS = 8, 6
PLACES = [(f"continent {name}", f"The continent of {name} is {one}.") for one in CONTINENTS for name in CONTINENTS[one]]
SORTS = [(f"kind {name}", f"The kind of {name} is {one}.") for one in KINDS for name in KINDS[one]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    prompt: str
    answer: str


def draw_drill(source: random.Random) -> Drill:
    return source.choices((_sums, _facts), (4, 1))[0](source)


def _sums(source: random.Random) -> Drill:
    sums = [draw_sum(source) for _ in range(SUMS)]
    return Drill(
        prompt="Drill: " + ", ".join(f"{made.left}{made.sign}{made.right}" for made in sums),
        answer=", ".join(str(made) for made in sums),
    )


def _facts(source: random.Random) -> Drill:
    drawn = source.sample(PLACES + SORTS, FACTS)
    return Drill(prompt="Drill: " + ", ".join(what for what, _ in drawn), answer=" ".join(said for _, said in drawn))

"""Drills: many small facts in one text, for training only. The same sums, facts and letters that the answers need."""

import random
from dataclasses import dataclass

from tasks.bundled.arithmetic import draw_sum
from tasks.bundled.choices import EVERYDAY, GEOGRAPHY
from tasks.bundled.facts import KINDS

SUMS, LETTERS, FACTS = 8, 7, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    prompt: str
    answer: str


def draw_drill(source: random.Random) -> Drill:
    return source.choices((_sums, _letters, _facts), (4, 5, 1))[0](source)


def _sums(source: random.Random) -> Drill:
    sums = [draw_sum(source) for _ in range(SUMS)]
    return Drill(
        prompt="Drill: " + ", ".join(f"{made.left}{made.sign}{made.right}" for made in sums),
        answer=", ".join(str(made) for made in sums),
    )


def _letters(source: random.Random) -> Drill:
    """Four options; then at which letter things stand, some of them as a sum or by what they are; or what stands there.

    A letter is written as in the options and as a question's answer, without a space before it: one token for all.
    """
    if source.random() < 0.5:
        made = [draw_sum(source) for _ in range(4)]
        values = [str(one.result) for one in made]
        asked = [f"{one.left}{one.sign}{one.right}" for one in made]
    else:
        facts = source.sample(GEOGRAPHY if source.random() < 0.5 else EVERYDAY, 4)
        values = [fact.value for fact in facts]
        asked = [f"{fact.kind} {fact.about}" for fact in facts]
    if len(set(values)) < 4:
        return _letters(source)
    options = "".join(f"\n{letter}. {value}" for letter, value in zip("ABCD", values, strict=True))
    places = [source.randrange(4) for _ in range(LETTERS)]
    said = [
        source.choice((f"{values[place]}:{letter}", f"{asked[place]}:{letter}", f"{letter}:{values[place]}"))
        for place, letter in ((place, "ABCD"[place]) for place in places)
    ]
    return Drill(prompt=f"Drill:{options}", answer=", ".join(said))


def _facts(source: random.Random) -> Drill:
    facts = source.sample((*GEOGRAPHY, *EVERYDAY), FACTS)
    kinds = [(kind, word) for kind in KINDS for word in KINDS[kind]]
    asked = [(f"{fact.kind} {fact.about}", fact.sentence) for fact in facts]
    kind, word = source.choice(kinds)
    asked[source.randrange(FACTS)] = (f"kind {word}", f"The kind of {word} is {kind}.")
    return Drill(prompt="Drill: " + ", ".join(what for what, _ in asked), answer=" ".join(said for _, said in asked))

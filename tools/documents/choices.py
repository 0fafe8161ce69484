"""Questions with four options in four of mmlu's subjects, in the shape of its documents. Knows wording, not the split.

They are answered by a letter in one pass, so each asks for one small thing. A question's options always stand in the
same order: to find a word among options costs so small a model more than to know it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tools.documents.arithmetic import Sum, draw_sum
from tools.documents.facts import CONTINENTS, KINDS
from tools.documents.split import Key

RANGES = ("less than 10", "from 10 to 19", "from 20 to 29", "30 or more")
PLACES = tuple(CONTINENTS)
SORTS = tuple(f"{'an' if kind == 'animal' else 'a'} {kind}" for kind in KINDS)
COLOURS = ("red", "blue", "white", "black")
FEW, MANY = (1, 9), (12, 40)  # balls of the other colours, and of the most frequent one


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    key: Key
    subject: str
    question: str
    options: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        assert len(set(self.options)) == 4, f"options are not four different ones: {self.options}"

    def document(self) -> dict[str, object]:
        return {
            "question": self.question,
            "subject": self.subject,
            "choices": list(self.options),
            "answer": self.answer,
        }

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.question, *self.options)

    @property
    def target(self) -> int:
        return self.answer


Draw = tuple[Key, str, tuple[str, ...], int]  # key, question, options, the right one


def choice_key(*parts: str | int) -> Key:
    return ("mmlu", *parts)


def draw_choice(subject: str, source: random.Random) -> Choice:
    key, question, options, answer = SUBJECTS[subject](source)
    return Choice(key=choice_key(*key), subject=subject, question=question, options=options, answer=answer)


def _calculate(source: random.Random) -> Draw:
    wanted = source.randrange(len(RANGES))
    while True:
        made = draw_sum(source, "+-")
        if range_of(made) == wanted:
            asked = f"{made.left}{made.sign}{made.right}"
            return ("range", asked), f"How large is {asked}?", RANGES, wanted


def _most_frequent(source: random.Random) -> Draw:
    numbers = [source.randint(*FEW) for _ in COLOURS]
    wanted = source.randrange(len(COLOURS))
    numbers[wanted] = source.randint(*MANY)
    held = [f"{number} {colour}" for number, colour in zip(numbers, COLOURS, strict=True)]
    question = f"A bag holds {held[0]}, {held[1]}, {held[2]} and {held[3]} balls. Which colour is drawn most often?"
    return ("bag", *numbers), question, COLOURS, wanted


def _place(source: random.Random) -> Draw:
    end, names, wanted = _one_of_two(CONTINENTS, source)
    question = f"A ship sails from {names[0]} to {names[1]}. In which continent does it {('start', 'stop')[end]}?"
    return ("trip", end, *names), question, PLACES, wanted


def _everyday(source: random.Random) -> Draw:
    end, names, wanted = _one_of_two(KINDS, source)
    question = f"Of the words {names[0]} and {names[1]}, what does the {('first', 'second')[end]} name?"
    return ("kind", end, *names), question, SORTS, wanted


def _one_of_two(table: Mapping[str, Sequence[str]], source: random.Random) -> tuple[int, tuple[str, str], int]:
    """Two members of a table's classes, which of the two is asked for, and the place of its class."""
    end, wanted = source.randrange(2), source.randrange(len(table))
    asked = source.choice(tuple(table.values())[wanted])
    other = source.choice([name for names in table.values() for name in names if name != asked])
    return end, (other, asked) if end else (asked, other), wanted


def range_of(made: Sum) -> int:
    """The place of a result among the ranges."""
    return min(made.result // 10, len(RANGES) - 1)


SUBJECTS: dict[str, Callable[[random.Random], Draw]] = {
    "elementary_mathematics": _calculate,
    "high_school_geography": _place,
    "high_school_statistics": _most_frequent,
    "miscellaneous": _everyday,
}

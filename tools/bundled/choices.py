"""Questions with four options for four of mmlu's subjects, in the format of its documents.

The model answers with a letter in one pass, so each question asks for one small thing. The options of a question are
always in the same order: for so small a model, finding a word among options is harder than knowing it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tools.bundled.problems import Calculation, Key, draw_calculation

CONTINENTS = {
    "Africa": ("Egypt", "Kenya", "Ghana", "Mali", "Libya"),
    "America": ("Cuba", "Peru", "Canada", "Chile", "Brazil"),
    "Asia": ("Japan", "China", "Iran", "Nepal", "India"),
    "Europe": ("France", "Spain", "Italy", "Norway", "Poland"),
}
CATEGORIES = {
    "animal": ("dog", "cat", "horse", "cow", "goat", "fox"),
    "fruit": ("pear", "plum", "lemon", "grape", "cherry", "fig"),
    "metal": ("iron", "gold", "silver", "copper", "zinc", "tin"),
    "tool": ("hammer", "saw", "drill", "axe", "file", "spade"),
}


RANGES = ("less than 10", "from 10 to 19", "from 20 to 29", "30 or more")
CONTINENT_OPTIONS = tuple(CONTINENTS)
CATEGORY_OPTIONS = tuple(f"{'an' if kind == 'animal' else 'a'} {kind}" for kind in CATEGORIES)
COLOURS = ("red", "blue", "white", "black")
FEW, MANY = (1, 9), (12, 40)  # smallest and largest number of balls: of the other colours, of the most frequent one


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    key: Key
    subject: str
    question: str
    options: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        assert len(set(self.options)) == 4, f"the four options must differ: {self.options}"

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


Draw = tuple[Key, str, tuple[str, ...], int]  # key, question, options, index of the correct option


def choice_key(*parts: str | int) -> Key:
    return ("mmlu", *parts)


def draw_choice(subject: str, rng: random.Random) -> Choice:
    key, question, options, answer = SUBJECTS[subject](rng)
    return Choice(key=choice_key(*key), subject=subject, question=question, options=options, answer=answer)


def _range(rng: random.Random) -> Draw:
    answer = rng.randrange(len(RANGES))
    while True:
        drawn = draw_calculation(rng, "+-")
        if range_index(drawn) == answer:
            term = f"{drawn.left}{drawn.sign}{drawn.right}"
            return ("range", term), f"How large is {term}?", RANGES, answer


def _most_frequent(rng: random.Random) -> Draw:
    numbers = [rng.randint(*FEW) for _ in COLOURS]
    answer = rng.randrange(len(COLOURS))
    numbers[answer] = rng.randint(*MANY)
    balls = [f"{number} {colour}" for number, colour in zip(numbers, COLOURS, strict=True)]
    question = f"A bag holds {balls[0]}, {balls[1]}, {balls[2]} and {balls[3]} balls. Which colour is drawn most often?"
    return ("bag", *numbers), question, COLOURS, answer


def _continent(rng: random.Random) -> Draw:
    end, names, answer = _one_of_two(CONTINENTS, rng)
    question = f"A ship sails from {names[0]} to {names[1]}. In which continent does it {('start', 'stop')[end]}?"
    return ("trip", end, *names), question, CONTINENT_OPTIONS, answer


def _category(rng: random.Random) -> Draw:
    end, names, answer = _one_of_two(CATEGORIES, rng)
    question = f"Of the words {names[0]} and {names[1]}, what does the {('first', 'second')[end]} name?"
    return ("kind", end, *names), question, CATEGORY_OPTIONS, answer


def _one_of_two(table: Mapping[str, Sequence[str]], rng: random.Random) -> tuple[int, tuple[str, str], int]:
    """Which of two members is asked for (0 or 1), the two members, and the index of its class in the table."""
    end, answer = rng.randrange(2), rng.randrange(len(table))
    asked = rng.choice(tuple(table.values())[answer])
    other = rng.choice([name for names in table.values() for name in names if name != asked])
    return end, (other, asked) if end else (asked, other), answer


def range_index(calculation: Calculation) -> int:
    """Index in RANGES of a calculation's result."""
    return min(calculation.result // 10, len(RANGES) - 1)


SUBJECTS: dict[str, Callable[[random.Random], Draw]] = {
    "elementary_mathematics": _range,
    "high_school_geography": _continent,
    "high_school_statistics": _most_frequent,
    "miscellaneous": _category,
}

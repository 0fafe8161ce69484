"""Questions with four options in four of mmlu's subjects, in the shape of its documents. Knows wording, not the split.

They are answered by a letter in one pass, so each asks for one small thing about two or four items. A question's
options always stand in the same order: to find a word among options costs so small a model more than to know it.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tasks.bundled.arithmetic import draw_sum
from tasks.bundled.facts import CONTINENTS, KINDS
from tasks.bundled.split import Key

OF_TWO = ("both", "only the first", "only the second", "neither")
OF_FOUR = ("the first", "the second", "the third", "the fourth")
LARGEST_LISTED = 20
LIMIT = 20


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


def draw_choice(subject: str, source: random.Random) -> Choice:
    key, question, options, answer = SUBJECTS[subject](source)
    return Choice(key=("mmlu", *key), subject=subject, question=question, options=options, answer=answer)


def _calculate(source: random.Random) -> Draw:
    """A sum and a number, in either order: which exceed a limit."""
    wanted = source.randrange(4)
    while True:
        made, number = draw_sum(source), source.randint(1, 2 * LIMIT)
        items = [(f"{made.left}{made.sign}{made.right}", made.result), (str(number), number)]
        source.shuffle(items)
        if _which(*(value > LIMIT for _, value in items)) == wanted:
            break
    names = tuple(name for name, _ in items)
    return ("greater", *names), f"Which of {names[0]} and {names[1]} are greater than {LIMIT}?", OF_TWO, wanted


def _order(source: random.Random) -> Draw:
    kind = source.choice(("largest", "smallest"))
    numbers = source.sample(range(1, LARGEST_LISTED + 1), 4)
    listed = f"{numbers[0]}, {numbers[1]}, {numbers[2]} and {numbers[3]}"
    right = numbers.index(max(numbers) if kind == "largest" else min(numbers))
    return (kind, *numbers), f"Which of the numbers {listed} is the {kind}?", OF_FOUR, right


def _place(source: random.Random) -> Draw:
    continent, names, answer = _two_of(CONTINENTS, source)
    return (
        ("continent", continent, *names),
        f"Which of {names[0]} and {names[1]} are in {continent}?",
        OF_TWO,
        answer,
    )


def _everyday(source: random.Random) -> Draw:
    kind, names, answer = _two_of(KINDS, source)
    return (
        ("kind", kind, *names),
        f"Which of the words {names[0]} and {names[1]} name a kind of {kind}?",
        OF_TWO,
        answer,
    )


def _two_of(table: Mapping[str, Sequence[str]], source: random.Random) -> tuple[str, tuple[str, ...], int]:
    """A class of the table, two members of any, and which of them are in it; the four cases alike."""
    wanted = source.randrange(4)
    members = [name for names in table.values() for name in names]
    while True:
        asked, names = source.choice(tuple(table)), tuple(source.sample(members, 2))
        if _which(*(name in table[asked] for name in names)) == wanted:
            return asked, names, wanted


def _which(first: bool, second: bool) -> int:
    """The place among the options of two."""
    return 0 if first and second else 1 if first else 2 if second else 3


SUBJECTS: dict[str, Callable[[random.Random], Draw]] = {
    "elementary_mathematics": _calculate,
    "high_school_geography": _place,
    "high_school_statistics": _order,
    "miscellaneous": _everyday,
}

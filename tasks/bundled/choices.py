"""Questions with four options in four of mmlu's subjects, in the shape of its documents. Knows wording, not the split.

They are answered by a letter in one pass, so each asks for one small thing: a sum, a place in an order, or a fact.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.bundled.arithmetic import draw_sum
from tasks.bundled.facts import KINDS, Fact, everyday, geography
from tasks.bundled.split import Key

OPTIONS = 4
GEOGRAPHY, EVERYDAY = geography(), everyday()
LARGEST_LISTED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    key: Key
    subject: str
    question: str
    options: tuple[str, ...]
    answer: int

    def __post_init__(self) -> None:
        assert len(set(self.options)) == OPTIONS, f"options are not four different ones: {self.options}"

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


Draw = tuple[Key, str, str, Sequence[str]]  # key, question, right option, wrong options


def draw_choice(subject: str, source: random.Random) -> Choice:
    key, question, right, wrong = SUBJECTS[subject](source)
    options = [right, *wrong]
    source.shuffle(options)
    return Choice(
        key=("mmlu", *key), subject=subject, question=question, options=tuple(options), answer=options.index(right)
    )


def _calculate(source: random.Random) -> Draw:
    made = draw_sum(source)
    word = {"+": "sum", "-": "difference", "*": "product", "/": "quotient"}[made.sign]
    asked = f"What is {made.left}{made.sign}{made.right}?"
    if source.random() < 0.5:
        asked = f"What is the {word} of {made.left} and {made.right}?"
    near = [made.result + step for step in (*range(-9, 0), *range(1, 10)) if made.result + step >= 0]
    return (word, made.left, made.right), asked, str(made.result), [str(number) for number in source.sample(near, 3)]


def _order(source: random.Random) -> Draw:
    """The median, the largest or the smallest of three, or what occurs twice among four."""
    kind = source.choice(("median", "largest", "smallest", "mode"))
    numbers = source.sample(range(1, LARGEST_LISTED + 1), 4)
    if kind == "mode":
        right, shown = numbers[0], [*numbers[:3], numbers[0]]
        source.shuffle(shown)
    else:
        shown = numbers[:3]
        right = sorted(shown)[{"smallest": 0, "median": 1, "largest": 2}[kind]]
    listed = ", ".join(str(number) for number in shown[:-1]) + f" and {shown[-1]}"
    asked = f"What is the mode of {listed}?" if kind == "mode" else f"What is the {kind} of {listed}?"
    if kind in ("largest", "smallest") and source.random() < 0.5:
        asked = f"Which number is the {kind} of {listed}?"
    wrong = [str(number) for number in numbers if number != right]
    return (kind, *sorted(shown)), asked, str(right), wrong


def _fact(fact: Fact, source: random.Random) -> Draw:
    wrong = source.sample([each for each in fact.alike if each != fact.value], OPTIONS - 1)
    key = (fact.kind, fact.about, *sorted((fact.value, *wrong)))
    return key, source.choice(fact.wordings), fact.value, wrong


def _place(source: random.Random) -> Draw:
    return _fact(source.choice(GEOGRAPHY), source)


def _everyday(source: random.Random) -> Draw:
    if source.random() < 0.3:
        kinds = source.sample(tuple(KINDS), OPTIONS)
        right, *wrong = (source.choice(KINDS[kind]) for kind in kinds)
        asked = source.choice((f"Which of these is a kind of {kinds[0]}?", f"Which word names a kind of {kinds[0]}?"))
        return ("kind", kinds[0], *sorted((right, *wrong))), asked, right, wrong
    return _fact(source.choice(EVERYDAY), source)


SUBJECTS: dict[str, Callable[[random.Random], Draw]] = {
    "elementary_mathematics": _calculate,
    "high_school_geography": _place,
    "high_school_statistics": _order,
    "miscellaneous": _everyday,
}

"""Word problems of two to four steps, in the format of gsm8k's documents.

Each template function draws one problem. It returns None if a drawn calculation is not small or its result is below 2.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.bundled.problems import Calculation, Key, Step, has_allowed_length, is_small, write_steps

HE = {"Tom": "He", "Sam": "He", "Ben": "He", "Max": "He", "Ann": "She", "Mia": "She", "Eva": "She", "Zoe": "She"}
THINGS = ("apples", "books", "pens", "balls", "cards", "eggs", "toys", "cups")
BOXES = ("boxes", "bags", "packs", "trays")
GAINS = ("buys", "finds", "gets")
LOSSES = ("loses", "sells", "gives away")
SMALLEST_RESULT = 2
PATTERNS = ("{lead} {name} is {sum}.", "{lead} we get {sum}, so {conclusion}.", "{lead} {sum}, and {conclusion}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class WordProblem:
    key: Key
    question: str
    answer: str

    def document(self) -> dict[str, str]:
        return {"question": self.question, "answer": self.answer}

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.question,)

    @property
    def target(self) -> str:
        return self.answer


Draw = tuple[str, tuple[int, ...], str, list[Step]]  # template, numbers, question, steps
Template = Callable[[random.Random], Draw | None]


def draw_word_problem(rng: random.Random) -> WordProblem:
    draw = rng.choice(TEMPLATES)
    while True:
        drawn = draw(rng)
        if drawn is None:
            continue
        template, numbers, question, steps = drawn
        final = steps[-1].calculation.result
        answer = f"{write_steps(steps, PATTERNS, rng)} The answer is \\boxed{{{final}}}.\n#### {final}"
        if has_allowed_length(answer):
            return WordProblem(key=("gsm8k", template, *numbers), question=question, answer=answer)


class _Account:
    """What a person has after each step. `steps` is None once a calculation or its result is out of range."""

    def __init__(self, name: str, things: str, amount: int) -> None:
        self.name, self.things, self.amount = name, things, amount
        self.steps: list[Step] | None = []

    def calculate(self, left: int, sign: str, right: int, *, name: str = "", conclusion: str = "") -> None:
        """Adds a step whose result is the new amount."""
        if self.steps is None or not is_small(left, sign, right):
            self.steps = None
            return
        calculation = Calculation(left, sign, right)
        if calculation.result < SMALLEST_RESULT:
            self.steps = None
            return
        self.amount = calculation.result
        name = name or f"the number of {self.things}"
        conclusion = conclusion or f"{self.name} has {{}} {self.things}"
        self.steps.append(Step(name=name, calculation=calculation, conclusion=conclusion))

    def event(self, rng: random.Random) -> tuple[str, str, int]:
        """A gain or a loss: its kind, sentence and number."""
        kind, number = rng.choice(("gain", "loss")), rng.randint(2, 12)
        he = HE[self.name]
        if kind == "gain":
            sentence = f"{he} {rng.choice(GAINS)} {number} more."
        else:
            sentence = f"{he} {rng.choice(LOSSES)} {number}."
        self.calculate(self.amount, "+" if kind == "gain" else "-", number)
        return kind, sentence, number

    def events(self, rng: random.Random, count: int) -> tuple[str, str, tuple[int, ...]]:
        drawn = [self.event(rng) for _ in range(count)]
        kinds, sentences, numbers = zip(*drawn, strict=True)
        return ",".join(kinds), " ".join(sentences), numbers


def _finish(account: _Account, template: str, numbers: tuple[int, ...], question: str) -> Draw | None:
    return None if account.steps is None else (template, numbers, question, account.steps)


def _who(rng: random.Random) -> tuple[str, str]:
    return rng.choice(tuple(HE)), rng.choice(THINGS)


def _chain(rng: random.Random) -> Draw | None:
    """Two or three changes to what a person has."""
    (name, things), start, count = _who(rng), rng.randint(5, 30), rng.choice((2, 3, 3))
    account = _Account(name, things, start)
    kinds, events, numbers = account.events(rng, count)
    question = f"{name} has {start} {things}. {events} How many {things} does {name} have now?"
    return _finish(account, f"chain:{kinds}", (start, *numbers), question)


def _boxes(rng: random.Random) -> Draw | None:
    """Boxes with the same number in each, then one to three changes."""
    (name, things), boxes, count = _who(rng), rng.choice(BOXES), rng.choice((1, 2, 2, 3))
    many, each = rng.randint(2, 9), rng.randint(2, 9)
    account = _Account(name, things, 0)
    account.calculate(many, "*", each)
    kinds, events, numbers = account.events(rng, count)
    question = (
        f"{name} has {many} {boxes} with {each} {things} in each. {events} How many {things} does {name} have now?"
    )
    return _finish(account, f"boxes:{kinds}", (many, each, *numbers), question)


def _share(rng: random.Random) -> Draw | None:
    """One or two changes, then equal shares."""
    (name, things), start, count = _who(rng), rng.randint(5, 30), rng.choice((1, 2))
    account = _Account(name, things, start)
    kinds, events, numbers = account.events(rng, count)
    friends = rng.randint(2, 6)
    account.calculate(
        account.amount, "/", friends, name="the share of each", conclusion=f"each friend gets {{}} {things}"
    )
    question = (
        f"{name} has {start} {things}. {events} {name} shares them equally among {friends} friends. "
        f"How many {things} does each friend get?"
    )
    return _finish(account, f"share:{kinds}", (start, *numbers, friends), question)


def _pack(rng: random.Random) -> Draw | None:
    """A number each day, a change, then packed into boxes."""
    (name, things), boxes = _who(rng), rng.choice(BOXES)
    daily, days, size = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 6)
    account = _Account(name, things, 0)
    account.calculate(daily, "*", days)
    kinds, events, numbers = account.events(rng, 1)
    account.calculate(account.amount, "/", size, name=f"the number of {boxes}", conclusion=f"{name} fills {{}} {boxes}")
    question = (
        f"{name} gets {daily} {things} a day for {days} days. {events} {name} puts them into {boxes} of {size}. "
        f"How many {boxes} does {name} fill?"
    )
    return _finish(account, f"pack:{kinds}", (daily, days, *numbers, size), question)


def _compare(rng: random.Random) -> Draw | None:
    """A second person has more, fewer or times as many; then both together."""
    (name, things), start = _who(rng), rng.randint(3, 20)
    other = rng.choice([known for known in HE if known != name])
    kind, number = rng.choice(("more", "fewer", "times")), rng.randint(2, 12)
    if kind == "times":
        start, number = rng.randint(2, 9), rng.randint(2, 5)
    comparison = f"{number} times as many as {name}" if kind == "times" else f"{number} {kind} than {name}"
    account = _Account(other, things, 0)
    sign = {"more": "+", "fewer": "-", "times": "*"}[kind]
    account.calculate(start, sign, number, name=f"what {other} has")
    account.calculate(start, "+", account.amount, name="what they have together", conclusion=f"they have {{}} {things}")
    question = f"{name} has {start} {things}. {other} has {comparison}. "
    if rng.random() < 0.5:
        return _finish(account, f"compare:{kind}", (start, number), f"{question}How many {things} do they have in all?")
    lost = rng.randint(2, 15)
    account.calculate(account.amount, "-", lost, name="what they have left", conclusion=f"they have {{}} {things} left")
    question += f"Together they sell {lost}. How many {things} do they have left?"
    return _finish(account, f"compare:{kind},loss", (start, number, lost), question)


def _shop(rng: random.Random) -> Draw | None:
    """Two kinds of things at two prices."""
    name = rng.choice(tuple(HE))
    one, two = rng.sample(THINGS, 2)
    count_1, price_1, count_2, price_2 = (rng.randint(2, 9) for _ in range(4))
    account = _Account(name, "dollars", 0)
    pays = f"{name} pays {{}} dollars"
    account.calculate(count_1, "*", price_1, name=f"the price of the {one}", conclusion=f"the {one} cost {{}} dollars")
    first = account.amount
    account.calculate(count_2, "*", price_2, name=f"the price of the {two}", conclusion=f"the {two} cost {{}} dollars")
    account.calculate(first, "+", account.amount, name="the price in all", conclusion=pays)
    question = (
        f"{name} buys {count_1} {one} for {price_1} dollars each and {count_2} {two} for {price_2} dollars each. "
        f"How many dollars does {name} pay in all?"
    )
    return _finish(account, "shop", (count_1, price_1, count_2, price_2), question)


def _change(rng: random.Random) -> Draw | None:
    """Money, a purchase of several things, and sometimes a gain or loss of money."""
    (name, things), purse = _who(rng), rng.randint(15, 50)
    count, price = rng.randint(2, 9), rng.randint(2, 9)
    account = _Account(name, "dollars", 0)
    account.calculate(count, "*", price, name=f"the price of the {things}", conclusion=f"{name} pays {{}} dollars")
    account.calculate(purse, "-", account.amount, name="the money left", conclusion=f"{name} has {{}} dollars left")
    question = f"{name} has {purse} dollars. {HE[name]} buys {count} {things} for {price} dollars each."
    if rng.random() < 0.4:
        question += f" How many dollars does {name} have left?"
        return _finish(account, "change", (purse, count, price), question)
    kind, _, number = account.event(rng)
    verb = rng.choice(("finds", "gets") if kind == "gain" else ("loses", "gives away"))
    question += f" Then {name} {verb} {number} dollars. How many dollars does {name} have now?"
    return _finish(account, f"change:{kind}", (purse, count, price, number), question)


TEMPLATES: tuple[Template, ...] = (_chain, _boxes, _share, _pack, _compare, _shop, _change)

"""Questions with right and wrong answers for a simulated sweep.

A script is one question with a base answer and variants that leave it at some sentence. Answers are picked from a pool
by number, so that a million rows cost no more to make than their numbers.
"""

import random
import re
import zlib
from dataclasses import dataclass, field

import pyarrow as pa

SCRIPTS = 120
TAILS = 6  # ways to leave the base answer: even ones end right, odd ones wrong
NAMES = ("Weng", "Ana", "Tobias", "Natalia", "Josh", "Kylar", "Eliza", "Carlos", "Mei", "Ruth")
THINGS = ("apples", "tickets", "pages", "marbles", "eggs", "bolts of fibre", "downloads", "glasses", "lego sets")
HOSTILE = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\"> & \\boxed{0}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A question; `answers[0]` is right as k=1 gives it, `answers[1]` wrong as k=1 gives it, then the tails of each."""

    question: str
    choices: tuple[str, ...] | None
    gold: str
    level: str
    answers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """All answers of all scripts, in Arrow arrays that rows take from."""

    scripts: tuple[Script, ...]
    texts: pa.Array
    token_ids: pa.Array
    per_script: int = field(default=2 + 2 * TAILS)

    def place(self, script: int, answer: int) -> int:
        return script * self.per_script + answer


def reasoning_pool(seed: int) -> Pool:
    return _pool([_reasoning(random.Random(f"{seed}:{n}"), n) for n in range(SCRIPTS)])


def options_pool(seed: int) -> Pool:
    return _pool([_options(random.Random(f"{seed}:{n}:options")) for n in range(SCRIPTS)], with_tokens=False)


def _pool(scripts: list[Script], *, with_tokens: bool = True) -> Pool:
    texts = [answer for script in scripts for answer in script.answers]
    ids = [[zlib.crc32(word.encode()) % 150_000 for word in re.findall(r"\s*\w+|\s*\W", t)] for t in texts]
    return Pool(
        scripts=tuple(scripts),
        texts=pa.array(texts, pa.string()),
        token_ids=pa.array(ids if with_tokens else [[] for _ in texts], pa.list_(pa.int32())),
    )


def _reasoning(rng: random.Random, number: int) -> Script:
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    start, gain, times, lost = (rng.randint(2, 60) for _ in range(4))
    gold = (start + gain) * times - lost
    question = (
        f"{name} has {start} {thing} and gets {gain} more. A friend has {times} times as many, "
        f"but gives {lost} away. How many {thing} does the friend have?"
    )
    steps = [
        f"First, we find how many {thing} {name} has. {name} starts with {start} and gets {gain} more.",
        f"So {name} has {start} + {gain} = {start + gain} {thing}.",
        f"The friend has {times} times as many, which is {times} * {start + gain} = {times * (start + gain)}.",
        f"Then the friend gives {lost} away: {times * (start + gain)} - {lost} = {gold}.",
        "Let us check the result once more before we answer." if rng.random() < 0.5 else "All numbers fit.",
    ]
    steps *= 1 + (rng.random() < 0.3)  # some answers are long
    wrong = gold + rng.choice((-10, -1, 1, 10, times))
    bases = (_ended(steps, gold), _ended([*steps[:-1], f"That leaves {wrong} {thing}."], wrong))
    tails = [_tail(rng, steps, gold if n % 2 == 0 else gold + rng.choice((-9, -2, 3, 7)), thing) for n in range(TAILS)]
    if number == 0:
        tails[1::2] = [" ".join([*steps[:2], HOSTILE])] * (TAILS // 2)
    answers = (*bases, *tails, *(_tail(rng, steps, wrong if n % 2 else gold, thing) for n in range(TAILS)))
    return Script(question=question, choices=None, gold=str(gold), level=f"Level {rng.randint(1, 5)}", answers=answers)


def _ended(steps: list[str], number: int) -> str:
    return " ".join([*steps, f"The final answer is \\boxed{{{number}}}."])


def _tail(rng: random.Random, steps: list[str], number: int, thing: str) -> str:
    kept = steps[: rng.randint(1, len(steps) - 1)]
    more = [f"Therefore the number of {thing} is {number}."] * rng.choice((1, 1, 2, 4))
    return _ended([*kept, *more], number)


def _options(rng: random.Random) -> Script:
    a, b = rng.randint(2, 40), rng.randint(2, 40)
    values = [str(a * b), str(a * b + 1), str(a + b), str(a * b - b)]
    question = f"What is the product of {a} and {b}?\n" + "\n".join(
        f"{letter}. {value}" for letter, value in zip("ABCD", values, strict=True)
    )
    tails = [" A" if n % 2 == 0 else f" {rng.choice('BCD')}" for n in range(TAILS)]
    return Script(
        question=question, choices=("A", "B", "C", "D"), gold="A", level="", answers=(" A", " B", *tails, *tails)
    )

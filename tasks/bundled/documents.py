"""Which documents the bundled task sets hold, drawn from the generators side by side with what is trained on.

Knows counts, seeds and the split; writes no files and renders no prompts.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from tasks.bundled import choices, math_problems
from tasks.bundled.choices import draw_choice
from tasks.bundled.math_problems import draw_math_problem
from tasks.bundled.split import TEST, TRAIN, Key, split_of
from tasks.bundled.word_problems import draw_word_problem

SEED = 2025
TESTS = {"gsm8k": 280, "minerva_math": 40, "mmlu": 70}  # of each subject, where there are subjects
EXAMPLES = {"gsm8k": 20, "minerva_math": 5, "mmlu": 5}  # worked examples, from the side that is trained on
GSM8K, MATH, MMLU = "openai/gsm8k", "EleutherAI/hendrycks_math", "cais/mmlu"


class Drawn(Protocol):
    @property
    def key(self) -> Key: ...

    def document(self) -> dict[str, Any]: ...


D = TypeVar("D", bound=Drawn)


def draws(draw: Callable[[random.Random], D], split: str, source: random.Random) -> Iterator[D]:
    """Problems of one side of the split, without end."""
    while True:
        drawn = draw(source)
        if split_of(drawn.key) == split:
            yield drawn


def distinct(draw: Callable[[random.Random], D], split: str, source: random.Random, count: int) -> list[D]:
    """Problems of one side of the split, no two with the same key."""
    found: dict[Key, D] = {}
    for drawn in draws(draw, split, source):
        found.setdefault(drawn.key, drawn)
        if len(found) == count:
            break
    return list(found.values())


def word_problem(subject: str, source: random.Random) -> Drawn:
    del subject
    return draw_word_problem(source)


DRAW: dict[str, Callable[[str, random.Random], Drawn]] = {
    "gsm8k": word_problem,
    "minerva_math": draw_math_problem,
    "mmlu": draw_choice,
}
SUBJECTS: dict[str, tuple[str, ...]] = {
    "gsm8k": ("main",),
    "minerva_math": tuple(math_problems.SUBJECTS),
    "mmlu": tuple(choices.SUBJECTS),
}
FOLDERS = {"gsm8k": GSM8K, "minerva_math": MATH, "mmlu": MMLU}


def files() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Every data file of the bundled sets, by its path below the folder that is laid out like the Hub."""
    for task, subjects in SUBJECTS.items():
        for subject in subjects:
            examples = "dev" if task == "mmlu" else "train"
            for name, split, count in (("test", TEST, TESTS[task]), (examples, TRAIN, EXAMPLES[task])):
                source = random.Random(f"{SEED}:{task}:{subject}:{split}")
                drawn = distinct(lambda s, task=task, subject=subject: DRAW[task](subject, s), split, source, count)
                yield f"{FOLDERS[task]}/{subject}/{name}.jsonl", [one.document() for one in drawn]

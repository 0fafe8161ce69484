"""Which documents the bundled task sets hold, and which problems may be trained on. Knows counts, seeds and the split.

Writes no files and renders no prompts.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tasks.catalog import CATALOG
from tools.documents import choices, math_problems
from tools.documents.choices import draw_choice
from tools.documents.math_problems import draw_math_problem
from tools.documents.split import TEST, TRAIN, Key, split_of
from tools.documents.word_problems import draw_word_problem

SEED = 2025
TESTS = {"gsm8k": 280, "minerva_math": 40, "mmlu": 70}  # of each subject
EXAMPLES = {"gsm8k": 20, "minerva_math": 5, "mmlu": 5}  # worked examples of each subject: these may be trained on
EXAMPLE_FILES = {"gsm8k": "train", "minerva_math": "train", "mmlu": "dev"}


class Problem(Protocol):
    """A drawn problem: its key for the split, its texts for a prompt, its answer or which option that is."""

    @property
    def key(self) -> Key: ...

    @property
    def fields(self) -> tuple[str, ...]: ...

    @property
    def target(self) -> str | int: ...

    def document(self) -> dict[str, Any]: ...


DRAW: dict[str, Callable[[str, random.Random], Problem]] = {
    "gsm8k": lambda _, source: draw_word_problem(source),
    "minerva_math": draw_math_problem,
    "mmlu": draw_choice,
}
SUBJECTS: dict[str, tuple[str, ...]] = {
    "gsm8k": ("main",),
    "minerva_math": tuple(math_problems.SUBJECTS),
    "mmlu": tuple(choices.SUBJECTS),
}


def draws(task: str, subject: str, split: str, source: random.Random) -> Iterator[Problem]:
    """Problems of one side of the split, without end."""
    while True:
        problem = DRAW[task](subject, source)
        if split_of(problem.key) == split:
            yield problem


def distinct(task: str, subject: str, split: str, source: random.Random, count: int) -> list[Problem]:
    """Problems of one side of the split, no two with the same key."""
    found: dict[Key, Problem] = {}
    for problem in draws(task, subject, split, source):
        found.setdefault(problem.key, problem)
        if len(found) == count:
            break
    return list(found.values())


def chosen(task: str, subject: str, split: str, count: int) -> list[Problem]:
    """The problems that ship with the project."""
    return distinct(task, subject, split, random.Random(f"{SEED}:{task}:{subject}:{split}"), count)


def files() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Every data file of the bundled sets, by its path below the folder that is laid out like the Hub."""
    for task, subjects in SUBJECTS.items():
        for subject in subjects:
            folder = f"{CATALOG[task].dataset}/{subject}"
            for name, split, count in (("test", TEST, TESTS[task]), (EXAMPLE_FILES[task], TRAIN, EXAMPLES[task])):
                problems = chosen(task, subject, split, count)
                yield f"{folder}/{name}.jsonl", [problem.document() for problem in problems]

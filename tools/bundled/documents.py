"""python -m tools.bundled.documents: writes the documents in tasks/bundled, the same bytes every time."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orchestrator.cli.console import Parser, run_command
from sampler import InputError
from tasks.catalog import CATALOG
from tasks.sources import BUNDLED
from tools.bundled import choices, math_problems
from tools.bundled.choices import draw_choice
from tools.bundled.math_problems import draw_math_problem
from tools.bundled.problems import TEST, TRAIN, Key, Problem, split_of
from tools.bundled.word_problems import draw_word_problem

SEED = 2025
TEST_DOCUMENTS = {"gsm8k": 280, "minerva_math": 40, "mmlu": 70}  # per subject
WORKED_EXAMPLES = {"gsm8k": 20, "minerva_math": 5, "mmlu": 5}  # per subject; the model may be trained on these
WORKED_EXAMPLE_FILES = {"gsm8k": "train", "minerva_math": "train", "mmlu": "dev"}
DRAW: dict[str, Callable[[str, random.Random], Problem]] = {
    "gsm8k": lambda _, rng: draw_word_problem(rng),
    "minerva_math": draw_math_problem,
    "mmlu": draw_choice,
}
SUBJECTS: dict[str, tuple[str, ...]] = {
    "gsm8k": ("main",),
    "minerva_math": tuple(math_problems.SUBJECTS),
    "mmlu": tuple(choices.SUBJECTS),
}
EXAMPLES = """examples:
  python -m tools.bundled.documents
  python -m tools.bundled.documents --to DIR
"""


def draw_problems(task: str, subject: str, split: str, rng: random.Random) -> Iterator[Problem]:
    """An endless stream of problems of one split."""
    while True:
        problem = DRAW[task](subject, rng)
        if split_of(problem.key) == split:
            yield problem


def bundled_problems(task: str, subject: str, split: str, count: int) -> list[Problem]:
    """The first `count` problems with different keys that the project's seed gives."""
    rng = random.Random(f"{SEED}:{task}:{subject}:{split}")
    problems: dict[Key, Problem] = {}
    for problem in draw_problems(task, subject, split, rng):
        problems.setdefault(problem.key, problem)
        if len(problems) == count:
            break
    return list(problems.values())


def document_files() -> Iterator[tuple[str, str]]:
    """Path and content of every data file; the paths are those of the datasets on the Hub."""
    for task, subjects in SUBJECTS.items():
        for subject in subjects:
            folder = f"{CATALOG[task].dataset}/{subject}"
            for name, split, count in (
                ("test", TEST, TEST_DOCUMENTS[task]),
                (WORKED_EXAMPLE_FILES[task], TRAIN, WORKED_EXAMPLES[task]),
            ):
                documents: list[dict[str, Any]] = [
                    problem.document() for problem in bundled_problems(task, subject, split, count)
                ]
                lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in documents]
                yield f"{folder}/{name}.jsonl", "".join(lines)


def write_documents(folder: Path) -> int:
    """Writes all data files. Returns the number of documents."""
    lines = 0
    for name, text in document_files():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
        lines += text.count("\n")
    return lines


def main() -> None:
    parser = Parser(
        prog="python -m tools.bundled.documents",
        description="Writes the bundled documents, the same bytes every time.",
        examples=EXAMPLES,
    )
    parser.add_argument("--to", metavar="DIR", help="an existing directory to write to (default: tasks/bundled)")
    folder = parser.parse_args().to
    if folder is not None and not Path(folder).is_dir():
        raise InputError(f"--to must be an existing directory (got {folder})")
    target = BUNDLED if folder is None else Path(folder)
    print(f"wrote {write_documents(target)} documents to {target}")


if __name__ == "__main__":
    run_command(main)

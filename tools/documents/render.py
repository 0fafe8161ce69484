"""python -m tools.documents.render: writes prompt and answer lines to train the bundled model on, as the tasks ask."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sampler import InputError
from sampler.cli import Parser, run_command
from tools.documents.documents import SUBJECTS, Problem, draws
from tools.documents.drills import draw_drill
from tools.documents.prompts import Prompt, prompts_of
from tools.documents.split import HELD_OUT, TRAIN

TRAINED = 150_000  # lines, unless told otherwise
SHARES = {"gsm8k": 22, "minerva_math": 38, "mmlu": 24, "drill": 16}  # of a hundred
HELD_OUT_LINES = 200  # of each task
MOST = 10_000_000
EXAMPLES = """examples:
  python -m tools.documents.render --out train.jsonl
  python -m tools.documents.render --out few.jsonl --examples 2000 --seed 1
"""

Line = dict[str, Any]
Prompts = dict[str, dict[str, Prompt]]  # by task and subject


def render(examples: int, seed: int) -> list[Line]:
    """`examples` lines to train on and some that are held out, in random order."""
    prompts: Prompts = {task: prompts_of(task, subjects) for task, subjects in SUBJECTS.items()}
    found: list[Line] = []
    for split, counts in (
        (TRAIN, {task: examples * share // 100 for task, share in SHARES.items()}),
        (HELD_OUT, dict.fromkeys(SUBJECTS, HELD_OUT_LINES)),
    ):
        for task, count in counts.items():
            source = random.Random(f"{seed}:{task}:{split}")
            lines = drill_lines(source) if task == "drill" else task_lines(task, split, prompts[task], source)
            found += [next(lines) for _ in range(count)]
    random.Random(f"{seed}:order").shuffle(found)
    return found


def task_lines(task: str, split: str, prompts: dict[str, Prompt], source: random.Random) -> Iterator[Line]:
    """Lines of one task without end, its subjects in turn."""
    drawn = {subject: draws(task, subject, split, source) for subject in SUBJECTS[task]}
    while True:
        for subject, problems in drawn.items():
            yield line(task, subject, split, prompts[subject], next(problems))


def line(task: str, subject: str, split: str, prompt: Prompt, problem: Problem) -> Line:
    asked, target = prompt.ask(problem.fields), problem.target
    answer = target if isinstance(target, str) else prompt.targets[target]
    return _line(task, subject, split, asked.system, asked.user, answer)


def drill_lines(source: random.Random) -> Iterator[Line]:
    while True:
        drill = draw_drill(source)
        yield _line("drill", None, TRAIN, None, drill.prompt, drill.answer)


def _line(task: str, subject: str | None, split: str, system: str | None, prompt: str, answer: str) -> Line:
    return {"task": task, "subject": subject, "split": split, "system": system, "prompt": prompt, "answer": answer}


def main() -> None:
    parser = Parser(
        prog="python -m tools.documents.render",
        description="Writes prompt and answer lines to train the bundled model on, as the tasks ask.",
        examples=EXAMPLES,
    )
    parser.add_argument("--out", required=True, metavar="FILE.jsonl", help="where to write")
    parser.add_argument("--examples", type=int, default=TRAINED, help=f"lines to train on (default: {TRAINED})")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (default: 0)")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    if not 100 <= arguments.examples <= MOST:
        raise InputError(f"--examples {arguments.examples}: 100 to {MOST} are allowed")
    if not out.parent.is_dir() or out.is_dir():
        what = "is a folder" if out.is_dir() else f"there is no folder {out.parent}"
        raise InputError(f"--out {out}: {what}")
    lines = render(arguments.examples, arguments.seed)
    unfinished = out.with_name(f"{out.name}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    os.replace(unfinished, out)
    print(f"{len(lines)} lines in {out}")


if __name__ == "__main__":
    run_command(main)

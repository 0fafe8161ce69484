"""python -m tasks.bundled.render: writes prompt and answer lines to train the bundled model on, as the tasks ask."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sampler import InputError
from sampler.cli import Parser, run_command
from tasks.bundled import choices, math_problems
from tasks.bundled.choices import draw_choice
from tasks.bundled.documents import GSM8K, MATH, MMLU, draws
from tasks.bundled.drills import draw_drill
from tasks.bundled.math_problems import draw_math_problem
from tasks.bundled.prompts import MARKS, Prompt, prompt_of
from tasks.bundled.split import HELD_OUT, TRAIN
from tasks.bundled.word_problems import draw_word_problem
from tasks.catalog import MINERVA_MATH

SHARES = {"gsm8k": 32, "minerva_math": 30, "mmlu": 26, "drill": 12}
HELD_OUT_LINES = 200  # of each task
MOST = 10_000_000
EXAMPLES = """examples:
  python -m tasks.bundled.render --out train.jsonl
  python -m tasks.bundled.render --out few.jsonl --examples 2000 --seed 1
"""

Line = dict[str, Any]


class Renderer:
    """The prompts of the bundled tasks, asked for once."""

    def __init__(self) -> None:
        question = {"question": MARKS[0], "answer": "#### 0"}
        problem = {"problem": MARKS[0], "solution": "\\boxed{0}"}
        choice = {"question": MARKS[0], "choices": list(MARKS[1:]), "answer": 0}
        parts = dict(zip(math_problems.SUBJECTS, MINERVA_MATH.subtasks, strict=True))
        self.prompts: dict[tuple[str, str], Prompt] = {("gsm8k", "main"): prompt_of("gsm8k", GSM8K, "main", question)}
        for part, task in parts.items():
            self.prompts["minerva_math", part] = prompt_of(task, MATH, part, problem)
        for part in choices.SUBJECTS:
            self.prompts["mmlu", part] = prompt_of(f"mmlu_{part}", MMLU, part, choice)

    def line(self, task: str, subject: str, split: str, fields: Sequence[str], answer: str | int) -> Line:
        prompt = self.prompts[task, subject]
        asked = prompt.ask(fields)
        return {
            "task": task,
            "subject": subject,
            "split": split,
            "system": asked.system,
            "prompt": asked.user,
            "answer": answer if isinstance(answer, str) else prompt.targets[answer],
        }

    def lines(self, task: str, split: str, source: random.Random) -> Iterator[Line]:
        """Lines of one task without end, its subjects in turn."""
        if task == "gsm8k":
            for word in draws(draw_word_problem, split, source):
                yield self.line(task, "main", split, [word.question], word.answer)
        if task == "drill":
            while True:
                drill = draw_drill(source)
                yield {
                    "task": task,
                    "subject": None,
                    "split": split,
                    "system": None,
                    "prompt": drill.prompt,
                    "answer": drill.answer,
                }
        if task == "minerva_math":
            yield from self._in_turn([self._math(subject, split, source) for subject in math_problems.SUBJECTS])
        yield from self._in_turn([self._choices(subject, split, source) for subject in choices.SUBJECTS])

    def _math(self, subject: str, split: str, source: random.Random) -> Iterator[Line]:
        for drawn in draws(lambda s: draw_math_problem(subject, s), split, source):
            yield self.line("minerva_math", subject, split, [drawn.problem], drawn.solution)

    def _choices(self, subject: str, split: str, source: random.Random) -> Iterator[Line]:
        for drawn in draws(lambda s: draw_choice(subject, s), split, source):
            yield self.line("mmlu", subject, split, [drawn.question, *drawn.options], drawn.answer)

    @staticmethod
    def _in_turn(parts: list[Iterator[Line]]) -> Iterator[Line]:
        while True:
            for part in parts:
                yield next(part)


def render(examples: int, seed: int) -> list[Line]:
    """`examples` lines to train on, then in among them some that are held out."""
    renderer, found = Renderer(), []
    for task, share in SHARES.items():
        lines = renderer.lines(task, TRAIN, random.Random(f"{seed}:{task}:{TRAIN}"))
        found += [next(lines) for _ in range(examples * share // 100)]
    for task in ("gsm8k", "minerva_math", "mmlu"):
        lines = renderer.lines(task, HELD_OUT, random.Random(f"{seed}:{task}:{HELD_OUT}"))
        found += [next(lines) for _ in range(HELD_OUT_LINES)]
    random.Random(f"{seed}:order").shuffle(found)
    return found


def main() -> None:
    parser = Parser(prog="python -m tasks.bundled.render", description=__doc__.partition(": ")[2], examples=EXAMPLES)
    parser.add_argument("--out", required=True, metavar="FILE.jsonl", help="where to write")
    parser.add_argument("--examples", type=int, default=150_000, help="lines to train on (default: 150000)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (default: 0)")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    if not 1 <= arguments.examples <= MOST:
        raise InputError(f"--examples {arguments.examples}: 1 to {MOST} are allowed")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}")
    lines = render(arguments.examples, arguments.seed)
    unfinished = out.with_name(f"{out.name}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    os.replace(unfinished, out)
    print(f"{len(lines)} lines in {out}")


if __name__ == "__main__":
    run_command(main)

"""python -m tools.bundled.training_lines: writes the prompts and answers that the bundled model is trained on.

The prompts come from the tasks themselves. Each task is opened on one document whose texts are placeholders; its prompt
is the prompt of every other document with the placeholders replaced. So prompts are defined only in the catalog and in
lm-eval, and lm-eval does not have to render each of 150,000 lines.
"""

import json
import os
import random
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.cli.console import Parser, run_command
from sampler import InputError
from tasks import lookup
from tasks.catalog import CATALOG, TaskSpec
from tasks.documents import TaskOptions
from tasks.task import open_task
from tools.bundled.choices import CATEGORIES, CONTINENTS, choice_key, range_index
from tools.bundled.documents import SUBJECTS, draw_problems
from tools.bundled.problems import HELD_OUT, TRAIN, Problem, draw_calculation, split_of

TRAINING_LINES = 150_000  # by default
SHARES_PERCENT = {"gsm8k": 22, "minerva_math": 38, "mmlu": 24, "drill": 16}
HELD_OUT_LINES = 200  # per task
MAX_LINES = 10_000_000
DRILL_ITEMS = 8
LETTERS = "ABCD"
PLACEHOLDERS = tuple(f"<<mark {number}>>" for number in range(5))
PLACEHOLDER_DOCUMENTS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": PLACEHOLDERS[0], "answer": "#### 0"},
    "minerva_math": {"problem": PLACEHOLDERS[0], "solution": "\\boxed{0}"},
    "mmlu": {"question": PLACEHOLDERS[0], "choices": list(PLACEHOLDERS[1:]), "answer": 0},
}
EXAMPLES = """examples:
  python -m tools.bundled.training_lines --out train.jsonl
  python -m tools.bundled.training_lines --out few.jsonl --examples 2000 --seed 1
"""

TrainingLine = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """The system and user message of one prompt."""

    system: str | None
    user: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTemplate:
    """A task's messages with placeholders, and the continuations it scores, if any."""

    messages: Messages
    continuations: tuple[str, ...]

    def fill(self, fields: Sequence[str]) -> Messages:
        texts = dict(zip(PLACEHOLDERS, fields, strict=False))
        user = re.sub("|".join(map(re.escape, texts)), lambda match: texts[match[0]], self.messages.user)
        return Messages(system=self.messages.system, user=user)


def prompt_templates(task: str, subjects: Iterable[str]) -> dict[str, PromptTemplate]:
    """The prompt template of each subject, which is a configuration of the task's dataset."""
    entry = CATALOG[task]
    names = _subtasks(entry)
    document = PLACEHOLDER_DOCUMENTS[task]
    return {subject: _prompt_template(names[subject], entry.dataset, subject, document) for subject in subjects}


def _subtasks(entry: TaskSpec) -> dict[str, str]:
    """lm-eval's task for each configuration of the dataset."""
    index = lookup.stock_tasks(entry.stock_folder)
    return {lookup.load_stock_config(index[name][1])["dataset_name"]: name for name in entry.subtasks}


def _prompt_template(task: str, dataset: str, subject: str, document: Mapping[str, Any]) -> PromptTemplate:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / dataset / subject
        data.mkdir(parents=True)
        (data / "test.jsonl").write_text(json.dumps(document) + "\n", encoding="utf-8")
        opened = open_task(task, TaskOptions(data=folder))
        requests = opened.requests(opened.documents[0], json_chat_template)
    return PromptTemplate(
        messages=parse_messages(requests[0].args[0]),
        continuations=tuple(str(request.args[1]) for request in requests),
    )


def json_chat_template(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
    """Replaces the model's chat template, so that the messages can be read back."""
    assert add_generation_prompt, "tasks that begin the answer themselves are not supported"
    return json.dumps(list(messages))


def parse_messages(context: str) -> Messages:
    """Reads what `json_chat_template` wrote."""
    messages = {message["role"]: message["content"] for message in json.loads(context)}
    assert messages.keys() <= {"system", "user"}, f"roles are {sorted(messages)}"
    return Messages(system=messages.get("system"), user=messages["user"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """Several small calculations or facts in one text, which belongs to no task and is only trained on."""

    prompt: str
    answer: str


def draw_drill(rng: random.Random) -> Drill:
    return rng.choices((_calculation_drill, _letter_drill), (3, 2))[0](rng)


def _calculation_drill(rng: random.Random) -> Drill:
    drawn = [draw_calculation(rng) for _ in range(DRILL_ITEMS)]
    return Drill(
        prompt="Drill: " + ", ".join(f"{item.left}{item.sign}{item.right}" for item in drawn),
        answer=", ".join(map(str, drawn)),
    )


def _letter_drill(rng: random.Random) -> Drill:
    """What mmlu questions ask, without the question: items and the letters of their options."""
    drawn = [rng.choice((_range_item, _country_item, _thing_item))(rng) for _ in range(DRILL_ITEMS)]
    return Drill(
        prompt="Drill: " + ", ".join(item for item, _ in drawn),
        answer=", ".join(f"{item}:\n{LETTERS[option]}" for item, option in drawn),
    )


def _range_item(rng: random.Random) -> tuple[str, int]:
    while True:
        drawn = draw_calculation(rng, "+-")
        term = f"{drawn.left}{drawn.sign}{drawn.right}"
        if split_of(choice_key("range", term)) == TRAIN:
            return term, range_index(drawn)


def _country_item(rng: random.Random) -> tuple[str, int]:
    return _member(CONTINENTS, rng)


def _thing_item(rng: random.Random) -> tuple[str, int]:
    return _member(CATEGORIES, rng)


def _member(table: Mapping[str, Sequence[str]], rng: random.Random) -> tuple[str, int]:
    option = rng.randrange(len(table))
    return rng.choice(tuple(table.values())[option]), option


def training_lines(examples: int, seed: int) -> list[TrainingLine]:
    """`examples` lines to train on and HELD_OUT_LINES held-out lines of each task, in random order."""
    templates = {task: prompt_templates(task, subjects) for task, subjects in SUBJECTS.items()}
    lines: list[TrainingLine] = []
    for split, counts in (
        (TRAIN, {task: examples * share // 100 for task, share in SHARES_PERCENT.items()}),
        (HELD_OUT, dict.fromkeys(SUBJECTS, HELD_OUT_LINES)),
    ):
        for task, count in counts.items():
            rng = random.Random(f"{seed}:{task}:{split}")
            stream = _drill_lines(rng) if task == "drill" else _task_lines(task, split, templates[task], rng)
            lines += [next(stream) for _ in range(count)]
    random.Random(f"{seed}:order").shuffle(lines)
    return lines


def _task_lines(
    task: str, split: str, templates: Mapping[str, PromptTemplate], rng: random.Random
) -> Iterator[TrainingLine]:
    """An endless stream of lines that cycles through the task's subjects."""
    drawn = {subject: draw_problems(task, subject, split, rng) for subject in SUBJECTS[task]}
    while True:
        for subject, problems in drawn.items():
            yield problem_line(task, subject, split, templates[subject], next(problems))


def problem_line(task: str, subject: str, split: str, template: PromptTemplate, problem: Problem) -> TrainingLine:
    messages, target = template.fill(problem.fields), problem.target
    answer = target if isinstance(target, str) else template.continuations[target]
    return _line(task, subject, split, messages.system, messages.user, answer)


def _drill_lines(rng: random.Random) -> Iterator[TrainingLine]:
    while True:
        drill = draw_drill(rng)
        yield _line("drill", None, TRAIN, None, drill.prompt, drill.answer)


def _line(task: str, subject: str | None, split: str, system: str | None, prompt: str, answer: str) -> TrainingLine:
    return {"task": task, "subject": subject, "split": split, "system": system, "prompt": prompt, "answer": answer}


def main() -> None:
    parser = Parser(
        prog="python -m tools.bundled.training_lines",
        description="Writes the prompts and answers that the bundled model is trained on, as JSON lines.",
        examples=EXAMPLES,
    )
    parser.add_argument("--out", required=True, metavar="FILE.jsonl", help="file to write")
    parser.add_argument(
        "--examples", type=int, default=TRAINING_LINES, help=f"lines to train on (default: {TRAINING_LINES})"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    if not 100 <= arguments.examples <= MAX_LINES:
        raise InputError(f"--examples must be between 100 and {MAX_LINES} (got {arguments.examples})")
    if out.is_dir():
        raise InputError(f"--out must be a file (got the directory {out})")
    if not out.parent.is_dir():
        raise InputError(f"--out must be in an existing directory ({out.parent} does not exist)")
    lines = training_lines(arguments.examples, arguments.seed)
    unfinished = out.with_name(f"{out.name}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    os.replace(unfinished, out)
    print(f"wrote {len(lines)} lines to {out}")


if __name__ == "__main__":
    run_command(main)

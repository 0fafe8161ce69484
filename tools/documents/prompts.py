"""How a task asks: what it sends for a document, found out from the task itself. Knows no generator.

A task is opened on one document whose texts are marks; what it sends for that document is the prompt of all others,
with the marks replaced. So the wording of a prompt is written in the catalog and in lm-eval only, and lm-eval is not
asked again for each of a hundred thousand lines.
"""

import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import lookup
from tasks.catalog import CATALOG, TaskSpec
from tasks.documents import TaskOptions
from tasks.task import open_task

MARKS = tuple(f"<<mark {number}>>" for number in range(5))
MARKED: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": MARKS[0], "answer": "#### 0"},
    "minerva_math": {"problem": MARKS[0], "solution": "\\boxed{0}"},
    "mmlu": {"question": MARKS[0], "choices": list(MARKS[1:]), "answer": 0},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The messages of one question."""

    system: str | None
    user: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A task's messages with marks in them, and the continuations it scores, if it does."""

    asked: Asked
    targets: tuple[str, ...]

    def ask(self, fields: Sequence[str]) -> Asked:
        texts = dict(zip(MARKS, fields, strict=False))
        user = re.sub("|".join(map(re.escape, texts)), lambda mark: texts[mark[0]], self.asked.user)
        return Asked(system=self.asked.system, user=user)


def prompts_of(task: str, subjects: Iterable[str]) -> dict[str, Prompt]:
    """The prompts of a catalog task, by the configuration of its dataset that a subject is."""
    entry = CATALOG[task]
    names = _subtasks(entry)
    return {subject: _prompt(names[subject], entry.dataset, subject, MARKED[task]) for subject in subjects}


def _subtasks(entry: TaskSpec) -> dict[str, str]:
    """lm-eval's task for each configuration of the dataset."""
    index = lookup.stock_tasks(entry.stock_folder)
    return {lookup.load_stock_config(index[name][1])["dataset_name"]: name for name in entry.subtasks}


def _prompt(task: str, dataset: str, subject: str, document: Mapping[str, Any]) -> Prompt:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / dataset / subject
        place.mkdir(parents=True)
        (place / "test.jsonl").write_text(json.dumps(document) + "\n", encoding="utf-8")
        opened = open_task(task, TaskOptions(data=folder))
        requests = opened.requests(opened.documents[0], as_json)
    return Prompt(asked=sent(requests[0].args[0]), targets=tuple(str(request.args[1]) for request in requests))


def as_json(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
    """Stands in for a chat template and keeps the messages apart."""
    assert add_generation_prompt, "a task that begins the answer itself has no place here"
    return json.dumps(list(messages))


def sent(context: str) -> Asked:
    """The messages that `as_json` wrote."""
    messages = {message["role"]: message["content"] for message in json.loads(context)}
    assert messages.keys() <= {"system", "user"}, f"roles are {sorted(messages)}"
    return Asked(system=messages.get("system"), user=messages["user"])

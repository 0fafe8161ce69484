"""How a task asks: what it sends for a document, found out from the task itself. Knows no generator.

A task is opened on one document whose fields are marks; what it sends for that document is the prompt of all others,
with the marks replaced. So the wording of a prompt is written in the catalog and in lm-eval only.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.opening import open_task
from tasks.options import TaskOptions

MARKS = ("<<mark0>>", "<<mark1>>", "<<mark2>>", "<<mark3>>", "<<mark4>>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The messages of one question."""

    system: str | None
    user: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A task's messages with marks in them, and the texts it expects or scores, where they are fixed."""

    asked: Asked
    targets: tuple[str, ...]

    def ask(self, fields: Sequence[str]) -> Asked:
        user = self.asked.user
        for mark, field in zip(MARKS, fields, strict=False):
            user = user.replace(mark, field)
        return Asked(system=self.asked.system, user=user)


def prompt_of(task: str, dataset: str, part: str, document: Mapping[str, Any]) -> Prompt:
    """The prompt of an lm-eval task, from what it sends for a document of marks."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / dataset / part
        place.mkdir(parents=True)
        (place / "test.jsonl").write_text(json.dumps(document) + "\n", encoding="utf-8")
        opened = open_task(task, TaskOptions(data=folder))
        requests = opened.requests(opened.documents[0], as_json)
    asked = sent(requests[0].args[0])
    return Prompt(asked=asked, targets=tuple(str(request.args[1]) for request in requests))


def as_json(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
    """Stands in for a chat template and keeps the messages apart."""
    assert add_generation_prompt, "a task that begins the answer itself has no place here"
    return json.dumps(list(messages))


def sent(context: str) -> Asked:
    """What `as_json` wrote."""
    messages = {message["role"]: message["content"] for message in json.loads(context)}
    assert messages.keys() <= {"system", "user"}, f"unknown roles in {messages}"
    return Asked(system=messages.get("system"), user=messages["user"])

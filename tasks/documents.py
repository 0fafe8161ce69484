"""What a person may choose about a task: how many documents, which prompts, from where. Checked at birth."""

import hashlib
import json
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sampler import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """Choices for one task; None means as in the catalog."""

    data: str = "hub"  # hub, bundled, or a folder laid out like the Hub
    limit: int | None = None  # the first N documents, of each subject in a group
    sample: int | None = None  # a random N, spread over the subjects like the documents are
    seed: int = 0
    fewshot: int | None = None
    chat_template: bool = True
    max_new_tokens: int | None = None
    allow_code_execution: bool = False
    unsafe_code_execution: bool = False
    revisions: tuple[tuple[str, str], ...] = ()  # of datasets on the Hub: to be read at this commit, not the newest

    def __post_init__(self) -> None:
        for name in ("limit", "sample", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: at least 1 is allowed")
        if self.fewshot is not None and self.fewshot < 0:
            raise InputError(f"--fewshot {self.fewshot}: 0 or more worked examples are allowed")
        if self.limit is not None and self.sample is not None:
            raise InputError("--limit and --sample exclude each other: the first N documents or a random N")
        if not self.data:
            raise InputError("--data is empty: hub, bundled or a folder laid out like the Hub is allowed")

    @property
    def code_execution_allowed(self) -> bool:
        """By flag, or by the variable that the Hub's own code metric asks for."""
        return self.allow_code_execution or self.unsafe_code_execution or os.environ.get("HF_ALLOW_CODE_EVAL") == "1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One question of a task. `index` is its place in lm-eval's evaluation split."""

    doc_id: str
    subtask: str
    index: int
    doc_hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A document for people: as asked, with its options and what is right."""

    doc_id: str
    subtask: str
    doc_hash: str
    question: str
    choices: tuple[str, ...] | None
    gold: str
    level: str | None  # how hard it is, where its dataset says so


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What the documents were made of; part of a result's identity."""

    source: str  # hub, folder or bundled
    datasets: Mapping[str, str]  # dataset: commit on the Hub, or a hash of the files read


def select_documents(name: str, subtasks: Mapping[str, Any], options: TaskOptions) -> list[Document]:
    """The chosen documents in their fixed order: subtask by subtask, each in the order of its data."""
    sizes = {name: len(task.task_docs) for name, task in subtasks.items()}
    chosen = {name: range(min(size, options.limit or size)) for name, size in sizes.items()}
    if options.sample is not None:
        chosen = _spread(sizes, options.sample, options.seed)
    if not any(chosen.values()):
        raise InputError(f"task {name} has no documents here")
    return [document for name, task in subtasks.items() for document in _documents(name, task, list(chosen[name]))]


def _spread(sizes: Mapping[str, int], wanted: int, seed: int) -> dict[str, Any]:
    """A random `wanted`, each subtask in proportion. A larger sample with the same seed contains the smaller one."""
    ranked: list[tuple[float, str, int]] = []
    for name, size in sizes.items():
        generator = random.Random(f"{seed}:{name}")
        offset = generator.random()
        order = generator.sample(range(size), size)
        ranked += [((place + offset) / size, name, index) for place, index in enumerate(order)]
    chosen: dict[str, list[int]] = {name: [] for name in sizes}
    for _, name, index in sorted(ranked)[:wanted]:
        chosen[name].append(index)
    return {name: sorted(indices) for name, indices in chosen.items()}


def _documents(subtask: str, task: Any, indices: list[int]) -> Iterator[Document]:
    contents = task.task_docs.select(indices)  # a walk; asking for each by its place takes three times as long
    for index, content in zip(indices, contents, strict=True):
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        yield Document(doc_id=f"{subtask}/{index}", subtask=subtask, index=index, doc_hash=digest[:16])

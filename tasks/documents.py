"""Documents of a task: the options that select them, and their identity.

The command line imports this module, so it must not import lm-eval, which takes seconds.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sampler.config import BUNDLED_MODEL
from sampler.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """User choices for a task."""

    data: str = "hub"  # hub, bundled, or a directory laid out like the Hub
    limit: int | None = None  # the first N documents, of each subject in a group; None: all
    sample: int | None = None  # N random documents, in proportion to the size of each subject
    seed: int = 0
    fewshot: int | None = None  # None: the catalog's default
    chat_template: bool = True
    thinking: bool = False  # turns on the thinking mode of chat templates that have one
    max_new_tokens: int | None = None  # None: the catalog's default
    allow_code_execution: bool = False
    unsafe_code_execution: bool = False
    revisions: tuple[tuple[str, str], ...] = ()  # (dataset, commit) to read instead of the newest commit

    @classmethod
    def from_settings(cls, settings: Any, **changes: Any) -> "TaskOptions":
        """Options from the attributes of `settings` that have the same names; the others keep their defaults."""
        known = {item.name: getattr(settings, item.name) for item in fields(cls) if hasattr(settings, item.name)}
        return cls(**known | changes)

    def __post_init__(self) -> None:
        for name in ("limit", "sample", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} must be at least 1 (got {value})")
        if self.fewshot is not None and self.fewshot < 0:
            raise InputError(f"--fewshot must be at least 0 (got {self.fewshot})")
        if self.limit is not None and self.sample is not None:
            raise InputError("--limit (the first N documents) and --sample (N random documents) exclude each other")
        if not self.data:
            raise InputError("--data must be hub, bundled or a directory laid out like the Hub (got an empty string)")

    @property
    def code_execution_allowed(self) -> bool:
        """Whether a flag or the environment variable of the Hub's code_eval metric allows generated programs to run."""
        return self.allow_code_execution or self.unsafe_code_execution or os.environ.get("HF_ALLOW_CODE_EVAL") == "1"


def resolve_data(data: str, model: str) -> str:
    """Resolve `auto`: the bundled documents for the bundled model, the Hub for every other model."""
    if data != "auto":
        return data
    return "bundled" if model == BUNDLED_MODEL else "hub"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One question of a task. Its id does not depend on how many documents are selected."""

    doc_id: str
    subtask: str
    index: int  # in lm-eval's evaluation split
    doc_hash: str  # of the content


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A document in readable form, for reports."""

    doc_id: str
    subtask: str
    doc_hash: str
    question: str
    choices: tuple[str, ...] | None
    gold: str
    level: str | None  # difficulty, if the dataset has one


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a task's documents come from; part of a result's identity."""

    source: str  # hub, folder or bundled
    datasets: Mapping[str, str]  # dataset → commit on the Hub, or a hash of the files read


def select_documents(name: str, subtasks: Mapping[str, Any], options: TaskOptions) -> list[Document]:
    """The selected documents in a fixed order: by subtask, then in the order of the data."""
    selected = _select_indices({subtask: len(task.task_docs) for subtask, task in subtasks.items()}, options)
    if not any(selected.values()):
        raise InputError(f"task {name} has no documents in this data")
    return [document for subtask, task in subtasks.items() for document in _documents(subtask, task, selected[subtask])]


def published_documents(sizes: Mapping[str, int], options: TaskOptions) -> list[Document]:
    """The selected documents of subtasks with these sizes, without loading them: `doc_hash` is empty."""
    return [
        Document(doc_id=f"{subtask}/{index}", subtask=subtask, index=index, doc_hash="")
        for subtask, indices in _select_indices(sizes, options).items()
        for index in indices
    ]


def _select_indices(sizes: Mapping[str, int], options: TaskOptions) -> Mapping[str, Sequence[int]]:
    if options.sample is None:
        return {subtask: range(min(size, options.limit or size)) for subtask, size in sizes.items()}
    return _sample_indices(sizes, options.sample, options.seed)


def _sample_indices(sizes: Mapping[str, int], count: int, seed: int) -> dict[str, list[int]]:
    """`count` random indices, in proportion to the sizes. A larger sample with the same seed contains a smaller one."""
    ranked: list[tuple[float, str, int]] = []
    for name, size in sizes.items():
        generator = random.Random(f"{seed}:{name}")
        offset = generator.random()
        order = generator.sample(range(size), size)
        ranked += [((rank + offset) / size, name, index) for rank, index in enumerate(order)]
    selected: dict[str, list[int]] = {name: [] for name in sizes}
    for _, name, index in sorted(ranked)[:count]:
        selected[name].append(index)
    return {name: sorted(indices) for name, indices in selected.items()}


def _documents(subtask: str, task: Any, indices: Sequence[int]) -> Iterator[Document]:
    contents = task.task_docs.select(list(indices))  # one pass: three times as fast as indexing each
    for index, content in zip(indices, contents, strict=True):
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        yield Document(doc_id=f"{subtask}/{index}", subtask=subtask, index=index, doc_hash=digest[:16])

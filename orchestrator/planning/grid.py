"""The trials of a sweep, their ids and their order."""

import hashlib
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from orchestrator.core.configuration import Configuration, grid
from orchestrator.core.trial import Trial
from orchestrator.planning.settings import SweepSettings
from tasks.documents import Document

SUBJECT_RUN_LENGTH = 8  # consecutive documents of one subject: they share few-shot examples, which are prefilled once


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepIdentity:
    """What all trials of a sweep have in common: model, prompts and documents.

    Created by preflight; read by the trial ids, sweep.json (which refuses to continue with another one) and the report.
    """

    model: str
    model_revision: str | None
    depth: int
    dtype: str
    subset_size: int
    data: str  # kind of source: hub, folder or bundled
    datasets: Mapping[str, Mapping[str, str]]  # task: dataset: revision
    sample: int | None
    seed: int
    fewshot: int | None
    chat_template: bool
    max_new_tokens: int | None
    batch_size: int
    shard_size: int

    def as_dict(self) -> dict[str, Any]:
        datasets = {task: dict(revisions) for task, revisions in self.datasets.items()}
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"datasets": datasets}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SweepIdentity":
        return cls(**values)

    def for_task(self, task: str) -> dict[str, Any]:
        """What can change the rows of every trial of a task."""
        common = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("depth", "datasets")}
        if self.sample is None:
            del common["seed"]
        return {**common, "task": task, "datasets": dict(self.datasets[task])}


def assign_shards(documents: Sequence[Document], shard_size: int) -> dict[str, int]:
    """The shard of each document, for all documents of a task (or a sample of them).

    Subjects take turns, a few documents each. So the first documents of every subject, which --limit selects, fill the
    first shards, and a larger limit only adds documents to trials.
    """
    assert shard_size >= 1
    order = {subtask: place for place, subtask in enumerate(dict.fromkeys(d.subtask for d in documents))}

    def turn(document: Document) -> tuple[int, int, int]:
        round_number, place = divmod(document.index, SUBJECT_RUN_LENGTH)
        return round_number, order[document.subtask], place

    return {document.doc_id: i // shard_size for i, document in enumerate(sorted(documents, key=turn))}


def plan_trials(
    identity: SweepIdentity,
    settings: SweepSettings,
    shards: Mapping[str, Sequence[int]],
    *,
    scored: Collection[str] = (),
) -> list[Trial]:
    """All trials in the order they should run, for the shards that each task has documents in.

    Shard by shard, and within a shard all configurations in random order: every configuration grows at the same pace
    on the same documents, and none always runs first. Tasks in `scored` have no decode settings.
    """
    prefixes = {task: _common_hash(identity.for_task(task)) for task in settings.tasks}
    last = max((max(numbers) for numbers in shards.values() if numbers), default=-1)
    present = {task: frozenset(shards[task]) for task in settings.tasks}
    axes = settings.as_dict()
    trials = []
    for repeat, shard, task in product(range(settings.repeats), range(last + 1), settings.tasks):
        if shard in present[task]:
            configurations = grid(axes, decoded=task not in scored)
            random.Random(f"{settings.seed}:{repeat}:{shard}:{task}").shuffle(configurations)
            trials += [_trial(task, prefixes[task], chosen, shard=shard, repeat=repeat) for chosen in configurations]
    return trials


def _common_hash(common: Mapping[str, Any]) -> Any:
    """The hash of what a task's trials have in common, computed once; each trial adds its own values."""
    return hashlib.sha256(f"[{_canonical_json(common)},".encode())


def _trial(task: str, prefix: Any, configuration: Configuration, *, shard: int, repeat: int) -> Trial:
    """The id is a hash of everything that can change the trial's rows: not of the limit, nor of the machine."""
    digest = prefix.copy()
    own = {**configuration.identity(), "repeat": repeat, "shard": shard}
    digest.update(f"{_canonical_json(own)}]".encode())
    return Trial(trial_id=digest.hexdigest()[:16], task=task, configuration=configuration, repeat=repeat, shard=shard)


_canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode

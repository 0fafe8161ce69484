"""Trials of a sweep: what they are, what identifies them, in which order they run. Knows no Ray, no files.

A trial is one shard of a task's documents under one policy and one set of decode settings. Its id is a hash of all that
can change its rows, and of nothing else: not the limit (a sweep can grow) and not the machine.
"""

import hashlib
import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Protocol

from orchestrator.planning.settings import SweepSettings

TRIAL_KEYS = ("task", "policy", "threshold", "small_block", "block_cache", "repeat", "shard")
TrialKey = tuple[Any, ...]  # a trial's values of TRIAL_KEYS
RUN_LENGTH = 8  # documents of one subject in a row: they share worked examples, which are prefilled once
DECODE_DEFAULTS = (0.95, 8, True)  # threshold, small block, block cache


class Document(Protocol):
    """As tasks.documents has it, which takes seconds to import."""

    @property
    def doc_id(self) -> str: ...
    @property
    def subtask(self) -> str: ...
    @property
    def index(self) -> int: ...  # in its subtask


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSpec:
    """One trial in plain values, as they travel to an actor."""

    trial_id: str
    task: str
    policy: str
    threshold: float
    small_block: int
    block_cache: bool
    repeat: int
    shard: int

    @property
    def configuration_label(self) -> str:
        """task/policy, with the decode settings that are not the defaults."""
        threshold, small_block, block_cache = DECODE_DEFAULTS
        parts = [self.policy]
        parts += [f"t{self.threshold:g}"] if self.threshold != threshold else []
        parts += [f"b{self.small_block}"] if self.small_block != small_block else []
        parts += ["nocache"] if self.block_cache != block_cache else []
        return f"{self.task}/{','.join(parts)}"

    @property
    def label(self) -> str:
        """task/policy/shard, with the decode settings and the repeat where they are not the defaults."""
        return f"{self.configuration_label}/{self.shard}" + (f".r{self.repeat}" if self.repeat else "")

    @property
    def tune_config(self) -> dict[str, Any]:
        """The trial as Ray Tune knows it."""
        return {name: getattr(self, name) for name in TRIAL_KEYS}

    @property
    def key(self) -> TrialKey:
        return trial_key(self.tune_config)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrialSpec":
        return cls(**values)


def trial_key(tune_config: Mapping[str, Any]) -> TrialKey:
    """Identifies a trial within a sweep, from its Ray Tune configuration."""
    return tuple(tune_config[name] for name in TRIAL_KEYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepIdentity:
    """What makes the trials of a sweep comparable: one model, one way to ask, the same documents."""

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

    def of_task(self, task: str) -> dict[str, Any]:
        """What all trials of a task have in common, as far as it can change their rows."""
        common = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("depth", "datasets")}
        if self.sample is None:
            del common["seed"]
        return {**common, "task": task, "datasets": dict(self.datasets[task])}


def shard_of(documents: "Sequence[Document]", shard_size: int) -> dict[str, int]:
    """Which trial of a task each document belongs to, for all documents the task has (or a sample of them).

    Subjects take turns, a few documents each, so that the first documents of every subject, which a limit takes, fill
    the first shards, and a larger limit only adds documents to trials.
    """
    assert shard_size >= 1
    places = {subtask: place for place, subtask in enumerate(dict.fromkeys(d.subtask for d in documents))}
    ordered = sorted(documents, key=lambda d: (d.index // RUN_LENGTH, places[d.subtask], d.index % RUN_LENGTH))
    return {document.doc_id: position // shard_size for position, document in enumerate(ordered)}


def plan_trials(
    identity: SweepIdentity,
    settings: SweepSettings,
    shards: Mapping[str, Sequence[int]],
    *,
    scored: Collection[str] = (),
) -> list[TrialSpec]:
    """All trials in the order they should run, for the shards that each task has documents in.

    Shard by shard, and within a shard all configurations in random order: they grow at the same pace on the same
    documents, and none is always first. The tasks in `scored` are not decoded: decode settings have no part in them.
    """
    begun = {task: _begun(identity.of_task(task)) for task in settings.tasks}
    last = max((max(numbers) for numbers in shards.values() if numbers), default=-1)
    present = {task: frozenset(shards[task]) for task in settings.tasks}
    trials = []
    for repeat, shard, task in product(range(settings.repeats), range(last + 1), settings.tasks):
        if shard in present[task]:
            configurations = list(configurations_of(settings, decoded=task not in scored))
            random.Random(f"{settings.seed}:{repeat}:{shard}:{task}").shuffle(configurations)
            trials += [_trial(task, begun[task], chosen, shard=shard, repeat=repeat) for chosen in configurations]
    return trials


def configurations_of(settings: SweepSettings, *, decoded: bool) -> Iterator[tuple[str, float, int, bool]]:
    """Policy, threshold, small block and block cache of each configuration that a task gets."""
    ways = product(settings.threshold, settings.small_block, settings.block_cache) if decoded else [DECODE_DEFAULTS]
    return ((policy, *way) for policy, way in product(settings.policies, ways))


def _begun(common: Mapping[str, Any]) -> Any:
    """A hash of what a task's trials have in common, to which each adds its own: half the work for many trials."""
    return hashlib.sha256(f"[{_canonical(common)},".encode())


def _trial(task: str, begun: Any, configuration: tuple[str, float, int, bool], *, shard: int, repeat: int) -> TrialSpec:
    policy, threshold, small_block, block_cache = configuration
    own: dict[str, Any] = {
        "block_cache": block_cache,
        "policy": policy,
        "repeat": repeat,
        "shard": shard,
        "small_block": small_block,
        "threshold": threshold,
    }
    digest = begun.copy()
    digest.update(f"{_canonical(own)}]".encode())
    return TrialSpec(trial_id=digest.hexdigest()[:16], task=task, **own)


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode

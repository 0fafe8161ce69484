"""Trials, each one shard of a task's documents under one configuration, and the documents that need rows."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from orchestrator.core.configuration import CONFIGURATION_KEYS, Configuration

TRIAL_KEYS = ("task", *CONFIGURATION_KEYS, "repeat", "shard")
TrialKey = tuple[Any, ...]  # a trial's values of TRIAL_KEYS: identifies it within a sweep


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """`trial_id` is a hash of everything that can change the trial's rows (see planning.run_plan)."""

    trial_id: str
    task: str
    configuration: Configuration
    repeat: int
    shard: int

    @property
    def policy(self) -> str:
        return self.configuration.policy

    @property
    def label(self) -> str:
        """task/configuration/shard, with the repeat if it is not the first."""
        return f"{self.task}/{self.configuration.slug()}/{self.shard}" + (f".r{self.repeat}" if self.repeat else "")

    @property
    def tune_config(self) -> dict[str, Any]:
        """The trial's configuration in Ray Tune: TRIAL_KEYS and their values."""
        return {"task": self.task, **self.configuration.as_dict(), "repeat": self.repeat, "shard": self.shard}

    @property
    def key(self) -> TrialKey:
        return trial_key(self.tune_config)

    def as_dict(self) -> dict[str, Any]:
        """As trial.json stores it."""
        return {"trial_id": self.trial_id, **self.tune_config}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Trial":
        return cls(
            trial_id=values["trial_id"],
            task=values["task"],
            configuration=Configuration.from_mapping(values),
            repeat=values["repeat"],
            shard=values["shard"],
        )


def trial_key(values: Mapping[str, Any]) -> TrialKey:
    """From a Ray Tune configuration or a row."""
    return tuple(values[name] for name in TRIAL_KEYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedDocuments:
    """The documents that need a row under each configuration: ids by task and shard, in the order they are run."""

    by_shard: Mapping[str, Mapping[int, tuple[str, ...]]]

    def ids(self, task: str, shard: int) -> tuple[str, ...]:
        return self.by_shard.get(task, {}).get(shard, ())

    def of(self, trial: Trial) -> tuple[str, ...]:
        return self.ids(trial.task, trial.shard)

    def is_complete(self, trial: Trial, facts: Mapping[str, Any] | None) -> bool:
        """Whether a trial, given its trial.json, has rows of all its wanted documents.

        More documents may be wanted than when it was finished. The smaller set is always part of the larger one, so
        comparing counts is enough.
        """
        return facts is not None and facts["status"] == "finished" and facts["rows"] >= len(self.of(trial))

    def count(self, task: str) -> int:
        return sum(map(len, self.by_shard[task].values()))

    def rows(self, trials: Iterable[Trial]) -> dict[tuple[str, Configuration], int]:
        """How many rows these trials will have, by task and configuration."""
        rows: Counter[tuple[str, Configuration]] = Counter()
        for trial in trials:
            rows[trial.task, trial.configuration] += len(self.of(trial))
        return dict(rows)


def documents_by_shard(shards: Iterable[tuple[str, int]]) -> dict[int, tuple[str, ...]]:
    """Groups (document id, shard) pairs."""
    found: dict[int, list[str]] = {}
    for doc_id, shard in shards:
        found.setdefault(shard, []).append(doc_id)
    return {shard: tuple(ids) for shard, ids in found.items()}


def shards_of_table(documents: pa.Table) -> dict[int, tuple[str, ...]]:
    """The document ids of each shard, from a table with the columns `doc_id` and `shard`."""
    return documents_by_shard(zip(documents["doc_id"].to_pylist(), documents["shard"].to_pylist(), strict=True))


def race_position(seed: int, task: str, doc_id: str) -> bytes:
    """The sort key of a document in a race: a random order that depends only on the seed."""
    return hashlib.sha256(f"{seed}\n{task}\n{doc_id}".encode()).digest()


def half_of(seed: int, task: str, doc_id: str) -> str:
    """The half of a task, "first" or "second", that a document belongs to. Depends only on the seed."""
    return "second" if race_position(seed, f"{task}/half", doc_id)[0] % 2 else "first"

"""A sweep that is ready to start: model found, tasks opened, trials planned."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.core.configuration import BaselineRule, Configuration, grid
from orchestrator.core.system import CORE, DeviceProfile
from orchestrator.core.trial import Trial, WantedDocuments, documents_by_shard
from orchestrator.planning.estimate import (
    ANSWER_TOKENS,
    BUNDLED_ANSWER_TOKENS,
    BYTES_PER_VALUE,
    RemainingWork,
    document_seconds,
    memory_needed,
    parameters,
    relative_cost,
)
from orchestrator.planning.machine import Placement
from orchestrator.planning.run_plan import plan_trials
from orchestrator.planning.settings import SweepSettings
from orchestrator.planning.sweep_record import Cut, SweepIdentity, new_record
from orchestrator.store.schema import DOCUMENTS
from sampler.config import BUNDLED_MODEL
from sampler.loading import ModelFiles
from sampler.records import LOGLIKELIHOOD
from tasks.documents import Document, TaskOptions
from tasks.task import Task


def answer_tokens(task: Task) -> int:
    """Expected length of an answer in tokens; 0 if options are scored."""
    if task.kind == LOGLIKELIHOOD:
        return 0
    usual = BUNDLED_ANSWER_TOKENS if task.provenance.source == "bundled" else task.spec.answer_tokens or ANSWER_TOKENS
    return min(usual, task.options.max_new_tokens or task.spec.max_new_tokens or usual)


@dataclass(frozen=True, kw_only=True)
class PreparedTask:
    """A task opened without --limit, and which of its documents are wanted."""

    task: Task
    shards: Mapping[str, int]  # by document id, in the order they are run
    shard_size: int  # documents per trial, at most
    limit: int | None
    cuts: tuple[Cut, ...] | None = None  # None in a sweep of an older version

    @cached_property
    def wanted(self) -> tuple[Document, ...]:
        """The first `limit` of each subject (of a half of them, with --half), in the task's order."""
        return tuple(self.within(self.limit))

    @cached_property
    def by_shard(self) -> Mapping[int, tuple[str, ...]]:
        """Ids of the wanted documents, in the order they are run."""
        wanted = {document.doc_id for document in self.wanted}
        return documents_by_shard((doc_id, shard) for doc_id, shard in self.shards.items() if doc_id in wanted)

    def within(self, limit: int | None) -> list[Document]:
        own = (document for document in self.task.documents if document.doc_id in self.shards)
        return [document for document in own if limit is None or document.index < limit]

    def table(self, limit: int | None) -> pa.Table:
        """The documents within a limit, for documents/<task>.parquet."""
        described = [self.task.describe(document) for document in self.within(limit)]
        return pa.Table.from_pylist(
            [
                {
                    **{name: getattr(one, name) for name in DOCUMENTS.names if name != "shard"},
                    "shard": self.shards[one.doc_id],
                }
                for one in described
            ],
            schema=DOCUMENTS,
        )

    @property
    def tokens(self) -> int:
        return answer_tokens(self.task)

    def facts(self) -> dict[str, Any]:
        """As sweep.json stores them."""
        return {
            "kind": self.task.kind,
            "primary": self.task.primary,
            "documents": len(self.wanted),
            "fewshot": self.task.fewshot,
            "source": self.task.provenance.source,
            "datasets": dict(self.task.provenance.datasets),
        }


@dataclass(frozen=True, kw_only=True)
class PreparedSweep:
    """Created by `preflight.prepare`; read by `plan_run`, the estimates and the checks.

    `settings` are resolved: no auto, absolute paths, only available tasks. `requested` are the user's.
    """

    settings: SweepSettings
    requested: SweepSettings
    files: ModelFiles
    tasks: Mapping[str, PreparedTask]
    identity: SweepIdentity
    placement: Placement
    notices: tuple[str, ...]
    device: DeviceProfile = CORE  # of an actor, for estimates
    replicate: str | None = None  # the k=1 policy that was added to those requested

    @property
    def name(self) -> str:
        return self.settings.name or default_name(self.identity.model)

    @property
    def folder(self) -> Path:
        return Path(self.settings.out) / self.name

    @property
    def model_source(self) -> str:
        """What every actor loads: a pinned commit, even if the Hub has a newer one by then."""
        from_hub = self.files.revision is not None and self.files.source != BUNDLED_MODEL
        return f"{self.identity.model}@{self.files.revision}" if from_hub else self.settings.model

    @property
    def options(self) -> TaskOptions:
        """How every actor opens the tasks: with the dataset revisions found here."""
        return task_options(self.settings, self.identity.datasets if self.identity.data == "hub" else {})

    @property
    def memory(self) -> int:
        """Bytes that the model and its caches need on an actor's device."""
        return memory_needed(self.files.config, self.identity.dtype, batch_size=self.settings.batch_size)

    @property
    def download(self) -> int:
        """Bytes of weights that are not here yet; checkpoints store 16 bits per parameter."""
        here = any(self.files.folder.glob("*.safetensors"))
        return 0 if here else BYTES_PER_VALUE["bfloat16"] * parameters(self.files.config)

    @property
    def rows_in_progress(self) -> int:
        """Rows of unfinished trials at any time."""
        return self.placement.actors * self.identity.shard_size

    @cached_property
    def baselines(self) -> Mapping[str, BaselineRule]:
        """By task, which k=1 a configuration is compared with."""
        facts = {name: task.facts() for name, task in self.tasks.items()}
        return BaselineRule.by_task({"settings": self.settings.as_dict(), "tasks": facts})

    @cached_property
    def trials(self) -> list[Trial]:
        shards = {name: sorted(task.by_shard) for name, task in self.tasks.items()}
        scored = [name for name, task in self.tasks.items() if task.task.kind == LOGLIKELIHOOD]
        return plan_trials(self.identity, self.settings, shards, scored=scored)

    @cached_property
    def wanted(self) -> WantedDocuments:
        return WantedDocuments(by_shard={name: task.by_shard for name, task in self.tasks.items()})

    def work(
        self, done: Mapping[str, Collection[str]] | None = None, *, trials: Sequence[Trial] | None = None
    ) -> dict[str, RemainingWork]:
        """What remains of these trials (default: all), given the documents that already have rows, by trial id."""
        done = done or {}
        count, rows = dict.fromkeys(self.tasks, 0), dict.fromkeys(self.tasks, 0)
        least, most = dict.fromkeys(self.tasks, 0.0), dict.fromkeys(self.tasks, 0.0)
        for trial in self.trials if trials is None else trials:
            wanted = self.wanted.of(trial)
            finished = done.get(trial.trial_id)
            missing = len(wanted) - (sum(doc_id in finished for doc_id in wanted) if finished else 0)
            count[trial.task] += missing > 0
            rows[trial.task] += missing
            low, high = self._costs[trial.task, trial.configuration]
            least[trial.task] += missing * low
            most[trial.task] += missing * high
        return {
            name: RemainingWork(
                trials=count[name],
                rows=rows[name],
                tokens=task.tokens,
                least=least[name] / max(1, rows[name]),
                most=most[name] / max(1, rows[name]),
            )
            for name, task in self.tasks.items()
        }

    def cost(self, task: str, configuration: Configuration) -> tuple[float, float]:
        """See `relative_cost`."""
        return self._costs[task, configuration]

    def document_seconds(self, task: str) -> float:
        """Seconds per document at k=1, by the rules for a folder without rows."""
        tokens, config = self.tasks[task].tokens, self.files.config
        return document_seconds(tokens, config=config, dtype=self.identity.dtype, device=self.device)

    @cached_property
    def _costs(self) -> dict[tuple[str, Configuration], tuple[float, float]]:
        return {
            (name, one): relative_cost(
                one,
                depth=self.identity.depth,
                subset_size=self.settings.subset_size,
                generates=task.task.kind != LOGLIKELIHOOD,
            )
            for name, task in self.tasks.items()
            for one in self.configurations(name)
        }

    def configurations(self, task: str) -> list[Configuration]:
        return grid(self.settings.as_dict(), decoded=self.tasks[task].task.kind != LOGLIKELIHOOD)

    def record(self) -> dict[str, Any]:
        """The record of this command, for sweep.json."""
        model = {
            "source": self.settings.model,
            "revision": self.identity.model_revision,
            "depth": self.identity.depth,
            "parameters": parameters(self.files.config),
            "layer_weights": list(self.files.config.layer_weights),  # of attention and of the MLP
            "family": self.files.config.family.name,
            "block_size": self.files.config.block_size,
        }
        facts = {name: task.facts() for name, task in self.tasks.items()}
        resolved = {name: getattr(self.settings, name) for name in self.files.config.decode_defaults}
        requested = replace(self.requested, tasks=tuple(self.tasks), shard_size=self.identity.shard_size, **resolved)
        record = new_record(settings=requested, identity=self.identity, model=model, tasks=facts)
        return record if self.replicate is None else {**record, "replicate": self.replicate}


def task_options(settings: SweepSettings, datasets: Mapping[str, Mapping[str, str]]) -> TaskOptions:
    """Without the limit, which only decides how many documents are run. `datasets`: revisions by task."""
    pinned = {dataset: commit for revisions in datasets.values() for dataset, commit in revisions.items()}
    return TaskOptions.from_settings(settings, limit=None, revisions=tuple(sorted(pinned.items())))


def default_name(model: str) -> str:
    """The folder name of a sweep without --name."""
    name = re.sub(r"[^A-Za-z0-9._+-]", "-", model.rpartition("/")[2]).lstrip("._+-")
    return name[:100] or "sweep"

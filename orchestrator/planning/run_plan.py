"""The trials of a sweep, their ids and their order; and the plan of one command: which trials, with which workers."""

import hashlib
import json
import random
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from typing import TYPE_CHECKING, Any

from orchestrator.core import system
from orchestrator.core.configuration import Configuration, grid
from orchestrator.core.race import Race
from orchestrator.core.trial import Trial, WantedDocuments
from orchestrator.planning.settings import SweepSettings
from orchestrator.planning.sweep_record import (
    Cut,
    SweepIdentity,
    SweepRecord,
    combine,
    describe_extension,
    unknown_settings,
)
from orchestrator.store import StoreWriter
from sampler.errors import InputError, counted
from sampler.records import GENERATE
from tasks.documents import Document, TaskOptions

if TYPE_CHECKING:  # imports torch and lm-eval, which the result actor does not need
    from orchestrator.planning.prepared import PreparedSweep

SUBJECT_RUN_LENGTH = 8  # consecutive documents of one subject: they share few-shot examples, which are prefilled once


def extend_cuts(
    cuts: Sequence[Cut], documents: Sequence[Document], *, limit: int | None, shard_size: int
) -> tuple[Cut, ...]:
    """Adds a cut if some documents within the limit have no shard yet: as few shards as have at most `shard_size`.

    Documents keep their shards when the limit grows, so no trial of an earlier command changes.
    """
    assert shard_size >= 1
    covered, shards = cuts[-1] if cuts else (0, 0)
    new = 0 if covered is None else sum(covered <= d.index and (limit is None or d.index < limit) for d in documents)
    if not new:
        return tuple(cuts)
    everything = limit is None or all(document.index < limit for document in documents)
    return (*cuts, (None if everything else limit, shards + -(-new // shard_size)))


def assign_shards(
    documents: Sequence[Document],
    cuts: Sequence[Cut] | None,
    *,
    shard_size: int = 1,
    position: Callable[[str], bytes] | None = None,
) -> dict[str, int]:
    """The shard of each document of a task (or of a sample) that a cut covers, in the order they are run.

    Subjects take turns, a few documents each. So the first documents of every subject, which --limit selects, fill the
    first shards. The shards of a cut have the same number of documents, or one more. `shard_size` is for sweeps of
    older versions, which have no cuts: their last shard can be much shorter than the others. In a race, documents are
    in the order of `position`, by id.
    """
    order = {subtask: place for place, subtask in enumerate(dict.fromkeys(d.subtask for d in documents))}

    def turn(document: Document) -> tuple[int, int, int]:
        round_number, place = divmod(document.index, SUBJECT_RUN_LENGTH)
        return round_number, order[document.subtask], place

    in_order = sorted(documents, key=turn if position is None else lambda document: position(document.doc_id))
    if cuts is None:
        return {document.doc_id: i // shard_size for i, document in enumerate(in_order)}
    shards: dict[str, int] = {}
    covered, first = 0, 0
    for limit, last in cuts:
        new = [d for d in in_order if covered <= d.index and (limit is None or d.index < limit)]
        shards |= {d.doc_id: first + i * (last - first) // len(new) for i, d in enumerate(new)}
        covered, first = limit or 0, last
    return shards


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
    prefixes = {task: _ShardPrefixes(identity, task) for task in settings.tasks}
    last = max((max(numbers) for numbers in shards.values() if numbers), default=-1)
    present = {task: frozenset(shards[task]) for task in settings.tasks}
    axes = settings.as_dict()
    trials = []
    for repeat, shard, task in product(range(settings.repeats), range(last + 1), settings.tasks):
        if shard in present[task]:
            configurations = grid(axes, decoded=task not in scored)
            random.Random(f"{settings.seed}:{repeat}:{shard}:{task}").shuffle(configurations)
            prefix = prefixes[task].of(shard)
            trials += [_trial(task, prefix, chosen, shard=shard, repeat=repeat) for chosen in configurations]
    return trials


class _ShardPrefixes:
    """The hashes of what the trials of a task's shards have in common, computed once per cut.

    The documents of a shard follow from its cut and those before it. A later cut changes no id.
    """

    def __init__(self, identity: SweepIdentity, task: str) -> None:
        common, cuts = identity.for_task(task), (identity.cuts or {}).get(task, ())
        self._ends = [shards for _, shards in cuts]
        upto = [{**common, "cuts": cuts[: place + 1]} for place in range(len(cuts))] if cuts else [common]
        self._hashes = [hashlib.sha256(f"[{_canonical_json(one)},".encode()) for one in upto]

    def of(self, shard: int) -> Any:
        return self._hashes[bisect_right(self._ends, shard)]


def _trial(task: str, prefix: Any, configuration: Configuration, *, shard: int, repeat: int) -> Trial:
    """The id is a hash of everything that can change the trial's rows: not of the limit, nor of the machine."""
    digest = prefix.copy()
    own = {**configuration.identity(), "repeat": repeat, "shard": shard}
    digest.update(f"{_canonical_json(own)}]".encode())
    return Trial(trial_id=digest.hexdigest()[:16], task=task, configuration=configuration, repeat=repeat, shard=shard)


_canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


# The plan of one command


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What all workers of a sweep have in common. Created by `worker_settings`; read by every worker, on any node."""

    model: str
    revision: str | None = None  # of the model that the sweep was planned with; None: any
    dtype: str  # never auto: all workers compute alike
    options: TaskOptions
    calibration_task: str
    device: str = "auto"
    family: str | None = None
    block_size: int | None = None
    subset_size: int | None = None
    batch_size: int = 1
    compile: bool = False  # run passes through torch.compile
    store_steps: bool = False  # rows get the step and confidence of each token
    threads: int | None = None  # None: torch decides
    datasets: Mapping[str, Mapping[str, str]] | None = None  # by task: the revisions that the sweep was planned with
    memory: int = 0  # bytes of the device that the model and its caches need
    timeout: float = 600.0  # seconds after which a worker that hangs is replaced

    def __post_init__(self) -> None:
        assert self.dtype != "auto"
        assert self.options.limit is None, "a worker opens all documents; each trial names those to run"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Created by `plan_run` before anything is written or started; read by the driver and the result actor."""

    folder: str
    sweep: str
    trials: tuple[Trial, ...]  # of the command, including finished ones
    wanted: WantedDocuments
    remaining: tuple[Trial, ...] = ()  # still to run
    rerun: tuple[str, ...] = ()  # ids of trials whose rows are quarantined first, because of --force
    record: SweepRecord = field(default_factory=dict)  # what sweep.json will say
    notices: tuple[str, ...] = ()

    @property
    def is_race(self) -> bool:
        return bool(self.record and self.record["settings"].get("race"))

    def unfinished(self, facts: Mapping[str, Mapping[str, Any]]) -> list[Trial]:
        """Trials that are not complete. `facts`: the content of each trial.json, by trial id."""
        return [trial for trial in self.trials if not self.wanted.is_complete(trial, facts.get(trial.trial_id))]


def plan_run(
    prepared: "PreparedSweep", writer: StoreWriter, stored: SweepRecord | None, *, force: Sequence[str] | None = None
) -> RunPlan:
    """Decides which trials a command runs. Writes nothing: the machine may turn out to be too small for the plan.

    `force`: policies to run again, all if empty; None reruns nothing.
    """
    record = combine(stored, prepared.record(), folder=str(prepared.folder))
    record.setdefault("sweep", f"{prepared.name}-{secrets.token_hex(4)}")
    record.setdefault("created", _now())
    if stored is None:
        record["pooled"] = "equal weights"  # the tasks are also judged together, which has to be declared beforehand
    record.setdefault("calibration_task", _calibration_task(prepared))
    known = writer.trials()
    if stored is not None and known:
        record["extensions"] = [*stored.get("extensions", ()), *_extension(stored, record)]
    trials = tuple(prepared.trials)
    if force is not None and prepared.settings.race:
        raise InputError(
            "--force must not be used with --race: its decisions were made from the rows that would be replaced; start "
            "another sweep with --name"
        )
    rerun = () if force is None else _started(trials, known, force or prepared.settings.all_policies)
    plan = RunPlan(
        folder=str(prepared.folder),
        sweep=record["sweep"],
        trials=trials,
        wanted=prepared.wanted,
        rerun=rerun,
        record=record,
    )
    remaining = plan.unfinished({trial_id: facts for trial_id, facts in known.items() if trial_id not in rerun})
    if (race := Race.from_record(record, prepared.wanted)) is not None:
        remaining = [trial for trial in remaining if race.is_needed(trial)]
    notices = [f"corrupted and quarantined: {description}" for description in writer.corrupted.values()]
    notices += writer.notices
    if stored is not None and (unknown := unknown_settings(stored)):
        notices.append(f"{writer.folder} was made by a newer version; its settings {', '.join(unknown)} are ignored")
    if rerun:
        notices.append(
            f"running {counted(len(rerun), 'trial')} again; the old rows are in {writer.folder / 'quarantine'}"
        )
    extensions = describe_extension(stored, record) if remaining and stored is not None else []
    notices += [f"extended by {'; '.join(extensions)}"] if extensions else []
    return replace(plan, remaining=tuple(remaining), notices=tuple(notices))


def save_plan(prepared: "PreparedSweep", writer: StoreWriter, plan: RunPlan, *, arguments: Sequence[str]) -> None:
    """Prepares the sweep's folder for the trials. Documents are written before sweep.json, which refers to them."""
    writer.quarantine(plan.rerun)
    limit = plan.record["settings"]["limit"]
    for name, task in prepared.tasks.items():
        if not _has_documents(writer, name, len(task.within(limit))):
            writer.write_documents(name, task.table(limit))
    command = {
        "argv": list(arguments),
        "at": _now(),
        "code": system.code_version(),
        "packages": system.package_versions(),
    }
    writer.write_sweep_record({**plan.record, "commands": [*plan.record.get("commands", ()), command]})


def worker_settings(prepared: "PreparedSweep", plan: RunPlan) -> WorkerSettings:
    """The settings of the workers that run a plan."""
    settings = prepared.settings
    return WorkerSettings(
        model=prepared.model_source,
        revision=prepared.identity.model_revision,
        dtype=prepared.identity.dtype,
        family=settings.family,
        block_size=settings.block_size,
        options=prepared.options,
        calibration_task=plan.record["calibration_task"],
        device="auto" if prepared.placement.gpus_per_actor else "cpu",
        subset_size=settings.subset_size,
        batch_size=settings.batch_size,
        compile=settings.compile,
        store_steps=settings.store_steps,
        threads=prepared.placement.threads_per_actor,
        datasets=plan.record["identity"]["datasets"],
        memory=prepared.memory,
        timeout=settings.worker_timeout,
    )


def _extension(stored: SweepRecord, record: SweepRecord) -> list[dict[str, Any]]:
    """Tasks that get more documents after results could be looked at, which a verdict has to account for."""
    documents = {
        task: [stored["tasks"][task]["documents"], facts["documents"]]
        for task, facts in record["tasks"].items()
        if task in stored["tasks"] and facts["documents"] > stored["tasks"][task]["documents"]
    }
    return [{"at": _now(), "documents": documents}] if documents else []


def _has_documents(writer: StoreWriter, task: str, count: int) -> bool:
    """Whether the folder has a valid file of this many documents of a task."""
    try:
        return len(writer.documents(task)) == count
    except InputError:  # missing or corrupted
        return False


def _started(trials: Sequence[Trial], known: Collection[str], policies: Sequence[str]) -> tuple[str, ...]:
    """Ids of the trials of these policies that are in the folder."""
    return tuple(trial.trial_id for trial in trials if trial.policy in policies and trial.trial_id in known)


def _calibration_task(prepared: "PreparedSweep") -> str:
    """Chosen when a sweep begins and kept, so that all calibrations are comparable."""
    generating = [name for name, task in prepared.tasks.items() if task.task.kind == GENERATE]
    return (generating or list(prepared.tasks))[0]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

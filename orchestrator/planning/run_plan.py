"""What one run of the sweep command will do: which trials, with which workers, and what sweep.json will say."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from orchestrator.core import system
from orchestrator.core.race import Race
from orchestrator.core.trial import Trial, WantedDocuments
from orchestrator.planning.sweep_record import SweepRecord, combine, describe_extension, unknown_settings
from orchestrator.store import StoreWriter
from sampler.errors import InputError, counted
from tasks.catalog import GENERATE
from tasks.documents import TaskOptions

if TYPE_CHECKING:  # imports torch and lm-eval, which the result actor does not need
    from orchestrator.planning.prepared import PreparedSweep


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What all workers of a sweep have in common. Created by `plan_run`; read by every worker, on any node."""

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
        """Trials to run, given each trial.json."""
        return [trial for trial in self.trials if not self.wanted.is_complete(trial, facts.get(trial.trial_id))]


def plan_run(
    prepared: "PreparedSweep", writer: StoreWriter, stored: SweepRecord | None, *, force: Sequence[str] | None = None
) -> RunPlan:
    """Writes nothing: the machine may turn out to be too small for the plan. `force`: policies to run again."""
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
    rerun = () if force is None else _begun(trials, known, force or prepared.settings.all_policies)
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
    notices = [f"corrupted and quarantined: {found}" for found in writer.corrupted.values()]
    notices += writer.notices
    if stored is not None and (unknown := unknown_settings(stored)):
        notices.append(f"{writer.folder} was made by a newer version; its settings {', '.join(unknown)} are ignored")
    if rerun:
        notices.append(
            f"running {counted(len(rerun), 'trial')} again; the old rows are in {writer.folder / 'quarantine'}"
        )
    more = describe_extension(stored, record) if remaining and stored is not None else []
    notices += [f"extended by {'; '.join(more)}"] if more else []
    return replace(plan, remaining=tuple(remaining), notices=tuple(notices))


def save_plan(prepared: "PreparedSweep", writer: StoreWriter, plan: RunPlan, *, arguments: Sequence[str]) -> None:
    """Makes the folder ready for the plan's trials. Documents come first, because sweep.json promises them."""
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
    try:
        return len(writer.documents(task)) == count
    except InputError:  # missing or corrupted
        return False


def _begun(trials: Sequence[Trial], known: Collection[str], policies: Sequence[str]) -> tuple[str, ...]:
    return tuple(trial.trial_id for trial in trials if trial.policy in policies and trial.trial_id in known)


def _calibration_task(prepared: "PreparedSweep") -> str:
    """Chosen when a sweep begins and kept, so that all calibrations are comparable."""
    generating = [name for name, task in prepared.tasks.items() if task.task.kind == GENERATE]
    return (generating or list(prepared.tasks))[0]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

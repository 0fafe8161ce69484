"""Prepares a sweep's folder: its request, its documents, and what of its trials is still to do. Starts nothing."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from orchestrator.planning.grid import TrialSpec
from orchestrator.planning.plan import Plan
from orchestrator.planning.prepared import Prepared
from orchestrator.planning.request import combine, extension
from orchestrator.running import provenance
from orchestrator.running.worker import WorkerSettings
from orchestrator.store.writer import StoreWriter
from sampler.errors import InputError
from tasks.catalog import GENERATE


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """What the driver is to do."""

    plan: Plan
    trials: list[TrialSpec]  # still to run
    worker: WorkerSettings
    notices: tuple[str, ...] = ()


def set_up(
    prepared: Prepared,
    writer: StoreWriter,
    *,
    arguments: Sequence[str],
    force: Sequence[str] | None = None,
) -> SetUp:
    """The folder is ready afterwards. Of a sweep that is done, nothing is written."""
    stored = writer.read_request()  # again: only now nobody else can change it
    request = combine(stored, prepared.request(), folder=str(prepared.folder))
    request.setdefault("sweep", f"{prepared.name}-{secrets.token_hex(4)}")
    request.setdefault("created", _now())
    request.setdefault("calibration_task", _calibration_task(prepared))
    plan = Plan(
        folder=str(prepared.folder),
        sweep=request["sweep"],
        trials=tuple(prepared.trials),
        documents={name: dict(task.by_shard) for name, task in prepared.tasks.items()},
    )
    notices = [f"damaged and set aside: {damage}" for damage in writer.damage.values()]
    if force is not None:
        notices += _set_aside(plan, writer, force or prepared.settings.policies)
    trials = plan.unfinished(writer.trials())
    if trials:
        more = extension(stored, request) if stored is not None else []
        notices += [f"extended by {'; '.join(more)}"] if more else []
        _write(prepared, writer, request, arguments)
    return SetUp(plan=plan, trials=trials, worker=_worker(prepared, request), notices=tuple(notices))


def _write(prepared: Prepared, writer: StoreWriter, request: dict[str, Any], arguments: Sequence[str]) -> None:
    """Documents first: a request promises them."""
    limit = request["settings"]["limit"]
    for name, task in prepared.tasks.items():
        if not _has_documents(writer, name, len(task.within(limit))):
            writer.write_documents(name, task.table(limit))
    made_with = {"at": _now(), "code": provenance.code(), "packages": provenance.packages()}
    commands = [*request.get("commands", ()), {"argv": list(arguments), **made_with}]
    writer.write_request({**request, "commands": commands})


def _has_documents(writer: StoreWriter, task: str, count: int) -> bool:
    try:
        return len(writer.documents(task)) == count
    except InputError:  # not there yet, or damaged
        return False


def _set_aside(plan: Plan, writer: StoreWriter, policies: Sequence[str]) -> list[str]:
    """Trials of these policies begin anew; what they had is kept beside."""
    known = writer.trial_ids()
    chosen = [trial.trial_id for trial in plan.trials if trial.policy in policies and trial.trial_id in known]
    for trial_id in chosen:
        writer.set_aside(trial_id)
    return [f"{len(chosen)} trials are run again; their old rows are in {writer.folder / 'set-aside'}"]


def _calibration_task(prepared: Prepared) -> str:
    """Chosen when a sweep begins and kept, so that all its calibrations are comparable."""
    generating = [name for name, task in prepared.tasks.items() if task.task.kind == GENERATE]
    return (generating or list(prepared.tasks))[0]


def _worker(prepared: Prepared, request: Mapping[str, Any]) -> WorkerSettings:
    settings = prepared.settings
    return WorkerSettings(
        model=prepared.model_source,
        dtype=prepared.identity.dtype,
        options=prepared.options,
        calibration_task=request["calibration_task"],
        device="auto" if prepared.placement.gpus_per_actor else "cpu",
        subset_size=settings.subset_size,
        batch_size=settings.batch_size,
        threads=prepared.placement.threads_per_actor,
        datasets=request["identity"]["datasets"],
        memory=prepared.memory,
        timeout=settings.worker_timeout,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

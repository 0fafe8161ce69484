"""A sweep's folder before its trials: what of them is still to do, then its request and documents. Starts nothing."""

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from orchestrator.core import provenance
from orchestrator.core.trial import Trial
from orchestrator.planning.plan import Plan
from orchestrator.planning.prepared import Prepared
from orchestrator.planning.request import combine, extension, unknown_settings
from orchestrator.running.worker import WorkerSettings
from orchestrator.store import StoreWriter
from sampler.errors import InputError
from tasks.catalog import GENERATE


@dataclass(frozen=True, kw_only=True, slots=True)
class SetUp:
    """What the driver is to do, and what the folder is to say once it can."""

    plan: Plan
    trials: list[Trial]  # still to run
    worker: WorkerSettings
    request: Mapping[str, Any]
    again: tuple[str, ...] = ()  # trials whose rows are to be set aside first
    notices: tuple[str, ...] = ()


def set_up(prepared: Prepared, writer: StoreWriter, *, force: Sequence[str] | None = None) -> SetUp:
    """Changes nothing: what is to run may turn out not to fit the machine, and then nothing was asked for."""
    stored = writer.read_request()  # again: only now nobody else can change it
    request = combine(stored, prepared.request(), folder=str(prepared.folder))
    request.setdefault("sweep", f"{prepared.name}-{secrets.token_hex(4)}")
    request.setdefault("created", _now())
    request.setdefault("calibration_task", _calibration_task(prepared))
    plan = Plan(
        folder=str(prepared.folder),
        sweep=request["sweep"],
        trials=tuple(prepared.trials),
        wanted=prepared.wanted,
    )
    known = writer.trials()
    again = _again(plan, known, force or prepared.settings.policies) if force is not None else ()
    trials = plan.unfinished({trial_id: facts for trial_id, facts in known.items() if trial_id not in again})
    notices = [f"corrupted and quarantined: {damage}" for damage in writer.corrupted.values()]
    notices += writer.notices
    if stored is not None and (unknown := unknown_settings(stored)):
        notices.append(f"{writer.folder} was made by a newer version; its settings {', '.join(unknown)} are ignored")
    if again:
        notices.append(f"{len(again)} trials are run again; their old rows are in {writer.folder / 'quarantine'}")
    more = extension(stored, request) if trials and stored is not None else []
    notices += [f"extended by {'; '.join(more)}"] if more else []
    return SetUp(
        plan=plan,
        trials=trials,
        worker=_worker(prepared, request),
        request=request,
        again=again,
        notices=tuple(notices),
    )


def write_down(prepared: Prepared, writer: StoreWriter, made: SetUp, *, arguments: Sequence[str]) -> None:
    """The folder is ready afterwards. Documents first: a request promises them."""
    for trial_id in made.again:
        writer.quarantine(trial_id)
    limit = made.request["settings"]["limit"]
    for name, task in prepared.tasks.items():
        if not _has_documents(writer, name, len(task.within(limit))):
            writer.write_documents(name, task.table(limit))
    made_with = {"at": _now(), "code": provenance.code_version(), "packages": provenance.package_versions()}
    commands = [*made.request.get("commands", ()), {"argv": list(arguments), **made_with}]
    writer.write_request({**made.request, "commands": commands})


def _has_documents(writer: StoreWriter, task: str, count: int) -> bool:
    try:
        return len(writer.documents(task)) == count
    except InputError:  # not there yet, or damaged
        return False


def _again(plan: Plan, known: Collection[str], policies: Sequence[str]) -> tuple[str, ...]:
    """Trials of these policies that have begun, finished or not."""
    return tuple(t.trial_id for t in plan.trials if t.policy in policies and t.trial_id in known)


def _calibration_task(prepared: Prepared) -> str:
    """Chosen when a sweep begins and kept, so that all its calibrations are comparable."""
    generating = [name for name, task in prepared.tasks.items() if task.task.kind == GENERATE]
    return (generating or list(prepared.tasks))[0]


def _worker(prepared: Prepared, request: Mapping[str, Any]) -> WorkerSettings:
    settings = prepared.settings
    return WorkerSettings(
        model=prepared.model_source,
        revision=prepared.identity.model_revision,
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

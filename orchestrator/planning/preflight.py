"""Prepares a sweep and reports, all at once, everything that is wrong with it before a model is loaded."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from orchestrator.core.errors import Problems
from orchestrator.planning.checks import check_capacity, check_model, folder_revision, nearest_existing
from orchestrator.planning.estimate import documents_per_trial
from orchestrator.planning.grid import SweepIdentity, assign_shards, extend_cuts, stored_cuts
from orchestrator.planning.machine import (
    FULL_MODEL,
    Machine,
    Placement,
    describe_auto_model,
    gpus_of,
    place,
    resolve_model,
)
from orchestrator.planning.prepared import PreparedSweep, PreparedTask, answer_tokens, default_name, task_options
from orchestrator.planning.settings import SweepSettings
from orchestrator.planning.sweep_record import SweepRecord, adopt_resolved, combine, larger_limit
from sampler import InputError
from sampler.device import BFLOAT16_CAPABILITY, bfloat16_problem
from sampler.loading import ModelFiles, find_model
from sampler.policy import resolve_subset_size
from tasks.sources import resolve_data
from tasks.task import Task, open_task

JOB_DIRECTORY = ("runtime_resources", "working_dir_files")  # where Ray unpacks the working directory of a job
FALLBACK_PLACEMENT = Placement(actors=1, gpus_per_actor=0, cpus_per_actor=1, threads_per_actor=1)  # after an error


def prepare(settings: SweepSettings, machine: Machine, stored: SweepRecord | None = None) -> PreparedSweep:
    """A sweep that can start, or one InputError with every reason why not. `stored` is the folder's sweep.json."""
    problems = Problems()
    notices: list[str] = []
    requested, settings = settings, _with_absolute_paths(adopt_resolved(settings, stored))
    files: ModelFiles | None = None
    placement = FALLBACK_PLACEMENT
    with problems.collect():
        model = resolve_model(settings.model, machine, settings.address)
        settings = replace(settings, model=model, data=resolve_data(settings.data, model))
        notices += describe_auto_model(requested, settings, machine)
        files = _find_model(requested, settings, machine)
    with problems.collect():
        placement = place(settings, machine)
    with problems.collect():
        dtype = machine.dtype if placement.gpus_per_actor else "float32"
        settings = replace(settings, dtype=dtype if settings.dtype == "auto" else settings.dtype)
        _check_dtype(settings, machine, placement)
    with problems.collect():
        _check_folder(Path(settings.out))
    opened = _open(settings, stored, problems, notices, lambda task: _shard_size(task, settings, files, placement))
    if files is not None:
        check_model(settings, files, opened, problems)
    prepared: PreparedSweep | None = None
    if files is not None and opened:
        with problems.collect():
            prepared = PreparedSweep(
                settings=replace(settings, tasks=tuple(opened)),
                requested=requested,
                files=files,
                tasks=opened,
                identity=_identity(settings, files, opened),
                placement=placement,
                notices=tuple(notices),
            )
            combine(stored, prepared.record(), folder=str(prepared.folder))
            if stored is None:  # an existing sweep is checked when it is known what remains
                check_capacity(prepared, machine, prepared.trials)
    problems.check()
    assert prepared is not None
    return prepared


def sweep_folder(settings: SweepSettings, machine: Machine) -> Path:
    """The sweep's folder, which must be known before `prepare` because its sweep.json is read first."""
    settings = _with_absolute_paths(settings)
    name = settings.name
    if name is None:
        model = resolve_model(settings.model, machine, settings.address)
        name = default_name(model if os.path.isdir(model) else model.partition("@")[0])
    return Path(settings.out) / name


def _find_model(requested: SweepSettings, settings: SweepSettings, machine: Machine) -> ModelFiles:
    """If --model was not given, an error also explains why this model was chosen."""
    try:
        return find_model(settings.model, weights=False)
    except InputError as error:
        if requested.model != "auto" or settings.model != FULL_MODEL:
            raise
        why = f"--model auto selected it ({gpus_of(machine, requested.address)})"
        raise InputError(f"{error}; {why}, --model tiny runs the small bundled model without a network") from None


def _with_absolute_paths(settings: SweepSettings) -> SweepSettings:
    """Actors have other working directories."""
    changes: dict[str, Any] = {"out": os.path.abspath(os.path.expanduser(settings.out))}
    for name in ("model", "data"):
        path = os.path.expanduser(getattr(settings, name))
        if os.path.isdir(path):
            changes[name] = os.path.abspath(path)
    return replace(settings, **changes)


def _check_dtype(settings: SweepSettings, machine: Machine, placement: Placement) -> None:
    if settings.dtype == "float16" and (machine.most("GPU") == 0 or settings.gpus_per_actor == 0):
        raise InputError("--dtype float16 is not supported on a CPU: use float32 or bfloat16")
    if settings.dtype == "bfloat16" and placement.gpus_per_actor:
        gpus = {device.capability: device for device in machine.devices if device.capability is not None}
        if gpus and max(gpus) < BFLOAT16_CAPABILITY:  # otherwise only the nodes that lack it are excluded
            raise InputError(f"--{bfloat16_problem(gpus[max(gpus)].label, max(gpus))}")


def _shard_size(task: Task, settings: SweepSettings, files: ModelFiles | None, placement: Placement) -> int:
    """The most documents that a trial of a task may have."""
    if settings.shard_size is not None or files is None:
        return settings.shard_size or 1
    device = "GPU" if placement.gpus_per_actor else "CPU"
    size = documents_per_trial(answer_tokens(task), config=files.config, dtype=settings.dtype, device=device)
    return max(1, size // settings.batch_size) * settings.batch_size


def _open(
    settings: SweepSettings,
    stored: SweepRecord | None,
    problems: Problems,
    notices: list[str],
    shard_size: Callable[[Task], int],
) -> dict[str, PreparedTask]:
    """Opens the tasks; an unavailable one is a problem, or with --skip-unavailable a notice."""
    known = stored["identity"] if stored is not None else {"data": None, "datasets": {}, "cuts": {}}
    cuts = stored_cuts(known)
    limit = settings.limit if stored is None else larger_limit(stored["settings"]["limit"], settings.limit)
    options = task_options(settings, known["datasets"] if known["data"] == "hub" else {})
    opened: dict[str, PreparedTask] = {}
    unavailable: list[str] = []
    for name in settings.tasks:
        try:
            task = open_task(name, options)
            size = shard_size(task)
            own = (
                None if cuts is None else extend_cuts(cuts.get(name, ()), task.documents, limit=limit, shard_size=size)
            )
            shards = assign_shards(task.documents, own, shard_size=size)
            opened[name] = PreparedTask(task=task, shards=shards, cuts=own, shard_size=size, limit=settings.limit)
        except InputError as error:
            unavailable += error.sentences
    if settings.skip_unavailable and opened:
        notices += [f"skipped: {sentence}" for sentence in unavailable]
    else:
        problems.sentences += unavailable
    return opened


def _identity(settings: SweepSettings, files: ModelFiles, opened: Mapping[str, PreparedTask]) -> SweepIdentity:
    tasks = [prepared.task for prepared in opened.values()]
    cuts = {name: prepared.cuts for name, prepared in opened.items() if prepared.cuts is not None}
    return SweepIdentity(
        model=files.source.partition("@")[0] if files.revision else os.path.basename(files.source),
        model_revision=files.revision or folder_revision(files.folder),
        depth=files.config.num_layers,
        dtype=settings.dtype,
        subset_size=resolve_subset_size(files.config.num_layers, settings.subset_size),
        data=tasks[0].provenance.source,
        datasets={task.name: dict(task.provenance.datasets) for task in tasks},
        sample=settings.sample,
        seed=settings.seed,
        fewshot=settings.fewshot,
        chat_template=settings.chat_template,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        shard_size=max(prepared.shard_size for prepared in opened.values()),
        cuts=None if cuts.keys() != opened.keys() else cuts,
    )


def _check_folder(out: Path) -> None:
    if any(pair == JOB_DIRECTORY for pair in pairwise(out.resolve().parts)):
        raise InputError(
            "--out must be outside the working directory that `ray job submit` uploads, because Ray deletes it after "
            f"the job: give an absolute path such as --out /data/results (got {out})"
        )
    nearest = nearest_existing(out)
    if not nearest.is_dir():
        raise InputError(f"--out {out}: {nearest} is a file, not a directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: {nearest} is not writable; choose a directory that is")

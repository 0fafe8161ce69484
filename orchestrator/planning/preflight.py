"""Everything that can be known to be wrong with a sweep before a model is loaded, all of it at once. No Ray."""

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from orchestrator.core.errors import Problems
from orchestrator.planning.fingerprint import folder_revision
from orchestrator.planning.fits import check_model
from orchestrator.planning.grid import SweepIdentity, assign_shards
from orchestrator.planning.machine import FULL_MODEL, Machine, Placement, gpus_of, notice_of, place, resolve_model
from orchestrator.planning.prepared import Prepared, PreparedTask, default_name, task_options
from orchestrator.planning.request import Request, adopt, combine
from orchestrator.planning.room import check_room, existing
from orchestrator.planning.settings import SweepSettings
from sampler import InputError
from sampler.loading import ModelFiles, find_model
from sampler.policy import checked_subset_size
from tasks.sources import resolve_data
from tasks.task import open_task

UPLOADED = ("runtime_resources", "working_dir_files")  # where Ray unpacks the working directories of jobs
STAND_IN = Placement(actors=1, gpus_per_actor=0, cpus_per_actor=1, threads_per_actor=1)  # so that checks go on


def prepare(settings: SweepSettings, machine: Machine, stored: Request | None = None) -> Prepared:
    """A sweep that can begin; or every reason why not, in one InputError. `stored` is the folder's sweep.json."""
    problems = Problems()
    notices: list[str] = []
    asked, settings = settings, _named(adopt(settings, stored))
    files: ModelFiles | None = None
    placement = STAND_IN
    with problems.collect():
        model = resolve_model(settings.model, machine, settings.address)
        settings = replace(settings, model=model, data=resolve_data(settings.data, model))
        notices += notice_of(asked, settings, machine)
        files = _find_model(asked, settings, machine)
    with problems.collect():
        placement = place(settings, machine)
    with problems.collect():
        dtype = machine.dtype if placement.gpus_per_actor else "float32"
        settings = replace(settings, dtype=dtype if settings.dtype == "auto" else settings.dtype)
        _check_dtype(settings, machine)
    with problems.collect():
        _check_folder(Path(settings.out))
    opened = _open(settings, stored, problems, notices)
    if files is not None:
        check_model(settings, files, opened, problems)
    prepared: Prepared | None = None
    if files is not None and opened:
        with problems.collect():
            prepared = Prepared(
                settings=replace(settings, tasks=tuple(opened)),
                asked=asked,
                files=files,
                tasks=opened,
                identity=_identity(settings, files, opened),
                placement=placement,
                notices=tuple(notices),
            )
            combine(stored, prepared.request(), folder=str(prepared.folder))
            if stored is None:  # of one that goes on it is asked when it is known what is left
                check_room(prepared, machine, prepared.trials)
    problems.check()
    assert prepared is not None
    return prepared


def sweep_folder(settings: SweepSettings, machine: Machine) -> Path:
    """Where the sweep lies or will lie; asked before its sweep.json can be read, so before `prepare`."""
    settings = _named(settings)
    name = settings.name
    if name is None:
        model = resolve_model(settings.model, machine, settings.address)
        name = default_name(model if os.path.isdir(model) else model.partition("@")[0])
    return Path(settings.out) / name


def _find_model(asked: SweepSettings, settings: SweepSettings, machine: Machine) -> ModelFiles:
    """Whoever named none is told why it is this one, and what runs without it."""
    try:
        return find_model(settings.model, weights=False)
    except InputError as error:
        if asked.model != "auto" or settings.model != FULL_MODEL:
            raise
        why = f"--model auto means it ({gpus_of(machine, asked.address)})"
        raise InputError(f"{error}; {why}, --model tiny runs the small bundled one without a network") from None


def _named(settings: SweepSettings) -> SweepSettings:
    """With folders by their full names: actors have working directories of their own."""
    changes: dict[str, Any] = {"out": os.path.abspath(os.path.expanduser(settings.out))}
    for name in ("model", "data"):
        path = os.path.expanduser(getattr(settings, name))
        if os.path.isdir(path):
            changes[name] = os.path.abspath(path)
    return replace(settings, **changes)


def _check_dtype(settings: SweepSettings, machine: Machine) -> None:
    if settings.dtype == "float16" and (machine.most("GPU") == 0 or settings.gpus_per_actor == 0):
        raise InputError("--dtype float16 is not supported on a CPU: float32 and bfloat16 are allowed")


def _open(
    settings: SweepSettings, stored: Request | None, problems: Problems, notices: list[str]
) -> dict[str, PreparedTask]:
    """The tasks that can be had; one that cannot is a problem, or a notice if it may be left out."""
    known = stored["identity"] if stored is not None else {"data": None, "datasets": {}}
    options = task_options(settings, known["datasets"] if known["data"] == "hub" else {})
    opened: dict[str, PreparedTask] = {}
    unavailable: list[str] = []
    for name in settings.tasks:
        try:
            task = open_task(name, options)
            shards = assign_shards(task.documents, settings.shard_size)
            opened[name] = PreparedTask(task=task, shards=shards, limit=settings.limit)
        except InputError as error:
            unavailable += error.sentences
    if settings.skip_unavailable and opened:
        notices += [f"left out: {sentence}" for sentence in unavailable]
    else:
        problems.sentences += unavailable
    return opened


def _identity(settings: SweepSettings, files: ModelFiles, opened: Mapping[str, PreparedTask]) -> SweepIdentity:
    tasks = [prepared.task for prepared in opened.values()]
    return SweepIdentity(
        model=files.source.partition("@")[0] if files.revision else os.path.basename(files.source),
        model_revision=files.revision or folder_revision(files.folder),
        depth=files.config.num_layers,
        dtype=settings.dtype,
        subset_size=checked_subset_size(files.config.num_layers, settings.subset_size),
        data=tasks[0].provenance.source,
        datasets={task.name: dict(task.provenance.datasets) for task in tasks},
        sample=settings.sample,
        seed=settings.seed,
        fewshot=settings.fewshot,
        chat_template=settings.chat_template,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch_size,
        shard_size=settings.shard_size,
    )


def _check_folder(out: Path) -> None:
    if any(pair == UPLOADED for pair in pairwise(out.resolve().parts)):
        raise InputError(
            "--out must be outside the working directory that `ray job submit` uploads, because Ray deletes it after "
            f"the job: give an absolute path such as --out /data/results (got {out})"
        )
    nearest = existing(out)
    if not nearest.is_dir():
        raise InputError(f"--out {out}: {nearest} is a file; a folder is allowed")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: {nearest} cannot be written to; a folder of your own is allowed")

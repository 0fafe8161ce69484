"""Everything that can be known to be wrong with a sweep before a model is loaded, all of it at once. No Ray."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from orchestrator.estimate import disk_needed
from orchestrator.fingerprint import folder_revision
from orchestrator.grid import SweepIdentity, shard_of
from orchestrator.machine import Machine, Placement, gpus_here, place, resolve_model
from orchestrator.prepared import Prepared, PreparedTask, default_name
from orchestrator.request import Request, adopt, combine
from orchestrator.settings import SweepSettings
from sampler import DecodeSettings, InputError, ReusePolicy
from sampler.decode import check_prompts
from sampler.errors import InputErrors
from sampler.loading import ModelFiles, find_model
from sampler.policy import checked_subset_size
from tasks.catalog import GENERATE
from tasks.decoder import chat_template, pairs_of, prompt_of
from tasks.harness import Task
from tasks.opening import open_task
from tasks.options import TaskOptions
from tasks.sources import resolve_auto


class Problems:
    """Sentences about what is wrong, collected until someone has to know."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            self.sentences += error.sentences

    def check(self) -> None:
        if self.sentences:
            raise InputErrors(self.sentences)


def prepare(settings: SweepSettings, machine: Machine, stored: Request | None = None) -> Prepared:
    """A sweep that can begin; or every reason why not, in one InputError. `stored` is the folder's sweep.json."""
    asked, problems, notices = settings, Problems(), []
    settings = _named(adopt(settings, stored))
    files: ModelFiles | None = None
    with problems.noted():
        model, notice = resolve_model(settings.model, gpus_here=gpus_here(), cluster=machine, address=settings.address)
        notices += [notice] if notice else []
        settings = replace(settings, model=model, data=resolve_auto(settings.data, model))
        files = find_model(settings.model, weights=False)
    placement: Placement | None = None
    with problems.noted():
        placement = place(settings, machine)
    with problems.noted():
        settings = replace(settings, dtype=_dtype(settings, machine))
    if files is not None:
        _check_model(settings, files, problems)
    opened = _open(settings, files, problems, notices)
    with problems.noted():
        _check_folder(Path(settings.out))
    problems.check()
    assert files is not None
    assert placement is not None
    settings = replace(settings, tasks=tuple(opened))
    identity = _identity(settings, files, opened)
    prepared = Prepared(
        settings=settings,
        asked=asked,
        files=files,
        tasks=opened,
        identity=identity,
        placement=placement,
        notices=tuple(notices),
    )
    with problems.noted():
        combine(stored, prepared.request(), folder=str(prepared.folder))
    with problems.noted():
        _check_disk(prepared)
    problems.check()
    return prepared


def sweep_folder(settings: SweepSettings, machine: Machine) -> Path:
    """Where the sweep lies or will lie; asked before its sweep.json can be read, so before `prepare`."""
    settings = _named(settings)
    name = settings.name
    if name is None:
        model, _ = resolve_model(settings.model, gpus_here=gpus_here(), cluster=machine, address=settings.address)
        name = default_name(os.path.basename(model) if os.path.isdir(model) else model.partition("@")[0])
    return Path(settings.out) / name


def task_options(settings: SweepSettings) -> TaskOptions:
    """How every process of a sweep opens its tasks: without the limit, which decides nothing but how many are run."""
    return TaskOptions(
        data=settings.data,
        sample=settings.sample,
        seed=settings.seed,
        fewshot=settings.fewshot,
        chat_template=settings.chat_template,
        max_new_tokens=settings.max_new_tokens,
        allow_code_execution=settings.allow_code_execution,
        unsafe_code_execution=settings.unsafe_code_execution,
    )


def _named(settings: SweepSettings) -> SweepSettings:
    """With folders by their full names: actors have working directories of their own."""
    changes: dict[str, str] = {"out": os.path.abspath(settings.out)}
    for name in ("model", "data"):
        path = os.path.expanduser(getattr(settings, name))
        if os.path.isdir(path):
            changes[name] = os.path.abspath(path)
    return replace(settings, **changes)  # type: ignore[arg-type]


def _dtype(settings: SweepSettings, machine: Machine) -> str:
    dtype = machine.dtype if settings.dtype == "auto" else settings.dtype
    if dtype == "float16" and not (machine.all_gpus and settings.gpus_per_actor != 0):
        raise InputError("--dtype float16 is not supported on a CPU: float32 and bfloat16 are allowed")
    return dtype


def _check_model(settings: SweepSettings, files: ModelFiles, problems: Problems) -> None:
    """Policies against its depth, decode settings against its block, its tokenizer and chat template."""
    config = files.config
    for name in settings.policies:
        with problems.noted():
            ReusePolicy.parse(name).bind(config.num_layers, settings.subset_size)
    with problems.noted():
        checked_subset_size(config.num_layers, settings.subset_size)
    for size in settings.small_block:
        with problems.noted():
            check_prompts((), DecodeSettings(small_block=size), config)
    with problems.noted():
        if settings.chat_template:
            chat_template(files.tokenizer)
        else:
            _ = files.tokenizer


def _open(
    settings: SweepSettings, files: ModelFiles | None, problems: Problems, notices: list[str]
) -> dict[str, PreparedTask]:
    """The tasks that can be had; one that cannot is a problem, or a notice if it may be left out."""
    options = task_options(settings)
    opened: dict[str, PreparedTask] = {}
    left_out: list[str] = []
    for name in settings.tasks:
        try:
            task = open_task(name, options)
            opened[name] = PreparedTask(
                task=task, shards=shard_of(task.documents, settings.shard_size), limit=settings.limit
            )
        except InputError as error:
            left_out += error.sentences
    if left_out and (not settings.skip_unavailable or not opened):
        problems.sentences += left_out
    else:
        notices += [f"left out: {sentence}" for sentence in left_out]
    for prepared in opened.values():
        if files is not None and not problems.sentences:
            with problems.noted():
                _check_first_documents(prepared, files, settings)
    return opened


def _check_first_documents(prepared: PreparedTask, files: ModelFiles, settings: SweepSettings) -> None:
    """A prompt of each subject, with its worked examples and room for the answer, fits the model."""
    task, template = prepared.task, chat_template(files.tokenizer) if settings.chat_template else None
    first = {document.subtask: document for document in reversed(prepared.wanted)}
    for document in first.values():
        requests = task.requests(document, template)
        try:
            if task.kind == GENERATE:
                prompts = [prompt_of(request, files.tokenizer) for request in requests]
                check_prompts(prompts, DecodeSettings(small_block=settings.small_block[0]), files.config)
            else:
                pairs_of(requests, files.tokenizer)
        except InputError as error:
            raise InputError(f"task {task.name}, document {document.doc_id}: {error}") from None


def _identity(settings: SweepSettings, files: ModelFiles, opened: Mapping[str, PreparedTask]) -> SweepIdentity:
    tasks: list[Task] = [prepared.task for prepared in opened.values()]
    return SweepIdentity(
        model=model_name(files),
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


def model_name(files: ModelFiles) -> str:
    """A Hub id without its revision, or what a folder is called."""
    return files.source.partition("@")[0] if files.revision else os.path.basename(os.path.normpath(files.source))


def _check_folder(out: Path) -> None:
    existing = _existing(out)
    if not existing.is_dir():
        raise InputError(f"--out {out}: {existing} is a file; a folder is allowed")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: {existing} cannot be written to; a folder of your own is allowed")


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _check_disk(prepared: Prepared) -> None:
    needed, free = disk_needed(prepared.work()), shutil.disk_usage(_existing(Path(prepared.settings.out))).free
    if needed > free:
        raise InputError(
            f"--out {prepared.settings.out}: about {needed / 2**20:.0f} MiB are needed there and {free / 2**20:.0f} "
            "MiB are free; name another folder, or a smaller --limit"
        )

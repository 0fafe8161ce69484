"""Prepares a sweep and reports, all at once, everything that is wrong with it before a model is loaded."""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from orchestrator.core.configuration import grid
from orchestrator.core.system import DeviceProfile
from orchestrator.core.trial import half_of, race_position
from orchestrator.planning.estimate import (
    check_capacity,
    check_devices,
    documents_per_trial,
    memory_remedy,
    nearest_existing,
)
from orchestrator.planning.machine import (
    Machine,
    Placement,
    describe_auto_model,
    gpus_of,
    place,
    resolve_model,
)
from orchestrator.planning.prepared import PreparedSweep, PreparedTask, answer_tokens, default_name, task_options
from orchestrator.planning.run_plan import assign_shards, extend_cuts
from orchestrator.planning.settings import SweepSettings
from orchestrator.planning.sweep_record import (
    SweepIdentity,
    SweepRecord,
    adopt_resolved,
    combine,
    larger_limit,
    stored_cuts,
)
from sampler import DecodeSettings, InputError, ReusePolicy
from sampler.config import FULL_MODEL, KNOWN_CHECKPOINTS, ModelConfig
from sampler.decode import check_prompts
from sampler.device import BFLOAT16_CAPABILITY, bfloat16_problem
from sampler.errors import Problems
from sampler.loading import FILES, ModelFiles, find_model
from sampler.policy import resolve_subset_size
from sampler.records import GENERATE
from sampler.reveal import THRESHOLD
from sampler.scoring import check_pairs
from tasks.documents import resolve_data
from tasks.evaluate import chat_renderer, to_pairs, to_prompt
from tasks.task import Task, open_task, published_task

JOB_DIRECTORY = ("runtime_resources", "working_dir_files")  # where Ray unpacks the working directory of a job
FALLBACK_PLACEMENT = Placement(actors=1, gpus_per_actor=0, cpus_per_actor=1, threads_per_actor=1)  # after an error
ANY_BLOCK = DecodeSettings(small_block=1)  # divides every block: --small-block is checked once, not for every task
RACE_SHARDS = 50  # of a task, at least: a race looks at its configurations after every shard
WHOLE_FILE_BYTES = 16 * 2**20  # larger files are sampled
SAMPLES, SAMPLE_BYTES = 64, 64 * 2**10  # different weights differ in all samples


def prepare(settings: SweepSettings, machine: Machine, stored: SweepRecord | None = None) -> PreparedSweep:
    """Returns a sweep that can start, or raises one InputError with all problems. `stored`: the folder's sweep.json."""
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
        settings = with_model_defaults(settings, files.config)
    with problems.collect():
        placement = place(settings, machine)
    with problems.collect():
        dtype = machine.dtype if placement.gpus_per_actor else "float32"
        settings = replace(settings, dtype=dtype if settings.dtype == "auto" else settings.dtype)
        _check_dtype(settings, machine, placement)
    with problems.collect():
        _check_folder(Path(settings.out))
    device = machine.device(placement.gpus_per_actor)
    opened = _open(
        settings, stored, machine, problems, notices, lambda task: _shard_size(task, settings, files, device)
    )
    if (added := _replicate(settings, stored, opened)) is not None:
        after = next(i for i, name in enumerate(settings.policies, start=1) if ReusePolicy.parse(name).k == 1)
        policies = (*settings.policies[:after], added, *settings.policies[after:])
        settings, requested = replace(settings, policies=policies), replace(requested, policies=policies)
        if stored is None:
            notices.append(
                f"added {added}: a second run of k=1 measures the noise between runs; --no-replicate omits it"
            )
    if files is not None:
        check_model(settings, files, opened, problems, prompts=machine.profile is None)
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
                device=device,
                replicate=added,
            )
            combine(stored, prepared.record(), folder=str(prepared.folder))
            if machine.profile is not None and machine.profile.memory:
                remedy = memory_remedy(prepared.identity.dtype, settings.batch_size)
                check_devices(prepared.memory, machine.devices, remedy=remedy, share=placement.gpus_per_actor)
            elif machine.profile is None and stored is None:  # an existing one is checked for its remaining trials only
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
    """If --model was not given, an error also explains why this model was chosen.

    A machine that is only planned for needs no files of a checkpoint whose shape is known.
    """
    repo, _, revision = settings.model.partition("@")
    config = KNOWN_CHECKPOINTS.get(repo)
    if machine.profile is not None and config is not None and not os.path.exists(repo):
        config = replace(config, block_size=settings.block_size or config.block_size)
        return ModelFiles(source=settings.model, revision=revision or "main", folder=Path(repo), config=config)
    try:
        return find_model(settings.model, family=settings.family, block_size=settings.block_size, weights=False)
    except InputError as error:
        if machine.profile is not None:
            known = f"shapes are known without files of {', '.join(KNOWN_CHECKPOINTS)}"
            raise InputError(f"{error}; {known}") from None
        if config is not None:
            error = InputError(f"{error} (--dry-run --device-profile a100-80 plans a sweep of it without its files)")
        if requested.model != "auto" or settings.model != FULL_MODEL:
            raise error from None
        why = f"--model auto selected it ({gpus_of(machine, requested.address)})"
        raise InputError(f"{error}; {why}, --model tiny runs the small bundled model without a network") from None


def with_model_defaults(settings: SweepSettings, config: ModelConfig) -> SweepSettings:
    """Fills in the decode settings that were not given and depend on the model."""
    missing: dict[str, Any] = {
        name: (value,) for name, value in config.decode_defaults.items() if getattr(settings, name) is None
    }
    if THRESHOLD not in settings.reveal:
        missing.pop("threshold", None)
    return replace(settings, **missing)


def _with_absolute_paths(settings: SweepSettings) -> SweepSettings:
    """Makes paths absolute, because actors have other working directories."""
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


def _shard_size(task: Task, settings: SweepSettings, files: ModelFiles | None, device: DeviceProfile) -> int:
    """The most documents that a trial of a task may have."""
    if settings.shard_size is not None or files is None:
        return settings.shard_size or 1
    size = documents_per_trial(answer_tokens(task), config=files.config, dtype=settings.dtype, device=device)
    if settings.race:
        wanted = sum(settings.limit is None or document.index < settings.limit for document in task.documents)
        size = race_shard_size(size, wanted)
    return max(1, size // settings.batch_size) * settings.batch_size


def replicate_of(policy: str) -> str:
    """The other name of k=1, which computes the same."""
    return "k1_last" if policy == "k1_first" else "k1_first"


def _replicate(settings: SweepSettings, stored: SweepRecord | None, opened: Mapping[str, PreparedTask]) -> str | None:
    """A second k=1 for a sweep that names one. An existing sweep only gets the one that was added when it began."""
    bases = [name for name in settings.policies if ReusePolicy.parse(name).k == 1]
    generates = any(task.task.kind == GENERATE for task in opened.values())
    if not settings.replicate or not generates or settings.repeats > 1:
        return None
    if len(bases) != 1 or (len(settings.policies) == 1 and not settings.configurations):
        return None
    other = replicate_of(bases[0])
    return other if stored is None or other == stored.get("replicate") else None


def race_shard_size(size: int, documents: int) -> int:
    """At most `size` documents, and few enough that a task has RACE_SHARDS shards."""
    return max(1, min(size, documents // RACE_SHARDS))


def _open(
    settings: SweepSettings,
    stored: SweepRecord | None,
    machine: Machine,
    problems: Problems,
    notices: list[str],
    shard_size: Callable[[Task], int],
) -> dict[str, PreparedTask]:
    """Opens the tasks; an unavailable one is a problem, or with --skip-unavailable a notice.

    For a machine that is only planned for, nothing is downloaded if the number of documents is known.
    """
    known = stored["identity"] if stored is not None else {"data": None, "datasets": {}, "cuts": {}}
    cuts = stored_cuts(known)
    limit = settings.limit if stored is None else larger_limit(stored["settings"]["limit"], settings.limit)
    options = task_options(settings, known["datasets"] if known["data"] == "hub" else {})
    opened: dict[str, PreparedTask] = {}
    unavailable: list[str] = []
    for name in settings.tasks:
        try:
            planned = machine.profile is not None and options.data == "hub"
            task = (published_task(name, options) if planned else None) or open_task(name, options)
            size = shard_size(task)
            chosen = [
                one for one in task.documents if settings.half in (None, half_of(settings.seed, name, one.doc_id))
            ]
            own = None if cuts is None else extend_cuts(cuts.get(name, ()), chosen, limit=limit, shard_size=size)
            position = partial(race_position, settings.seed, name) if settings.race else None
            shards = assign_shards(chosen, own, shard_size=size, position=position)
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
        family=settings.family,
        block_size=settings.block_size,
        thinking=settings.thinking,
        race=settings.race,
        half=settings.half,
    )


def _check_folder(out: Path) -> None:
    """Raises InputError if sweeps cannot be stored below this directory."""
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


# Whether the model suits the policies and tasks


def folder_revision(folder: Path) -> str:
    """A revision for a model folder that has none: a hash of its files, wherever the folder is."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in FILES for path in folder.glob(pattern)}, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_FILE_BYTES:
                digest.update(file.read())
            else:
                for sample in range(SAMPLES):
                    file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()}"


def check_model(
    settings: SweepSettings,
    files: ModelFiles,
    tasks: Mapping[str, PreparedTask],
    problems: Problems,
    *,
    prompts: bool = True,
) -> None:
    """Checks policies against the depth, small blocks against the block size, prompts against the maximum length."""
    config = files.config
    with problems.collect():
        resolve_subset_size(config.num_layers, settings.subset_size)
    scored = sorted(task.task.name for task in tasks.values() if task.task.kind != GENERATE)
    for name in settings.all_policies:
        with problems.collect():
            ReusePolicy.parse(name).bind(config.num_layers, settings.subset_size)
        with problems.collect():
            if scored:
                _check_scoring(name, scored[0])
    for size in dict.fromkeys(one.small_block for one in grid(settings.as_dict())):
        with problems.collect():
            check_prompts((), DecodeSettings(small_block=size), config)
    if not prompts:
        return
    with problems.collect():
        tokenizer = files.tokenizer
        template = chat_renderer(tokenizer, settings.thinking) if settings.chat_template else None
        for task in tasks.values():
            with problems.collect():
                _check_first_documents(task, config, tokenizer, template)


def _check_scoring(policy: str, task: str) -> None:
    try:
        ReusePolicy.parse(policy).check_scoring()
    except InputError as error:
        raise InputError(f"task {task}: {error}") from None


def _check_first_documents(prepared: PreparedTask, config: ModelConfig, tokenizer: Any, template: Any) -> None:
    """The first prompt of each subject, with few-shot examples and space for the answer, must fit the model."""
    task = prepared.task
    first = {document.subtask: document for document in reversed(prepared.wanted)}
    for document in first.values():
        requests = task.requests(document, template)
        try:
            if task.kind == GENERATE:
                check_prompts([to_prompt(request, tokenizer) for request in requests], ANY_BLOCK, config)
            else:
                check_pairs(to_pairs(requests, tokenizer), config)
        except InputError as error:
            raise InputError(f"task {task.name}, document {document.doc_id}: {error}") from None

"""Checks before a run: the model suits the policies and tasks, and disk and memory suffice for the trials left."""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.core.errors import Problems
from orchestrator.core.hardware import Device
from orchestrator.core.trial import Trial
from orchestrator.planning.estimate import disk_needed, format_bytes
from orchestrator.planning.machine import Machine
from orchestrator.planning.prepared import PreparedSweep, PreparedTask
from orchestrator.planning.settings import SweepSettings
from sampler import DecodeSettings, InputError, ReusePolicy
from sampler.config import ModelConfig
from sampler.decode import check_ids, check_length, check_prompts
from sampler.loading import FILES, ModelFiles
from sampler.policy import resolve_subset_size
from tasks.catalog import GENERATE
from tasks.evaluate import chat_renderer, to_pairs, to_prompt

ANY_BLOCK = DecodeSettings(small_block=1)  # divides every block: --small-block is checked once, not for every task
WHOLE_FILE_BYTES = 16 * 2**20  # larger files are sampled
SAMPLES, SAMPLE_BYTES = 64, 64 * 2**10  # different weights differ in all samples


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
    settings: SweepSettings, files: ModelFiles, tasks: Mapping[str, PreparedTask], problems: Problems
) -> None:
    """Checks policies against the depth, small blocks against the block size, prompts against the maximum length."""
    config = files.config
    with problems.collect():
        resolve_subset_size(config.num_layers, settings.subset_size)
    scored = sorted(task.task.name for task in tasks.values() if task.task.kind != GENERATE)
    for name in settings.policies:
        with problems.collect():
            ReusePolicy.parse(name).bind(config.num_layers, settings.subset_size)
        with problems.collect():
            if scored:
                _check_scoring(name, scored[0])
    for size in settings.small_block:
        with problems.collect():
            check_prompts((), DecodeSettings(small_block=size), config)
    with problems.collect():
        tokenizer = files.tokenizer
        template = chat_renderer(tokenizer) if settings.chat_template else None
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
            for pair in to_pairs(requests, tokenizer) if task.kind != GENERATE else ():
                check_ids(pair.prefix, config, "prompt")
                check_length(len(pair.prefix) + len(pair.target), config)
        except InputError as error:
            raise InputError(f"task {task.name}, document {document.doc_id}: {error}") from None


def check_capacity(prepared: PreparedSweep, machine: Machine, trials: Sequence[Trial]) -> None:
    """Checks disk and this machine's memory; `check_devices` checks GPUs and other nodes."""
    problems = Problems()
    with problems.collect():
        _check_disk(prepared, trials)
    with problems.collect():
        if machine.memory is not None and not prepared.placement.gpus_per_actor:
            actors = max(1, min(prepared.placement.actors, len(trials)))
            _check_memory(prepared.memory, machine.memory, actors)
    problems.check()


def _check_memory(needed: int, free: int, actors: int) -> None:
    if needed * actors > free:
        raise InputError(
            f"each actor needs about {format_bytes(needed)} of memory, but with {format_bytes(free)} free each of "
            f"{actors} has {format_bytes(free / actors)}: use a smaller --batch-size or fewer --actors"
        )


def check_devices(needed: int, devices: Sequence[Device], *, share: float = 1.0, in_use: bool = False) -> list[Device]:
    """Devices too small for an actor; an InputError if all are. `in_use`: other programs may release memory."""

    def available(device: Device) -> float:
        return (device.total if in_use else device.free) * share

    small = [device for device in devices if available(device) < needed]
    if devices and len(small) == len(devices):
        largest = max(devices, key=available)
        raise InputError(
            f"each actor needs about {format_bytes(needed)} of memory, but the largest device ({largest.label}) has "
            f"{format_bytes(available(largest))} for it: use a smaller --batch-size"
        )
    return small


def _check_disk(prepared: PreparedSweep, trials: Sequence[Trial]) -> None:
    needed = disk_needed(prepared.work(trials=trials), running=prepared.rows_in_progress)
    free = shutil.disk_usage(nearest_existing(Path(prepared.settings.out))).free
    if needed > free:
        raise InputError(
            f"--out {prepared.settings.out} needs about {format_bytes(needed)}, but {format_bytes(free)} are free: "
            "choose another directory or a smaller --limit"
        )


def nearest_existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())

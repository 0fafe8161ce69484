"""Estimates of the memory, disk space and time that a sweep needs, and errors if there is not enough.

Times are those of measured rows if there are any; otherwise the rules in this module give rough ones.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from orchestrator.core.configuration import Configuration
from orchestrator.core.speed import ideal_speedup
from orchestrator.core.system import Device, DeviceProfile, format_bytes, free_memory
from orchestrator.core.trial import Trial
from sampler.config import ModelConfig, expected_shapes
from sampler.errors import InputError, Problems
from sampler.policy import ReusePolicy

if TYPE_CHECKING:
    import torch

    from orchestrator.planning.machine import Machine
    from orchestrator.planning.prepared import PreparedSweep

PREFILL_POSITIONS = 1024  # forwarded at once
PADDED_POSITIONS = 128  # of a denoising pass of up to eight rows
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}

# Bytes on disk, measured with pyarrow 26. While a trial runs, a batch of one row is mostly headers. A finished trial
# is a Parquet footer, trial.json and directories; each row adds little more than its tokens.
RUNNING_ROW_BYTES, TRIAL_BYTES, ROW_BYTES, TOKEN_BYTES = 6_000, 30_000, 200, 8
STEP_BYTES = 16  # of each token, with --store-steps

# Assumptions for a sweep without rows
ANSWER_TOKENS = 256  # of an answer of a task whose answers were not measured
BUNDLED_ANSWER_TOKENS = 50  # of the bundled model, which answers the bundled documents briefly
SCORED_PASSES = 4.0  # per document whose options are scored
ONE_BY_ONE = 101.7 / 39.1  # how much longer an answer takes at threshold 1 (tokens/s on an A100, published)

# A trial is short, so that all policies run while an actor's speed stays the same (that of a shared CPU changes within
# seconds), but long enough that the work between trials takes less than 3 % of the time. Scored tasks have no speed-up
# to measure, so their trials may be longer.
SCORED_TRIAL_SECONDS = 60.0


def parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def memory_needed(config: ModelConfig, dtype: str, *, batch_size: int = 1, positions: int = 4096) -> int:
    """Bytes on the device: weights, keys and values of `positions` per row, logits, cached states.

    One extra row receives the writes of padding. A prompt is prefilled in chunks, without a mask.
    """
    width, block, rows = BYTES_PER_VALUE[dtype], config.block_size, batch_size + 1
    positions = min(-(-positions // block) * block, config.max_positions)
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim * positions * rows
    kept = config.num_layers * config.hidden_size * block * rows
    forwarded = max(PREFILL_POSITIONS, 2 * block * batch_size)
    prefill = min(positions, forwarded) * (2 * config.intermediate_size + 4 * config.hidden_size)
    stored = 4 * config.num_layers * config.hidden_size * max(PADDED_POSITIONS, block * batch_size)  # at once
    logits = 3 * 4 * config.vocab_size * block * batch_size  # float32 logits, probabilities and ranks
    return width * (parameters(config) + keys + kept + max(prefill, stored)) + logits


def memory_remedy(dtype: str, batch_size: int, *, actors: int = 1) -> str:
    """Advice for needing less memory; remedies that cost no speed come first."""
    remedies = ["--dtype bfloat16"] if dtype == "float32" else []
    remedies += ["a smaller --batch-size"] if batch_size > 1 else []
    remedies += ["fewer --actors"] if actors > 1 else []
    return f"use {' or '.join(remedies or ['a smaller model', 'a machine with more memory'])}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemainingWork:
    """What remains to be done of one task. Created by PreparedSweep.work."""

    trials: int
    rows: int  # documents × configurations × repeats
    tokens: int  # expected per answer; 0 if options are scored
    least: float = 1.0  # mean time of a row relative to k=1, if every policy reaches its ideal speed-up
    most: float = 1.0  # the same if no policy is faster


def disk_needed(work: Mapping[str, RemainingWork], *, running: int, steps: bool = False) -> int:
    """Bytes for all finished trials, plus `running` rows of trials in progress. `steps`: with --store-steps."""
    token = TOKEN_BYTES + STEP_BYTES * steps
    finished = sum(task.trials * TRIAL_BYTES + task.rows * (ROW_BYTES + token * task.tokens) for task in work.values())
    return finished + min(running, sum(task.rows for task in work.values())) * (RUNNING_ROW_BYTES + 2 * token * 2048)


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondsNeeded:
    """Seconds that one actor needs for a task: if every policy reaches its ideal speed-up, and if none is faster."""

    least: float
    most: float
    measured: bool  # from rows; otherwise a rough estimate


def seconds_needed(
    work: Mapping[str, RemainingWork],
    measured: Mapping[str, float],
    *,
    config: ModelConfig,
    dtype: str,
    device: DeviceProfile,
) -> dict[str, SecondsNeeded]:
    """By task. `measured`: seconds per document of the sweep's rows, by task."""
    needed = {}
    for name, task in work.items():
        if name in measured:
            total = task.rows * measured[name]
            needed[name] = SecondsNeeded(least=total, most=total, measured=True)
        else:
            total = task.rows * document_seconds(task.tokens, config=config, dtype=dtype, device=device)
            needed[name] = SecondsNeeded(least=task.least * total, most=task.most * total, measured=not task.rows)
    return needed


def documents_per_trial(tokens: int, *, config: ModelConfig, dtype: str, device: DeviceProfile) -> int:
    """How many documents of a task last as long as a trial should. `tokens`: per answer; 0 if options are scored."""
    seconds = device.trial_seconds if tokens else SCORED_TRIAL_SECONDS
    return max(1, round(seconds / document_seconds(tokens, config=config, dtype=dtype, device=device)))


def document_seconds(tokens: int, *, config: ModelConfig, dtype: str, device: DeviceProfile) -> float:
    """Seconds per document at k=1 and a threshold below 1. `tokens`: per answer; 0 if options are scored."""
    passes = tokens / device.tokens_per_pass if tokens else SCORED_PASSES
    return passes * rough_pass_seconds(config, dtype, device)


def rough_pass_seconds(config: ModelConfig, dtype: str, device: DeviceProfile) -> float:
    """A fixed cost per layer, plus reading every weight once."""
    weights = parameters(config) * BYTES_PER_VALUE[dtype]
    return config.num_layers * device.layer_seconds + weights / device.bytes_per_second


def relative_cost(
    configuration: Configuration, *, depth: int, subset_size: int | None, generates: bool
) -> tuple[float, float]:
    """Time of a document relative to k=1 at a threshold below 1: at the policy's ideal speed-up, and without any gain.

    Scoring under a policy of period K takes K times as many passes.
    """
    if not generates:
        period = float(ReusePolicy.parse(configuration.policy).bind(depth, subset_size).period or 1)
        return period, period
    slower = ONE_BY_ONE if configuration.threshold == 1 else 1.0
    return slower / best_speedup(configuration.policy, depth, subset_size), slower


def best_speedup(policy: str, depth: int, subset_size: int | None) -> float:
    """The ideal speed-up of a policy of the fixed grid; 1 for others, whose savings depend on the documents."""
    parsed = ReusePolicy.parse(policy)
    layers = depth if parsed.mode == "output" else len(parsed.layer_indices(depth, subset_size))
    return ideal_speedup(parsed.k, layers, depth) or 1.0


def measured_seconds(rows: pa.Table) -> dict[str, float]:
    """Seconds per document by task, from the wall time of the batches of a sweep's rows."""
    keys = ["task", "trial_id", "attempt", "batch_id"]
    batches = rows.group_by(keys).aggregate([("batch_seconds", "max"), ("batch_seconds", "count")])
    tasks = batches.group_by("task").aggregate([("batch_seconds_max", "sum"), ("batch_seconds_count", "sum")])
    return {task["task"]: task["batch_seconds_max_sum"] / task["batch_seconds_count_sum"] for task in tasks.to_pylist()}


# Whether there is enough memory and disk space


def free_on(device: "torch.device") -> int:
    """Bytes that are free now on a device of this machine."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def check_model_fits(config: ModelConfig, dtype: str, device: "torch.device", *, batch_size: int) -> None:
    """Raises InputError if a device of this machine does not have enough free memory to decode with a model."""
    from sampler.device import pick_dtype

    chosen = str(pick_dtype(dtype, device)).removeprefix("torch.")
    free, needed = free_on(device), memory_needed(config, chosen, batch_size=batch_size)
    if needed > free:
        raise InputError(
            f"the model needs about {format_bytes(needed)} of memory, but {format_bytes(free)} are free: "
            f"{memory_remedy(chosen, batch_size)}"
        )


def check_capacity(prepared: "PreparedSweep", machine: "Machine", trials: Sequence[Trial]) -> None:
    """Checks this machine's disk space and memory for these trials; `check_devices` checks GPUs and other nodes."""
    problems = Problems()
    with problems.collect():
        _check_disk(prepared, trials)
    with problems.collect():
        if machine.memory is not None and not prepared.placement.gpus_per_actor:
            actors = max(1, min(prepared.placement.actors, len(trials)))
            _check_memory(prepared, machine.memory, actors)
    problems.check()


def _check_memory(prepared: "PreparedSweep", free: int, actors: int) -> None:
    needed = prepared.memory
    if needed * actors > free:
        batch_size, fewer = prepared.settings.batch_size, actors if needed <= free else 1
        total = f", so {actors} actors need {format_bytes(actors * needed)}" if actors > 1 else ""
        raise InputError(
            f"each actor needs about {format_bytes(needed)} of memory{total}, but {format_bytes(free)} are free: "
            f"{memory_remedy(prepared.identity.dtype, batch_size, actors=fewer)}"
        )


def check_devices(
    needed: int, devices: Sequence[Device], *, remedy: str, share: float = 1.0, in_use: bool = False
) -> list[Device]:
    """The devices that are too small for an actor; InputError if all are.

    `in_use`: other programs use the devices, and may release their memory.
    """

    def available(device: Device) -> float:
        return (device.total if in_use else device.free) * share

    small = [device for device in devices if available(device) < needed]
    if devices and len(small) == len(devices):
        largest = max(devices, key=available)
        raise InputError(
            f"each actor needs about {format_bytes(needed)} of memory, but the largest device ({largest.label}) has "
            f"{format_bytes(available(largest))} for it: {remedy}"
        )
    return small


def _check_disk(prepared: "PreparedSweep", trials: Sequence[Trial]) -> None:
    needed = disk_needed(
        prepared.work(trials=trials), running=prepared.rows_in_progress, steps=prepared.settings.store_steps
    )
    free = shutil.disk_usage(nearest_existing(Path(prepared.settings.out))).free
    if needed > free:
        raise InputError(
            f"--out {prepared.settings.out} needs about {format_bytes(needed)}, but {format_bytes(free)} are free: "
            "choose another directory or a smaller --limit"
        )


def nearest_existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


# Estimates as text


def rough_duration(seconds: float) -> str:
    """5 seconds, 2 minutes, 2.0 hours"""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:,.0f} hours" if seconds >= 36_000 else f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.0f} minutes" if round(seconds) >= 120 else f"{seconds:.0f} seconds"


def duration_range(least: float, most: float) -> str:
    """5 minutes, 17 to 20 hours, 90 minutes to 2.1 hours"""
    low, high = rough_duration(least), rough_duration(most)
    if low == high:
        return low
    number, _, unit = low.partition(" ")
    return f"{number if high.endswith(unit) else low} to {high}"

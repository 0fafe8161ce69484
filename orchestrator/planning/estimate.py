"""Estimates of the memory, disk space and time a sweep needs: from measured rows, else by the rules stated here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from sampler.config import ModelConfig, expected_shapes

PREFILL_POSITIONS = 1024  # forwarded at once
PADDED_POSITIONS = 128  # of a denoising pass of up to eight rows
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}

# Bytes on disk, measured with pyarrow 26. While a trial runs, a batch of one row is mostly headers. A finished trial
# is a Parquet footer, trial.json and directories; each row adds little more than its tokens.
RUNNING_ROW_BYTES, TRIAL_BYTES, ROW_BYTES, TOKEN_BYTES = 6_000, 30_000, 200, 8

# Rules for a folder without rows.
ANSWER_TOKENS = 256  # per answer, if the task allows as many
BUNDLED_ANSWER_TOKENS = 50  # the same for the bundled documents, which the bundled model answers briefly
TOKENS_PER_PASS = 2.0
LAYER_SECONDS = {"CPU": 0.25e-3, "GPU": 0.3e-3}  # fixed cost of a layer
BYTES_PER_SECOND = {"CPU": 8e9, "GPU": 6e11}  # at which a pass reads the weights, on one core or one GPU
SCORED_PASSES = 4.0  # per document whose options are scored

# A trial lasts about as long as its actor's speed stays the same, so that all policies run at each speed; a shared CPU
# changes its speed within seconds. It lasts long enough for the work between trials to be less than 3 % of it. Scored
# tasks have no speed-up to measure.
TRIAL_SECONDS = {"CPU": 3.0, "GPU": 30.0}
SCORED_TRIAL_SECONDS = 60.0


def parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def memory_needed(config: ModelConfig, dtype: str, *, batch_size: int = 1, positions: int = 4096) -> int:
    """Bytes on the device: weights, keys and values of `positions` per row, logits, cached states.

    One row more than the batch has takes what padding writes. A prompt is prefilled in parts, and without a mask.
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
    """What to do if memory does not suffice; what costs no speed comes first."""
    remedies = ["--dtype bfloat16"] if dtype == "float32" else []
    remedies += ["a smaller --batch-size"] if batch_size > 1 else []
    remedies += ["fewer --actors"] if actors > 1 else []
    return f"use {' or '.join(remedies or ['a smaller model', 'a machine with more memory'])}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RemainingWork:
    """What remains to be done of one task. Created by PreparedSweep.work."""

    trials: int
    rows: int  # documents × configurations × repeats
    tokens: int  # maximum per answer; 0 if options are scored


def disk_needed(work: Mapping[str, RemainingWork], *, running: int) -> int:
    """Bytes for all finished trials, plus `running` rows of trials in progress."""
    lasting = sum(
        task.trials * TRIAL_BYTES + task.rows * (ROW_BYTES + TOKEN_BYTES * _answer(task.tokens))
        for task in work.values()
    )
    return lasting + min(running, sum(task.rows for task in work.values())) * (
        RUNNING_ROW_BYTES + 2 * TOKEN_BYTES * 2048
    )


def seconds_needed(
    work: Mapping[str, RemainingWork], measured: Mapping[str, float], *, config: ModelConfig, dtype: str, device: str
) -> tuple[float, list[str]]:
    """Seconds of one actor for all of it, and the tasks for which only the rules above apply."""
    a_pass = rough_pass_seconds(config, dtype, device)
    rough = [name for name, task in work.items() if name not in measured and task.rows]
    total = sum(task.rows * measured.get(name, _passes(task.tokens) * a_pass) for name, task in work.items())
    return total, rough


def documents_per_trial(tokens: int, *, config: ModelConfig, dtype: str, device: str) -> int:
    """How many documents of a task last as long as a trial should. `tokens`: per answer; 0 if options are scored."""
    seconds = TRIAL_SECONDS[device] if tokens else SCORED_TRIAL_SECONDS
    return max(1, round(seconds / (_passes(tokens) * rough_pass_seconds(config, dtype, device))))


def rough_pass_seconds(config: ModelConfig, dtype: str, device: str) -> float:
    """A fixed cost per layer, plus reading every weight once."""
    weights = parameters(config) * BYTES_PER_VALUE[dtype]
    return config.num_layers * LAYER_SECONDS[device] + weights / BYTES_PER_SECOND[device]


def measured_seconds(rows: pa.Table) -> dict[str, float]:
    """Seconds per document by task, from the wall time of the batches of a sweep's rows."""
    keys = ["task", "trial_id", "attempt", "batch_id"]
    batches = rows.group_by(keys).aggregate([("batch_seconds", "max"), ("batch_seconds", "count")])
    tasks = batches.group_by("task").aggregate([("batch_seconds_max", "sum"), ("batch_seconds_count", "sum")])
    return {task["task"]: task["batch_seconds_max_sum"] / task["batch_seconds_count_sum"] for task in tasks.to_pylist()}


def _answer(tokens: int) -> int:
    return min(tokens, ANSWER_TOKENS)


def _passes(tokens: int) -> float:
    """Of a document; `tokens`: maximum per answer."""
    return _answer(tokens) / TOKENS_PER_PASS if tokens else SCORED_PASSES


def format_bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def rough_duration(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} seconds"

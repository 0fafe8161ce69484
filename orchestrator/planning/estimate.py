"""How much memory, disk and time a sweep will take: from what was measured, else by stated rough rules. No files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from sampler.config import ModelConfig, expected_shapes

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# On disk, measured with pyarrow 26 on rows of ROWS: while a trial runs, a batch of one row is mostly headers; what a
# finished one leaves is a Parquet footer, trial.json and folders, and for each row little but its tokens.
ROW_WHILE_RUNNING, TRIAL, ROW, TOKEN = 6_000, 30_000, 200, 8

# Rough rules, for a folder without rows.
ANSWER_TOKENS = 256  # of an answer, if the task allows as many
TOKENS_PER_PASS = 2.0
LAYER_SECONDS = {"CPU": 0.25e-3, "GPU": 0.3e-3}  # that a layer takes however small it is
BYTES_PER_SECOND = {"CPU": 8e9, "GPU": 6e11}  # of weights that a pass reads, on one core or one GPU
SCORED_PASSES = 4.0  # for a document of which options are scored


def parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def memory_needed(config: ModelConfig, dtype: str, *, batch_size: int = 1, positions: int = 4096) -> int:
    """Bytes on the device: weights, keys and values of `positions` for each row, the head's logits, kept states."""
    size, block = BYTES[dtype], config.block_size
    positions = min(-(-positions // block) * block, config.max_positions)
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim * positions * batch_size
    kept = config.num_layers * config.hidden_size * block * batch_size
    prefill = positions * (2 * config.intermediate_size + 4 * config.hidden_size)
    logits = 3 * 4 * config.vocab_size * block * batch_size  # in float32: as they come, as probabilities, as ranks
    return size * (parameters(config) + keys + kept + prefill) + logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is left to do of one task."""

    trials: int
    rows: int  # documents × configurations × repeats
    tokens: int  # most an answer may have; 0 where options are scored


def disk_needed(work: Mapping[str, Work], *, running: int) -> int:
    """Bytes: what stays, and the `running` rows of trials that are not finished at a time."""
    lasting = sum(task.trials * TRIAL + task.rows * (ROW + TOKEN * _answer(task)) for task in work.values())
    return lasting + min(running, sum(task.rows for task in work.values())) * (ROW_WHILE_RUNNING + 2 * TOKEN * 2048)


def seconds_needed(
    work: Mapping[str, Work], measured: Mapping[str, float], *, config: ModelConfig, dtype: str, device: str
) -> tuple[float, list[str]]:
    """Seconds of one actor for all of it, and the tasks for which only the rough rule was at hand."""
    a_pass = rough_pass_seconds(config, dtype, device)
    rough = [name for name, task in work.items() if name not in measured and task.rows]
    total = 0.0
    for name, task in work.items():
        passes = _answer(task) / TOKENS_PER_PASS if task.tokens else SCORED_PASSES
        total += task.rows * measured.get(name, passes * a_pass)
    return total, rough


def rough_pass_seconds(config: ModelConfig, dtype: str, device: str) -> float:
    """Every layer costs something, and every weight is read once."""
    weights = parameters(config) * BYTES[dtype]
    return config.num_layers * LAYER_SECONDS[device] + weights / BYTES_PER_SECOND[device]


def measured_seconds(rows: pa.Table) -> dict[str, float]:
    """Seconds for each document by task: the wall time of its batches, from rows of a sweep."""
    keys = ["task", "trial_id", "attempt", "batch_id"]
    batches = rows.group_by(keys).aggregate([("batch_seconds", "max"), ("batch_seconds", "count")])
    tasks = batches.group_by("task").aggregate([("batch_seconds_max", "sum"), ("batch_seconds_count", "sum")])
    return {task["task"]: task["batch_seconds_max_sum"] / task["batch_seconds_count_sum"] for task in tasks.to_pylist()}


def _answer(task: Work) -> int:
    return min(task.tokens, ANSWER_TOKENS)

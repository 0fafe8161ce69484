"""Row columns as numpy arrays: codes, primary scores, wall times, fingerprints of answers.

A million answers do not fit into memory, so text is never read. An answer is represented by a 64-bit fingerprint of
its tokens, or by its highest-scoring option.
"""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.core.configuration import DECODE_SETTINGS
from orchestrator.core.evidence import metric_value
from orchestrator.core.speed import Array as Array
from orchestrator.core.speed import group_codes
from sampler.errors import InputError

COUNTERS = (  # summed per configuration
    "tokens",
    "prompt_tokens",
    "prefill_tokens",
    "passes_prefill",
    "passes_full",
    "passes_small",
    "passes_commit",
    "layers_computed",
    "layers_reused",
    "layer_positions",
    "eligible",
    "replayed",
    "seconds",
)
NUMBERS = ("k", "batch_size", "repeat", "attempt", "batch_id", "batch_seconds", "calibration", *COUNTERS)
NAMES = ("trial_id", "policy", "subset", "mode", "dtype", "doc_id", "subtask", "finish", "actor", "device")
OTHERS = ("sweep", "task", "shard", "doc_hash", "correct", "metrics", "layers", "token_ids", "scores", "started_at")
COLUMNS = (*DECODE_SETTINGS, *NUMBERS, *NAMES, *OTHERS)  # all columns that an analysis reads
MANY_VALUES = ("trial_id", "doc_id", "doc_hash")  # joining dictionaries of hundreds of files would take seconds
FINGERPRINT = "answer"  # column of a condensed table, instead of token_ids and scores

ROWS_PER_CHUNK = 40_000  # token lists are flattened one chunk at a time, to limit memory
HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def check_columns(rows: pa.Table) -> None:
    """InputError if a column is missing that an analysis reads, or if there are no rows."""
    present = {*rows.column_names, *(("token_ids", "scores") if FINGERPRINT in rows.column_names else ())}
    absent = [name for name in COLUMNS if name not in present]
    if absent:
        raise InputError(f"the rows lack the columns {', '.join(absent)}; another version of the program wrote them")
    if not rows.num_rows:
        raise InputError("there are no rows to analyse yet; let a sweep finish some documents first")


def to_numpy(column: pa.ChunkedArray) -> Array:
    """A column of numbers or booleans as an array; null becomes NaN."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    if column.null_count:
        column = column.cast(pa.float64()).fill_null(math.nan)
    values: Array = column.to_numpy()
    return values


def encode(column: pa.ChunkedArray) -> tuple[Array, tuple[Any, ...]]:
    """Codes into the column's distinct values in sorted order, and these values; null is the last value, None."""
    whole = column.unify_dictionaries().combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    whole = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    order = pc.sort_indices(whole.dictionary).to_numpy()
    rank = np.empty(len(order) + 1, dtype=np.int32)
    rank[order] = np.arange(len(order))
    rank[-1] = len(order)  # null
    code = whole.indices.fill_null(len(order)).to_numpy() if whole.null_count else whole.indices.to_numpy()
    return without_unused(rank[code], (*whole.dictionary.take(pa.array(order)).to_pylist(), None))


def without_unused(code: Array, values: tuple[Any, ...]) -> tuple[Array, tuple[Any, ...]]:
    """Codes and values without the values that no code refers to."""
    used = np.bincount(code, minlength=len(values)) > 0
    if used.all():
        return code, values
    new_code = (np.cumsum(used) - 1).astype(np.int32)
    return new_code[code], tuple(values[number] for number in np.flatnonzero(used))


def first_indices(group: Array, groups: int) -> Array:
    """By group: the index at which it occurs first."""
    first = np.zeros(groups, dtype=np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]
    return first


def varies_within(values: Array, group: Array, groups: int) -> Array:
    """By group: whether it has more than one value."""
    result = np.zeros(groups, dtype=bool)
    result[group[values != values[first_indices(group, groups)][group]]] = True
    return result


def primary_scores(correct: Array, metrics: pa.ChunkedArray, row: Array, primary: str) -> Array:
    """Each row's primary metric: 0 or 1 from `correct`, else the number in `metrics`, NaN if there is none.

    `metrics` is the column of all tasks, and `row` the indices of the task's rows in it.
    """
    values = correct.astype(np.float64)
    unclear = np.flatnonzero(np.isnan(values))
    if len(unclear):
        code, texts = encode(metrics.take(pa.array(row[unclear])))
        values[unclear] = np.array([metric_value(text, primary) for text in texts])[code]
    return values


def has_nonfinite_metric(rows: pa.Table) -> Array:
    """By row: whether a metric is NaN or infinite, or no metrics are recorded."""
    code, texts = encode(rows["metrics"])
    wrong = np.array([text is None or "NaN" in text or "Infinity" in text for text in texts])
    result: Array = wrong[code]
    return result


def apportioned_wall_time(trial: Array, attempt: Array, batch: Array, batch_seconds: Array, tokens: Array) -> Array:
    """Each row's share of its batch's wall time: by tokens, or equal shares if the batch has no tokens.

    The shares of a batch add up to its time, so tokens ÷ summed shares is the throughput at any batch size.
    """
    group, groups = group_codes(trial, attempt, batch)
    delivered = np.bincount(group, weights=tokens, minlength=groups)
    members = np.bincount(group, minlength=groups)
    share = np.where(delivered[group] > 0, tokens / np.maximum(delivered[group], 1), 1 / members[group])
    result: Array = batch_seconds * share
    return result


def condense(rows: pa.Table) -> pa.Table:
    """Replaces tokens, scores and text by fingerprints, and encodes strings (except MANY_VALUES) as dictionaries.

    A million condensed rows fit into memory: condense batch by batch, concatenate, then analyse.
    """
    kept = [name for name in rows.column_names if name not in ("token_ids", "scores", "text")]
    small = rows.select(kept).append_column(FINGERPRINT, pa.array(fingerprints(rows)))
    for index, field in enumerate(small.schema):
        if pa.types.is_string(field.type) and field.name not in MANY_VALUES:
            small = small.set_column(index, field.name, small.column(index).dictionary_encode())
    return small


def fingerprints(rows: pa.Table) -> Array:
    """A number per row that is equal for equal answers: a hash of its tokens, else the index of its best option."""
    if FINGERPRINT in rows.column_names:
        return to_numpy(rows[FINGERPRINT])
    result = np.zeros(rows.num_rows, dtype=np.uint64)
    done = 0
    for batch in rows.select(["token_ids", "scores"]).to_batches(max_chunksize=ROWS_PER_CHUNK):
        tokens, scores = batch.column(0), batch.column(1)
        hashes = _hash_lists(tokens)
        if len(scores.flatten()):
            hashes = np.where(_lengths(tokens) == 0, _best_option(scores) + np.uint64(1), hashes)
        result[done : done + batch.num_rows] = hashes
        done += batch.num_rows
    return result


def _lengths(lists: pa.Array) -> Array:
    return to_numpy(pa.chunked_array([pc.list_value_length(lists)])).astype(np.int64)


def _hash_lists(lists: pa.Array) -> Array:
    """A polynomial in the token ids, modulo 2⁶⁴; 0 for an empty list."""
    lengths = _lengths(lists)
    flat = to_numpy(pa.chunked_array([lists.flatten()])).astype(np.uint64)
    hashes = np.zeros(len(lengths), dtype=np.uint64)
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return hashes
    starts = np.concatenate(([0], np.cumsum(lengths[filled])[:-1]))
    position = np.arange(len(flat)) - np.repeat(starts, lengths[filled])
    powers = np.cumprod(np.full(int(lengths.max()), HASH_MULTIPLIER, dtype=np.uint64), dtype=np.uint64)
    mixed = flat + np.uint64(1)
    mixed ^= mixed << np.uint64(21)
    mixed *= powers[position]
    total = np.add.reduceat(mixed, starts)
    total ^= total >> np.uint64(31)
    hashes[filled] = total * HASH_MULTIPLIER + lengths[filled].astype(np.uint64)
    return hashes


def _best_option(lists: pa.Array) -> Array:
    """The first index of the highest score in each row, 0 for an empty list."""
    lengths = _lengths(lists)
    flat = to_numpy(pa.chunked_array([lists.flatten()]))
    result = np.zeros(len(lengths), dtype=np.uint64)
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return result
    starts = np.concatenate(([0], np.cumsum(lengths[filled])[:-1]))
    owner = np.repeat(np.arange(len(filled)), lengths[filled])
    best = np.maximum.reduceat(flat, starts)
    positions = np.where(flat == best[owner], np.arange(len(flat)) - starts[owner], len(flat))
    result[filled] = np.minimum.reduceat(positions, starts).astype(np.uint64)
    return result

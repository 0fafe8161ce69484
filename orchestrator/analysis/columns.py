"""A table of rows as numpy columns: codes, primary metric, wall time, fingerprints of answers. Knows no pairing.

Text columns are never touched: a million answers would not fit. An answer is known by a 64-bit fingerprint of its
tokens, or by the option that scored highest.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Array = NDArray[Any]
NUMBERS = (
    "k",
    "threshold",
    "small_block",
    "block_cache",
    "batch_size",
    "repeat",
    "attempt",
    "batch_id",
    "tokens",
    "seconds",
    "batch_seconds",
    "passes_prefill",
    "passes_full",
    "passes_small",
    "passes_commit",
    "layers_computed",
    "layers_reused",
    "layer_positions",
    "eligible",
    "replayed",
    "calibration",
)
NAMES = ("trial_id", "policy", "subset", "mode", "dtype", "doc_id", "subtask", "finish", "actor", "device")
OTHERS = ("sweep", "task", "doc_hash", "correct", "metrics", "layers", "token_ids", "scores", "started_at")
COLUMNS = (*NUMBERS, *NAMES, *OTHERS)  # all that an analysis reads; a caller need not load others
ANSWER = "answer"  # the fingerprint, in tables whose tokens and scores were left behind
SPAN = 40_000  # rows whose tokens are spread out at a time
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def numbers(column: pa.ChunkedArray) -> Array:
    """A column of numbers or truths as numpy; null becomes NaN."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    if column.null_count:
        column = column.cast(pa.float64()).fill_null(math.nan)
    values: Array = column.to_numpy()
    return values


def codes(column: pa.ChunkedArray) -> tuple[Array, tuple[Any, ...]]:
    """A column of names as codes into its distinct values in sorted order; null is a value, None, and the last one."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    whole = encoded.unify_dictionaries().combine_chunks()
    whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    values = whole.dictionary.to_pylist()
    code = whole.indices.fill_null(len(values)).to_numpy() if whole.null_count else whole.indices.to_numpy()
    used = np.flatnonzero(np.bincount(code, minlength=len(values))[: len(values)])  # a part of a table has fewer
    order = sorted(used.tolist(), key=values.__getitem__)
    rank = np.empty(len(values) + 1, dtype=np.int32)
    rank[order] = np.arange(len(order))
    rank[-1] = len(order)  # of null
    return rank[code], (*(values[place] for place in order), *((None,) if whole.null_count else ()))


def grouped(*keys: Array) -> tuple[Array, int]:
    """One code from 0 on for each distinct combination of the keys, in their sorted order."""
    combined, span = np.zeros(len(keys[0]), dtype=np.int64), 1
    for key in keys:
        place, values = _ranked(key)
        if span * values > 2**62:
            combined, span = _dense(combined, span)
        combined, span = combined * values + place, span * values
    return _dense(combined, span)


def _ranked(key: Array) -> tuple[Array, int]:
    """A key as small whole numbers in the same order, and how many there may be."""
    if key.dtype.kind in "iub" and len(key) and key.min() >= 0 and key.max() < 2**31:
        return key.astype(np.int64), int(key.max()) + 1
    values, place = np.unique(key, return_inverse=True)
    return place.reshape(-1), max(1, len(values))


def _dense(combined: Array, span: int) -> tuple[Array, int]:
    """Codes without gaps; by counting where that takes little room, else by sorting."""
    if span <= 8 * len(combined) + 1024:
        used = np.bincount(combined, minlength=span) > 0
        return (np.cumsum(used) - 1)[combined], int(used.sum())
    values, place = np.unique(combined, return_inverse=True)
    return place.reshape(-1), len(values)


def score_of(rows: pa.Table, primary: str) -> Array:
    """Each row's primary metric: 1 or 0 for right or wrong, else the number in its metrics; NaN where there is none."""
    values = numbers(rows["correct"]).astype(np.float64)
    unclear = np.flatnonzero(np.isnan(values))
    if len(unclear):
        code, texts = codes(rows["metrics"].take(pa.array(unclear)))
        values[unclear] = np.array([_number(text, primary) for text in texts])[code]
    return values


def _number(text: str, primary: str) -> float:
    try:
        metrics = json.loads(text)
    except ValueError:
        return math.nan
    if not isinstance(metrics, Mapping):
        return math.nan
    value = metrics.get(primary)
    if value is None and len(metrics) == 1:
        value = next(iter(metrics.values()))
    return float(value) if isinstance(value, bool | int | float) else math.nan


def has_nan(rows: pa.Table) -> Array:
    """Rows whose metrics hold a number that is none."""
    code, texts = codes(rows["metrics"])
    wrong = np.array([text is None or "NaN" in text or "Infinity" in text for text in texts])
    result: Array = wrong[code]
    return result


def wall_time(trial: Array, attempt: Array, batch: Array, batch_seconds: Array, tokens: Array) -> Array:
    """Each row's part of its batch's wall time, by the tokens it delivered, equal parts where there are none.

    The parts of a batch add up to its time once, so sums over rows are tokens ÷ wall time whatever the batch size;
    with one document in a batch they are its own time.
    """
    group, groups = grouped(trial, attempt, batch)
    delivered = np.bincount(group, weights=tokens, minlength=groups)
    members = np.bincount(group, minlength=groups)
    share = np.where(delivered[group] > 0, tokens / np.maximum(delivered[group], 1), 1 / members[group])
    result: Array = batch_seconds * share
    return result


def condense(rows: pa.Table) -> pa.Table:
    """Rows with their answers' fingerprints in place of tokens, scores and text, and names stored once.

    Small enough to hold by the million: a caller condenses batch by batch, joins the batches and analyses that.
    """
    kept = [name for name in rows.column_names if name not in ("token_ids", "scores", "text")]
    small = rows.select(kept).append_column(ANSWER, pa.array(fingerprints(rows)))
    for place, field in enumerate(small.schema):
        if pa.types.is_string(field.type):
            small = small.set_column(place, field.name, small.column(place).dictionary_encode())
    return small


def fingerprints(rows: pa.Table) -> Array:
    """A number per row that is equal for equal answers: of its tokens, else of its highest option's place."""
    if ANSWER in rows.column_names:
        return numbers(rows[ANSWER])
    result = np.zeros(rows.num_rows, dtype=np.uint64)
    done = 0
    for batch in rows.select(["token_ids", "scores"]).to_batches(max_chunksize=SPAN):
        tokens, scores = batch.column(0), batch.column(1)
        marks = _mark_tokens(tokens)
        if len(scores.flatten()):
            marks = np.where(_lengths(tokens) == 0, _highest(scores) + np.uint64(1), marks)
        result[done : done + batch.num_rows] = marks
        done += batch.num_rows
    return result


def _lengths(lists: pa.Array) -> Array:
    return numbers(pa.chunked_array([pc.list_value_length(lists)])).astype(np.int64)


def _mark_tokens(lists: pa.Array) -> Array:
    """A polynomial in the token ids, modulo 2⁶⁴, with a mixed final step; 0 for no tokens."""
    lengths = _lengths(lists)
    flat = numbers(pa.chunked_array([lists.flatten()])).astype(np.uint64)
    marks = np.zeros(len(lengths), dtype=np.uint64)
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return marks
    starts = np.concatenate(([0], np.cumsum(lengths[filled])[:-1]))
    place = np.arange(len(flat)) - np.repeat(starts, lengths[filled])
    powers = np.cumprod(np.full(int(lengths.max()), MULTIPLIER, dtype=np.uint64), dtype=np.uint64)
    mixed = flat + np.uint64(1)
    mixed ^= mixed << np.uint64(21)
    mixed *= powers[place]
    total = np.add.reduceat(mixed, starts)
    total ^= total >> np.uint64(31)
    marks[filled] = total * MULTIPLIER + lengths[filled].astype(np.uint64)
    return marks


def _highest(lists: pa.Array) -> Array:
    """The place of the highest score in each row, 0 where there is none."""
    lengths = _lengths(lists)
    flat = numbers(pa.chunked_array([lists.flatten()]))
    result = np.zeros(len(lengths), dtype=np.uint64)
    filled = np.flatnonzero(lengths)
    if not len(filled):
        return result
    starts = np.concatenate(([0], np.cumsum(lengths[filled])[:-1]))
    owner = np.repeat(np.arange(len(filled)), lengths[filled])
    best = np.maximum.reduceat(flat, starts)
    places = np.where(flat == best[owner], np.arange(len(flat)) - starts[owner], len(flat))
    result[filled] = np.minimum.reduceat(places, starts).astype(np.uint64)
    return result


SAMPLES = 4  # that a calibration is the mean of
REACH = 6  # calibrations on either side of those that hold the samples next to the row: more than a hiccup spoils
AT_ONCE = 50_000  # medians; each needs a row of neighbours


def speeds_of_moments(rows: pa.Table) -> Array:
    """Tokens/s for each row, from the calibrations of its own actor."""
    own = numbers(rows["calibration"]).astype(np.float64)
    actor, _ = grouped(*(codes(rows[name])[0] for name in ("sweep", "actor", "device")))
    order = np.lexsort((rows["started_at"].cast(pa.int64()).to_numpy(), actor))
    speed, first = own[order], np.diff(actor[order], prepend=-1) != 0
    taken = first | (np.diff(speed, prepend=np.nan) != 0)  # a calibration that changed has one sample more
    result = np.empty(len(own))
    result[order] = _medians(speed[taken], first[taken])[np.cumsum(taken) - 1]
    return result


def _medians(values: Array, first: Array) -> Array:
    """Around each place, within its own actor; where that has no more calibrations, those within reach count twice."""
    begins = np.flatnonzero(first)
    actor = np.cumsum(first) - 1
    low, high = begins[actor], np.append(begins[1:], len(values))[actor] - 1
    around = np.arange(-REACH, SAMPLES + REACH + 1)
    result = np.empty(len(values))
    for start in range(0, len(values), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        lowest, highest = low[part, None], high[part, None]
        place = np.arange(len(values))[part, None] + around
        place = np.where(place < lowest, 2 * lowest - place, place)
        place = np.where(place > highest, 2 * highest - place, place)
        result[part] = np.median(values[np.clip(place, lowest, highest)], axis=1)
    return result

"""A comparison by subject and by level of difficulty. Its parts are small, so their intervals are for looking, not for
deciding: no verdict is drawn from them. Knows no speed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis.accuracy import few_documents_interval, mean_interval
from orchestrator.analysis.columns import Array, numbers
from orchestrator.analysis.pairs import TaskRows
from orchestrator.analysis.resample import Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One subject or level: accuracies between 0 and 1, the difference in points."""

    name: str
    documents: int
    baseline: Estimate
    accuracy: Estimate
    lost: int
    won: int
    points: Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    by_subject: tuple[Part, ...]
    by_level: tuple[Part, ...]


def levels_of(rows: TaskRows, documents: pa.Table | None) -> tuple[Array, tuple[str, ...]]:
    """Each document's level as a code, −1 where its dataset states none."""
    result = np.full(rows.documents, -1, dtype=np.int64)
    if documents is None or "level" not in documents.column_names:
        return result, ()
    found = pc.index_in(pa.array(rows.doc_ids, pa.string()), value_set=documents["doc_id"].combine_chunks())
    stated = documents["level"].combine_chunks().take(found).dictionary_encode()
    names = stated.dictionary.to_pylist()
    order = sorted(range(len(names)), key=lambda code: str(names[code]))
    rank = np.argsort(np.array(order, dtype=np.int64)) if order else np.zeros(0, dtype=np.int64)
    known = np.flatnonzero(numbers(pa.chunked_array([stated.is_valid()])))
    result[known] = rank[stated.indices.drop_null().to_numpy()]
    return result, tuple(str(names[code]) for code in order)


def breakdown(rows: TaskRows, runs: Array, against: Array, level: Array, levels: Sequence[str]) -> Breakdown:
    base, ours = rows.mean(against, "score"), rows.mean(runs, "score")
    return Breakdown(
        by_subject=_parts(base, ours, rows.strata, rows.subtasks) if len(rows.subtasks) > 1 else (),
        by_level=_parts(base, ours, level, levels),
    )


def _parts(base: Array, ours: Array, code: Array, names: Sequence[str]) -> tuple[Part, ...]:
    both = ~(np.isnan(base) | np.isnan(ours))
    result = []
    for number, name in enumerate(names):
        here = both & (code == number)
        if here.any():
            result.append(_part(name, base[here], ours[here]))
    return tuple(result)


def _part(name: str, base: Array, ours: Array) -> Part:
    lost, won = int((ours < base).sum()), int((ours > base).sum())
    share = few_documents_interval(lost, won, len(base))
    value = 100 * float((ours - base).mean())
    low, high = min(value, 100 * share.low), max(value, 100 * share.high)
    return Part(
        name=name,
        documents=len(base),
        baseline=mean_interval(base),
        accuracy=mean_interval(ours),
        lost=lost,
        won=won,
        points=share.map(low, value, high),
    )

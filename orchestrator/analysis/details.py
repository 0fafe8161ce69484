"""What a report draws besides the comparisons: distributions, agreement between answers, speed over time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis.columns import Array, numbers
from orchestrator.analysis.intervals import Estimate, few_documents_interval, mean_interval
from orchestrator.analysis.runs import TaskRows

BINS = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Counts between edges; the edges are the same for every configuration of a task."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    p10: float
    p50: float
    p90: float
    mean: float


def histograms(rows: TaskRows, column: str) -> tuple[Histogram, ...]:
    """One per configuration."""
    values = rows.columns[column].astype(float)
    edges = _edges(values)
    result = []
    for number in range(len(rows.configurations)):
        own = values[rows.rows_of(rows.runs_of(number))]
        low, middle, high = (float(q) for q in np.quantile(own, [0.1, 0.5, 0.9]))
        counts, _ = np.histogram(own, bins=edges)
        result.append(
            Histogram(
                edges=tuple(float(edge) for edge in edges),
                counts=tuple(int(count) for count in counts),
                p10=low,
                p50=middle,
                p90=high,
                mean=float(own.mean()),
            )
        )
    return tuple(result)


def _edges(values: Array) -> Array:
    low, high = float(values.min()), float(values.max())
    whole = max(1.0, np.ceil((high - low + 1) / BINS))
    return np.arange(low, high + 2 * whole, whole)


def agreement(rows: TaskRows) -> tuple[tuple[float | None, ...], ...]:
    """Configurations × configurations: share of identical answers on shared documents, in their first runs."""
    runs = [int(rows.runs_of(number)[0]) for number in range(len(rows.configurations))]
    cells = rows.cell[runs]
    marks = rows.columns["mark"][cells]
    found = cells >= 0
    return tuple(
        tuple(_share(marks[a], marks[b], found[a] & found[b]) for b in range(len(runs))) for a in range(len(runs))
    )


def _share(one: Array, other: Array, both: Array) -> float | None:
    return float((one[both] == other[both]).mean()) if both.any() else None


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


MOST = 200  # listed per configuration; counted are all


@dataclass(frozen=True, kw_only=True, slots=True)
class Break:
    """One document, and the trials whose rows have the two answers."""

    doc_id: str
    subtask: str
    baseline_trial: str
    trial: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Breaks:
    lost: int
    won: int
    listed: tuple[Break, ...]


def breaks(rows: TaskRows, runs: Array, against: Array, most: int = MOST) -> Breaks:
    """Documents in their order; of several repeats the first that has the document speaks."""
    base, ours = rows.mean(against, "score"), rows.mean(runs, "score")
    with np.errstate(invalid="ignore"):
        lost, won = np.flatnonzero(ours < base), np.flatnonzero(ours > base)
    shown = lost[:most]
    baseline_cells, cells = _first(rows.cell[against][:, shown]), _worst(rows, runs, shown)
    trials = rows.names["trial_id"]
    listed = tuple(
        Break(
            doc_id=str(rows.doc_ids[document]),
            subtask=rows.subtasks[rows.strata[document]],
            baseline_trial=str(trials[rows.columns["trial_id"][baseline_cells[i]]]),
            trial=str(trials[rows.columns["trial_id"][cells[i]]]),
        )
        for i, document in enumerate(shown)
    )
    return Breaks(lost=len(lost), won=len(won), listed=listed)


def _first(cells: Array) -> Array:
    """Of each document the first run that has it."""
    run = (cells >= 0).argmax(axis=0)
    result: Array = cells[run, np.arange(cells.shape[1])]
    return result


def _worst(rows: TaskRows, runs: Array, documents: Array) -> Array:
    """Of each document the run that scored lowest: the one that broke."""
    scores = np.where(rows.cell[runs] >= 0, rows.values(runs, "score"), np.inf)[:, documents]
    result: Array = rows.cell[runs][scores.argmin(axis=0), documents]
    return result

"""Where a configuration breaks: documents that k=1 got right and it got wrong, and the first token that differs."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from orchestrator.analysis.columns import Array
from orchestrator.analysis.pairs import TaskRows

MOST = 200  # listed per configuration; counted are all


@dataclass(frozen=True, kw_only=True, slots=True)
class Break:
    """One document. `baseline_row` and `row` are places in the table of rows, where the texts are."""

    doc_id: str
    subtask: str
    baseline_row: int
    row: int
    baseline_trial: str
    trial: str
    first_difference: int | None  # index of the first token that differs; None where there are no tokens to compare


@dataclass(frozen=True, kw_only=True, slots=True)
class Breaks:
    lost: int
    won: int
    listed: tuple[Break, ...]


def breaks(rows: TaskRows, table: pa.Table, runs: Array, against: Array, most: int = MOST) -> Breaks:
    """Documents in their order; of several repeats the first that has the document speaks."""
    base, ours = rows.mean(against, "score"), rows.mean(runs, "score")
    with np.errstate(invalid="ignore"):
        lost, won = np.flatnonzero(ours < base), np.flatnonzero(ours > base)
    shown = lost[:most]
    baseline_cells, cells = _first(rows.cell[against][:, shown]), _worst(rows, runs, shown)
    places, others = rows.row[baseline_cells], rows.row[cells]
    firsts = _first_differences(table, places, others)
    trials = rows.names["trial_id"]
    listed = tuple(
        Break(
            doc_id=str(rows.doc_ids[document]),
            subtask=rows.subtasks[rows.strata[document]],
            baseline_row=int(places[i]),
            row=int(others[i]),
            baseline_trial=str(trials[rows.columns["trial_id"][baseline_cells[i]]]),
            trial=str(trials[rows.columns["trial_id"][cells[i]]]),
            first_difference=firsts[i],
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


def _first_differences(table: pa.Table, places: Array, others: Array) -> list[int | None]:
    if "token_ids" not in table.column_names or not len(places):
        return [None] * len(places)
    pairs = zip(*(table["token_ids"].take(pa.array(side)).to_pylist() for side in (places, others)), strict=True)
    return [first_difference(one, other) for one, other in pairs]


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The first index at which two answers differ, the shorter one's length if it begins the longer, None if equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))

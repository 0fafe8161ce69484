"""Where a configuration breaks: documents that k=1 got right and it got wrong."""

from dataclasses import dataclass

import numpy as np

from orchestrator.analysis.columns import Array
from orchestrator.analysis.pairs import TaskRows

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

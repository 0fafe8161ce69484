"""What a validity gate looks at and what it says. A finding that failed and `withholds` takes verdicts away."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from orchestrator.analysis.columns import Array
from orchestrator.analysis.pairs import TaskRows
from orchestrator.analysis.shapes import Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    gate: str
    ok: bool
    sentence: str
    trials: tuple[str, ...] = ()  # none of them named: all are concerned
    withholds: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """All that gates look at. `trials` are the trial.json files, where the caller has them."""

    table: pa.Table
    tasks: Sequence[TaskRows]
    timeline: Sequence[Trial]
    documents: Mapping[str, pa.Table]
    request: Mapping[str, Any]
    trials: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def trials_of(rows: TaskRows, places: Array) -> tuple[str, ...]:
    names = rows.names["trial_id"]
    return tuple(sorted(str(names[code]) for code in np.unique(rows.columns["trial_id"][places])))


def failed(gate: str, rows: TaskRows, places: Array, said: str, *, withholds: bool = False) -> Finding:
    return Finding(
        gate=gate, ok=False, sentence=f"{rows.task}: {said}.", trials=trials_of(rows, places), withholds=withholds
    )


def wanted_documents(rows: TaskRows, documents: pa.Table | None, request: Mapping[str, Any]) -> int:
    """As many as the request says, else as the folder describes, else as any run has."""
    said = request.get("tasks", {}).get(rows.task, {}).get("documents")
    if isinstance(said, int):
        return said
    return rows.documents if documents is None else documents.num_rows

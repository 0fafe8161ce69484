"""What a report draws besides the comparisons: distributions, agreement between answers, speed over time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from orchestrator.analysis.columns import Array, grouped, numbers
from orchestrator.analysis.pairs import Settings, TaskRows

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One attempt at a trial on one actor, as a point in time."""

    trial_id: str
    attempt: int
    task: str
    label: str
    settings: Settings
    actor: str
    device: str
    started_at: float  # seconds since 1970
    documents: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    calibration: float
    work_per_pass: float  # calibrated seconds of an average pass
    work_per_layer: float  # and of an average layer that ran, all else included
    first_of_actor: bool


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


def timeline(tasks: Sequence[TaskRows], table: pa.Table) -> tuple[Trial, ...]:
    """Every trial and attempt of all tasks with its speed, in order of time."""
    started = numbers(table["started_at"].cast(pa.int64())) / 1e6
    found = sorted((trial for rows in tasks for trial in _trials(rows, started[rows.row])), key=lambda t: t.started_at)
    seen: set[str] = set()
    result = []
    for trial in found:
        result.append(trial if trial.actor in seen else replace(trial, first_of_actor=True))
        seen.add(trial.actor)
    return tuple(result)


def _trials(rows: TaskRows, started: Array) -> Iterator[Trial]:
    columns, names = rows.columns, rows.names
    group, count = grouped(columns["trial_id"], columns["attempt"], columns["actor"])
    first = np.zeros(count, dtype=np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]
    began = np.full(count, np.inf)
    np.minimum.at(began, group, started)
    documents = np.bincount(group, minlength=count)
    totals = {
        name: np.bincount(group, weights=columns[name], minlength=count)
        for name in ("tokens", "wall", "work", "passes", "layers_computed")
    }
    for i, row in enumerate(first):
        tokens, wall = int(totals["tokens"][i]), float(totals["wall"][i])
        yield Trial(
            trial_id=str(names["trial_id"][columns["trial_id"][row]]),
            attempt=int(columns["attempt"][row]),
            task=rows.task,
            label=rows.run_label(int(rows.run[row])),
            settings=rows.configurations[rows.owner[rows.run[row]]].settings,
            actor=str(names["actor"][columns["actor"][row]]),
            device=str(names["device"][columns["device"][row]]),
            started_at=float(began[i]),
            documents=int(documents[i]),
            tokens=tokens,
            seconds=wall,
            tokens_per_second=tokens / wall if tokens and wall > 0 else None,
            calibration=float(columns["calibration"][row]),
            work_per_pass=float(totals["work"][i] / max(1.0, totals["passes"][i])),
            work_per_layer=float(totals["work"][i] / max(1.0, totals["layers_computed"][i])),
            first_of_actor=False,
        )

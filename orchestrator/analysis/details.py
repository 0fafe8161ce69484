"""Details of a task for the report: histograms, agreement of answers, breakdowns by subject and level, regressions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import special

from orchestrator.analysis.columns import Array, group_codes, to_numpy
from orchestrator.analysis.intervals import Estimate, accuracy_interval, around, tango_interval
from orchestrator.analysis.runs import TaskRuns

HISTOGRAM_BINS = 40
MAX_LISTED_REGRESSIONS = 200  # per configuration
MAX_SHARD_RATIOS = 400  # per configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Counts between edges; all configurations of a task share the edges."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    p50: float
    p90: float
    mean: float


def histograms(rows: TaskRuns, column: str) -> tuple[Histogram, ...]:
    """One per configuration."""
    values = rows.columns[column].astype(float)
    low, high = float(values.min()), float(values.max())
    width = max(1.0, np.ceil((high - low + 1) / HISTOGRAM_BINS))
    edges = np.arange(low, high + 2 * width, width)
    result = []
    for number in range(len(rows.configurations)):
        own = values[rows.rows_of(rows.runs_of(number))]
        p50, p90 = (float(q) for q in np.quantile(own, [0.5, 0.9]))
        result.append(
            Histogram(
                edges=tuple(float(edge) for edge in edges),
                counts=tuple(int(count) for count in np.histogram(own, bins=edges)[0]),
                p50=p50,
                p90=p90,
                mean=float(own.mean()),
            )
        )
    return tuple(result)


def answer_agreement(rows: TaskRuns) -> tuple[tuple[float | None, ...], ...]:
    """Configurations × configurations: share of identical answers on shared documents, in their first runs."""
    runs = [int(rows.runs_of(number)[0]) for number in range(len(rows.configurations))]
    cells = rows.cell[runs]
    answers, found = rows.columns["answer"][cells], cells >= 0

    def share(a: int, b: int) -> float | None:
        both = found[a] & found[b]
        return float((answers[a][both] == answers[b][both]).mean()) if both.any() else None

    return tuple(tuple(share(a, b) for b in range(len(runs))) for a in range(len(runs)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Subgroup:
    """A comparison within one subject or level: accuracies between 0 and 1, the difference in points."""

    name: str
    documents: int
    baseline: Estimate
    accuracy: Estimate
    lost: int
    won: int
    points: Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Subgroups are small: their intervals are descriptive, and no verdict is drawn from them."""

    by_subject: tuple[Subgroup, ...]
    by_level: tuple[Subgroup, ...]
    subject_p: float | None = None  # of the hypothesis that the difference is the same in all subjects
    level_p: float | None = None


def document_levels(rows: TaskRuns, documents: pa.Table | None) -> tuple[Array, tuple[str, ...]]:
    """Each document's level as a code into the names; −1 if its dataset has none."""
    result = np.full(rows.documents, -1, dtype=np.int64)
    if documents is None or "level" not in documents.column_names:
        return result, ()
    found = pc.index_in(pa.array(rows.doc_ids, pa.string()), value_set=documents["doc_id"].combine_chunks())
    stated = documents["level"].combine_chunks().take(found).dictionary_encode()
    names = stated.dictionary.to_pylist()
    order = sorted(range(len(names)), key=lambda code: str(names[code]))
    rank = np.argsort(np.array(order, dtype=np.int64)) if order else np.zeros(0, dtype=np.int64)
    known = np.flatnonzero(to_numpy(pa.chunked_array([stated.is_valid()])))
    result[known] = rank[stated.indices.drop_null().to_numpy()]
    return result, tuple(str(names[code]) for code in order)


def breakdown(rows: TaskRuns, runs: Array, baseline: Array, level: Array, levels: Sequence[str]) -> Breakdown:
    base, ours = rows.mean(baseline, "score"), rows.mean(runs, "score")
    return Breakdown(
        by_subject=_subgroups(base, ours, rows.strata, rows.subtasks) if len(rows.subtasks) > 1 else (),
        by_level=_subgroups(base, ours, level, levels),
        subject_p=heterogeneity(ours - base, rows.strata),
        level_p=heterogeneity(ours - base, level),
    )


def heterogeneity(differences: Array, code: Array) -> float | None:
    """P-value of equal mean differences in all groups: squares between groups ÷ total variance, chi-squared."""
    known = ~np.isnan(differences) & (code >= 0)
    values, (_, group) = differences[known], np.unique(code[known], return_inverse=True)
    sizes = np.bincount(group.reshape(-1))
    if len(sizes) < 2 or not values.std() > 0:
        return None
    means = np.bincount(group.reshape(-1), weights=values) / sizes
    squares = float((sizes * (means - values.mean()) ** 2).sum()) / float(values.var(ddof=1))
    return float(special.chdtrc(len(sizes) - 1, squares))


def _subgroups(base: Array, ours: Array, code: Array, names: Sequence[str]) -> tuple[Subgroup, ...]:
    both = ~(np.isnan(base) | np.isnan(ours))
    masks = [(name, both & (code == number)) for number, name in enumerate(names)]
    return tuple(_subgroup(name, base[mask], ours[mask]) for name, mask in masks if mask.any())


def _subgroup(name: str, base: Array, ours: Array) -> Subgroup:
    lost, won = int((ours < base).sum()), int((ours > base).sum())
    interval = tango_interval(lost, won, len(base)).percent()
    return Subgroup(
        name=name,
        documents=len(base),
        baseline=accuracy_interval(base),
        accuracy=accuracy_interval(ours),
        lost=lost,
        won=won,
        points=around(100 * float((ours - base).mean()), interval.low, interval.high),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRatio:
    """Speed-up in tokens/s (documents/s, if nothing is generated) on one shard, at the time its trial started."""

    started_at: float  # seconds since 1970
    ratio: float


def shard_ratios(rows: TaskRuns, runs: Array, baseline: Array) -> tuple[ShardRatio, ...]:
    """A configuration against k=1 on each shard that both completed; at most MAX_SHARD_RATIOS, evenly chosen."""
    cells = rows.timed[runs]
    base = [np.broadcast_to(rows.mean(baseline, name, timed=True), cells.shape) for name in ("tokens", "work")]
    both = (cells >= 0) & ~np.isnan(base[1])
    own = {name: rows.columns[name][cells[both]] for name in ("trial_id", "tokens", "work", "started_at")}
    trial, trials = group_codes(own["trial_id"])
    sums = [
        np.bincount(trial, weights=values, minlength=trials)
        for values in (own["tokens"], own["work"], *(side[both] for side in base))
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = sums[3] / sums[1] * np.where(sums[2] > 0, sums[0] / sums[2], 1.0)
    started = np.full(trials, np.inf)
    np.minimum.at(started, trial, own["started_at"])
    order = np.argsort(started, kind="stable")
    order = order[ratio[order] > 0]
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), MAX_SHARD_RATIOS)).astype(int))]
    return tuple(ShardRatio(started_at=float(started[one]), ratio=float(ratio[one])) for one in chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression:
    """A document that k=1 got right and a configuration got wrong, and the trials that hold the two answers."""

    doc_id: str
    subtask: str
    baseline_trial: str
    trial: str


def find_regressions(rows: TaskRuns, runs: Array, baseline: Array) -> tuple[Regression, ...]:
    """In document order, with the first baseline run that has the document and the run that scored lowest."""
    with np.errstate(invalid="ignore"):
        lost = np.flatnonzero(rows.mean(runs, "score") < rows.mean(baseline, "score"))
    shown = lost[:MAX_LISTED_REGRESSIONS]
    base_cells = rows.cell[baseline][:, shown]
    first = (base_cells >= 0).argmax(axis=0)
    scores = np.where(rows.cell[runs] >= 0, rows.values(runs, "score"), np.inf)[:, shown]
    trials, codes = rows.names["trial_id"], rows.columns["trial_id"]
    return tuple(
        Regression(
            doc_id=str(rows.doc_ids[document]),
            subtask=rows.subtasks[rows.strata[document]],
            baseline_trial=str(trials[codes[base_cells[first[i], i]]]),
            trial=str(trials[codes[rows.cell[runs[scores[:, i].argmin()], document]]]),
        )
        for i, document in enumerate(shown)
    )

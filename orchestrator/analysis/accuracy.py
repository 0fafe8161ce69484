"""Paired accuracy differences: a configuration against k=1 on the same documents.

Over all documents, by subject and level, and document by document: which answers agree, and which got worse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from scipy import special

from orchestrator.analysis.columns import Array, to_numpy
from orchestrator.analysis.intervals import (
    DRAWS,
    Bounds,
    Estimate,
    Levels,
    accuracy_interval,
    around,
    paired_bootstrap,
    tango_interval,
    tango_variance,
    unbounded,
)
from orchestrator.analysis.runs import TaskRuns

POWER = 0.8
SIGNIFICANCE = 0.05
TYPICAL_DISAGREEMENT = (0.05, 0.20)  # share of documents on which two configurations differ, low and high
NEVER = 10_000_000  # documents; a larger requirement is not reported
MAX_LISTED_REGRESSIONS = 200  # per configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Accuracy in percentage points, configuration minus k=1: a drop is negative."""

    documents: int
    lost: int  # right at k=1, wrong here
    won: int
    both_right: int  # scored above 0 on both sides and neither lost nor won
    points: Estimate
    simultaneous: Estimate  # at the level that holds for all compared configurations together
    bounds: Bounds  # what the verdict compares with the margin
    p_value: float
    p_holm: float
    disagreement: float  # mean squared difference of scores: the share of documents lost or won, if binary
    detectable: float  # smallest difference from 0, in points, found with 80 % power

    @property
    def flips(self) -> int:
        return self.lost + self.won

    @property
    def both_wrong(self) -> int:
        return self.documents - self.flips - self.both_right


def paired_difference(
    baseline: Array,
    scores: Array,
    strata: Array,
    *,
    rng: np.random.Generator,
    levels: Levels | None = None,
    draws: int = DRAWS,
) -> PairedDifference:
    """Compares scores of the same documents: Tango's interval if all are 0 or 1, else the paired bootstrap."""
    levels = levels or Levels()
    differences = scores - baseline
    lost, won = int((differences < 0).sum()), int((differences > 0).sum())
    intervals = [one.percent() for one in _intervals(baseline, scores, strata, lost, won, levels.all, rng, draws)]
    disagreement = float(np.mean(differences**2)) if lost + won else 1 / (len(differences) + 2)
    p_value = mcnemar(lost, won)
    return PairedDifference(
        documents=len(differences),
        lost=lost,
        won=won,
        both_right=int(((differences == 0) & (scores > 0)).sum()),
        points=intervals[0],
        simultaneous=intervals[1],
        bounds=_bounds(intervals, len(differences), lost, won, binary=_is_binary(baseline, scores)),
        p_value=p_value,
        p_holm=p_value,
        disagreement=disagreement,
        detectable=100 * detectable(len(differences), disagreement),
    )


def _intervals(
    baseline: Array,
    scores: Array,
    strata: Array,
    lost: int,
    won: int,
    levels: Sequence[float],
    rng: np.random.Generator,
    draws: int,
) -> list[Estimate]:
    documents = len(scores)
    if documents < 2:
        return [unbounded(float((scores - baseline).mean()), level) for level in levels]
    if _is_binary(baseline, scores):
        return [tango_interval(lost, won, documents, level) for level in levels]
    return paired_bootstrap(scores - baseline, strata, rng, levels, draws)


def _is_binary(*scores: Array) -> bool:
    return all(bool(np.isin(part, (0.0, 1.0)).all()) for part in scores) and len(scores[0]) > 1


def _bounds(intervals: Sequence[Estimate], documents: int, lost: int, won: int, *, binary: bool) -> Bounds:
    """The upper bounds, which reject, are corrected for continuity: half a document less is lost.

    Without it, a true drop at the margin is rejected more often than stated, since lost documents are few and skewed.
    """
    bounds = Bounds.of(intervals)
    if not binary or not lost:
        return bounds
    high, joint = (
        tango_interval(lost - 0.5, won + 0.5, documents, one.level).percent().high
        for one in (intervals[1], intervals[3])
    )
    return replace(bounds, high=max(bounds.high, high), joint_high=max(bounds.joint_high, joint))


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p-value of the hypothesis that lost and won documents are equally likely."""
    discordant = lost + won
    if discordant == 0:
        return 1.0
    return float(min(1.0, 2 * special.bdtr(min(lost, won), discordant, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the given order."""
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(raised))
    return [float(p) for p in adjusted]


def detectable(documents: int, disagreement: float) -> float:
    """The smallest difference, between 0 and 1, that a paired test of so many documents finds with 80 % power."""
    reach = float(special.ndtri(1 - SIGNIFICANCE / 2) + special.ndtri(POWER))
    return min(1.0, reach * math.sqrt(disagreement / documents))


def documents_for_margin(margin: float, comparisons: int) -> int | None:
    """Documents that show non-inferiority with 80 % power, if 10 % of the answers change and nothing is lost."""
    return documents_needed(0.1, 0.0, margin, Levels(comparisons=comparisons))


def documents_needed(disagreement: float, points: float, margin: float, levels: Levels) -> int | None:
    """Documents that show, with 80 % power, on which side of minus `margin` a true difference of `points` lies.

    A non-inferiority test at the level of the verdict; None if the difference is too close to the margin.
    """
    difference, edge = points / 100, -margin / 100
    if difference == edge:
        return None
    disagreement = max(disagreement, abs(difference), 1e-4)
    at_edge = tango_variance((disagreement - difference) / 2, (disagreement + difference) / 2, edge)
    level = levels.confirming if difference > edge else levels.joint
    reach = float(special.ndtri((1 + level) / 2)) * math.sqrt(at_edge)
    reach += float(special.ndtri(POWER)) * math.sqrt(disagreement - difference**2)
    needed = (reach / (difference - edge)) ** 2
    return math.ceil(needed) if needed <= NEVER else None


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
    stated = rows.described(documents, "level").dictionary_encode()
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

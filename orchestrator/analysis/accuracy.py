"""Paired accuracy differences: a configuration against k=1 on the same documents.

Over all documents, by subject and level, and document by document: which answers agree, and which got worse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from scipy import special

from orchestrator.analysis.columns import Array, to_numpy, varies_within
from orchestrator.analysis.intervals import (
    DRAWS,
    Bounds,
    Estimate,
    Levels,
    accuracy_interval,
    around,
    one_sided,
    paired_bootstrap,
    tango_interval,
    tango_variance,
)
from orchestrator.analysis.runs import TaskRuns
from orchestrator.core.configuration import DECODE_SETTINGS
from orchestrator.core.speed import group_codes

POWER = 0.8
SIGNIFICANCE = 0.05
TYPICAL_DISAGREEMENT = (0.05, 0.20)  # share of documents on which two configurations differ, low and high
MAX_DOCUMENTS_NEEDED = 10_000_000  # a larger number is not reported
MAX_LISTED_REGRESSIONS = 200  # per configuration
# Rows at k=1 that agree in these have the same answer. In half precision, another batch size may round differently.
SAME_ANSWER_KEYS = (*DECODE_SETTINGS, "device", "batch_size", "doc_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Accuracy in percentage points, configuration minus k=1: a drop is negative."""

    documents: int
    lost: int  # right at k=1, wrong here
    won: int
    both_right: int  # the same score above 0 on both sides
    points: Estimate
    simultaneous: Estimate  # at the level at which the intervals of all compared configurations hold together
    bounds: Bounds  # what the verdict compares with the margin
    p_value: float
    p_holm: float
    disagreement: float  # mean squared difference of scores; for a binary metric the share of documents lost or won
    detectable: float  # smallest difference from 0, in points, that is found with 80 % power

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
    differences, documents = scores - baseline, len(scores)
    lost, won = int((differences < 0).sum()), int((differences > 0).sum())
    binary = documents > 1 and all(bool(np.isin(side, (0.0, 1.0)).all()) for side in (baseline, scores))
    if binary:
        shares = [tango_interval(lost, won, documents, level) for level in levels.all]
    else:
        shares = paired_bootstrap(differences, strata, rng, levels.all, draws)
    intervals = [share.percent() for share in shares]
    disagreement = float(np.mean(differences**2)) if lost + won else 1 / (documents + 2)
    p_value = mcnemar(lost, won)
    return PairedDifference(
        documents=documents,
        lost=lost,
        won=won,
        both_right=int(((differences == 0) & (scores > 0)).sum()),
        points=intervals[0],
        simultaneous=intervals[1],
        bounds=_binary_bounds(intervals, documents, lost, won) if binary and lost else Bounds.of(intervals),
        p_value=p_value,
        p_holm=p_value,
        disagreement=disagreement,
        detectable=100 * detectable(documents, disagreement),
    )


def _binary_bounds(intervals: Sequence[Estimate], documents: int, lost: int, won: int) -> Bounds:
    """Bounds of a binary metric: the upper ones, which reject, assume that half a document less is lost.

    Without this correction for continuity, a true drop at the margin is rejected more often than stated, because lost
    documents are few and their distribution is skewed.
    """
    bounds = Bounds.of(intervals)
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
    """Holm's adjusted p-values, in the order of `p_values`."""
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
    """Documents needed to show non-inferiority with 80 % power if 10 % of the answers change, as many lost as won.

    None if no reasonable number is enough.
    """
    return documents_needed(0.1, 0.0, margin, Levels(comparisons=comparisons))


def documents_needed(disagreement: float, points: float, margin: float, levels: Levels) -> int | None:
    """Documents needed to show, with 80 % power, on which side of minus `margin` a true difference of `points` lies.

    The test is one of non-inferiority, at the level of the verdict. None if the difference is too close to the margin.
    """
    difference, edge = points / 100, -margin / 100
    if difference == edge:
        return None
    disagreement = max(disagreement, abs(difference), 1e-4)
    at_edge = tango_variance((disagreement - difference) / 2, (disagreement + difference) / 2, edge)
    level = levels.confirming if difference > edge else levels.joint
    reach = float(special.ndtri(one_sided(level))) * math.sqrt(at_edge)
    reach += float(special.ndtri(POWER)) * math.sqrt(disagreement - difference**2)
    needed = (reach / (difference - edge)) ** 2
    return math.ceil(needed) if needed <= MAX_DOCUMENTS_NEEDED else None


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
    """Compares two groups of runs within each subject and level; `level` is each document's code into `levels`."""
    base, ours = rows.mean(baseline, "score"), rows.mean(runs, "score")
    return Breakdown(
        by_subject=_subgroups(base, ours, rows.strata, rows.subtasks) if len(rows.subtasks) > 1 else (),
        by_level=_subgroups(base, ours, level, levels),
        subject_p=heterogeneity(ours - base, rows.strata),
        level_p=heterogeneity(ours - base, level),
    )


def heterogeneity(differences: Array, code: Array) -> float | None:
    """P-value of the hypothesis that the mean difference is the same in all groups; None if nothing can differ.

    The sum of squares between groups ÷ the total variance is compared with the chi-squared distribution.
    """
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
    answers, present = rows.columns["answer"][cells], cells >= 0

    def share(a: int, b: int) -> float | None:
        both = present[a] & present[b]
        return float((answers[a][both] == answers[b][both]).mean()) if both.any() else None

    return tuple(tuple(share(a, b) for b in range(len(runs))) for a in range(len(runs)))


def differing_answers(rows: TaskRuns, indices: Array, *keys: Array) -> tuple[Array, int]:
    """Which of these rows have different answers although they should agree, and how many groups they form.

    Rows should agree if they have the same SAME_ANSWER_KEYS and the same values of `keys` (one value per row).
    """
    if not len(indices):
        return indices, 0
    columns = (*keys, *(rows.columns[name] for name in SAME_ANSWER_KEYS))
    group, count = group_codes(*(column[indices] for column in columns))
    differs = varies_within(rows.columns["answer"][indices], group, count)
    return indices[differs[group]], int(differs.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression:
    """A document that k=1 got right and a configuration got wrong, and the trials that produced the two answers."""

    doc_id: str
    subtask: str
    baseline_trial: str
    trial: str


def find_regressions(rows: TaskRuns, runs: Array, baseline: Array) -> tuple[Regression, ...]:
    """Documents on which these runs scored lower than the baseline, in document order; at most MAX_LISTED_REGRESSIONS.

    Each names the trials of the first baseline run that has the document and of the run that scored lowest.
    """
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

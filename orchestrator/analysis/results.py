"""The result of an analysis: everything that a report shows about its tasks, and about all tasks pooled."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from orchestrator.analysis.accuracy import Breakdown, PairedDifference, Regression, mcnemar
from orchestrator.analysis.costs import (
    REFERENCE,
    SPEED,
    Explanation,
    ModelledSpeedup,
    Ranking,
    ShardRatio,
    family_order,
)
from orchestrator.analysis.gates import Finding
from orchestrator.analysis.intervals import Bounds, Estimate, Levels, exp, log
from orchestrator.analysis.raced import RaceResult
from orchestrator.analysis.runs import SUBSETS, Histogram, ResolvedConfiguration
from orchestrator.analysis.speedups import NoiseFloor, Speedup, Throughput
from orchestrator.analysis.trial_facts import AttemptTimeline
from orchestrator.analysis.verdicts import (
    Compared,
    Criteria,
    Verdict,
    judge_all,
    judge_task,
    no_verdict_yet,
    withhold,
)
from orchestrator.core.configuration import Configuration
from orchestrator.core.race import RaceEntry
from orchestrator.core.speed import MAX_LENGTH_CHANGE


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A configuration against the pooled k=1 with its decode settings, on the documents both have."""

    documents: int
    difference: PairedDifference
    speedup: Speedup | None  # None if no times can be compared; not judged if nothing is generated
    verdict: Verdict
    gates: tuple[str, ...]  # that failed and withhold the verdict
    explanation: Explanation | None
    modelled: ModelledSpeedup | None  # a second estimate of the speed-up, from counters; decides nothing
    shards: tuple[ShardRatio, ...]  # speed-up on each shard, in order of time
    regressions: tuple[Regression, ...]  # the first ones; `difference.lost` counts all
    breakdown: Breakdown
    race: RaceResult | None = None  # None: the sweep is not a race


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigurationResult:
    """One configuration, all its repeats together. Accuracy lies between 0 and 1."""

    resolved: ResolvedConfiguration
    repeats: int
    trials: int
    documents: int
    wanted: int
    accuracy: Estimate
    throughput: Throughput
    steps: Histogram
    lengths: Histogram
    comparison: Comparison | None  # None for k=1, and if no k=1 ran with these settings
    ranking: Ranking | None = None  # None if nothing is generated

    @property
    def configuration(self) -> Configuration:
        return self.resolved.configuration

    @property
    def label(self) -> str:
        return self.resolved.label

    @property
    def difference(self) -> PairedDifference | None:
        return None if self.comparison is None else self.comparison.difference

    @property
    def speedup(self) -> Speedup | None:
        return None if self.comparison is None else self.comparison.speedup

    @property
    def on_front(self) -> bool:
        """No other configuration of the task dominates its accuracy and speed."""
        return self.ranking is not None and self.ranking.on_front(SPEED)

    @property
    def tokens_per_second(self) -> float:
        """0 if nothing is generated."""
        rate = self.throughput.tokens_per_second
        return 0.0 if rate is None else rate.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """Pooled runs at k=1 with one set of decode settings."""

    configuration: Configuration  # that of the first run
    labels: tuple[str, ...]
    documents: int
    accuracy: Estimate
    throughput: Throughput
    noise_floor: NoiseFloor | None  # None: there is only one run


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """All results of one task."""

    task: str
    kind: str  # generate or loglikelihood
    primary: str
    wanted: int
    documents: int  # answered by at least one run
    comparisons: int  # configurations judged together
    detectable: tuple[float, float]  # points that this number of documents can show if 5 % or 20 % of answers change
    baselines: tuple[Baseline, ...]
    configurations: tuple[ConfigurationResult, ...]
    verdict: Verdict
    agreement: tuple[tuple[float | None, ...], ...]  # share of identical answers, in the order of configurations
    missing: tuple[str, ...]  # sentences about what has not run yet
    race: tuple[RaceEntry, ...] = ()  # of all configurations, k=1 included; empty if the sweep is not a race


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledComparison:
    """A configuration against k=1 over all tasks."""

    label: str
    difference: PairedDifference
    speedup: Speedup | None  # None if no task generates
    verdict: Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledResult:
    """Verdicts over all tasks together."""

    tasks: tuple[str, ...]
    comparisons: tuple[PooledComparison, ...]
    verdict: Verdict
    declared: bool  # False: the sweep did not declare pooling before its run, so the verdicts are exploratory


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """All results of a sweep, or of several sweeps that were analysed together."""

    sweeps: tuple[str, ...]
    rows: int
    criteria: Criteria  # that the verdicts apply
    declared: Criteria  # that sweep.json declares
    tasks: tuple[TaskResult, ...]
    gates: tuple[Finding, ...]
    timeline: AttemptTimeline
    pooled: PooledResult | None = None  # None unless several tasks share a configuration

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.gates if not finding.ok)


def as_json(value: object) -> object:
    """An analysis, or any part of it, as JSON types; NaN and infinity become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return as_json(value.tolist())
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    assert value is None or isinstance(value, str | int | float | bool), f"{value!r} is not JSON"
    return value


def sort_configurations(task: TaskResult) -> TaskResult:
    """The same result with its configurations sorted as tables list them: by settings, k, mode and subset."""
    order = sorted(range(len(task.configurations)), key=lambda index: _sort_key(task.configurations[index].resolved))
    return replace(
        task,
        configurations=tuple(task.configurations[index] for index in order),
        agreement=tuple(tuple(task.agreement[a][b] for b in order) for a in order),
    )


def _sort_key(own: ResolvedConfiguration) -> tuple[object, ...]:
    named = SUBSETS[:3]
    subset = named.index(own.subset) if own.subset in named else len(named)
    return own.settings, own.k is None, own.k or 0, own.mode or "", subset, own.label


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The most accurate configuration and the fastest one; a tie goes to the faster or the more accurate one."""

    accurate: ConfigurationResult
    fast: ConfigurationResult | None  # None if nothing is generated


def best(results: Sequence[ConfigurationResult]) -> Best:
    fast = [result for result in results if result.tokens_per_second > 0]
    return Best(
        accurate=max(results, key=lambda result: (result.accuracy.value, result.tokens_per_second)),
        fast=max(fast, key=lambda result: (result.tokens_per_second, result.accuracy.value)) if fast else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyParallelism:
    """How many tokens a family of policies reveals per forward pass, and at which accuracy."""

    family: str
    configurations: int
    tokens_per_pass: float  # the highest of the family
    area: float  # AUP, see `area_under_parallelism`


def family_parallelism(task: TaskResult) -> list[FamilyParallelism]:
    """By policy family; k=1, where every curve starts, counts in each of them."""
    points: dict[str, list[tuple[float, float]]] = {}
    for result in task.configurations:
        rate = result.throughput.tokens_per_pass
        if result.ranking is not None and rate:
            points.setdefault(result.ranking.family, []).append((rate, 100 * result.accuracy.value))
    start = points.get(REFERENCE, [])
    return [
        FamilyParallelism(
            family=family,
            configurations=len(own),
            tokens_per_pass=max(rate for rate, _ in own),
            area=area_under_parallelism([*own, *(start if family != REFERENCE else ())]),
        )
        for family, own in sorted(points.items(), key=lambda item: family_order(item[0]))
    ]


def area_under_parallelism(points: Sequence[tuple[float, float]]) -> float:
    """AUP: the area under accuracy (in percent) over tokens per forward pass, from 0 to the highest.

    Up to the slowest point its accuracy counts; from there on, trapezoids between neighbours.
    """
    ordered = sorted(points)
    (rate, accuracy), *_ = ordered
    area = rate * accuracy
    for (left, low), (right, high) in pairwise(ordered):
        area += (right - left) * (low + high) / 2
    return area


def best_by_k(task: TaskResult) -> list[tuple[int | None, Best]]:
    """The best configurations of each period k, k=1 first; policies without a period (None) last."""
    periods = sorted({r.resolved.k for r in task.configurations}, key=lambda k: (k is None, k or 0))
    return [(k, best([r for r in task.configurations if r.resolved.k == k])) for k in periods]


# Pooled over tasks: every task has the same weight, its documents are a stratum of their own. The accuracy difference
# is the mean of the tasks' differences, the speed-up the geometric mean of those of the generating tasks. An end of a
# pooled interval follows from the tasks' ends by adding their squared distances, since the tasks' documents and trials
# are independent (MOVER: Zou and Donner, Statistics in Medicine 27, 2008).
SWEEP = "the sweep"  # what the pooled verdict is on


def pool_tasks(
    tasks: Mapping[str, Mapping[str, Comparison]],
    criteria: Criteria,
    *,
    looks: int,
    missing: Sequence[str],
    declared: bool,
) -> PooledResult | None:
    """The pooled verdicts on the configurations that all tasks have; None with a single task or without any of these.

    `tasks` maps task → configuration label → comparison.
    """
    first = next(iter(tasks.values()), {})
    labels = [label for label in first if all(label in other for other in tasks.values())]
    if len(tasks) < 2 or not labels:
        return None
    by_label = {label: [task[label] for task in tasks.values()] for label in labels}
    compared = [
        Compared(
            label=label,
            difference=_pooled_difference([part.difference for part in parts]),
            speedup=_pooled_speedup([part.speedup for part in parts if part.speedup and part.speedup.tokens]),
        )
        for label, parts in by_label.items()
    ]
    generates = any(one.speedup is not None for one in compared)
    gates = [list(dict.fromkeys(gate for part in parts for gate in part.gates)) for parts in by_label.values()]
    if missing:
        verdicts = no_verdict_yet(compared, missing, criteria)
    else:
        levels = Levels(comparisons=len(labels), looks=looks)
        verdicts = judge_all(compared, criteria, levels, generates=generates, valid=not any(gates))
        verdicts = [
            withhold(label, verdict, failed) for label, verdict, failed in zip(labels, verdicts, gates, strict=True)
        ]
    results = [
        PooledComparison(label=one.label, difference=one.difference, speedup=one.speedup, verdict=verdict)
        for one, verdict in zip(compared, verdicts, strict=True)
    ]
    return PooledResult(
        tasks=tuple(tasks),
        comparisons=tuple(results),
        verdict=judge_task(
            SWEEP,
            [(one.label, one.verdict) for one in results],
            criteria,
            list(dict.fromkeys(gate for failed in gates for gate in failed)),
        ),
        declared=declared,
    )


def _end(values: Sequence[float], ends: Sequence[float], side: int) -> float:
    """The lower (`side` −1) or upper (1) end of a mean's interval, from the ends of its parts' intervals."""
    mean = sum(values) / len(values)
    return mean + side * math.hypot(*(end - value for value, end in zip(values, ends, strict=True))) / len(values)


def _pooled_estimate(parts: Sequence[Estimate]) -> Estimate:
    values = [part.value for part in parts]
    return Estimate(
        value=sum(values) / len(values),
        low=_end(values, [part.low for part in parts], -1),
        high=_end(values, [part.high for part in parts], 1),
        level=min(part.level for part in parts),
    )


def _pooled_bounds(values: Sequence[float], parts: Sequence[Bounds]) -> Bounds:
    return Bounds(
        low=_end(values, [part.low for part in parts], -1),
        low_level=min(part.low_level for part in parts),
        high=_end(values, [part.high for part in parts], 1),
        high_level=min(part.high_level for part in parts),
        joint_high=_end(values, [part.joint_high for part in parts], 1),
        joint_level=min(part.joint_level for part in parts),
    )


def _pooled_difference(parts: Sequence[PairedDifference]) -> PairedDifference:
    documents = sum(part.documents for part in parts)
    lost, won = sum(part.lost for part in parts), sum(part.won for part in parts)
    disagreement = documents * sum(part.disagreement / part.documents for part in parts) / len(parts) ** 2
    return PairedDifference(
        documents=documents,
        lost=lost,
        won=won,
        both_right=sum(part.both_right for part in parts),
        points=_pooled_estimate([part.points for part in parts]),
        simultaneous=_pooled_estimate([part.simultaneous for part in parts]),
        bounds=_pooled_bounds([part.points.value for part in parts], [part.bounds for part in parts]),
        p_value=mcnemar(lost, won),
        p_holm=mcnemar(lost, won),
        disagreement=disagreement,
        detectable=math.hypot(*(part.detectable for part in parts)) / len(parts),
    )


def _pooled_speedup(parts: Sequence[Speedup]) -> Speedup | None:
    """The geometric mean of the speed-ups of the tasks that generate; None if none does."""
    if not parts:
        return None

    def estimate(of: Callable[[Speedup], Estimate | None]) -> Estimate:
        return _pooled_estimate([own.mapped(log) for part in parts if (own := of(part)) is not None]).exp()

    def bounds(of: Callable[[Speedup], Estimate | None], at: Callable[[Speedup], Bounds | None]) -> Bounds:
        values = [log(own.value) for part in parts if (own := of(part)) is not None]
        logs = [ends.mapped(log) for part in parts if (ends := at(part)) is not None]
        return _pooled_bounds(values, logs).mapped(exp)

    length = estimate(lambda one: one.length)
    return Speedup(
        documents=sum(one.documents for one in parts),
        trials=sum(one.trials for one in parts),
        tokens=estimate(lambda one: one.tokens),
        tokens_simultaneous=estimate(lambda one: one.tokens_simultaneous),
        tokens_bounds=bounds(lambda one: one.tokens, lambda one: one.tokens_bounds),
        seconds=estimate(lambda one: one.seconds),
        seconds_simultaneous=estimate(lambda one: one.seconds_simultaneous),
        seconds_bounds=bounds(lambda one: one.seconds, lambda one: one.seconds_bounds),
        length=length,
        length_changed=abs(length.value - 1) > MAX_LENGTH_CHANGE or any(one.length_changed for one in parts),
        noise_known=all(one.noise_known for one in parts),
    )

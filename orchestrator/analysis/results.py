"""The result of an analysis, as values: everything that a report shows."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.analysis.accuracy import PairedDifference
from orchestrator.analysis.details import Breakdown, Histogram, Regression, ShardRatio
from orchestrator.analysis.explain import Explanation, ModelledSpeedup
from orchestrator.analysis.gates import Finding
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.pooled import PooledResult
from orchestrator.analysis.ranking import SPEED, Ranking
from orchestrator.analysis.runs import SUBSETS, ResolvedConfiguration, TrialAttempt
from orchestrator.analysis.speedups import NoiseFloor, Speedup, Throughput
from orchestrator.analysis.verdicts import Criteria, Verdict
from orchestrator.core.configuration import Configuration


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
    shards: tuple[ShardRatio, ...]  # speed-up of each shard, in order of time
    regressions: tuple[Regression, ...]  # the first ones; `difference.lost` counts all
    breakdown: Breakdown


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
    task: str
    kind: str  # generate or loglikelihood
    primary: str
    wanted: int
    documents: int  # answered by at least one run
    comparisons: int  # configurations judged together
    detectable: tuple[float, float]  # points that so many documents can show, if 5 % or 20 % of them change
    baselines: tuple[Baseline, ...]
    configurations: tuple[ConfigurationResult, ...]
    verdict: Verdict
    agreement: tuple[tuple[float | None, ...], ...]  # share of identical answers, in the order of configurations
    missing: tuple[str, ...]  # sentences about what has not run yet


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    sweeps: tuple[str, ...]
    rows: int
    criteria: Criteria
    declared: Criteria
    tasks: tuple[TaskResult, ...]
    gates: tuple[Finding, ...]
    timeline: tuple[TrialAttempt, ...]
    pooled: PooledResult | None = None  # None unless several tasks share a configuration

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.gates if not finding.ok)


def as_json(value: object) -> object:
    """An analysis, or any part of it, as JSON types; NaN and infinity become null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    assert value is None or isinstance(value, str | int | float | bool), f"{value!r} is not JSON"
    return value


def sort_configurations(task: TaskResult) -> TaskResult:
    """The same result with configurations by settings, k, mode and subset, as tables list them."""
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
    """The most accurate configuration and the fastest one; ties are broken by the other quality."""

    accurate: ConfigurationResult
    fast: ConfigurationResult | None  # None if nothing is generated


def best(results: Sequence[ConfigurationResult]) -> Best:
    fast = [result for result in results if result.tokens_per_second > 0]
    return Best(
        accurate=max(results, key=lambda result: (result.accuracy.value, result.tokens_per_second)),
        fast=max(fast, key=lambda result: (result.tokens_per_second, result.accuracy.value)) if fast else None,
    )


def best_by_k(task: TaskResult) -> list[tuple[int | None, Best]]:
    """k=1 first; policies without a period last."""
    periods = sorted({r.resolved.k for r in task.configurations}, key=lambda k: (k is None, k or 0))
    return [(k, best([r for r in task.configurations if r.resolved.k == k])) for k in periods]

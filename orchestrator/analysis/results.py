"""What an analysis found, as values: everything a report draws or prints, nothing it would have to compute."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.analysis.accuracy import Difference
from orchestrator.analysis.details import Breakdown, Breaks, Histogram
from orchestrator.analysis.explain import Explanation
from orchestrator.analysis.gates import Finding
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.ranking import Standing
from orchestrator.analysis.runs import Configuration, Trial
from orchestrator.analysis.speedups import NoiseFloor, Speedup, Throughput
from orchestrator.analysis.verdicts import Criteria, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A configuration against the pooled k=1 with its decode settings, on the documents both have."""

    documents: int
    unpaired: int  # documents that only one side has
    difference: Difference
    speedup: Speedup | None  # None where the sides share no time; never judged where nothing is generated
    verdict: Verdict
    explanation: Explanation | None
    breaks: Breaks
    breakdown: Breakdown


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigurationResult:
    """One configuration, all its repeats together. Accuracy lies between 0 and 1."""

    configuration: Configuration
    repeats: int
    trials: int
    documents: int
    wanted: int
    accuracy: Estimate
    throughput: Throughput
    steps: Histogram
    lengths: Histogram
    comparison: (
        Comparison | None
    )  # with k=1 at the same settings; None for k=1, and where no k=1 ran with these settings
    relative_speed: Estimate | None  # of tokens/s against k=1 at the task's first settings: one axis for all
    pareto: bool  # no other configuration of the task is as accurate and, on that axis, as fast
    standing: Standing | None = None  # beside all others, decode settings included; None where nothing is generated

    @property
    def label(self) -> str:
        return self.configuration.label


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """Pooled runs at k=1 with one set of decode settings."""

    threshold: float
    small_block: int
    block_cache: bool
    labels: tuple[str, ...]
    documents: int
    accuracy: Estimate
    throughput: Throughput
    floor: NoiseFloor | None  # None: one run only


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    task: str
    kind: str  # generate or loglikelihood
    primary: str
    wanted: int
    documents: int  # answered by at least one run
    family: int  # configurations judged together
    detectable: tuple[float, float]  # points that so many documents can show, if 5 % or 20 % of them change
    baselines: tuple[Baseline, ...]
    configurations: tuple[ConfigurationResult, ...]
    hypothesis: Verdict
    agreement: tuple[tuple[float | None, ...], ...]  # share of identical answers, in the order of configurations
    missing: tuple[str, ...]  # what is not there yet, in sentences


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    sweeps: tuple[str, ...]
    rows: int
    criteria: Criteria
    declared: Criteria
    tasks: tuple[TaskResult, ...]
    gates: tuple[Finding, ...]
    timeline: tuple[Trial, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.gates if not finding.ok)


def as_json(value: object) -> object:
    """An analysis, or any part of it, as JSON's own types; a number that is none becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    assert value is None or isinstance(value, str | int | float | bool), f"{value!r} is not JSON"
    return value


SUBSETS = ("first", "middle", "last")


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """Of one task: the most accurate configuration and the fastest one; of equals the other quality decides."""

    accurate: ConfigurationResult
    fast: ConfigurationResult | None  # None where nothing is generated


def ordered(task: TaskResult) -> TaskResult:
    """The same result with configurations by k, subset and settings, as tables list them."""
    places = sorted(range(len(task.configurations)), key=lambda place: _order(task.configurations[place]))
    return replace(
        task,
        configurations=tuple(task.configurations[place] for place in places),
        agreement=tuple(tuple(task.agreement[a][b] for b in places) for a in places),
    )


def _order(result: ConfigurationResult) -> tuple[object, ...]:
    own = result.configuration
    subset = SUBSETS.index(own.subset) if own.subset in SUBSETS else len(SUBSETS)
    return own.settings, own.k is None, own.k or 0, own.mode or "", subset, own.label


def best(results: Sequence[ConfigurationResult]) -> Best:
    speed = {id(result): _speed(result) for result in results}
    fast = [result for result in results if speed[id(result)] > 0]
    return Best(
        accurate=max(results, key=lambda result: (result.accuracy.value, speed[id(result)])),
        fast=max(fast, key=lambda result: (speed[id(result)], result.accuracy.value)) if fast else None,
    )


def best_of_each_k(task: TaskResult) -> list[tuple[int | None, Best]]:
    """k=1 first; policies without a period last."""
    periods = sorted({r.configuration.k for r in task.configurations}, key=lambda k: (k is None, k or 0))
    return [(k, best([r for r in task.configurations if r.configuration.k == k])) for k in periods]


def _speed(result: ConfigurationResult) -> float:
    rate = result.throughput.tokens_per_second
    return 0.0 if rate is None else rate.value

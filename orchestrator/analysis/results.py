"""What an analysis found, as values: everything a report draws or prints, nothing it would have to compute."""

import dataclasses
import math
from dataclasses import dataclass

from orchestrator.analysis.accuracy import Difference
from orchestrator.analysis.breakdown import Breakdown
from orchestrator.analysis.breaks import Breaks
from orchestrator.analysis.explain import Explanation
from orchestrator.analysis.findings import Finding
from orchestrator.analysis.noise import NoiseFloor
from orchestrator.analysis.pairs import Configuration
from orchestrator.analysis.resample import Estimate
from orchestrator.analysis.shapes import Histogram, Trial
from orchestrator.analysis.speed import Speedup, Throughput
from orchestrator.analysis.standing import Standing
from orchestrator.analysis.verdict import Criteria, Verdict


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

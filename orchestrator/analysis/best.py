"""Which configurations to name: an order for tables, the best of each k and of a benchmark. Compares values only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.analysis.results import ConfigurationResult, TaskResult

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

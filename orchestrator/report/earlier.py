"""An earlier experiment's means beside ours, configuration by configuration. Pairs nothing, tests nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.analysis.earlier_results import OldRow, OldTask, caveats, read_folder
from orchestrator.analysis.results import ConfigurationResult, TaskResult


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    old: OldRow
    ours: ConfigurationResult | None  # None where we have no such configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierTask:
    name: str
    in_ours: bool
    rows: tuple[Beside, ...]
    anomalies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """What stands beside one section, and what must be known about it."""

    folder: str
    caveats: tuple[str, ...]
    tasks: tuple[EarlierTask, ...]


def read_earlier(folder: Path) -> tuple[OldTask, ...]:
    """InputError where there is nothing to compare with."""
    return read_folder(folder)


def beside(old: Sequence[OldTask], ours: Sequence[TaskResult], folder: Path) -> Earlier:
    results = {task.task: task for task in ours}
    tasks = tuple(_task(one, results.get(one.task)) for one in old)
    return Earlier(folder=folder.resolve().name, caveats=caveats(old), tasks=tasks)


def _task(old: OldTask, ours: TaskResult | None) -> EarlierTask:
    found: dict[str, ConfigurationResult] = {}
    for result in ours.configurations if ours is not None else ():
        found.setdefault(result.configuration.policy, result)
    return EarlierTask(
        name=old.task + (f" (first {old.limit} of each subject)" if old.limit else ""),
        in_ours=ours is not None,
        rows=tuple(Beside(old=row, ours=found.get(row.summary.config)) for row in old.rows),
        anomalies=old.anomalies,
    )

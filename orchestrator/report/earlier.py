"""Earlier results as summary.json files, in the original experiment's format or as our report writes them.

Such a file holds means and times but no documents, so its results are never paired with rows: differences between two
files are differences of means.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.analysis.runs import SUBSETS
from orchestrator.store.files import CorruptedFile, read_regular
from sampler.errors import InputError

UNPAIRED = "without documents, so nothing is paired"
CAVEATS = (
    f"{UNPAIRED} and no interval is possible",
    "tokens per second counted padding after the stop token and included loading the model",
    "layers that should have been replayed still ran, and k=1 ran without the block cache",
)
MAX_NUMBER = 1e18  # JSON numbers may be too large for arithmetic
MAX_REPLICATE_RATIO = 1.5  # of the speeds of configurations that are identical by definition


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One summary.json; accuracy lies between 0 and 1."""

    task: str
    limit: int | None
    config: str
    k: int | None
    accuracy: float
    tokens: int | None
    seconds: float | None
    tokens_per_second: float | None
    timestamp: str
    reported_drop: float | None  # points, if the experiment's own table states it (from rounded accuracies)
    ours: bool = False  # written by a report of this program

    def __post_init__(self) -> None:
        if not 0 <= self.accuracy <= 1:
            raise InputError(f"{self.task} {self.config}: accuracy must be between 0 and 1 (got {self.accuracy})")


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierResult:
    summary: Summary
    drop: float | None  # points against the mean accuracy of k=1; negative is worse
    speed_ratio: float | None  # tokens/s against the median of k=1


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierTaskResults:
    task: str
    limit: int | None
    rows: tuple[EarlierResult, ...]
    anomalies: tuple[str, ...]


def read_summaries(folder: Path) -> tuple[EarlierTaskResults, ...]:
    """All summary.json files below a folder, by task."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory; give a directory with summary.json files")
    paths = sorted(folder.rglob("summary.json"))
    if not paths:
        raise InputError(f"{folder} contains no summary.json; give a directory with results of an earlier experiment")
    return compare_by_task([read_summary(path) for path in paths])


def read_summary(path: Path) -> Summary:
    try:
        content = json.loads(read_regular(path).decode())
    except (OSError, CorruptedFile) as error:
        raise InputError(f"cannot read {path} ({getattr(error, 'strerror', None) or error})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error})") from None
    return parse_summary(content, str(path))


def parse_summary(content: object, origin: str) -> Summary:
    """`origin` names the file in errors."""
    if not isinstance(content, Mapping):
        raise InputError(f"{origin} must contain a JSON object")
    for key in ("task", "config", "accuracy"):
        if content.get(key) is None:
            raise InputError(f"{origin} lacks {key!r}; a summary.json has task, config and accuracy")
    timing = _object(content, "throughput", origin)
    task, limit = _task_and_limit(str(content["task"]), _object(content, "eval_params", origin), origin)
    config = content["config"]
    name = str(config.get("name", "")) if isinstance(config, Mapping) else str(config)
    matched = re.match(r"k([0-9]{1,9})", name)
    tokens = _nonnegative(timing, "tokens_generated", origin)
    accuracy = _number(content, "accuracy", origin)
    assert accuracy is not None
    return Summary(
        task=task,
        limit=limit,
        config=name,
        k=int(matched[1]) if matched else None,
        accuracy=accuracy / 100 if accuracy > 1 else accuracy,
        tokens=None if tokens is None else int(tokens),
        seconds=_nonnegative(timing, "total_time_s", origin),
        tokens_per_second=_nonnegative(timing, "tokens_per_s", origin),
        timestamp=str(content.get("timestamp") or ""),
        reported_drop=_number(content, "reported_drop_points", origin),
        ours={"gates", "counters", "intervals"} <= content.keys(),
    )


def _task_and_limit(task: str, parameters: Mapping[str, Any], origin: str) -> tuple[str, int | None]:
    """The limit is in the parameters, or in the task's name."""
    matched = re.fullmatch(r"(.+)_limit_([0-9]{1,9})", task)
    if matched:
        return matched[1], int(matched[2])
    limit = _nonnegative(parameters, "limit", origin)
    return task, None if limit is None else int(limit)


def _object(content: Mapping[str, Any], key: str, origin: str) -> Mapping[str, Any]:
    value = content.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise InputError(f"{origin}: {key} must be a JSON object or null")
    return value or {}


def _number(content: Mapping[str, Any], key: str, origin: str) -> float | None:
    value = content.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
        raise InputError(f"{origin}: {key} must be a number (got {str(value)[:80]!r})")
    return float(value)


def _nonnegative(content: Mapping[str, Any], key: str, origin: str) -> float | None:
    value = _number(content, key, origin)
    if value is not None and value < 0:
        raise InputError(f"{origin}: {key} must not be negative (got {value:g})")
    return value


def compare_by_task(summaries: Sequence[Summary]) -> tuple[EarlierTaskResults, ...]:
    """Each task's configurations against its own k=1, and their anomalies."""
    by_task: dict[tuple[str, int | None], list[Summary]] = {}
    for one in sorted(summaries, key=lambda one: (one.k or 0, _subset_order(one.config), one.config)):
        by_task.setdefault((one.task, one.limit), []).append(one)
    return tuple(
        EarlierTaskResults(task=task, limit=limit, rows=_results(group), anomalies=tuple(find_anomalies(group)))
        for (task, limit), group in by_task.items()
    )


def caveats(tasks: Sequence[EarlierTaskResults]) -> tuple[str, ...]:
    """Limits of these numbers; those of our own reports do not have the original experiment's faults."""
    return (UNPAIRED,) if all(row.summary.ours for task in tasks for row in task.rows) else CAVEATS


def _results(group: Sequence[Summary]) -> tuple[EarlierResult, ...]:
    baselines = [one for one in group if one.k == 1]
    speeds = [one.tokens_per_second for one in baselines if one.tokens_per_second]
    accuracy = float(np.mean([one.accuracy for one in baselines])) if baselines else None
    speed = float(np.median(speeds)) if speeds else None
    return tuple(
        EarlierResult(
            summary=one,
            drop=None if accuracy is None else 100 * (one.accuracy - accuracy),
            speed_ratio=one.tokens_per_second / speed if one.tokens_per_second and speed else None,
        )
        for one in group
    )


def _subset_order(config: str) -> int:
    subsets = SUBSETS[:3]
    return next((i for i, subset in enumerate(subsets) if subset in config), len(subsets))


def find_anomalies(group: Sequence[Summary]) -> list[str]:
    """Identical configurations of one task that differ, and different ones that are identical."""
    found = _outlying_replicate([(one.config, one.tokens_per_second or 0.0) for one in group if one.k == 1])
    if len({one.accuracy for one in group if one.k == 1}) > 1:
        found.append("The k=1 configurations differ in accuracy, though they are identical by definition.")
    if len(group) > 2 and len({one.k for one in group}) > 1 and len({one.accuracy for one in group}) == 1:
        found.append(
            f"All {len(group)} configurations have exactly the same accuracy ({group[0].accuracy:.2%}): the policy "
            "never reached the model."
        )
    return found


def _outlying_replicate(replicates: Sequence[tuple[str, float]]) -> list[str]:
    """Of identical configurations, the one whose tokens/s is furthest from the others."""
    timed = [(config, speed) for config, speed in replicates if speed]
    if len(timed) < 2:
        return []
    middle = float(np.median([speed for _, speed in timed]))
    outlier = max(timed, key=lambda one: abs(math.log(one[1] / middle)))
    others = [one for one in timed if one is not outlier]
    (config, speed), usual = outlier, float(np.mean([speed for _, speed in others]))
    ratio = max(speed / usual, usual / speed)
    if ratio < MAX_REPLICATE_RATIO:
        return []
    names = " and ".join(f"{name} ({rate:g})" for name, rate in others)
    return [
        f"{config} ran at {speed:g} tokens/s, {ratio:.1f} times {'slower' if speed < usual else 'faster'} than "
        f"{names}, though these configurations are identical by definition: a cold start, or another load on the "
        "machine. It cannot be used as a baseline for speed-ups."
    ]

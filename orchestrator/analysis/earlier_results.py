"""Earlier results in the experiment's own summary.json format, to stand beside ours. Never paired with our rows.

Such a file holds a mean and a clock, no documents: differences between two of them are differences of means, and their
tokens per second counted padding and the loading of the model. The one module here that reads files.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sampler.errors import InputError

UNPAIRED = "no documents, so nothing is paired"
CAVEATS = (
    f"{UNPAIRED} and no interval is possible",
    "tokens per second counted padding after the stop token and included loading the model",
    "layers that were to be replayed still ran, and k=1 ran without the block cache",
)
LARGEST = 1e18  # of anything that a summary counts; a JSON number may be too large for any arithmetic
TWINS_APART = 1.5  # fastest ÷ slowest of configurations that are the same by definition


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One configuration of an earlier experiment; accuracy lies between 0 and 1."""

    task: str
    limit: int | None
    config: str
    k: int | None
    accuracy: float
    tokens: int | None
    seconds: float | None
    tokens_per_second: float | None
    timestamp: str
    reported_drop: float | None  # points, where the experiment's own table states it (from rounded accuracies)
    ours: bool = False  # written by a report of this program

    def __post_init__(self) -> None:
        if not 0 <= self.accuracy <= 1:
            raise InputError(f"{self.task} {self.config}: accuracy {self.accuracy} is outside 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class OldRow:
    summary: Summary
    drop: float | None  # points against the mean accuracy of k=1; negative is worse
    speed_ratio: float | None  # tokens/s against the median of k=1


@dataclass(frozen=True, kw_only=True, slots=True)
class OldTask:
    task: str
    limit: int | None
    rows: tuple[OldRow, ...]
    anomalies: tuple[str, ...]


def read_folder(folder: Path) -> tuple[OldTask, ...]:
    """All summary.json files below a folder, by task."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; a folder with summary.json files is needed")
    paths = sorted(folder.rglob("summary.json"))
    if not paths:
        raise InputError(f"{folder} holds no summary.json; a folder of an earlier experiment's results is needed")
    return tables([read_file(path) for path in paths])


def read_file(path: Path) -> Summary:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); a readable file is needed") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error})") from None
    return summary(content, str(path))


def summary(content: object, origin: str) -> Summary:
    """A file's content; `origin` names it in errors."""
    if not isinstance(content, Mapping):
        raise InputError(f"{origin} holds no JSON object")
    for key in ("task", "config", "accuracy"):
        if content.get(key) is None:
            raise InputError(f"{origin} lacks {key!r}; the experiment's summary.json has task, config and accuracy")
    clock = _object(content, "throughput", origin)
    task, limit = _task_and_limit(str(content["task"]), _object(content, "eval_params", origin), origin)
    config = content["config"]
    name = str(config.get("name", "")) if isinstance(config, Mapping) else str(config)
    matched = re.match(r"k([0-9]{1,9})", name)
    tokens = _amount(clock, "tokens_generated", origin)
    return Summary(
        task=task,
        limit=limit,
        config=name,
        k=int(matched[1]) if matched else None,
        accuracy=_share(content, origin),
        tokens=None if tokens is None else int(tokens),
        seconds=_amount(clock, "total_time_s", origin),
        tokens_per_second=_amount(clock, "tokens_per_s", origin),
        timestamp=str(content.get("timestamp") or ""),
        reported_drop=_number(content, "reported_drop_points", origin),
        ours={"gates", "counters", "intervals"} <= content.keys(),
    )


def _task_and_limit(task: str, parameters: Mapping[str, Any], origin: str) -> tuple[str, int | None]:
    """The limit stands in the parameters, or in the task's name."""
    matched = re.fullmatch(r"(.+)_limit_([0-9]{1,9})", task)
    if matched:
        return matched[1], int(matched[2])
    limit = _amount(parameters, "limit", origin)
    return task, None if limit is None else int(limit)


def _object(content: Mapping[str, Any], key: str, origin: str) -> Mapping[str, Any]:
    value = content.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise InputError(f"{origin}: {key} is no JSON object; the experiment's summary.json has one, or null, there")
    return value or {}


def _share(content: Mapping[str, Any], origin: str) -> float:
    value = _number(content, "accuracy", origin)
    assert value is not None
    return value / 100 if value > 1 else value


def _number(content: Mapping[str, Any], key: str, origin: str) -> float | None:
    value = content.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise InputError(f"{origin}: {key} {str(value)[:80]!r} is no number")
    return float(value)


def _amount(content: Mapping[str, Any], key: str, origin: str) -> float | None:
    value = _number(content, key, origin)
    if value is not None and value < 0:
        raise InputError(f"{origin}: {key} {value:g} is negative; 0 or more is allowed")
    return value


def tables(summaries: Sequence[Summary]) -> tuple[OldTask, ...]:
    """Each task's configurations against its own k=1, and what is odd about them."""
    by_task: dict[tuple[str, int | None], list[Summary]] = {}
    for one in sorted(summaries, key=lambda one: (one.k or 0, _place(one.config), one.config)):
        by_task.setdefault((one.task, one.limit), []).append(one)
    return tuple(
        OldTask(task=task, limit=limit, rows=_rows(group), anomalies=tuple(anomalies(group)))
        for (task, limit), group in by_task.items()
    )


def caveats(found: Sequence[OldTask]) -> tuple[str, ...]:
    """What has to be known of such figures; those of our own reports have none of the experiment's faults."""
    return (UNPAIRED,) if all(row.summary.ours for task in found for row in task.rows) else CAVEATS


def _rows(group: Sequence[Summary]) -> tuple[OldRow, ...]:
    twins = [one for one in group if one.k == 1]
    speeds = [one.tokens_per_second for one in twins if one.tokens_per_second]
    accuracy = float(np.mean([one.accuracy for one in twins])) if twins else None
    speed = float(np.median(speeds)) if speeds else None
    return tuple(
        OldRow(
            summary=one,
            drop=None if accuracy is None else 100 * (one.accuracy - accuracy),
            speed_ratio=one.tokens_per_second / speed if one.tokens_per_second and speed else None,
        )
        for one in group
    )


def _place(config: str) -> int:
    subsets = ("first", "middle", "last")
    return next((i for i, subset in enumerate(subsets) if subset in config), len(subsets))


def anomalies(group: Sequence[Summary]) -> list[str]:
    """What cannot be: configurations that are the same by definition and differ, or differ by definition and are the
    same. `group` is one task."""
    found = []
    twins = [one for one in group if one.k == 1 and one.tokens_per_second]
    if len(twins) > 1:
        found += _odd_twin(twins)
    if len({one.accuracy for one in group if one.k == 1}) > 1:
        found.append("The k=1 configurations differ in accuracy, though they are the same by definition.")
    if len(group) > 2 and len({one.k for one in group}) > 1 and len({one.accuracy for one in group}) == 1:
        found.append(
            f"All {len(group)} configurations have exactly the same accuracy ({group[0].accuracy:.2%}): the policy "
            "never reached the model."
        )
    return found


def _odd_twin(twins: Sequence[Summary]) -> list[str]:
    """Of identical configurations, the one whose speed lies furthest from the others."""
    middle = float(np.median([one.tokens_per_second for one in twins if one.tokens_per_second]))
    odd = max(twins, key=lambda one: abs(math.log((one.tokens_per_second or middle) / middle)))
    others = [one for one in twins if one is not odd]
    speed = odd.tokens_per_second or middle
    usual = float(np.mean([one.tokens_per_second for one in others if one.tokens_per_second]))
    ratio = max(speed / usual, usual / speed)
    if ratio < TWINS_APART:
        return []
    names = " and ".join(f"{one.config} ({one.tokens_per_second:g})" for one in others)
    return [
        f"{odd.config} ran at {speed:g} tokens/s, {ratio:.1f} times {'slower' if speed < usual else 'faster'} than "
        f"{names}, though these configurations are the same by definition: a cold start, or another load on the "
        "machine. No speed-up may be taken against it."
    ]

"""summary.json: writes one for each configuration of a report, and reads those of an earlier experiment.

The files have the keys of the original experiment, and more. They hold means and times but no documents, so the results
in them are never paired with rows: differences between two files are differences of means.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.analysis import as_json
from orchestrator.analysis.results import ConfigurationResult, TaskResult
from orchestrator.analysis.runs import SUBSETS
from orchestrator.analysis.trial_facts import TrialProvenance
from orchestrator.core.configuration import DECODE_SETTINGS, varying_settings
from orchestrator.core.totals import TaskConfiguration
from orchestrator.report.section import ConfigurationView, Section
from orchestrator.store.files import CorruptedFile, read_regular
from sampler.errors import InputError

RENAMED_SETTINGS = {"block_cache": "use_block_cache"}  # as the original experiment wrote them
UNPAIRED = "its documents are unknown, so nothing is paired"
CAVEATS = (
    f"{UNPAIRED} and no interval is possible",
    "tokens per second counted padding after the stop token and included loading the model",
    "layers that should have been replayed still ran, and k=1 ran without the block cache",
)
MAX_NUMBER = 1e18  # JSON numbers may be too large for arithmetic
MAX_REPLICATE_RATIO = 1.5  # of the speeds of replicates; a larger one is reported


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


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierExperiment:
    """Results to show next to those of a report."""

    name: str  # of its directory
    tasks: tuple[EarlierTaskResults, ...]

    @property
    def caveats(self) -> tuple[str, ...]:
        """Limitations of its numbers. Our own reports do not have the faults of the original experiment."""
        return (UNPAIRED,) if all(row.summary.ours for task in self.tasks for row in task.rows) else CAVEATS


def read_earlier_experiment(folder: Path) -> EarlierExperiment:
    """All summary.json files below a directory."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a directory; give a directory with summary.json files")
    paths = sorted(folder.rglob("summary.json"))
    if not paths:
        raise InputError(f"{folder} contains no summary.json; give a directory with results of an earlier experiment")
    tasks = compare_by_task([read_summary(path) for path in paths])
    return EarlierExperiment(name=folder.resolve().name, tasks=tasks)


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
    """The configurations of each task, compared with its own k=1, and anomalies in their results."""
    by_task: dict[tuple[str, int | None], list[Summary]] = {}
    for one in sorted(summaries, key=lambda one: (one.k or 0, _subset_order(one.config), one.config)):
        by_task.setdefault((one.task, one.limit), []).append(one)
    return tuple(
        EarlierTaskResults(task=task, limit=limit, rows=_results(group), anomalies=tuple(find_anomalies(group)))
        for (task, limit), group in by_task.items()
    )


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
    """Sentences on replicates of one task whose results differ, and on configurations whose results do not."""
    anomalies = _outlying_replicate([(one.config, one.tokens_per_second or 0.0) for one in group if one.k == 1])
    if len({one.accuracy for one in group if one.k == 1}) > 1:
        anomalies.append("The k=1 configurations differ in accuracy, although they are the same computation.")
    if len(group) > 2 and len({one.k for one in group}) > 1 and len({one.accuracy for one in group}) == 1:
        anomalies.append(
            f"All {len(group)} configurations have exactly the same accuracy ({group[0].accuracy:.2%}): the policy "
            "probably had no effect on the model."
        )
    return anomalies


def _outlying_replicate(replicates: Sequence[tuple[str, float]]) -> list[str]:
    """A sentence on the replicate whose tokens/s is furthest from the others, if it is far enough."""
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
        f"{names}, although these configurations are the same computation. The cause is probably a cold start or "
        "other load on the machine, so it cannot be used as a baseline for speed-ups."
    ]


def configuration_summaries(section: Section) -> Iterator[tuple[str, dict[str, Any]]]:
    """The directory name (task[_limit_N]/configuration) and content of each summary.json."""
    limit = section.request.get("settings", {}).get("limit")
    unknown = TrialProvenance(devices=(), packages=(), codes=())
    for task_view in section.tasks:
        task = task_view.task
        folder = task.task + (f"_limit_{limit}" if limit else "")
        varying = varying_settings(result.configuration for result in task.configurations)
        for view in task_view.configurations:
            configuration = view.result.configuration
            provenance = section.provenance_by_configuration.get((task.task, configuration), unknown)
            yield f"{folder}/{configuration.slug(varying)}", _summary(section, task, view, provenance)


def _summary(
    section: Section, task: TaskResult, view: ConfigurationView, provenance: TrialProvenance
) -> dict[str, Any]:
    result = view.result
    own, speed = result.resolved, result.throughput
    identity = section.request["identity"]
    rate = speed.tokens_per_second
    return {
        "task": task.task,
        "config": own.policy,
        "timestamp": view.counters.ended.isoformat(),
        "accuracy": result.accuracy.value,
        "throughput": {
            "tokens_generated": speed.tokens,
            "total_time_s": speed.seconds,
            "tokens_per_s": None if rate is None else rate.value,
        },
        "gpu_info": [{"name": device.name, **dict(device.facts)} for device in provenance.devices],
        "git": {"versions": list(provenance.codes)},
        "environment": {
            name: versions[0] if len(versions) == 1 else list(versions) for name, versions in provenance.packages
        },
        "model_args": {
            "model": identity.get("model"),
            "revision": identity.get("model_revision"),
            "dtype": identity.get("dtype"),
            "reuse_k": own.k,
            "layer_subset": own.subset,
            "mode": own.mode,
            **{RENAMED_SETTINGS.get(name, name): getattr(own.configuration, name) for name in DECODE_SETTINGS},
        },
        "eval_params": {
            "limit": section.request.get("settings", {}).get("limit"),
            "num_fewshot": section.request["tasks"].get(task.task, {}).get("fewshot"),
            "batch_size": identity.get("batch_size"),
            "max_new_tokens": identity.get("max_new_tokens"),
            "chat_template": identity.get("chat_template"),
            "primary_metric": task.primary,
            "documents": result.documents,
            "documents_wanted": result.wanted,
            "repeats": result.repeats,
        },
        "layers": list(own.layers),
        "intervals": _intervals(result),
        "verdict": as_json(result.comparison.verdict) if result.comparison else None,
        "counters": {"rows": view.counters.rows, **view.counters.sums},
        "flops_per_token": view.flops_per_token,
        "peak_memory_bytes": view.peak_memory_bytes,
        "gates": _gates(section, (task.task, own.configuration)),
    }


def _intervals(result: ConfigurationResult) -> dict[str, Any]:
    intervals: dict[str, Any] = {
        "accuracy": result.accuracy,
        "tokens_per_s": result.throughput.tokens_per_second,
        "seconds_per_document": result.throughput.seconds_per_document,
    }
    comparison = result.comparison
    if comparison is not None:
        own, speed = comparison.difference, comparison.speedup
        intervals |= {
            "accuracy_difference_points": own.points,
            "accuracy_difference_simultaneous": own.simultaneous,
            "accuracy_difference_bounds": own.bounds,
            "lost": own.lost,
            "won": own.won,
            "p_mcnemar": own.p_value,
            "p_holm": own.p_holm,
            "speedup": None if speed is None else speed.tokens,
            "speedup_bounds": None if speed is None else speed.tokens_bounds,
            "speedup_documents": None if speed is None else speed.seconds,
            "speedup_documents_bounds": None if speed is None else speed.seconds_bounds,
            "speedup_modelled": comparison.modelled,
        }
    return {name: as_json(value) for name, value in intervals.items()}


def _gates(section: Section, own: TaskConfiguration) -> list[dict[str, Any]]:
    """All findings except those that name only trials of other configurations."""
    return [
        {"gate": finding.gate, "ok": finding.ok, "sentence": finding.sentence}
        for finding in section.analysis.gates
        if finding.ok or not finding.trials or own in section.configurations_of(finding)
    ]

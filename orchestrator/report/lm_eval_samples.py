"""The samples in lm-eval's samples_*.jsonl: reads those of any engine, and builds those of a sweep's rows."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list

from orchestrator.core.untrusted import (
    CONTROL,
    Check,
    anything,
    each,
    line,
    name_problem,
    number,
    optional,
    shape_problem,
    shown,
    whole,
)
from sampler.errors import InputError
from tasks.catalog import CATALOG

SAMPLES = re.compile(r"samples_(.+?)(?:_\d{4}-\d\d-\d\dT[\d.:+-]+)?\.jsonl")
RESULTS = re.compile(r"results_.*\.json")
TOLERANCE = 1e-6  # between the results file and the mean of the samples
DOCUMENT_INDEX = re.compile("[0-9]{1,9}")
Json = dict[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One document with its response, from the lines of all filters."""

    doc_id: str
    subtask: str
    doc_hash: str
    prompt: str
    choices: tuple[str, ...] | None
    gold: str
    text: str | None
    scores: tuple[float, ...]
    metrics: Mapping[str, Any]
    time: tuple[float, int] | None  # seconds and tokens


@dataclass(frozen=True, kw_only=True)
class ImportedTask:
    """The samples of a task, by doc_id."""

    name: str
    primary: str
    samples: Mapping[str, Sample]
    fewshot: int | None

    @property
    def generates(self) -> bool:
        return any(sample.text is not None for sample in self.samples.values())

    @property
    def timed(self) -> bool:
        return all(sample.time is not None for sample in self.samples.values())


def read_tasks(files: Sequence[Path], metric: str | None = None) -> dict[str, ImportedTask]:
    """The tasks in samples files and directories of them, checked against the results files."""
    every = (path for file in files for path in (sorted(file.iterdir()) if file.is_dir() else [file]))
    candidates = list(dict.fromkeys(every))
    results = [_read_json(path) for path in candidates if RESULTS.fullmatch(path.name)]
    paths: dict[str, Path] = {}
    for path in candidates:
        match = SAMPLES.fullmatch(path.name)
        if match is None:
            if path in files and not RESULTS.fullmatch(path.name):
                raise InputError(
                    f"{path} must be a file of lm-eval, named samples_TASK_DATE.jsonl or results_DATE.json"
                )
            continue
        if match[1] in paths:
            raise InputError(f"{path} and {paths[match[1]]} both have samples of {match[1]}; import one of them")
        paths[match[1]] = path
    if not paths:
        raise InputError(f"{', '.join(map(str, files))}: no samples_*.jsonl; run lm-eval with --log_samples")
    groups: dict[str, dict[str, Path]] = {}
    for subtask, path in paths.items():
        groups.setdefault(_task_of(subtask, results), {})[subtask] = path
    return {name: _read_task(name, subtasks, results, metric) for name, subtasks in groups.items()}


def _task_of(subtask: str, results: Sequence[Json]) -> str:
    for spec in CATALOG.values():
        if subtask in spec.subtasks:
            return spec.name
    for group, subtasks in (item for one in results for item in _mapping(one.get("group_subtasks")).items()):
        if isinstance(subtasks, list) and subtask in subtasks:
            return str(group)
    return subtask


def _read_task(name: str, paths: Mapping[str, Path], results: Sequence[Json], metric: str | None) -> ImportedTask:
    samples: dict[str, Sample] = {}
    for subtask, path in paths.items():
        samples |= {sample.doc_id: sample for sample in _read_samples(subtask, path)}
    spec, first = CATALOG.get(name), next(iter(samples.values()))
    primary = metric or (spec.primary if spec is not None else next(iter(first.metrics)))
    if primary not in first.metrics and len(first.metrics) == 1 and metric is None:
        primary = next(iter(first.metrics))
    for sample in samples.values():
        if not isinstance(sample.metrics.get(primary), int | float):
            known = ", ".join(sample.metrics)
            raise InputError(
                f"{name}: {sample.doc_id} has no numeric metric {primary}, only {known}; choose one with --metric"
            )
    shots = {value for one in results for key, value in _mapping(one.get("n-shot")).items() if key in paths}
    task = ImportedTask(name=name, primary=primary, samples=samples, fewshot=shots.pop() if len(shots) == 1 else None)
    for result in results:
        _check_result(task, paths, _mapping(result.get("results")))
    return task


def _check_result(task: ImportedTask, paths: Mapping[str, Path], stated: Mapping[str, Any]) -> None:
    """Raises InputError if a results file states another value than the mean of the samples."""
    name, _, filter_name = task.primary.partition(",")
    for subtask, path in paths.items():
        scores = [float(one.metrics[task.primary]) for one in task.samples.values() if one.subtask == subtask]
        entries = _mapping(stated.get(subtask))
        keys = [key for key in entries if key.split(",")[0] == name and filter_name in ("", *key.split(",")[1:])]
        value = entries[keys[0]] if len(keys) == 1 else None
        if isinstance(value, int | float) and abs(value - sum(scores) / len(scores)) > TOLERANCE:
            raise InputError(
                f"{path} has a mean {task.primary} of {sum(scores) / len(scores):.4f}, but its results file states "
                f"{value:.4f}: they are not from the same run"
            )


def _read_samples(subtask: str, path: Path) -> Iterator[Sample]:
    if (problem := name_problem(subtask)) is not None:
        raise InputError(f"{path}: the task must be {problem}")
    lines: dict[int, dict[str, Json]] = {}
    for line_number, text in enumerate(_read_bytes(path).splitlines(), start=1):
        if text.strip():
            origin = f"{path}, line {line_number}"
            sample = _parse(text, origin)
            _check_sample(sample, origin)
            filters = lines.setdefault(sample["doc_id"], {})
            if sample["filter"] in filters:
                raise InputError(f"{origin}: document {sample['doc_id']} occurs twice")
            filters[sample["filter"]] = sample
    if not lines:
        raise InputError(f"{path} has no samples")
    count = max(map(len, lines.values()))
    for index, filters in sorted(lines.items()):
        if len(filters) < count:
            raise InputError(f"{path}: document {index} has {len(filters)} of {count} filters; the file is incomplete")
        yield _sample(subtask, index, list(filters.values()))


def _as(expected: str, read: Callable[[Any], object]) -> Check:
    """A check that fails, with what was expected, if `read` returns None for the value."""
    return lambda value: expected if read(value) is None else None


def _check_sample(sample: Json, origin: str) -> None:
    if (problem := shape_problem(sample, SAMPLE, REQUIRED_KEYS)) is not None:
        raise InputError(f"{origin} {problem}; it must be a sample as lm-eval's --log_samples writes it")
    absent = [name for name in sample["metrics"] if name not in sample]
    if absent or not sample["metrics"]:
        raise InputError(f"{origin} has no value of the metric {absent[0]!r}" if absent else f"{origin} has no metrics")


def _sample(subtask: str, index: int, lines: Sequence[Json]) -> Sample:
    first = lines[0]
    prompt, responses = _prompt(first["arguments"]), _responses(first["resps"])
    assert prompt is not None
    assert responses is not None
    metrics = {
        f"{name},{line['filter']}" if len(lines) > 1 else name: line[name] for line in lines for name in line["metrics"]
    }
    # As in tasks/documents.py, so that documents are recognized in sweeps of this project.
    content = json.dumps(first["doc"], sort_keys=True, ensure_ascii=False, default=str)
    seconds, tokens = first.get("seconds"), first.get("tokens")
    return Sample(
        doc_id=f"{subtask}/{index}",
        subtask=subtask,
        doc_hash=hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        prompt=prompt[0],
        choices=prompt[1:] or None,
        gold=str(first["target"]),
        text=responses if isinstance(responses, str) else None,
        scores=() if isinstance(responses, str) else responses,
        metrics=metrics,
        time=None if seconds is None or tokens is None else (float(seconds), tokens),
    )


def _prompt(arguments: Any) -> tuple[str, ...] | None:
    """The prompt, then the options of a multiple-choice document."""
    requests = list(arguments.values()) if isinstance(arguments, dict) else arguments
    if not isinstance(requests, list) or not requests:
        return None
    parts = [list(one.values()) if isinstance(one, dict) else one for one in requests]
    if not all(isinstance(one, list) and one and isinstance(one[0], str) for one in parts):
        return None
    return parts[0][0], *(one[1] for one in parts if len(one) > 1 and isinstance(one[1], str))


def _responses(resps: Any) -> str | tuple[float, ...] | None:
    """The generated text, or the log-likelihood of each option."""
    firsts = [one[0] for one in resps if isinstance(one, list) and one] if isinstance(resps, list) else []
    if not firsts or len(firsts) < len(resps):
        return None
    if isinstance(firsts[0], str):
        return firsts[0]
    try:
        scores = tuple(float(one[0]) for one in firsts)
    except (TypeError, ValueError, IndexError, KeyError):
        return None
    return scores if all(map(math.isfinite, scores)) else None


def _read_json(path: Path) -> Json:
    return _parse(_read_bytes(path), str(path))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _parse(text: bytes, origin: str) -> Json:
    """A JSON object; `origin` names the file and line in errors."""
    try:
        value = json.loads(text.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # ValueError: also not UTF-8
        raise InputError(f"{origin} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{origin} must be a JSON object (got {shown(value)})")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, kw_only=True)
class PromptParts:
    """A document as lm-eval sees it; `arguments` are the requests before the chat template is applied."""

    content: Any
    target: Any
    arguments: list[tuple[Any, ...]]
    filtered: dict[str, list[Any]]  # responses by filter


def document_index(row: Row) -> int:
    """The document's index in lm-eval's evaluation split: a doc_id is subtask/index."""
    index = row["doc_id"].rpartition("/")[2]
    if not DOCUMENT_INDEX.fullmatch(index):
        raise InputError(f"the document {row['doc_id']} cannot be exported: its id must end with /NUMBER")
    return int(index)


def row_metrics(row: Row) -> dict[str, Any]:
    """The metrics of a row, checked because the sweep may come from another machine."""
    try:
        metrics = json.loads(row["metrics"])
    except (ValueError, RecursionError):
        metrics = None
    if not isinstance(metrics, dict) or CONTROL.search(" ".join(metrics)):
        raise InputError(f"the metrics of {row['doc_id']} are not a JSON object of metrics; run its trial again")
    return metrics


def row_samples(row: Row, prompt: PromptParts) -> Iterator[Json]:
    """The samples that lm-eval would log for a row, one for each filter."""
    responses = [[[score, None]] for score in row["scores"]] if row["scores"] else [[row["text"] or ""]]
    content = json.dumps(prompt.content, indent=2, default=handle_non_serializable, ensure_ascii=False)
    arguments = {f"gen_args_{i}": {f"arg_{j}": a for j, a in enumerate(p)} for i, p in enumerate(prompt.arguments)}
    for name, metrics in _metrics_by_filter(row_metrics(row), prompt.filtered).items():
        yield {
            "doc_id": document_index(row),
            "doc": prompt.content,
            "target": str(prompt.target),
            "arguments": arguments,
            "resps": sanitize_list(responses),
            "filtered_resps": sanitize_list(prompt.filtered.get(name, [one[0] for one in responses])),
            "filter": name,
            "metrics": list(metrics),
            "doc_hash": hash_string(content),
            "prompt_hash": hash_string(str(prompt.arguments[0][0])),
            "target_hash": hash_string(str(prompt.target)),
            **metrics,
        }


def split_metric(name: str, default_filter: str) -> tuple[str, str]:
    """exact_match,strict-match → (exact_match, strict-match)."""
    metric, comma, filter_name = name.rpartition(",")
    return (metric, filter_name) if comma else (name, default_filter)


def _metrics_by_filter(metrics: Mapping[str, Any], filtered: Mapping[str, object]) -> dict[str, Json]:
    default = next(iter(filtered), "none")
    by_filter: dict[str, Json] = {name: {} for name in filtered}
    for name, value in metrics.items():
        metric, filter_name = split_metric(name, default)
        by_filter.setdefault(filter_name, {})[metric] = value
    return by_filter


REQUIRED_KEYS = ("doc_id", "doc", "target", "arguments", "resps", "filter", "metrics")
SAMPLE = {
    "doc_id": whole(0, 10**9),
    "doc": each(anything),
    "arguments": _as("a prompt for each request", _prompt),
    "resps": _as("a text, or a log-likelihood of each option", _responses),
    "filter": line,
    "metrics": [line],
    "seconds": optional(_as("a number above 0", lambda value: None if number(value) or value <= 0 else value)),
    "tokens": optional(whole(1)),
}

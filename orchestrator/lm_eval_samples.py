"""Stored rows as lm-eval's samples and aggregates. Knows its file formats; reads and writes no files.

A task that can be opened again gives its own documents, filters and aggregation. Where it cannot (its data is not at
hand), what the sweep stored about documents stands in, and metrics are averaged.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list

from tasks.documents import Document
from tasks.task import Task

Row = Mapping[str, Any]
Samples = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the documents of one task come from: `task` if it could be opened, and always what the sweep stored."""

    name: str
    task: Task | None
    stored: Mapping[str, Row]  # by doc_id
    fewshot: int

    def place(self, doc_id: str) -> int:
        """The document's place in lm-eval's evaluation split: the sweep's ids are subtask/place."""
        return int(doc_id.rpartition("/")[2])


def samples(source: Source, rows: Sequence[Row]) -> Samples:
    """By subtask, in the order of documents; one for each filter of a task, as lm-eval writes them."""
    found: Samples = {}
    for row in sorted(rows, key=lambda row: (row["subtask"], source.place(row["doc_id"]))):
        found.setdefault(row["subtask"], []).extend(_samples(source, row))
    for lines in found.values():  # all of one filter, then all of the next
        filters = list(dict.fromkeys(line["filter"] for line in lines))
        lines.sort(key=lambda line: filters.index(line["filter"]))
    return found


def _samples(source: Source, row: Row) -> Iterator[dict[str, Any]]:
    place = source.place(row["doc_id"])
    content, target, arguments, filtered = _asked(source, row, place)
    responses = [[[score, None]] for score in row["scores"]] if row["scores"] else [[row["text"] or ""]]
    hashed = json.dumps(content, indent=2, default=handle_non_serializable, ensure_ascii=False)
    for name, metrics in _by_filter(json.loads(row["metrics"]), filtered).items():
        yield {
            "doc_id": place,
            "doc": content,
            "target": str(target),
            "arguments": {f"gen_args_{i}": {f"arg_{j}": a for j, a in enumerate(p)} for i, p in enumerate(arguments)},
            "resps": sanitize_list(responses),
            "filtered_resps": sanitize_list(filtered.get(name, [one[0] for one in responses])),
            "filter": name,
            "metrics": list(metrics),
            "doc_hash": hash_string(hashed),
            "prompt_hash": hash_string(str(arguments[0][0])),
            "target_hash": hash_string(str(target)),
            **metrics,
        }


def _asked(source: Source, row: Row, place: int) -> tuple[Any, Any, list[tuple[Any, ...]], dict[str, list[Any]]]:
    """The document, its target, what was asked before a chat template was put around it, and filtered responses."""
    if source.task is None:
        stored = source.stored[row["doc_id"]]
        choices = stored["choices"] or [None]
        options = [(stored["question"], choice) if choice is not None else (stored["question"],) for choice in choices]
        return dict(stored), stored["gold"], options, {}
    subtask = source.task.subtasks[row["subtask"]]
    content = subtask.task_docs[place]
    document = Document(doc_id=row["doc_id"], subtask=row["subtask"], index=place, doc_hash=row["doc_hash"])
    requests = source.task.requests(document, None)
    for request, response in zip(requests, row["scores"] or [row["text"] or ""], strict=True):
        request.resps = [(response, None) if row["scores"] else response]
    subtask._instances = requests  # the only way to have lm-eval's filters run on one document
    subtask.apply_filters()
    subtask._instances = None
    names = requests[0].filtered_resps
    filtered = {name: [request.filtered_resps[name] for request in requests] for name in names}
    return content, subtask.doc_to_target(content), [request.args for request in requests], filtered


def _by_filter(metrics: Mapping[str, Any], filtered: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """exact_match,strict-match belongs to that filter; a name without a filter to the only one there is."""
    only = next(iter(filtered), "none")
    found: dict[str, dict[str, Any]] = {name: {} for name in filtered}
    for name, value in metrics.items():
        metric, comma, filter_name = name.rpartition(",")
        found.setdefault(filter_name if comma else only, {})[metric if comma else name] = value
    return found


def aggregate(source: Source, rows: Sequence[Row]) -> dict[str, Any]:
    """The parts of lm-eval's results that come from rows and tasks."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["subtask"]] = counts.get(row["subtask"], 0) + 1
    if source.task is None:
        return _averaged(source, rows, counts)
    task = source.task
    scored = [
        (
            Document(
                doc_id=row["doc_id"],
                subtask=row["subtask"],
                index=source.place(row["doc_id"]),
                doc_hash=row["doc_hash"],
            ),
            json.loads(row["metrics"]),
        )
        for row in rows
    ]
    tables = task.aggregate(scored)
    subtasks = {name: one for name, one in task.subtasks.items() if name in counts}
    groups = [group for group in task.evaluable if isinstance(group, Group)]
    named = [*subtasks, *(group.name for group in groups)]
    return {
        "results": tables,
        **({"groups": {group.name: tables[group.name] for group in groups}} if groups else {}),
        "group_subtasks": {group.name: sorted(subtasks) for group in groups},
        "configs": {name: one.dump_config() for name, one in subtasks.items()},
        "versions": {name: one.VERSION for name, one in subtasks.items()},
        "n-shot": dict.fromkeys(named, source.fewshot),
        "higher_is_better": {name: one.higher_is_better() for name, one in subtasks.items()},
        "n-samples": {
            name: {"original": len(one.task_docs), "effective": counts[name]} for name, one in subtasks.items()
        },
    }


def _averaged(source: Source, rows: Sequence[Row], counts: Mapping[str, int]) -> dict[str, Any]:
    tables: dict[str, dict[str, Any]] = {}
    for name in [*counts, *([source.name] if source.name not in counts else [])]:
        mine = [json.loads(row["metrics"]) for row in rows if name in (row["subtask"], source.name)]
        table: dict[str, Any] = {"name": name, "alias": name, "sample_len": len(mine)}
        for metric in dict.fromkeys(metric for metrics in mine for metric in metrics):
            values = [float(v) for metrics in mine for v in _flat(metrics.get(metric)) if isinstance(v, int | float)]
            base, comma, filter_name = metric.rpartition(",")
            base, filter_name = (base, filter_name) if comma else (metric, "none")
            table[f"{base},{filter_name}"] = mean(values) if values else None
            table[f"{base}_stderr,{filter_name}"] = mean_stderr(values) if len(values) > 1 else "N/A"
        tables[name] = table
    group = source.name not in counts
    return {
        "results": tables,
        **({"groups": {source.name: tables[source.name]}} if group else {}),
        "group_subtasks": {source.name: sorted(counts)} if group else {},
        "configs": {},
        "versions": {},
        "n-shot": dict.fromkeys(tables, source.fewshot),
        "higher_is_better": {},
        "n-samples": {name: {"original": count, "effective": count} for name, count in counts.items()},
    }


def _flat(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]

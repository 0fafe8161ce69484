"""`python -m orchestrator.export --lm-eval DIR`: a sweep's rows as the files lm-eval itself writes.

    <out>/<model>__<configuration>/results_<date>.json
                                   samples_<subtask>_<date>.jsonl

One folder for each configuration and repeat. The date is that of its last row, so the same rows give the same files.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.utils import handle_non_serializable, hash_string, sanitize_list, sanitize_model_name

from orchestrator.report.sweeps import LEFT_OUT, check_files, open_sweep
from orchestrator.report.write import write_all
from orchestrator.store import Store
from sampler.errors import InputError
from tasks.documents import Document, TaskOptions
from tasks.task import Task, open_task

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
    groups = [group for group in task.lm_eval_tasks if isinstance(group, Group)]
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


COLUMNS = ("doc_id", "subtask", "doc_hash", "metrics", "text", "scores", "started_at")
FIRST = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")


def export_lm_eval(folder: Path, out: Path | None = None) -> list[Path]:
    """Writes the files of each configuration in turn and returns their folders."""
    store, request = open_sweep(folder)
    trials = store.trials()
    check_files(store, trials)
    target = folder / "lm-eval" if out is None else out
    sources: dict[str, Source] = {}
    written = []
    for name, by_task in _runs(trials).items():
        tasks = {}
        for task, trial_ids in by_task.items():
            rows = store.rows(trial_ids, COLUMNS, verify=False).to_pylist()
            if rows:
                tasks[task] = rows
                sources[task] = sources.get(task) or _source(store, request, task)
        if tasks:
            model = sanitize_model_name(f"{request['identity']['model']}__{name}")
            write_all(target / model, dict(_files(request, name, tasks, sources)))
            written.append(target / model)
    if not written:
        raise InputError(f"{folder} has no rows yet; let the sweep finish some documents first")
    for damage in store.corrupted.values():
        print(LEFT_OUT.format(damage), file=sys.stderr)
    for notice in store.notices:
        print(notice, file=sys.stderr)
    return written


def _runs(trials: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Trial ids by configuration and repeat, then by task."""
    found: dict[str, dict[str, list[str]]] = {}
    for trial_id, facts in trials.items():
        name = configuration_name(facts["trial"])
        found.setdefault(name, {}).setdefault(facts["trial"]["task"], []).append(trial_id)
    return dict(sorted(found.items()))


def configuration_name(trial: Mapping[str, Any]) -> str:
    """policy, with decode settings and repeat where they are not as usual."""
    parts = [str(trial["policy"])]
    parts += [f"t{trial['threshold']:g}"] if trial["threshold"] != 0.95 else []
    parts += [f"b{trial['small_block']}"] if trial["small_block"] != 8 else []
    parts += [] if trial["block_cache"] else ["nocache"]
    return "_".join(parts) + (f".r{trial['repeat']}" if trial["repeat"] else "")


def _source(store: Store, request: Mapping[str, Any], task: str) -> Source:
    identity, settings = request["identity"], request["settings"]
    stored = {row["doc_id"]: row for row in store.documents(task).to_pylist()}
    data = str(settings.get("data") or identity.get("data"))
    options = TaskOptions(
        data=str(identity["data"]) if data == "auto" else data,
        fewshot=identity.get("fewshot"),
        chat_template=bool(identity.get("chat_template", True)),
        max_new_tokens=identity.get("max_new_tokens"),
        allow_code_execution=True,  # nothing is run: metrics are those stored
    )
    fewshot = int(request["tasks"].get(task, {}).get("fewshot") or 0)
    try:
        opened = open_task(task, options)
    except InputError as problem:
        print(f"{task} cannot be opened here, so its metrics are averaged: {problem}", file=sys.stderr)
        return Source(name=task, task=None, stored=stored, fewshot=fewshot)
    if dict(opened.provenance.datasets) != dict(identity.get("datasets", {}).get(task, {})):
        print(f"{task} has other data here than in the sweep, so its metrics are averaged", file=sys.stderr)
        return Source(name=task, task=None, stored=stored, fewshot=fewshot)
    return Source(name=task, task=opened, stored=stored, fewshot=fewshot)


def _files(
    request: Mapping[str, Any], name: str, tasks: Mapping[str, Sequence[Row]], sources: Mapping[str, Source]
) -> Iterator[tuple[str, bytes]]:
    """Samples first: results.json speaks of them."""
    last = max(row["started_at"] for rows in tasks.values() for row in rows)
    date = last.replace(tzinfo=None).isoformat().replace(":", "-")
    hashes: dict[str, str] = {}
    parts: dict[str, Any] = {}
    for task, rows in tasks.items():
        found: Samples = samples(sources[task], rows)
        for subtask, lines in found.items():
            hashes[subtask] = hash_string("".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in lines))
            yield f"samples_{subtask}_{date}.jsonl", b"".join(_dumped(line) + b"\n" for line in lines)
        for key, value in aggregate(sources[task], rows).items():
            parts.setdefault(key, {}).update(value)
    ordered = {key: parts[key] for key in FIRST if key in parts}
    yield f"results_{date}.json", _dumped({**ordered, **_context(request, name, last.timestamp(), hashes)}, indent=2)


def _context(request: Mapping[str, Any], name: str, date: float, hashes: Mapping[str, str]) -> dict[str, Any]:
    identity = request["identity"]
    model = f"{identity['model']}__{name}"
    code = next((c.get("code") or {} for c in reversed(request.get("commands", []))), {})
    return {
        "config": {
            "model": "reuse-sweep",
            "model_args": {"pretrained": identity["model"], "policy": name, "dtype": identity.get("dtype")},
            "model_revision": identity.get("model_revision"),
            "batch_size": identity.get("batch_size"),
            "limit": request["settings"].get("limit"),
        },
        "git_hash": code.get("commit"),
        "date": date,
        "task_hashes": dict(hashes),
        "model_source": "reuse-sweep",
        "model_name": model,
        "model_name_sanitized": sanitize_model_name(model),
        "fewshot_as_multiturn": True,
    }


def _dumped(value: object, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False).encode()

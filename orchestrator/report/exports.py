"""Exports a sweep as lm-eval's files, as a CSV file, or as a dataset on the Hugging Face Hub.

Tools for lm-eval results can read the first of these:

    <out>/<model>__<configuration>/results_<date>.json
                                   samples_<subtask>_<date>.jsonl

There is one directory per configuration and repeat. The date is that of its last row, so the same rows give the same
files. If a task can be opened here, lm-eval itself provides documents, filters and aggregation. If it cannot (its data
is not available), the documents stored in the sweep are used, and metrics are averaged.
"""

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from lm_eval.api.group import Group
from lm_eval.api.metrics import mean, mean_stderr
from lm_eval.utils import handle_non_serializable, hash_string, sanitize_model_name

from orchestrator.core.configuration import Configuration
from orchestrator.core.totals import KEYS
from orchestrator.core.untrusted import path_below, printable
from orchestrator.report.lm_eval_samples import (
    Json,
    PromptParts,
    Row,
    document_index,
    row_metrics,
    row_samples,
    split_metric,
)
from orchestrator.report.section import build_section
from orchestrator.report.sweeps import check_files, corruption_notice, no_rows, open_sweep, read_sweeps
from orchestrator.report.write import results_markdown, write_all
from orchestrator.store import Store
from sampler.errors import InputError
from sampler.hub import hub_problem, retry_hub
from sampler.records import LOGLIKELIHOOD
from tasks.catalog import CATALOG
from tasks.documents import Document, TaskOptions
from tasks.task import Task, open_task

COLUMNS = ("doc_id", "subtask", "doc_hash", "metrics", "text", "scores", "started_at")
RESULT_KEYS = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
Samples = dict[str, list[Json]]  # by subtask


@dataclass(frozen=True, kw_only=True)
class TaskSource:
    """A task's documents: `task` if it could be opened, and always those stored in the sweep."""

    name: str
    task: Task | None
    stored: Mapping[str, Row]  # by doc_id
    fewshot: int


def export_lm_eval(folder: Path, out: Path | None = None, record: Mapping[str, Any] | None = None) -> list[Path]:
    """Write the files of each configuration and return their directories; `record` is sweep.json, if it was read."""
    store, request = open_sweep(folder, record)
    attempts = store.attempts()
    check_files(store, attempts)
    target = path_below(folder, "lm-eval/results.json").parent if out is None else out
    sources: dict[str, TaskSource] = {}
    written = []
    for name, by_task in _trials_by_configuration(attempts).items():
        rows_by_task = {}
        for task, trial_ids in by_task.items():
            rows = store.rows(trial_ids, COLUMNS, verify=False).to_pylist()
            if rows:
                rows_by_task[task] = rows
                sources[task] = sources.get(task) or _open_source(store, request, task)
        if rows_by_task:
            model = sanitize_model_name(f"{request['identity']['model']}__{name}")
            folder_of_model = path_below(target, f"{model}/results.json").parent
            write_all(folder_of_model, dict(_files(request, name, rows_by_task, sources)))
            written.append(folder_of_model)
    if not written:
        raise no_rows(store)
    _print_notices(store)
    return written


def _print_notices(store: Store) -> None:
    """Print what could not be read or was ignored to stderr."""
    for notice in (*map(corruption_notice, store.corrupted.values()), *store.notices):
        print(printable(notice), file=sys.stderr)


def _trials_by_configuration(attempts: pa.Table) -> dict[str, dict[str, list[str]]]:
    """Trial ids by the name of a configuration (and repeat), then by task."""
    trial_ids: dict[str, dict[str, list[str]]] = {}
    trials = attempts.group_by([*KEYS, "repeat"], use_threads=False).aggregate([("trial_id", "distinct")])
    for row in trials.to_pylist():
        name = Configuration.from_mapping(row).slug() + (f".r{row['repeat']}" if row["repeat"] else "")
        trial_ids.setdefault(name, {})[row["task"]] = row["trial_id_distinct"]
    return dict(sorted(trial_ids.items()))


def _open_source(store: Store, request: Mapping[str, Any], task: str) -> TaskSource:
    identity, settings = request["identity"], request["settings"]
    data = str(settings.get("data") or identity.get("data"))
    options = TaskOptions(
        data=str(identity["data"]) if data == "auto" else data,
        fewshot=identity.get("fewshot"),
        chat_template=bool(identity.get("chat_template", True)),
        max_new_tokens=identity.get("max_new_tokens"),
        allow_code_execution=True,  # nothing is executed: stored metrics are used
    )
    opened: Task | None = None
    try:
        opened = open_task(task, options)
    except InputError as problem:
        print(printable(f"cannot open {task} here, so its metrics are averaged: {problem}"), file=sys.stderr)
    if opened is not None and dict(opened.provenance.datasets) != dict(identity.get("datasets", {}).get(task, {})):
        print(f"the data of {task} here differs from the sweep's, so its metrics are averaged", file=sys.stderr)
        opened = None
    return TaskSource(
        name=task,
        task=opened,
        stored={row["doc_id"]: row for row in store.documents(task).to_pylist()},
        fewshot=int(request["tasks"].get(task, {}).get("fewshot") or 0),
    )


def _files(
    request: Mapping[str, Any], name: str, tasks: Mapping[str, Sequence[Row]], sources: Mapping[str, TaskSource]
) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a configuration's files. Samples come first, because the results file has their hashes."""
    last = max(row["started_at"] for rows in tasks.values() for row in rows)
    date = last.replace(tzinfo=None).isoformat().replace(":", "-")
    hashes: dict[str, str] = {}
    results: dict[str, Any] = {}
    for task, rows in tasks.items():
        for subtask, lines in _samples(sources[task], rows).items():
            hashes[subtask] = hash_string("".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in lines))
            yield f"samples_{subtask}_{date}.jsonl", b"".join(_to_json(line) + b"\n" for line in lines)
        for key, value in _aggregate(sources[task], rows).items():
            results.setdefault(key, {}).update(value)
    ordered = {key: results[key] for key in RESULT_KEYS if key in results}
    context = _context(request, name, last.timestamp(), hashes)
    yield f"results_{date}.json", _to_json({**ordered, **context}, indent=2)


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


def _to_json(value: object, indent: int | None = None) -> bytes:
    return json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False).encode()


def _document(row: Row) -> Document:
    return Document(doc_id=row["doc_id"], subtask=row["subtask"], index=document_index(row), doc_hash=row["doc_hash"])


def _samples(source: TaskSource, rows: Sequence[Row]) -> Samples:
    """Samples by subtask, in the order in which lm-eval writes them: by filter, then by document."""
    samples: Samples = {}
    for row in sorted(rows, key=lambda row: (row["subtask"], document_index(row))):
        prompt = _stored_prompt(source, row) if source.task is None else _prompt(source.task, row)
        samples.setdefault(row["subtask"], []).extend(row_samples(row, prompt))
    for lines in samples.values():
        filters = list(dict.fromkeys(line["filter"] for line in lines))
        lines.sort(key=lambda line: filters.index(line["filter"]))
    return samples


def _stored_prompt(source: TaskSource, row: Row) -> PromptParts:
    stored = source.stored.get(row["doc_id"])
    if stored is None:
        raise InputError(f"{row['doc_id']} has a row, but is not among the documents of {source.name} in the sweep")
    question, choices = stored["question"], stored["choices"]
    arguments = [(question, choice) for choice in choices] if choices else [(question,)]
    return PromptParts(content=dict(stored), target=stored["gold"], arguments=arguments, filtered={})


def _prompt(task: Task, row: Row) -> PromptParts:
    document = _document(row)
    subtask = task.subtasks.get(row["subtask"])
    if subtask is None or document.index >= len(subtask.task_docs):
        raise InputError(f"{row['doc_id']} of subtask {row['subtask']} is not among the documents of {task.name}")
    content = subtask.task_docs[document.index]
    requests = task.requests(document, None)
    expected = len(requests) if task.kind == LOGLIKELIHOOD else 0
    if len(row["scores"]) != expected:
        raise InputError(f"{row['doc_id']} must have {expected} scores, one for each option (got {len(row['scores'])})")
    for request, response in zip(requests, row["scores"] or [row["text"] or ""], strict=True):
        request.resps = [(response, None) if row["scores"] else response]
    subtask._instances = requests  # the only way to run lm-eval's filters on a single document
    subtask.apply_filters()
    subtask._instances = None
    names = requests[0].filtered_resps
    return PromptParts(
        content=content,
        target=subtask.doc_to_target(content),
        arguments=[request.args for request in requests],
        filtered={name: [request.filtered_resps[name] for request in requests] for name in names},
    )


def _aggregate(source: TaskSource, rows: Sequence[Row]) -> dict[str, Any]:
    """The entries of lm-eval's results file that depend on rows and tasks."""
    counts = Counter(row["subtask"] for row in rows)
    if source.task is None:
        return _average(source, rows, counts)
    task = source.task
    tables = task.aggregate([(_document(row), row_metrics(row)) for row in rows])
    subtasks = {name: one for name, one in task.subtasks.items() if name in counts}
    groups = [group for group in task.lm_eval_tasks if isinstance(group, Group)]
    names = [*subtasks, *(group.name for group in groups)]
    return {
        "results": tables,
        **({"groups": {group.name: tables[group.name] for group in groups}} if groups else {}),
        "group_subtasks": {group.name: sorted(subtasks) for group in groups},
        "configs": {name: one.dump_config() for name, one in subtasks.items()},
        "versions": {name: one.VERSION for name, one in subtasks.items()},
        "n-shot": dict.fromkeys(names, source.fewshot),
        "higher_is_better": {name: one.higher_is_better() for name, one in subtasks.items()},
        "n-samples": {
            name: {"original": len(one.task_docs), "effective": counts[name]} for name, one in subtasks.items()
        },
    }


def _average(source: TaskSource, rows: Sequence[Row], counts: Mapping[str, int]) -> dict[str, Any]:
    """The same entries for a task that cannot be opened here: metrics are means over documents."""
    is_group = source.name not in counts
    tables: dict[str, dict[str, Any]] = {}
    for name in [*counts, *([source.name] if is_group else [])]:
        own = [row_metrics(row) for row in rows if name in (row["subtask"], source.name)]
        table: dict[str, Any] = {"name": name, "alias": name, "sample_len": len(own)}
        for key in dict.fromkeys(key for metrics in own for key in metrics):
            stored = [metrics.get(key) for metrics in own]
            flat = (item for value in stored for item in (value if isinstance(value, list) else [value]))
            values = [float(item) for item in flat if isinstance(item, int | float)]
            metric, filter_name = split_metric(key, "none")
            table[f"{metric},{filter_name}"] = mean(values) if values else None
            table[f"{metric}_stderr,{filter_name}"] = mean_stderr(values) if len(values) > 1 else "N/A"
        tables[name] = table
    return {
        "results": tables,
        **({"groups": {source.name: tables[source.name]}} if is_group else {}),
        "group_subtasks": {source.name: sorted(counts)} if is_group else {},
        "configs": {},
        "versions": {},
        "n-shot": dict.fromkeys(tables, source.fewshot),
        "higher_is_better": {},
        "n-samples": {name: {"original": count, "effective": count} for name, count in counts.items()},
    }


def export_csv(folder: Path, out: Path | None = None, record: Mapping[str, Any] | None = None) -> Path:
    """All rows as one CSV file; lists are JSON."""
    store, _ = open_sweep(folder, record)
    rows = store.rows()
    if not rows.num_rows:
        raise no_rows(store)
    target = path_below(folder, "rows.csv") if out is None else out
    if target.is_dir():
        raise InputError(f"--out {target} is a directory; give the name of a file, such as {target / 'rows.csv'}")
    for index, column in enumerate(rows.schema):
        if pa.types.is_list(column.type):
            values = [None if value is None else json.dumps(value) for value in rows[column.name].to_pylist()]
            rows = rows.set_column(index, column.name, pa.array(values, pa.string()))
    content = pa.BufferOutputStream()
    pa.csv.write_csv(rows, content)
    write_all(target.parent, {target.name: content.getvalue().to_pybytes()})
    _print_notices(store)
    return target


def check_repository(repository: str) -> None:
    if not REPOSITORY.fullmatch(repository):
        raise InputError(
            f"--hub must be OWNER/NAME; both may contain letters, digits, '-', '_' and '.' (got {repository})"
        )


def export_hub(
    folder: Path,
    repository: str,
    record: Mapping[str, Any] | None = None,
    *,
    public: bool = False,
    dry_run: bool = False,
) -> list[str]:
    """Push rows, documents and a generated card to a dataset repository; returns lines to print."""
    check_repository(repository)
    store, request = open_sweep(folder, record)
    tasks = [task for task in request["tasks"] if not (task in CATALOG and CATALOG[task].gated)]
    with tempfile.TemporaryDirectory(prefix="reuse-hub-") as staging:
        root = Path(staging)
        rows = store.rows()
        if not rows.num_rows:
            raise no_rows(store)
        _print_notices(store)
        pa.parquet.write_table(rows, root / "rows.parquet", compression="zstd")
        (root / "documents").mkdir()
        for task in tasks:
            pa.parquet.write_table(store.documents(task), root / "documents" / f"{task}.parquet", compression="zstd")
        (root / "sweep.json").write_bytes(_to_json(request, indent=1))
        card = _dataset_card(folder, repository, request, tasks)
        (root / "README.md").write_text(card, encoding="utf-8")
        files = sorted(path for path in root.rglob("*") if path.is_file())
        sizes = [f"{path.relative_to(root)}: {path.stat().st_size:,} bytes" for path in files]
        if dry_run:
            kind = "public" if public else "private"
            return [f"would push to the {kind} dataset {repository}:", *sizes, "", card]
        return [*sizes, _push(root, repository, public=public)]


def _push(folder: Path, repository: str, *, public: bool) -> str:
    """Push all files of a directory; returns the URL of the commit."""
    api = HfApi()
    try:
        retry_hub(lambda: api.create_repo(repository, repo_type="dataset", private=not public, exist_ok=True))
        if not public and not retry_hub(lambda: api.dataset_info(repository)).private:
            raise InputError(f"the dataset {repository} is public; add --public to push to it")
        commit = retry_hub(
            lambda: api.upload_folder(
                repo_id=repository,
                repo_type="dataset",
                folder_path=folder,
                commit_message="Push a sweep of reuse-sweep",
            )
        )
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: from Xet uploads
        raise InputError(f"cannot push to {repository}: {hub_problem(error)}") from None
    return str(commit.commit_url)


def _dataset_card(folder: Path, repository: str, request: Mapping[str, Any], tasks: Sequence[str]) -> str:
    configs: list[dict[str, Any]] = [{"config_name": "rows", "data_files": "rows.parquet", "default": True}]
    configs += [{"config_name": f"documents-{task}", "data_files": f"documents/{task}.parquet"} for task in tasks]
    name = str(request.get("sweep") or folder.name)
    facts = {"pretty_name": name, "tags": ["reuse-sweep", "lm-eval"], "configs": configs}
    try:
        (data,) = read_sweeps([folder])
        results = results_markdown([build_section(data, figures=False)]).partition("\n")[2].strip()
    except InputError as problem:  # for instance, a single policy
        results = f"There is no verdict: {problem}."
    withheld = [task for task in request["tasks"] if task not in tasks]
    notes = [f"The documents of {', '.join(withheld)} are gated and not included."] if withheld else []
    lines = [
        f"---\n{yaml.safe_dump(facts, sort_keys=False)}---\n\n# {name}",
        f"Results of layer-reuse policies on {', '.join(request['tasks'])} with the model "
        f"{request['identity']['model']}, collected by reuse-sweep. There is one row per document and configuration.",
        *notes,
        f'```python\nfrom datasets import load_dataset\n\nrows = load_dataset("{repository}", split="train")\n```',
        "The documents come from the benchmarks and keep their licenses.",
        results,
    ]
    return printable("\n\n".join(lines) + "\n")

"""`python -m orchestrator.export --lm-eval DIR`: a sweep's rows as the files lm-eval itself writes.

    <out>/<model>__<configuration>/results_<date>.json
                                   samples_<subtask>_<date>.jsonl

One folder for each configuration and repeat. The date is that of its last row, so the same rows give the same files.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.utils import handle_non_serializable, hash_string, sanitize_model_name

from orchestrator.lm_eval_samples import Row, Samples, Source, aggregate, samples
from orchestrator.report.gather import LEFT_OUT, check_files, open_sweep
from orchestrator.report.write import write_all
from orchestrator.store import Store
from sampler.cli import Parser, run_command
from sampler.errors import InputError
from tasks.documents import TaskOptions
from tasks.task import open_task

COLUMNS = ("doc_id", "subtask", "doc_hash", "metrics", "text", "scores", "started_at")
EXAMPLES = """examples:
  python -m orchestrator.export --lm-eval results/my-sweep
  python -m orchestrator.export --lm-eval results/my-sweep --out exported
"""
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
    for damage in store.damage.values():
        print(LEFT_OUT.format(damage), file=sys.stderr)
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


def parser() -> Parser:
    result = Parser(
        prog="python -m orchestrator.export",
        description="Writes a sweep's rows as the results_*.json and samples_*.jsonl that lm-eval writes.",
        examples=EXAMPLES,
    )
    result.add_argument("--lm-eval", type=Path, required=True, metavar="DIR", help="the folder of a sweep")
    result.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: DIR/lm-eval)")
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    for folder in export_lm_eval(given.lm_eval, given.out):
        print(folder)


if __name__ == "__main__":
    run_command(main)

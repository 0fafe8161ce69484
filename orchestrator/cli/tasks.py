"""`reuse-sweep tasks`: lists the benchmarks; `reuse-sweep tasks run`: one benchmark with one policy, without Ray."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from orchestrator.cli.console import Parser, announce, parse_options, sub_command
from orchestrator.cli.sampling import PolicyOptions, parse_decoding
from orchestrator.planning.fields import setting, shared
from orchestrator.planning.settings import SweepSettings
from sampler.errors import InputError
from sampler.policy import ReusePolicy
from sampler.records import GENERATE

if TYPE_CHECKING:
    from tasks.catalog import TaskSpec
    from tasks.documents import TaskOptions
    from tasks.evaluate import Result
    from tasks.sources import Source
    from tasks.task import Task

LIST_EXAMPLES = """examples:
  reuse-sweep tasks
  reuse-sweep tasks --data DIR --json
  reuse-sweep tasks run --tasks gsm8k --model tiny --limit 5      see `reuse-sweep tasks run --help`
"""
RUN_EXAMPLES = """examples:
  reuse-sweep tasks run --tasks gsm8k --model DIR --policies k2_middle --limit 5
  reuse-sweep tasks run --tasks mmlu --model DIR --data DIR --sample 500 --fewshot 5 --out rows.jsonl
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListOptions:
    data: str = shared(SweepSettings, "data")
    allow_code_execution: bool = shared(SweepSettings, "allow_code_execution")
    unsafe_code_execution: bool = shared(SweepSettings, "unsafe_code_execution")
    json: bool = setting(False, help="print one JSON object per benchmark")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions(PolicyOptions):
    task: str = setting(
        typed_as="tasks", aliases=("task",), metavar="TASK", help="a name from `reuse-sweep tasks`, or any lm-eval task"
    )
    data: str = shared(SweepSettings, "data")
    limit: int | None = shared(SweepSettings, "limit")
    sample: int | None = shared(SweepSettings, "sample")
    seed: int = shared(SweepSettings, "seed", help="random seed of the sample")
    fewshot: int | None = shared(SweepSettings, "fewshot")
    chat_template: bool = shared(SweepSettings, "chat_template")
    thinking: bool = shared(SweepSettings, "thinking")
    max_new_tokens: int | None = shared(SweepSettings, "max_new_tokens")
    allow_code_execution: bool = shared(SweepSettings, "allow_code_execution")
    unsafe_code_execution: bool = shared(SweepSettings, "unsafe_code_execution")
    out: Path | None = setting(
        None, metavar="FILE.jsonl", default_text="standard output", help="write the results to this file"
    )


def tasks(arguments: Sequence[str]) -> None:
    command = sub_command("tasks", arguments, ["list", "run"])
    if command == "run":
        run_task(arguments[1:])
        return
    parser = Parser(
        prog="reuse-sweep tasks",
        description="Lists the benchmarks, what they need, and whether they can run here.",
        examples=LIST_EXAMPLES,
    )
    options = parse_options(parser, ListOptions, arguments[1:] if command else arguments)
    announce("looking for the benchmarks")
    from tasks.documents import TaskOptions, resolve_data

    listed = list_tasks(TaskOptions.from_settings(options, data=resolve_data(options.data, "")))
    if options.json:
        for entry in listed:
            print(json.dumps(entry))
    else:
        _print_tasks(listed)


def list_tasks(options: "TaskOptions") -> list[dict[str, Any]]:
    """The facts printed about each benchmark.

    `problem`: why it cannot run here, or None; `bundled`: whether it can run with the bundled documents.
    """
    from tasks.catalog import CATALOG
    from tasks.sources import choose_source

    source, bundled = choose_source(options.data), choose_source("bundled")
    return [
        {
            "task": entry.name,
            "documents": entry.document_count,
            "kind": entry.kind,
            "primary": entry.primary,
            "needs": _needs(entry),
            "problem": _problem(entry, options, source),
            "bundled": _problem(entry, options, bundled) is None,
        }
        for entry in CATALOG.values()
    ]


def _needs(entry: "TaskSpec") -> str:
    needs = [entry.install_command.removeprefix("pip install ").strip('"')] if entry.install_command else []
    needs += ["punkt_tab"] if entry.needs_punkt else []
    needs += ["Hub token"] if entry.gated else []
    needs += ["--allow-code-execution"] if entry.runs_code else []
    return ", ".join(needs)


def _problem(entry: "TaskSpec", options: "TaskOptions", source: "Source") -> str | None:
    from tasks.catalog import check_requirements

    try:
        check_requirements(entry, options)
        source.check(entry.dataset, gated=entry.gated)
    except InputError as error:
        return str(error)
    return None


def _print_tasks(listed: Sequence[Mapping[str, Any]]) -> None:
    rows: list[tuple[str, ...]] = [("task", "documents", "kind", "primary metric", "needs", "here", "bundled")]
    for entry in listed:
        here = ("yes" if runs else "no" for runs in (entry["problem"] is None, entry["bundled"]))
        rows.append((*(str(entry[name]) for name in ("task", "documents", "kind", "primary", "needs")), *here))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for entry in listed:
        if entry["problem"]:
            print(f"\n{entry['task']}: {entry['problem']}")
    print("\nhere: runs with these flags; bundled: runs with --data bundled, a small set of documents in this project.")
    print("Any other lm-eval task can be used by its name.")


def run_task(arguments: Sequence[str]) -> None:
    parser = Parser(
        prog="reuse-sweep tasks run",
        description="Runs one benchmark with one policy in this process. Prints a JSON line per document, then totals.",
        examples=RUN_EXAMPLES,
    )
    options, decode = parse_decoding(parser, RunOptions, arguments)
    policy = ReusePolicy.parse(options.policy)
    options.start()
    from tqdm import tqdm

    from sampler.decode import check_prompts
    from tasks.documents import TaskOptions, resolve_data
    from tasks.evaluate import ModelDecoder, chat_renderer, evaluate
    from tasks.task import open_task

    data = resolve_data(options.data, options.model)
    task = open_task(options.task, TaskOptions.from_settings(options, data=data))
    if task.kind != GENERATE:
        policy.check_scoring()
    files = options.find()
    settings = files.config.decode_settings(decode)
    policy.bind(files.config.num_layers, options.subset_size)
    check_prompts((), settings, files.config)
    if options.chat_template:
        chat_renderer(files.tokenizer)
    with _output(options.out) as out:
        decoder = ModelDecoder(
            model=options.load(files, rows=options.batch_size),
            policy=policy,
            settings=settings,
            batch_size=options.batch_size,
            subset_size=options.subset_size,
        )
        scored = []
        results = evaluate(task, task.documents, decoder)
        for result in tqdm(results, total=len(task.documents), unit="doc", disable=None):
            print(json.dumps(_result_json(result), ensure_ascii=False), file=out, flush=True)
            scored.append((result.document, result.metrics))
        print(json.dumps(_totals_json(task, policy, scored), ensure_ascii=False), file=out, flush=True)


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {path} cannot be written ({error.strerror})") from None
    with file:
        yield file


def _result_json(result: "Result") -> dict[str, Any]:
    return {
        "doc_id": result.document.doc_id,
        "subtask": result.document.subtask,
        "doc_hash": result.document.doc_hash,
        "correct": result.correct,
        "metrics": result.metrics,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish": result.finish,
        "scores": list(result.scores),
        "prompt_tokens": result.prompt_tokens,
        "tokens": result.tokens,
        "tokens_prefilled": result.tokens_prefilled,
        "tokens_scored": result.tokens_scored,
        "rewound": result.rewound,
        "seconds": round(result.seconds, 6),
        **result.counters.as_json(),
    }


def _totals_json(task: "Task", policy: ReusePolicy, scored: list[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    return {
        "task": task.name,
        "policy": str(policy),
        "documents": len(scored),
        "fewshot": task.fewshot,
        "primary": task.primary,
        "source": task.provenance.source,
        "datasets": dict(task.provenance.datasets),
        "results": task.aggregate(scored),
    }

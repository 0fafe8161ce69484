"""python -m tasks.run: one benchmark with one policy; a JSON line for each document, then the aggregate."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from sampler import DecodeSettings, InputError, ReusePolicy, load_model
from sampler.cli import Parser, add_decode_flags, add_model_flags, run_command
from sampler.decode import check_batch_size, check_prompts
from sampler.loading import find_model
from tasks.catalog import GENERATE
from tasks.documents import TaskOptions
from tasks.evaluate import ModelDecoder, Result, chat_renderer, evaluate
from tasks.sources import resolve_data
from tasks.task import Task, open_task

EXAMPLES = """examples:
  python -m tasks.run --task gsm8k --model DIR --policy k2_middle --limit 5
  python -m tasks.run --task mmlu --model DIR --data FOLDER --sample 500 --fewshot 5 --out rows.jsonl
"""


def main() -> None:
    arguments = _parser().parse_args()
    policy = ReusePolicy.parse(arguments.policy)
    settings = DecodeSettings(
        threshold=arguments.threshold, small_block=arguments.small_block, block_cache=arguments.block_cache
    )
    check_batch_size(arguments.batch_size)
    task = open_task(arguments.task, _options(arguments))
    if task.kind != GENERATE:
        policy.check_scoring()
    files = find_model(arguments.model)
    policy.bind(files.config.num_layers, arguments.subset_size)
    check_prompts((), settings, files.config)
    if arguments.chat_template:
        chat_renderer(files.tokenizer)
    with _output(arguments.out) as out:
        model = load_model(files, dtype=arguments.dtype, device=arguments.device)
        sampler = ModelDecoder(
            model=model,
            policy=policy,
            settings=settings,
            batch_size=arguments.batch_size,
            subset_size=arguments.subset_size,
        )
        scored = []
        for result in tqdm(
            evaluate(task, task.documents, sampler), total=len(task.documents), unit="doc", disable=None
        ):
            print(json.dumps(as_json(result), ensure_ascii=False), file=out, flush=True)
            scored.append((result.document, result.metrics))
        print(json.dumps(summary(task, policy, scored), ensure_ascii=False), file=out, flush=True)


def as_json(result: Result) -> dict[str, Any]:
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


def summary(task: Task, policy: ReusePolicy, scored: list[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
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


@contextmanager
def _output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    if not Path(path).parent.is_dir():
        raise InputError(f"--out {path}: there is no folder {Path(path).parent}")
    with Path(path).open("w", encoding="utf-8") as file:
        yield file


def _options(arguments: argparse.Namespace) -> TaskOptions:
    return TaskOptions(
        data=resolve_data(arguments.data, arguments.model),
        limit=arguments.limit,
        sample=arguments.sample,
        seed=arguments.seed,
        fewshot=arguments.fewshot,
        chat_template=arguments.chat_template,
        max_new_tokens=arguments.max_new_tokens,
        allow_code_execution=arguments.allow_code_execution,
        unsafe_code_execution=arguments.unsafe_code_execution,
    )


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        default="auto",
        help="hub, bundled, or a folder laid out like the Hub (default: bundled with the bundled model, else hub)",
    )
    parser.add_argument("--allow-code-execution", action="store_true", help="run generated programs, in a cage")
    parser.add_argument("--unsafe-code-execution", action="store_true", help="run them even where there is no cage")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tasks.run", description="Evaluates one benchmark with one policy.", examples=EXAMPLES
    )
    parser.add_argument("--task", required=True, help="a name that python -m tasks.list shows, or any lm-eval task")
    add_model_flags(parser)
    add_decode_flags(parser)
    parser.add_argument("--limit", type=int, help="the first N documents, of each subject in a group")
    parser.add_argument("--sample", type=int, help="a random N, spread over the subjects")
    parser.add_argument("--seed", type=int, default=0, help="of the random sample (default: 0)")
    parser.add_argument("--fewshot", type=int, help="worked examples in the prompt (default: as the task says)")
    parser.add_argument("--no-chat-template", dest="chat_template", action="store_false", help="ask in plain text")
    parser.add_argument("--max-new-tokens", type=int, help="most tokens of an answer (default: as the task says)")
    parser.add_argument("--out", metavar="FILE.jsonl", help="write there instead of to the screen")
    add_task_flags(parser)
    return parser


if __name__ == "__main__":
    run_command(main)

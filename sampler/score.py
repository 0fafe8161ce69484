"""python -m sampler.score: log-likelihoods of (prefix, target) pairs, JSON lines in and out, in order."""

import argparse
from typing import Any

from sampler.cli import Line, Parser, add_model_flags, read_lines, run_command, write_in_order
from sampler.decode import check_batch_size
from sampler.loading import ModelFiles, find_model, load_model, pick_device, pick_dtype
from sampler.policy import ReusePolicy
from sampler.records import Pair, Scored
from sampler.scoring import METHODS, check_pairs, score_pairs
from sampler.text import encode_pair

EXAMPLES = """examples:
  echo '{"id": 1, "prefix": "The capital of France is", "target": " Paris"}' |
    python -m sampler.score --model Efficient-Large-Model/Fast_dLLM_v2_7B --policy k2_middle
  python -m sampler.score --model DIR --ids --scoring reference --batch-size 8 < pairs.jsonl
"""


def main() -> None:
    arguments = _parser().parse_args()
    policy = ReusePolicy.parse(arguments.policy)
    policy.check_scoring()
    check_batch_size(arguments.batch_size)
    pick_dtype(arguments.dtype, pick_device(arguments.device))
    lines = read_lines()
    files = find_model(arguments.model)
    policy.bind(files.config.num_layers, arguments.subset_size)
    if lines and not arguments.ids:
        _ = files.tokenizer  # a model without one is refused before its weights are read
    pairs = []
    for line in lines:
        with line:
            pairs.append(_pair(line, files, arguments.ids))
            check_pairs(pairs[-1:], files.config)
    model = load_model(files, dtype=arguments.dtype, device=arguments.device)
    results = score_pairs(
        model,
        pairs,
        policy=policy,
        method=arguments.scoring,
        batch_size=arguments.batch_size,
        subset_size=arguments.subset_size,
    )
    write_in_order(((index, _output(lines[index], scored)) for index, scored in results), len(lines))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m sampler.score",
        description='Scores targets. Lines in: {"id", "prefix", "target"} as texts or, with --ids, as token ids.',
        examples=EXAMPLES,
    )
    add_model_flags(parser)
    parser.add_argument("--ids", action="store_true", help="lines hold token ids instead of text")
    parser.add_argument(
        "--scoring", choices=METHODS, default="chain", help="all tokens of the target, or its first as the reference"
    )
    return parser


def _pair(line: Line, files: ModelFiles, given: bool) -> Pair:
    if given:
        return Pair(prefix=line.token_ids("prefix"), target=line.token_ids("target"))
    prefix, target = encode_pair(files.tokenizer, line.text("prefix"), line.text("target"))
    return Pair(prefix=prefix, target=target)


def _output(line: Line, scored: Scored) -> dict[str, Any]:
    return {
        "id": line.fields["id"],
        "score": scored.score,
        "greedy": scored.greedy,
        "rewound": scored.rewound,
        **scored.counters.as_json(),
        "seconds": round(scored.seconds, 6),
    }


if __name__ == "__main__":
    run_command(main)

"""python -m sampler.generate: continues prompts, JSON lines in and out, in order."""

import argparse
from typing import Any

from sampler.cli import Line, Parser, add_decode_flags, add_model_flags, read_lines, run_command, write_in_order
from sampler.decode import check_batch_size, check_prompts, decode_prompts
from sampler.errors import InputError
from sampler.loading import ModelFiles, find_model, load_model, pick_device, pick_dtype
from sampler.policy import ReusePolicy
from sampler.records import DecodeSettings, Generated, Prompt, document_seed
from sampler.text import check_stop, encode, encode_chat

EXAMPLES = """examples:
  echo '{"id": 1, "messages": [{"role": "user", "content": "What is 3 + 4?"}]}' |
    python -m sampler.generate --model Efficient-Large-Model/Fast_dLLM_v2_7B
  python -m sampler.generate --model DIR --policy k2_middle --ids --batch-size 8 < prompts.jsonl
"""


def main() -> None:
    arguments = _parser().parse_args()
    policy = ReusePolicy.parse(arguments.policy)
    settings = DecodeSettings(
        threshold=arguments.threshold,
        small_block=arguments.small_block,
        block_cache=arguments.block_cache,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
    )
    check_batch_size(arguments.batch_size)
    check_stop(arguments.stop)
    pick_dtype(arguments.dtype, pick_device(arguments.device))
    lines = read_lines()
    files = find_model(arguments.model)
    policy.bind(files.config.num_layers, arguments.subset_size)
    check_prompts([], settings, files.config)
    if arguments.stop or (lines and not arguments.ids):
        _ = files.tokenizer  # a model without one is refused before its weights are read
    prompts = []
    for line in lines:
        with line:
            prompts.append(_prompt(line, files, arguments))
            check_prompts(prompts[-1:], settings, files.config)
    model = load_model(files, dtype=arguments.dtype, device=arguments.device)
    results = decode_prompts(
        model,
        prompts,
        policy=policy,
        settings=settings,
        batch_size=arguments.batch_size,
        subset_size=arguments.subset_size,
        with_text=not arguments.ids,
    )
    write_in_order(
        ((index, _output(lines[index], generated, with_text=not arguments.ids)) for index, generated in results),
        len(lines),
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m sampler.generate",
        description='Continues prompts. Lines in: {"id", "prompt"}, {"id", "messages"} or, with --ids, {"id", "ids"}.',
        examples=EXAMPLES,
    )
    add_model_flags(parser)
    parser.add_argument("--ids", action="store_true", help="lines hold token ids instead of text")
    add_decode_flags(parser)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="exact limit (default: 256)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus when sampling (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="with each line's id it seeds that line (default: 0)")
    return parser


def _prompt(line: Line, files: ModelFiles, arguments: argparse.Namespace) -> Prompt:
    return Prompt(
        ids=prompt_ids(line, files, arguments.ids),
        stop=tuple(arguments.stop),
        seed=document_seed(arguments.seed, line.fields["id"]),
    )


def prompt_ids(line: Line, files: ModelFiles, given: bool) -> tuple[int, ...]:
    if given:
        return line.token_ids("ids")
    if "messages" in line.fields and "prompt" in line.fields:
        raise InputError('"prompt" and "messages" are both given; one of them is allowed')
    if "messages" in line.fields:
        return encode_chat(files.tokenizer, line.messages())
    return encode(files.tokenizer, line.text("prompt"))


def _output(line: Line, generated: Generated, *, with_text: bool) -> dict[str, Any]:
    text = {"text": generated.text} if with_text else {}
    return {
        "id": line.fields["id"],
        "ids": list(generated.ids),
        **text,
        "finish": generated.finish,
        **generated.counters.as_json(),
        "seconds": round(generated.seconds, 6),
    }


if __name__ == "__main__":
    run_command(main)

"""python -m sampler.profile: how far each layer's contribution moves between steps, and which layers move least."""

import argparse
import json
from pathlib import Path

from sampler.cli import MODEL_HELP, Parser, add_decode_flags, add_device_flags, read_lines, run_command
from sampler.decode import check_batch_size, check_prompts
from sampler.drift import GROUPS, Profile, check_path, draw, profile
from sampler.errors import InputError
from sampler.generate import prompt_ids
from sampler.loading import find_model, load_model, pick_device, pick_dtype
from sampler.policy import checked_subset_size
from sampler.records import DecodeSettings, Prompt, document_seed

EXAMPLES = """examples:
  python -m sampler.profile --model tiny --figure drift.svg < prompts.jsonl
  python -m sampler.profile --model DIR --ids --size 8 --json < prompts.jsonl
"""


def main() -> None:
    arguments = _parser().parse_args()
    settings = DecodeSettings(
        threshold=arguments.threshold,
        small_block=arguments.small_block,
        block_cache=arguments.block_cache,
        max_new_tokens=arguments.max_new_tokens,
    )
    check_batch_size(arguments.batch_size)
    pick_dtype(arguments.dtype, pick_device(arguments.device))
    if arguments.figure is not None:
        check_path(arguments.figure)
    lines = read_lines()
    files = find_model(arguments.model)
    size = checked_subset_size(files.config.num_layers, arguments.size)
    check_prompts([], settings, files.config)
    prompts = []
    for line in lines:
        with line:
            ids = prompt_ids(line, files, arguments.ids)
            prompts.append(Prompt(ids=ids, seed=document_seed(0, line.fields["id"])))
            check_prompts(prompts[-1:], settings, files.config)
    model = load_model(files, dtype=arguments.dtype, device=arguments.device)
    found = profile(model, prompts, settings=settings, batch_size=arguments.batch_size)
    if not found.passes:
        raise InputError("no block took a second pass, so nothing can be compared; give longer prompts or more of them")
    print(json.dumps(found.as_json(size), indent=1) if arguments.json else table(found, size))
    if arguments.figure is not None:
        draw(found, found.suggestion(size), arguments.figure)


def table(found: Profile, size: int) -> str:
    """The profile for people: a line for each layer, then the suggestion."""
    suggested = found.suggestion(size)
    head = f"{'layer':>5}  {'of stream':>9}  {'of itself':>9}" + "".join(f"  {group:>13}" for group in GROUPS)
    lines = [f"relative L1 change of each layer's contribution between steps, {found.passes} passes", "", head]
    for layer in range(found.depth):
        cells = [found.of(layer, group=group).relative for group in GROUPS]
        shown = "".join(f"  {'–' if value is None else f'{value:.3f}':>13}" for value in cells)
        whole = found.of(layer)
        lines.append(f"{layer:>5}  {whole.of_stream or 0:>9.3f}  {whole.relative or 0:>9.3f}{shown}")
    return "\n".join([*lines, "", f"the {size} layers that move least against the residual stream: {suggested}"])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m sampler.profile",
        description="Measures at k=1 how far each layer's contribution moves from step to step. Lines in as for "
        "sampler.generate.",
        examples=EXAMPLES,
    )
    parser.add_argument("--model", required=True, help=MODEL_HELP)
    parser.add_argument("--ids", action="store_true", help="lines hold token ids instead of text")
    parser.add_argument("--size", type=int, help="layers to suggest (default: 12, or a third)")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw layers × steps into this .svg or .png")
    parser.add_argument("--json", action="store_true", help="print JSON, step by step, instead of a table")
    parser.add_argument("--batch-size", type=int, default=1, help="documents decoded together (default: 1)")
    add_device_flags(parser)
    add_decode_flags(parser)
    parser.add_argument("--max-new-tokens", type=int, default=256, help="exact limit (default: 256)")
    return parser


if __name__ == "__main__":
    run_command(main)

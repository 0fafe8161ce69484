"""python -m tools.tiny.evaluate: measures a model on held-out lines with the sampler's own decoding and scoring.

An answer is correct if its last \\boxed{} has the same content as that of the expected answer; a choice is correct if
its letter is the most likely of A to D. lm-eval's metrics are not used.
"""

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from orchestrator.cli.console import Parser, run_command
from sampler.decode import Step, decode_prompts
from sampler.errors import InputError
from sampler.loading import LoadedModel, load_model
from sampler.policy import ReusePolicy
from sampler.records import Counters, DecodeSettings, Pair, Prompt
from sampler.scoring import score_pairs
from sampler.text import encode, encode_chat
from tools.tiny.examples import DRILL, HELD_OUT, Line, read_lines
from tools.tiny.model_files import LETTERS

BOX = re.compile(r"\\boxed\{([^{}]*)\}")
EXAMPLES = """examples:
  python -m tools.tiny.evaluate --data build/tiny.jsonl --limit 60
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The results of one task. The last three are None for choices, which are scored and not generated."""

    documents: int
    right: int
    tokens: float | None = None  # mean tokens of an answer
    passes: float | None = None  # mean denoising passes of an answer
    steps: float | None = None  # mean denoising steps of a block that contains only the answer

    def __str__(self) -> str:
        text = f"{100 * self.right / self.documents:.1f} % correct of {self.documents}"
        if self.tokens is not None:
            text += f", {self.tokens:.1f} tokens and {self.passes:.1f} denoising passes per answer"
        if self.steps is not None:
            text += f", {self.steps:.2f} passes per full block"
        return text


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.limit < 1:
        raise InputError(f"--limit must be at least 1 (got {arguments.limit})")
    lines = read_lines(Path(arguments.data))
    model = load_model(arguments.model)
    figures = evaluate(model, lines, limit=arguments.limit, batch_size=arguments.batch_size)
    print_figures(figures)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tools.tiny.evaluate",
        description="Answers the held-out lines of a data file and prints the share of correct answers per task.",
        examples=EXAMPLES,
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="JSON lines of prompts and answers")
    parser.add_argument("--model", default="tiny", help="a model directory (default: tiny, the bundled model)")
    parser.add_argument("--limit", type=int, default=1_000_000, help="held-out lines per task (default: all)")
    parser.add_argument("--batch-size", type=int, default=1, help="prompts decoded together (default: 1)")
    return parser


def print_figures(figures: Mapping[str, Figures]) -> None:
    for task, measured in figures.items():
        print(f"{task}: {measured}")


def evaluate(
    model: LoadedModel, lines: Iterable[Line], *, limit: int = 1_000_000, batch_size: int = 1
) -> dict[str, Figures]:
    """Figures of each task on its first held-out lines, at threshold 0.95 and small block 8 with policy k1."""
    tasks: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.split == HELD_OUT and line.task != DRILL and len(tasks[line.task]) < limit:
            tasks[line.task].append(line)
    return {
        task: _choices(model, chosen) if _are_choices(chosen) else _answers(model, chosen, batch_size)
        for task, chosen in sorted(tasks.items())
    }


def _are_choices(lines: Sequence[Line]) -> bool:
    return all(line.answer.strip() in LETTERS for line in lines)


def _choices(model: LoadedModel, lines: Sequence[Line]) -> Figures:
    pairs = []
    for line in lines:
        prefix = encode_chat(model.tokenizer, line.messages)
        pairs += [Pair(prefix=prefix, target=encode(model.tokenizer, letter)) for letter in LETTERS]
    scores = [0.0] * len(pairs)
    for index, scored in tqdm(score_pairs(model, pairs, policy=_K1), total=len(pairs), unit="pair", disable=None):
        scores[index] = scored.score
    right = 0
    for number, line in enumerate(lines):
        four = scores[number * len(LETTERS) : (number + 1) * len(LETTERS)]
        right += LETTERS[four.index(max(four))] == line.answer.strip()
    return Figures(documents=len(lines), right=right)


def _answers(model: LoadedModel, lines: Sequence[Line], batch_size: int) -> Figures:
    prompts = [Prompt(ids=encode_chat(model.tokenizer, line.messages)) for line in lines]
    settings = DecodeSettings(threshold=0.95, small_block=8, max_new_tokens=160)
    steps: Counter[tuple[int, int]] = Counter()
    counters = Counters()
    full_block_steps: list[int] = []  # of each block without prompt tokens
    size = model.config.block_size
    right = tokens = 0

    def count_step(step: Step) -> None:
        steps[step.document, step.block] += 1

    results = decode_prompts(model, prompts, policy=_K1, settings=settings, batch_size=batch_size, on_step=count_step)
    for index, generated in tqdm(results, total=len(prompts), unit="answer", disable=None):
        right += boxed(generated.text or "") == boxed(lines[index].answer)
        tokens += len(generated.ids)
        counters += generated.counters
        begin, end = len(prompts[index].ids), len(prompts[index].ids) + len(generated.ids)
        full_block_steps += [steps[index, block] for block in range(-(-begin // size), end // size)]
    count = len(lines)
    return Figures(
        documents=count,
        right=right,
        tokens=tokens / count,
        passes=(counters.full + counters.small) / count,
        steps=sum(full_block_steps) / len(full_block_steps) if full_block_steps else None,
    )


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{} of an answer."""
    contents = BOX.findall(text)
    return contents[-1].replace(" ", "") if contents else None


_K1 = ReusePolicy.parse("k1")

if __name__ == "__main__":
    run_command(main)

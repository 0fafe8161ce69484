"""python -m tools.tiny.train: makes the bundled model from prompt and answer lines, tokenizer and all.

A run that is interrupted continues from its checkpoint when the same command is given again. The model's files are
written when it is finished. Knows the sampler and a data file, and nothing of where the data comes from.
"""

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from orchestrator.cli.console import Parser, run_command
from sampler.config import ModelConfig
from sampler.errors import InputError
from sampler.loading import load_model
from tools.tiny import checkpoint
from tools.tiny.batches import Batches
from tools.tiny.checkpoint import Progress
from tools.tiny.evaluate import evaluate, print_figures
from tools.tiny.examples import TRAIN, encode_examples, read_lines, training_texts
from tools.tiny.model_files import LAYERS, tiny_config, write_model
from tools.tiny.tokenizer import build_tokenizer
from tools.tiny.trainer import SHALLOWER, Budget, Stopwatch, Trainer, compiler_at_hand

MINUTES = 70.0
OUT = "build/tiny"
SECONDS_BETWEEN_CHECKPOINTS = 60.0
EXAMPLES = """examples:
  python -m tools.tiny.train --data build/tiny.jsonl
  python -m tools.tiny.train --data build/tiny.jsonl --out build/toy --minutes 2 --threads 2
"""


def main(given: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(given)
    _check(arguments)
    data, out = Path(arguments.data), Path(arguments.out)
    minutes = None if arguments.steps else arguments.minutes or MINUTES
    budget = Budget(steps=arguments.steps, minutes=minutes)
    lines = read_lines(data)
    tokenizer = build_tokenizer(training_texts(lines))
    config = tiny_config(tokenizer, layers=arguments.layers)
    run = identity(data.read_bytes(), config, budget, arguments.seed)
    trainer = Trainer(
        config,
        Batches(
            encode_examples([line for line in lines if line.split == TRAIN], tokenizer), config, seed=arguments.seed
        ),
        seed=arguments.seed,
        threads=arguments.threads,
        compiled=compiler_at_hand() if arguments.compile is None else arguments.compile,
    )
    path = Path(arguments.checkpoint) if arguments.checkpoint else out / "checkpoint.safetensors"
    progress = train(trainer, budget, path, run)
    write_model(out, trainer.weights, config, tokenizer)
    path.unlink()
    rate = progress.examples / progress.seconds
    print(f"{progress.step} steps, {progress.examples} examples in {progress.seconds / 60:.1f} minutes, {rate:.1f}/s")
    print_figures(evaluate(load_model(str(out)), lines))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tools.tiny.train",
        description="Trains a small block-diffusion model on prompt and answer lines, and says how well it answers "
        'held-out ones. Lines: {"task", "split": "train" or "held_out", "system", "prompt", "answer"}.',
        examples=EXAMPLES,
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="JSON lines of prompts and answers")
    parser.add_argument("--out", default=OUT, metavar="DIR", help=f"where the finished model goes (default: {OUT})")
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes", type=float, help=f"train for this long; the learning rate follows the clock (default: {MINUTES:g})"
    )
    length.add_argument("--steps", type=int, help="train for so many steps, whatever time they take")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and masks (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="1 or 2; the result is the same (default: 2)")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of the network (default: {LAYERS})")
    parser.add_argument(
        "--checkpoint", metavar="FILE", help="where an interrupted run continues (default: in DIR, until finished)"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compile the layers (default: if there is a C++ compiler)",
    )
    return parser


def _check(arguments: argparse.Namespace) -> None:
    if arguments.minutes is not None and not 0 < arguments.minutes < 1e6:
        raise InputError(f"minutes {arguments.minutes}: a positive number is allowed")
    if arguments.steps is not None and arguments.steps < 1:
        raise InputError(f"steps {arguments.steps}: at least 1 is allowed")
    if arguments.threads not in (1, 2):
        raise InputError(f"threads {arguments.threads}: 1 or 2 is allowed")
    if arguments.layers < 1 or arguments.layers % SHALLOWER:
        raise InputError(f"layers {arguments.layers}: a multiple of {SHALLOWER} is allowed")
    out = Path(arguments.out)
    if out.exists() and not out.is_dir():
        raise InputError(f"output {arguments.out!r} is a file; a folder is allowed")


def identity(data: bytes, config: ModelConfig, budget: Budget, seed: int) -> str:
    """Tells one run from another: a checkpoint is continued only by the run that wrote it."""
    parts = [hashlib.sha256(data).hexdigest(), asdict(config), asdict(budget), seed]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def train(trainer: Trainer, budget: Budget, path: Path, run: str) -> Progress:
    """Runs to the end of the budget, from where a checkpoint of this run stands."""
    progress = Progress(run=run)
    found = checkpoint.load(path, run)
    if found is not None:
        tensors, progress = found
        trainer.restore(tensors, progress.step, progress.grew_at)
    watch, saved = Stopwatch(progress.seconds), progress.seconds
    bar = _Bar(budget, progress)
    loss: float | None = None
    while (position := budget.position(progress.step, watch.seconds())) < 1:
        report = trainer.step(position)
        loss = report.loss if loss is None else 0.97 * loss + 0.03 * report.loss
        progress = Progress(
            run=run,
            step=trainer.number,
            seconds=watch.seconds(),
            examples=progress.examples + report.examples,
            grew_at=trainer.grew_at,
        )
        bar.show(progress, loss, report.hits)
        if progress.seconds - saved > SECONDS_BETWEEN_CHECKPOINTS:
            checkpoint.save(path, trainer.state(), progress)
            saved = progress.seconds
    checkpoint.save(path, trainer.state(), progress)
    bar.close()
    return progress


class _Bar:
    """Progress on the terminal, or a line every hundred steps in a log."""

    def __init__(self, budget: Budget, progress: Progress) -> None:
        self.budget = budget
        self.began = progress
        self.bar: Any = tqdm(total=1000, unit="‰", mininterval=1.0, bar_format="{l_bar}{bar}| {postfix}")

    def show(self, progress: Progress, loss: float, hits: float) -> None:
        position = self.budget.position(progress.step, progress.seconds)
        done = position - self.budget.position(self.began.step, self.began.seconds)
        spent = progress.seconds - self.began.seconds
        left = spent / done * (1 - position) if done else 0.0
        rate = (progress.examples - self.began.examples) / spent
        self.bar.n = min(1000, round(1000 * position))
        self.bar.set_postfix_str(
            f"step {progress.step}, loss {loss:.4f}, hits {hits:.3f}, {rate:.1f} examples/s, {left / 60:.1f} min left"
        )

    def close(self) -> None:
        self.bar.close()


if __name__ == "__main__":
    run_command(main)

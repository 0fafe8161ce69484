"""python -m tools.tiny.train: trains the bundled model and its tokenizer on prompt and answer lines.

An interrupted run continues from its checkpoint when the same command is repeated. The model's files are written when
training has finished.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from orchestrator.cli.console import Parser, run_command
from sampler.config import ModelConfig
from sampler.errors import InputError
from sampler.loading import load_model
from tools.tiny.batches import Batches
from tools.tiny.evaluate import evaluate, print_figures
from tools.tiny.examples import TRAIN, encode_examples, read_lines, training_texts
from tools.tiny.model_files import LAYERS, build_tokenizer, tiny_config, write_model
from tools.tiny.trainer import DEPTH_RATIO, Budget, Stopwatch, Trainer, has_compiler

DEFAULT_MINUTES = 70.0
DEFAULT_OUT = "build/tiny"
CHECKPOINT_SECONDS = 60.0
EXAMPLES = """examples:
  python -m tools.tiny.train --data build/tiny.jsonl
  python -m tools.tiny.train --data build/tiny.jsonl --out build/toy --minutes 2 --threads 2
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of a training run. `run` is its `run_identity`."""

    run: str
    step: int = 0
    seconds: float = 0.0
    examples: int = 0
    grew_at: int = 0  # the step before which the network grew last


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], progress: Progress) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    save_file(dict(tensors), fresh, metadata={"progress": json.dumps(asdict(progress))})
    os.replace(fresh, path)


def load_checkpoint(path: Path, run: str) -> tuple[dict[str, Tensor], Progress] | None:
    """The state of this run, or None if there is no checkpoint yet. Raises InputError if it is of another run."""
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            progress = Progress(**json.loads((file.metadata() or {})["progress"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{path} is not a training checkpoint or is corrupted; remove it") from None
    if progress.run != run:
        raise InputError(
            f"{path} belongs to a run with other data, layers, seed or budget; remove it or choose another --checkpoint"
        )
    return tensors, progress


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    _check(arguments)
    data, out = Path(arguments.data), Path(arguments.out)
    minutes = None if arguments.steps else arguments.minutes or DEFAULT_MINUTES
    budget = Budget(steps=arguments.steps, minutes=minutes)
    lines = read_lines(data)
    tokenizer = build_tokenizer(training_texts(lines))
    config = tiny_config(tokenizer, layers=arguments.layers)
    run = run_identity(data.read_bytes(), config, budget, arguments.seed)
    trainer = Trainer(
        config,
        Batches(
            encode_examples([line for line in lines if line.split == TRAIN], tokenizer), config, seed=arguments.seed
        ),
        seed=arguments.seed,
        threads=arguments.threads,
        compiled=has_compiler() if arguments.compile is None else arguments.compile,
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
        description="Trains a small block-diffusion model on prompt and answer lines, and evaluates it on "
        'held-out lines. Lines: {"task", "split": "train" or "held_out", "system", "prompt", "answer"}.',
        examples=EXAMPLES,
    )
    parser.add_argument("--data", required=True, metavar="FILE", help="JSON lines of prompts and answers")
    parser.add_argument(
        "--out", default=DEFAULT_OUT, metavar="DIR", help=f"directory for the finished model (default: {DEFAULT_OUT})"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes",
        type=float,
        help=f"train for this long; the learning rate follows the clock (default: {DEFAULT_MINUTES:g})",
    )
    length.add_argument("--steps", type=int, help="train for this many steps instead")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and masks (default: 0)")
    parser.add_argument("--threads", type=int, default=2, help="1 or 2, with the same result (default: 2)")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"number of layers (default: {LAYERS})")
    parser.add_argument(
        "--checkpoint", metavar="FILE", help="checkpoint of an interrupted run (default: in --out, until finished)"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="compile the layers (default: if a C++ compiler is installed)",
    )
    return parser


def _check(arguments: argparse.Namespace) -> None:
    if arguments.minutes is not None and not 0 < arguments.minutes < 1e6:
        raise InputError(f"--minutes must be above 0 and below 1000000 (got {arguments.minutes})")
    if arguments.steps is not None and arguments.steps < 1:
        raise InputError(f"--steps must be at least 1 (got {arguments.steps})")
    if arguments.threads not in (1, 2):
        raise InputError(f"--threads must be 1 or 2 (got {arguments.threads})")
    if arguments.layers < 1 or arguments.layers % DEPTH_RATIO:
        raise InputError(f"--layers must be a multiple of {DEPTH_RATIO} (got {arguments.layers})")
    out = Path(arguments.out)
    if out.exists() and not out.is_dir():
        raise InputError(f"--out must be a directory (got the file {arguments.out!r})")


def run_identity(data: bytes, config: ModelConfig, budget: Budget, seed: int) -> str:
    """A hash of everything that shapes a run. A checkpoint is continued only by a run with the same identity."""
    parts = [hashlib.sha256(data).hexdigest(), asdict(config), asdict(budget), seed]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def train(trainer: Trainer, budget: Budget, path: Path, run: str) -> Progress:
    """Trains to the end of the budget, from the checkpoint of this run if there is one."""
    progress = Progress(run=run)
    checkpoint = load_checkpoint(path, run)
    if checkpoint is not None:
        tensors, progress = checkpoint
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
        if progress.seconds - saved > CHECKPOINT_SECONDS:
            save_checkpoint(path, trainer.state(), progress)
            saved = progress.seconds
    save_checkpoint(path, trainer.state(), progress)
    bar.close()
    return progress


class _Bar:
    """A progress bar."""

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

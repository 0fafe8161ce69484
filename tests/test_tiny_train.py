"""Training: seeded, resumed exactly, the same on one thread and two, and clear about bad input."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_training_data import sum_line, write_lines

from sampler import InputError, load_model
from tools.tiny.batches import Batches
from tools.tiny.evaluate import boxed, evaluate
from tools.tiny.examples import encode_examples, read_lines, training_texts
from tools.tiny.model_files import build_tokenizer, tiny_config, write_model
from tools.tiny.train import Progress, load_checkpoint, main, run_identity, save_checkpoint, train
from tools.tiny.trainer import GROWS_AT, Budget, Trainer, learning_rate, orthogonal

RUN = "a run"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("data") / "lines.jsonl")


@pytest.fixture(scope="module")
def prepared(data: Path) -> tuple[Any, list[Any], Any]:
    """Tokenizer, training lines, configuration of a network of nine layers."""
    lines = read_lines(data)
    tokenizer = build_tokenizer(training_texts(lines))
    return tokenizer, [line for line in lines if line.split == "train"], tiny_config(tokenizer, layers=9)


def new_trainer(prepared: tuple[Any, list[Any], Any], *, seed: int = 0, threads: int = 1) -> Trainer:
    tokenizer, lines, config = prepared
    return Trainer(
        config, Batches(encode_examples(lines, tokenizer), config, seed=seed, size=12), seed=seed, threads=threads
    )


def assert_same(left: Trainer, right: Trainer, same: bool = True) -> None:
    state = right.state()
    assert left.state().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in left.state().items()) is same


@pytest.mark.parametrize("at", [1, 3, 6])  # before and after the network grows, twice
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    prepared: tuple[Any, list[Any], Any], tmp_path: Path, at: int
) -> None:
    budget = Budget(steps=8)
    assert budget.position(1, 0) < GROWS_AT[0] < budget.position(3, 0) < GROWS_AT[1] < budget.position(6, 0)
    whole = new_trainer(prepared)
    progress = train(whole, budget, tmp_path / "whole.safetensors", RUN)
    begun = new_trainer(prepared)
    for step in range(at):
        begun.step(budget.position(step, 0))
    seen = sum(begun.batches.shard(number, 0.5).examples for number in range(2 * at))
    stopped = Progress(run=RUN, step=at, examples=seen, grew_at=begun.grew_at)
    save_checkpoint(tmp_path / "cut.safetensors", begun.state(), stopped)
    resumed = new_trainer(prepared)
    again = train(resumed, budget, tmp_path / "cut.safetensors", RUN)
    assert_same(whole, resumed)
    assert (again.step, again.examples, again.grew_at) == (8, progress.examples, progress.grew_at)
    assert whole.depth == 9


def test_threads_change_nothing_and_the_seed_does(prepared: tuple[Any, list[Any], Any], tmp_path: Path) -> None:
    runs = [new_trainer(prepared, threads=threads, seed=seed) for threads, seed in ((1, 0), (2, 0), (1, 1))]
    for number, trainer in enumerate(runs):
        train(trainer, Budget(steps=3), tmp_path / f"{number}.safetensors", RUN)
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2], same=False)


def test_the_loss_falls(prepared: tuple[Any, list[Any], Any]) -> None:
    trainer = new_trainer(prepared)
    reports = [trainer.step(step / 60) for step in range(40)]
    assert reports[-1].loss < 0.6 * reports[0].loss
    assert reports[-1].hits > reports[0].hits


def test_growing_keeps_the_scale_of_the_loss(prepared: tuple[Any, list[Any], Any]) -> None:
    trainer = new_trainer(prepared)
    before = [trainer.step(0.1) for _ in range(30)][-1]
    assert trainer.depth == 1
    after = trainer.step(GROWS_AT[0])
    assert trainer.depth == 3
    assert after.loss < 1.5 * before.loss


def test_a_checkpoint_of_another_run_is_refused(prepared: tuple[Any, list[Any], Any], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, {"x": torch.zeros(1)}, Progress(run="another", step=3))
    with pytest.raises(InputError, match="a run with other data, layers, seed or budget"):
        load_checkpoint(path, RUN)
    path.write_bytes(b"not safetensors")
    with pytest.raises(InputError, match="is not a training checkpoint"):
        load_checkpoint(path, RUN)
    config = prepared[2]
    names = {
        run_identity(b"data", config, Budget(steps=1), 0),
        run_identity(b"other", config, Budget(steps=1), 0),
        run_identity(b"data", config, Budget(steps=2), 0),
        run_identity(b"data", config, Budget(minutes=1), 0),
        run_identity(b"data", config, Budget(steps=1), 1),
    }
    assert len(names) == 5


def test_the_schedule_rises_stays_and_ends_at_zero() -> None:
    assert learning_rate(0) < 0.2
    assert learning_rate(0.1) == learning_rate(0.3) == 1
    assert all(learning_rate(at) < 0.2 for at in GROWS_AT)  # a fresh optimizer starts gently
    assert 0 < learning_rate(0.99) < 0.05
    assert learning_rate(1.0) == 0
    assert Budget(minutes=2).position(7, 60.0) == 0.5
    assert Budget(steps=10).position(5, 1e9) == 0.5


def test_orthogonal_has_singular_values_near_one() -> None:
    matrices = torch.randn(3, 40, 20, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.5
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(orthogonal(matrices).flatten(), (u @ v).flatten(), 0) > 0.97


def test_a_written_model_loads_and_is_evaluated(
    prepared: tuple[Any, list[Any], Any], data: Path, tmp_path: Path
) -> None:
    tokenizer, _, config = prepared
    trainer = new_trainer(prepared)
    trainer.step(GROWS_AT[-1])
    write_model(tmp_path, trainer.weights, config, tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    model = load_model(str(tmp_path))
    assert model.config == config
    figures = evaluate(model, read_lines(data), limit=3)
    assert set(figures) == {"gsm8k", "mmlu"}
    assert figures["gsm8k"].documents == figures["mmlu"].documents == 3
    assert figures["mmlu"].tokens is None
    assert 0 < (figures["gsm8k"].tokens or 0) <= 160


def test_the_last_box_counts() -> None:
    assert boxed("so \\boxed{3}, no, $\\boxed{ 4}$.") == "4"
    assert boxed("four") is None


def bad(fields: dict[str, Any]) -> str:
    return json.dumps(sum_line(random.Random(0), "train") | fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'must have lines with "split": "train"'),
        ("{", "line 1: not valid JSON"),
        ("[1]", "line 1: not a JSON object"),
        (bad({"split": "test"}), 'line 1: "split" must be "train" or "held_out" (got \'test\')'),
        (bad({"prompt": 3}), 'line 1: "prompt" must be a string (got 3)'),
        (bad({"answer": ""}), 'line 1: "answer" must not be empty'),
        (bad({"split": "held_out"}), 'must have lines with "split": "train"'),
        (bad({"task": "drill", "answer": "nothing"}), "has no results"),
    ],
)
def test_invalid_data_is_reported(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text + "\n")

    def read() -> None:
        lines = read_lines(path)
        encode_examples(lines, build_tokenizer(training_texts(lines)))

    with pytest.raises(InputError) as error:
        read()
    assert message in str(error.value)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.tiny.train", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no such file", "--out", "x"], "cannot read data file no such file"),
        (["--out", "x"], "--data"),
        (["--data", "x", "--out", "y", "--steps", "0"], "--steps must be at least 1 (got 0)"),
        (["--data", "x", "--out", "y", "--minutes", "-1"], "--minutes must be above 0"),
        (["--data", "x", "--out", "y", "--minutes", "1", "--steps", "1"], "not allowed with"),
        (["--data", "x", "--out", "y", "--threads", "3"], "--threads must be 1 or 2 (got 3)"),
        (["--data", "x", "--out", "y", "--layers", "4"], "--layers must be a multiple of 9 (got 4)"),
        (["--data", "x", "--out", __file__], "--out must be a directory"),
    ],
)
def test_invalid_arguments_are_reported(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        main(arguments)
    assert message in str(error.value)


def test_the_command_prints_one_line_and_exits_with_2() -> None:
    done = run("--data", "no such file", "--out", "x")
    assert done.returncode == 2
    assert done.stderr == "error: cannot read data file no such file: No such file or directory\n"


@pytest.mark.slow
def test_two_minutes_train_a_toy(tmp_path: Path) -> None:
    """End to end on sums below nine: it answers most of them."""
    data = write_lines(tmp_path / "lines.jsonl", train=2000, held_out=25)
    done = run("--data", data, "--out", tmp_path / "toy", "--minutes", 2, "--layers", 9)
    assert done.returncode == 0, done.stderr
    assert "min left" in done.stderr
    assert not (tmp_path / "toy" / "checkpoint.safetensors").exists()
    figures = evaluate(load_model(str(tmp_path / "toy")), read_lines(data))
    assert str(figures["gsm8k"]) in done.stdout
    assert figures["gsm8k"].right >= 15

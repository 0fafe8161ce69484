"""python -m tools.bundled.training_lines: its lines, its reproducibility and its errors."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.bundled.problems import count_pieces
from tools.bundled.training_lines import SHARES_PERCENT, training_lines

KEYS = ["task", "subject", "split", "system", "prompt", "answer"]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tools.bundled.training_lines", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_lines(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    done = command("--out", str(out), "--examples", "1000", "--seed", "5")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"wrote 1600 lines to {out}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"], "nothing unfinished stays"
    lines = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
    assert lines == training_lines(1000, 5), "the same seed draws the same lines"
    assert lines != training_lines(1000, 6)
    trained = [line for line in lines if line["split"] == "train"]
    assert Counter(line["task"] for line in trained) == {task: 10 * share for task, share in SHARES_PERCENT.items()}
    assert [line["task"] for line in lines] != sorted(line["task"] for line in lines), "in random order"
    for line in lines:
        assert list(line) == KEYS
        assert (line["system"] is None) == (line["task"] != "mmlu")
        whole = f"{line['system'] or ''}{line['prompt']}{line['answer']}"
        assert count_pieces(whole) <= 150, "room for a chat template in 160 tokens"
        assert line["task"] != "mmlu" or line["answer"] in "ABCD"


def test_few_words_and_no_large_numbers() -> None:
    """What the bundled model can learn: a closed vocabulary, and numbers below 100."""
    text = "\n".join(f"{line['system'] or ''} {line['prompt']} {line['answer']}" for line in training_lines(5_000, 1))
    assert len(set(re.findall(r"[A-Za-z]+", text))) < 320
    assert max(int(number) for number in re.findall(r"\d+", text)) <= 69


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "nowhere/lines.jsonl"), "nowhere does not exist"),
        (("--out", "."), "must be a file"),
        (("--out", "lines.jsonl", "--examples", "3"), "--examples must be between 100 and 10000000 (got 3)"),
        ((), "--out"),
    ],
)
def test_invalid_arguments(arguments: tuple[str, ...], message: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr

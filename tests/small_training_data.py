"""A small data file as the tasks render it: sums as word problems, drills of them, and choices."""

import json
import random
from pathlib import Path
from typing import Any

BOX = "Please reason step by step, and put your final answer within \\boxed{}."


def sum_line(rng: random.Random, split: str) -> dict[str, Any]:
    name, a, b = rng.choice(("Ann", "Ben")), rng.randrange(1, 5), rng.randrange(1, 5)
    return {
        "task": "gsm8k",
        "subject": "main",
        "split": split,
        "system": None,
        "prompt": f"Question: {name} has {a} pens. {name} gets {b} more. How many pens are there?\n{BOX}",
        "answer": f"We get {a}+{b}={a + b}, so {name} has {a + b} pens. The answer is \\boxed{{{a + b}}}.",
    }


def choice_line(rng: random.Random, split: str) -> dict[str, Any]:
    options = rng.sample(range(10), 4)
    right = rng.randrange(4)
    listed = "".join(f"\n{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))
    return {
        "task": "mmlu",
        "subject": "miscellaneous",
        "split": split,
        "system": "The following are multiple choice questions (with answers) about miscellaneous.\n\n",
        "prompt": f"Which of these is {options[right]}?{listed}\nAnswer:",
        "answer": "ABCD"[right],
    }


def drill_line(rng: random.Random) -> dict[str, Any]:
    sums = [(rng.randrange(1, 5), rng.randrange(1, 5)) for _ in range(4)]
    return {
        "task": "drill",
        "subject": None,
        "split": "train",
        "system": None,
        "prompt": "Drill: " + ", ".join(f"{a}+{b}" for a, b in sums),
        "answer": ", ".join(f"{a}+{b}={a + b}" for a, b in sums),
    }


def write_lines(path: Path, *, train: int = 60, held_out: int = 4, seed: int = 0) -> Path:
    rng = random.Random(seed)
    lines = []
    for _ in range(train):
        lines += [sum_line(rng, "train"), choice_line(rng, "train"), drill_line(rng)]
    for _ in range(held_out):
        lines += [sum_line(rng, "held_out"), choice_line(rng, "held_out")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path

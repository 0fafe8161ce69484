"""A very small model and its documents, made for each campaign, and the sweep to be run on them. Knows no faults."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.tiny.model_files import tiny_config, write_model
from tools.tiny.network import HEAD, new_weights
from tools.tiny.tokenizer import build_tokenizer

LAYERS = 6  # first, middle and last are two each
POLICIES = ("k1", "k2_first", "k2_middle", "k3_last")
DOCUMENTS = 48  # as many as are decoded while a round's faults come
NEW_TOKENS = 96
SHARD = 4
NAME = "s"  # of each sweep's folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What every sweep of a campaign has in common."""

    folder: Path
    timeout: float  # seconds until a worker that hangs is ended
    documents: int = DOCUMENTS

    @property
    def rows(self) -> int:
        return self.documents * len(POLICIES)

    def flags(self, out: Path, *, address: str | None = None) -> list[str]:
        """On a machine with one core the actors share it; on two nodes each has one."""
        given: dict[str, object] = {
            "tasks": "gsm8k",
            "policies": ",".join(POLICIES),
            "max-new-tokens": NEW_TOKENS,
            "shard-size": SHARD,
            "limit": self.documents,
            "fewshot": 0,
            "model": self.folder / "model",
            "data": self.folder / "data",
            "out": out,
            "name": NAME,
            "actors": 2,
            "threads-per-actor": 1,
            "cpus-per-actor": 0.5 if address is None else 1,
            "worker-timeout": self.timeout,
        }
        if address is not None:
            given["address"] = address
        return [*(str(part) for name, value in given.items() for part in (f"--{name}", value)), "--no-dashboard"]


def write_case(folder: Path, *, timeout: float) -> Case:
    write_files(folder, documents=DOCUMENTS)
    return Case(folder=folder, timeout=timeout)


def write_files(folder: Path, *, documents: int) -> None:
    """`folder`/model and `folder`/data. Random weights: nonsense, but another for each document and policy."""
    questions = [f"What is {number} plus {7 * number}, and why?" for number in range(documents)]
    tokenizer = build_tokenizer(questions[:DOCUMENTS], vocabulary=300, seen=2)
    config = tiny_config(tokenizer, layers=LAYERS)
    weights = new_weights(config, torch.Generator().manual_seed(0))
    weights[HEAD] *= 50  # sure enough of itself to show what a wrong cache would change
    write_model(folder / "model", weights, config, tokenizer)
    data = folder / "data" / "openai" / "gsm8k"
    (data / "main").mkdir(parents=True)
    rows = [{"question": text, "answer": f"It is so.\n#### {8 * n}"} for n, text in enumerate(questions)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for split in ("train", "test"):
        (data / "main" / f"{split}.jsonl").write_text(text, encoding="utf-8")
    files = "".join(f"\n  - split: {split}\n    path: main/{split}.jsonl" for split in ("train", "test"))
    readme = f"---\nconfigs:\n- config_name: main\n  data_files:{files}\n---\n"
    (data / "README.md").write_text(readme, encoding="utf-8")

"""Command lines that must be refused, in bad_inputs.txt: `$ command`, `< line of standard input`, words of the errors.

They run in the directory that `write_place` fills.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from simulated_sweep import Simulation, write_sweep

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "m28"
YAML = {
    "broken.yaml": "tasks: gsm8k\nlimit: [1, 2\n",
    "tab.yaml": "tasks: gsm8k\n\tlimit: 5\n",
    "twice.yaml": "tasks: gsm8k\nlimit: 5\nlimit: 6\n",
    "list.yaml": "- gsm8k\n",
    "unknown.yaml": "tasks: gsm8k\nlimits: 5\n",
    "values.yaml": "tasks: gsm8k\nlimit: many\nthreshold: [1.5, .nan]\n",
    "object.yaml": "!!python/object/apply:os.system ['true']\n",
    "latin.yaml": b"tasks: gsm8k # \xe9\n",
    "flags.yaml": "tasks: gsm8k\ndry-run: true\n",
    "deep.yaml": "[" * 5000,
}


def write_place(place: Path) -> None:
    """Sweeps, models and files that are damaged in many ways, next to good ones."""
    results = place / "results"
    one = Simulation(documents={"gsm8k": 20}, policies=("k1_first", "k2_middle"), shard_size=10)
    write_sweep(results / "demo", one)
    for name in ("badjson", "list", "cut", "keys", "norows", "damaged"):
        shutil.copytree(results / "demo", results / name)
    (results / "badjson" / "sweep.json").write_text("not json")
    (results / "list" / "sweep.json").write_text("[]")
    whole = (results / "cut" / "sweep.json").read_bytes()
    (results / "cut" / "sweep.json").write_bytes(whole[: len(whole) // 2])
    (results / "keys" / "sweep.json").write_text('{"sweep": "keys"}')
    shutil.rmtree(results / "norows" / "trials")
    for folder in results.joinpath("norows").glob("compacted*"):
        shutil.rmtree(folder)
    for rows in results.joinpath("damaged", "trials").glob("*/*.parquet"):
        rows.write_bytes(rows.read_bytes()[:100])
    (place / "empty").mkdir()
    (place / "text.txt").write_text("hello\n")
    (place / "nothing.jsonl").write_text("")
    (place / "noise.jsonl").write_bytes(bytes(range(256)))
    (place / "samples_x.jsonl").write_text('{"doc_id": 0}\n')
    (place / "executable").write_text("#!/bin/sh\nexit 3\n")
    (place / "executable").chmod(0o755)
    (place / "golden").symlink_to(GOLDEN)
    for name, text in YAML.items():
        (place / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    config = json.loads((GOLDEN / "config.json").read_text())
    write_model(place / "qwen", {**config, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "bd_size")
    write_model(place / "bert", {**config, "architectures": ["BertModel"], "model_type": "bert"})
    write_model(place / "moe", {**config, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"})
    write_model(place / "layers", {**config, "num_hidden_layers": "many"})
    write_model(place / "weightless", config)
    (place / "noconfig").mkdir()
    (place / "badconfig").mkdir()
    (place / "badconfig" / "config.json").write_text("{")


def write_model(folder: Path, config: Mapping[str, object], without: str = "") -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != without}))


def read_cases() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The command, its input, and words that its errors contain."""
    for block in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").removeprefix("$ ").split("\n$ "):
        command, *others = block.splitlines()
        lines = "\n".join(line[2:] for line in others if line.startswith("< "))
        yield command, lines, tuple(line.strip() for line in others if line.startswith("  "))

"""sweep.json is read once per command."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COUNTING = """
import runpy, sys
opened = []
sys.addaudithook(lambda event, values: opened.append(values[0]) if event == "open" else None)
module, sys.argv = sys.argv[1], ["command", *sys.argv[2:]]
try:
    runpy.run_module(module, run_name="__main__")
finally:
    print("reads:", sum(str(path).endswith("/sweep.json") for path in opened))
"""
FINISHED = (
    *("--tasks", "gsm8k,mmlu", "--policies", "k1_first,k1_last,k2_middle"),
    *("--threshold", "0.9,0.95", "--limit", "2", "--seed", "3"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("formats") / "results"
    with tarfile.open(ROOT / "tests" / "formats" / "v1-finished.tar.gz") as archive:
        archive.extractall(root, filter="data")
    return root / "finished"


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("orchestrator.status", ["{folder}"]),
        ("orchestrator.report", ["{folder}"]),
        ("orchestrator.export", ["--lm-eval", "{folder}"]),
        ("orchestrator.sweep", [*FINISHED, "--out", "{out}", "--name", "finished"]),
        ("orchestrator.sweep", [*FINISHED, "--out", "{out}", "--name", "finished", "--dry-run"]),
    ],
)
def test_sweep_json_is_read_once(folder: Path, module: str, arguments: list[str]) -> None:
    filled = [argument.format(folder=folder, out=folder.parent) for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, module, *filled],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reads: 1" in done.stdout.splitlines()

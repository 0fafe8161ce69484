"""A worker that loads for longer than many trials of the others is kept, and then gets trials."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


def test_a_slowly_loading_worker_is_kept(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "slow_loading_worker.py"), str(tmp_path / "s")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert rows.keys() == {"worker-1", "worker-2"}, "no worker was replaced"
    assert sum(rows.values()) == 54
    assert rows["worker-2"] >= 5

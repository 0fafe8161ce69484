"""A worker that loads for longer than the others' trials last gets its trials nevertheless."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


def test_a_worker_that_loads_for_long_is_not_thrown_away(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "late_worker.py"), str(tmp_path / "s")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert rows.keys() == {"worker-1", "worker-2"}, "one worker each, begun once"
    assert sum(rows.values()) == 54
    assert rows["worker-2"] >= 5

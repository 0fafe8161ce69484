"""Large reports are written by several processes: same content, and no process is left over."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_sweep import Simulation, write_sweep

from orchestrator.report import write
from orchestrator.report.section import build_section
from orchestrator.report.sweeps import process_pool_map, read_sweeps
from orchestrator.store.reader import TRIALS_PER_GROUP
from sampler.errors import InputError
from tools.faults.faults import trial_files
from tools.processes import descendants, wait_until_gone

ROOT = Path(__file__).parents[1]
WAITING = """
import sys, time
from orchestrator.report.sweeps import process_pool_map

if __name__ == "__main__":
    with process_pool_map() as parallel:
        list(parallel(abs, range(4)))
        print("ready", flush=True)
        time.sleep(600)
"""


def test_several_processes_give_the_same_report(tmp_path: Path) -> None:
    """More trials than one part holds, one of them corrupted."""
    sweep = write_sweep(tmp_path / "s", Simulation(documents={"gsm8k": 160, "mmlu": 57}, shard_size=20))
    victim = trial_files(sweep, ("rows.parquet",))[70]
    victim.write_bytes(victim.read_bytes()[:-20])
    (alone,) = read_sweeps([sweep])
    assert len(alone.attempts) > TRIALS_PER_GROUP
    with process_pool_map() as parallel:
        (together,) = read_sweeps([sweep], parallel)
        section = build_section(together, parallel=parallel)
    assert together.rows.equals(alone.rows)
    assert together.reading_notices == alone.reading_notices
    assert str(victim) in together.reading_notices[0]
    assert section.figures == build_section(alone).figures


def test_a_large_report_uses_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = write_sweep(tmp_path / "s", Simulation(documents={"gsm8k": 20}, policies=("k1", "k2_first")))
    write.write_report([sweep], out=tmp_path / "alone")
    monkeypatch.setattr(write, "POOL_MIN_TRIALS", 2)
    write.write_report([sweep], out=tmp_path / "together")
    for path in (path for path in (tmp_path / "alone").rglob("*") if path.is_file()):
        assert (tmp_path / "together" / path.relative_to(tmp_path / "alone")).read_bytes() == path.read_bytes(), path


def test_a_killed_process_is_an_input_error() -> None:
    with pytest.raises(InputError, match="memory"), process_pool_map() as parallel:
        list(parallel(os._exit, [1]))


def test_processes_exit_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    path = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=os.environ | path) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        helpers = list(descendants(started.pid))
        assert helpers
        os.kill(started.pid, signal.SIGKILL)
    assert wait_until_gone(helpers, timeout_seconds=900)

"""A large sweep's report is made in several processes: the same report, and none of them is left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_sweep import Simulation, write_sweep

from orchestrator.report import write
from orchestrator.report.section import section
from orchestrator.report.sweeps import TABLES, gather, side_by_side
from sampler.errors import InputError
from tools.faults import damage
from tools.processes import below, gone

ROOT = Path(__file__).parents[1]
WAITING = """
import sys, time
from orchestrator.report.sweeps import side_by_side

if __name__ == "__main__":
    with side_by_side() as mapped:
        list(mapped(abs, range(4)))
        print("ready", flush=True)
        time.sleep(600)
"""


def test_processes_give_the_same_report(tmp_path: Path) -> None:
    """More trials than a part holds, one of them damaged."""
    sweep = write_sweep(tmp_path / "s", Simulation(documents={"gsm8k": 160, "mmlu": 57}, shard_size=20))
    victim = damage.files(sweep, ("rows.parquet",))[70]
    victim.write_bytes(victim.read_bytes()[:-20])
    (alone,) = gather([sweep])
    assert len(alone.trials) > TABLES
    with side_by_side() as mapped:
        (together,) = gather([sweep], mapped)
        drawn = section(together, mapped=mapped)
    assert together.rows.equals(alone.rows)
    assert together.damage == alone.damage
    assert str(victim) in together.damage[0]
    assert drawn.pictures == section(alone).pictures


def test_a_large_sweep_is_reported_by_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = write_sweep(tmp_path / "s", Simulation(documents={"gsm8k": 20}, policies=("k1", "k2_first")))
    write.write_report([sweep], out=tmp_path / "alone")
    monkeypatch.setattr(write, "LARGE", 2)
    write.write_report([sweep], out=tmp_path / "together")
    for path in (path for path in (tmp_path / "alone").rglob("*") if path.is_file()):
        assert (tmp_path / "together" / path.relative_to(tmp_path / "alone")).read_bytes() == path.read_bytes(), path


def test_a_process_that_is_ended_is_told_in_a_sentence() -> None:
    with pytest.raises(InputError, match="perhaps for the memory it took"), side_by_side() as mapped:
        list(mapped(os._exit, [1]))


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    path = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=os.environ | path) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == b"ready\n"
        helpers = list(below(started.pid))
        assert helpers
        os.kill(started.pid, signal.SIGKILL)
    assert gone(helpers, within=30)

"""reuse-sweep bench sweep and tools.cold: figures of hand-made runs; a slow test runs both on a real sweep."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from random_model import write_model
from tasks_fakes import bench
from test_timeline import attempt, trials

from orchestrator.cli.bench import TIMELINE_PARTS, MeasuredSweep, sweep_figures, sweep_table
from orchestrator.core.configuration import Configuration
from orchestrator.core.totals import RunningTotals, Sums
from orchestrator.core.trial import Trial
from orchestrator.planning.settings import SweepSettings
from orchestrator.progress.progress import PARTS, timeline
from sampler.errors import InputError
from tools import cold

SETTINGS = SweepSettings(tasks=("gsm8k",), policies=("k1_first", "k1_last", "k2_last"), model="made", limit=2)


def warm_run() -> MeasuredSweep:
    running = RunningTotals()
    for policy, speed in (("k1_first", 1.0), ("k1_last", 1.1), ("k2_last", 1.5)):
        trial = Trial(trial_id=policy, task="gsm8k", configuration=Configuration(policy=policy), repeat=0, shard=0)
        sums = Sums(baseline=policy[1] == "1", documents=2, tokens=100, seconds=1 / speed, work=50 / speed)
        running.add_sums(trial, sums)
    found = timeline(trials(attempt("a", 0, 10), attempt("b", 0, 9), attempt("a", 10.01, 20)))
    assert found is not None
    return MeasuredSweep(seconds=30.0, timeline=found, totals=running.totals(), documents=6)


def cold_run() -> cold.ColdRun:
    speeds = {"k1_first": 2.0, "k1_last": 1.0, "k2_last": 1.0}
    return cold.ColdRun(
        seconds=60.0,
        at_a_time=2,
        answers={
            ("gsm8k", policy): {
                doc: cold.Answer(tokens=50, seconds=5 * speed, token_ids=(1, 2) if doc == "a" else (1, 3))
                for doc in "ab"
            }
            for policy, speed in speeds.items()
        },
    )


def test_figures_of_a_sweep() -> None:
    figures = sweep_figures(warm_run())
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["warm"]["loads"] == 2
    assert figures["warm"]["k1_spread"] == pytest.approx(1.1)
    assert figures["warm"]["before_first_trial"] == pytest.approx(10.0)
    assert set(TIMELINE_PARTS) == set(PARTS)
    text = sweep_table(figures)
    assert "median 10 ms" in text
    assert max(map(len, text.splitlines()[1:])) <= 80


def test_comparison_with_cold_processes() -> None:
    figures = sweep_figures(warm_run())
    ids = {("gsm8k", policy, doc): (1, 2) for policy in SETTINGS.policies for doc in "ab"}
    figures["cold"] = cold.compare(figures, cold_run(), ids)
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert figures["cold"]["wall_ratio"] == pytest.approx(2.0)
    assert figures["cold"]["decoding"] == pytest.approx(40 / 120)
    assert (figures["cold"]["same_answers"], figures["cold"]["loads"]) == (3, 3)
    assert figures["cold"]["k1_spread"] == pytest.approx(2.0)
    text = cold.table(figures)
    assert "2.00 times as long" in text
    assert "3 of 6 answers are identical" in text
    assert max(map(len, text.splitlines()[1:])) <= 80


def test_cold_processes_get_the_sweep_s_settings() -> None:
    command = cold.process_command(SETTINGS, "gsm8k", "k2_last", Path("out.jsonl"))
    flags = (
        "-m orchestrator.cli tasks run --task gsm8k --policy k2_last --model made --data auto --limit 2 --dtype auto "
        "--batch-size 1 --out out.jsonl"
    )
    assert command[1:] == flags.split()
    given = replace(SETTINGS, threshold=(0.9,), small_block=(4,))
    assert "--threshold 0.9 --small-block 4" in " ".join(cold.process_command(given, "gsm8k", "k1", Path("x")))


def test_a_failing_cold_process_is_reported(tmp_path: Path) -> None:
    settings = replace(SETTINGS, policies=("k1",), data=str(tmp_path / "absent"))
    with pytest.raises(InputError, match=r"exit code 2: .*absent"):
        cold.run_cold(settings, at_a_time=2, folder=tmp_path)


@pytest.mark.slow
def test_a_benchmark_of_a_very_small_model(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    command = [sys.executable, "-m", "tools.cold", "--json", "--"]
    command += ["--model", model, "--data", bench(), "--tasks", "gsm8k"]
    command += ["--policies", "k1_first,k1_last,k2_last", "--limit", "4", "--max-new-tokens", "32"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["documents"], figures["warm"]["loads"], figures["cold"]["loads"]) == (12, 2, 3)
    assert figures["cold"]["same_answers"] == 12
    assert sum(figures["timeline"]["shares"][part] for part in PARTS) == pytest.approx(1, abs=1e-6)
    assert all(share > -0.01 for share in figures["timeline"]["shares"].values())

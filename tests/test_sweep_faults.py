"""Sweeps that are disturbed end with exactly the rows of one that was not. Each takes a minute or two."""

import os
import signal
import time
from pathlib import Path

import pytest
from sweep_cases import write_case
from sweep_runs import Run, outcome, processes, rows_there
from test_tasks_sources import gsm8k_row, write_dataset

from orchestrator.store import Store

pytestmark = pytest.mark.slow
FLAGS = ("--tasks", "gsm8k", "--policies", "k1,k2_middle,k3_last", "--max-new-tokens", "200", "--shard-size", "6")
HERE = ("--actors", "2", "--no-dashboard")
GONE = 15.0  # seconds for Ray's processes after the command itself


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def undisturbed(case: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, object]]:
    run = Run(case, tmp_path_factory.mktemp("undisturbed") / "results", *FLAGS, *HERE)
    run.wait()
    return outcome(run.folder)


def gone(pids: set[int]) -> bool:
    until = time.monotonic() + GONE
    while left := pids & {pid for pid, _, _ in processes()}:
        if time.monotonic() > until:
            print([name for pid, _, name in processes() if pid in left])
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGINT], 130),
        ([signal.SIGINT] * 4, 130),  # an impatient person
        ([signal.SIGTERM], 143),
        ([signal.SIGUSR1], 138),
    ],
    ids=["Ctrl-C", "Ctrl-C again and again", "SIGTERM", "SIGUSR1"],
)
def test_an_interrupted_sweep_continues(
    case: Path, tmp_path: Path, undisturbed: dict[object, object], signals: list[signal.Signals], code: int
) -> None:
    run = Run(case, tmp_path / "results", *FLAGS, *HERE)
    run.until_rows(4)
    below, before = set(run.descendants()), outcome(run.folder)
    sent = time.monotonic()
    for number in signals:
        if number == signal.SIGINT:
            os.killpg(run.process.pid, number)  # as a terminal does
        else:
            run.process.send_signal(number)
        time.sleep(0.2)
    text = run.wait(code)
    assert time.monotonic() - sent < 10
    assert gone(below)
    assert f"continue with: python -m orchestrator.sweep --model {case}" in text
    assert "Traceback" not in text
    kept = outcome(run.folder)
    assert before.items() <= kept.items()
    assert len(kept) < len(undisturbed)
    again = Run(case, tmp_path / "results", *FLAGS, *HERE)
    again.wait()
    assert outcome(again.folder) == undisturbed


@pytest.mark.parametrize("victim", ["ray::SweepWorker", "ray::Results"])
def test_a_killed_actor_is_replaced(case: Path, tmp_path: Path, undisturbed: dict[object, object], victim: str) -> None:
    run = Run(case, tmp_path / "results", *FLAGS, *HERE)
    run.until_rows(4)
    os.kill(run.named(victim)[0], signal.SIGKILL)
    run.wait()
    assert outcome(run.folder) == undisturbed


def test_a_killed_driver_leaves_no_processes_and_no_lock(
    case: Path, tmp_path: Path, undisturbed: dict[object, object]
) -> None:
    run = Run(case, tmp_path / "results", *FLAGS, *HERE)
    run.until_rows(4)
    below, before = set(run.descendants()), outcome(run.folder)
    run.process.kill()
    assert gone(below)
    run.wait(-signal.SIGKILL)
    again = Run(case, tmp_path / "results", *FLAGS, *HERE)
    again.wait()
    found = outcome(again.folder)
    assert before.items() <= found.items()
    assert found == undisturbed


def test_a_second_command_leaves_the_first_alone(case: Path, tmp_path: Path, undisturbed: dict[object, object]) -> None:
    run = Run(case, tmp_path / "results", *FLAGS, *HERE)
    run.until_rows(2)
    second = Run(case, tmp_path / "results", *FLAGS, *HERE)
    assert "is in use" in second.wait(2)
    run.wait()
    assert outcome(run.folder) == undisturbed


def test_one_actor_gives_the_rows_of_two(case: Path, tmp_path: Path, undisturbed: dict[object, object]) -> None:
    run = Run(case, tmp_path / "results", *FLAGS, "--actors", "1", "--no-dashboard")
    run.wait()
    assert outcome(run.folder) == undisturbed


def test_a_trial_that_cannot_be_run_fails_alone(case: Path, tmp_path: Path) -> None:
    """A document too long for the model is not seen by looking at the first one."""
    rows = [gsm8k_row(number) for number in range(6)]
    rows[5]["question"] = "why? " * 8000
    write_dataset(tmp_path / "case" / "data", "openai/gsm8k", "main", {"train": rows, "test": rows})
    os.symlink(case / "model", tmp_path / "case" / "model")
    flags = ("--tasks", "gsm8k", "--policies", "k1,k2_middle", "--max-new-tokens", "16", "--shard-size", "3", *HERE)
    run = Run(tmp_path / "case", tmp_path / "results", *flags)
    text = run.wait(1)
    states = {(f["trial"]["policy"], f["trial"]["shard"]): f for f in Store(run.folder).trials().values()}
    assert {key: facts["status"] for key, facts in states.items()} == {
        (policy, shard): "failed" if shard else "finished" for policy in ("k1", "k2_middle") for shard in (0, 1)
    }
    assert "do not fit" in states["k1", 1]["attempts"][-1]["reason"]
    assert "do not fit" in text
    assert "2 trials failed" in text
    before = rows_there(run.folder)
    assert "2 trials failed" in Run(tmp_path / "case", tmp_path / "results", *flags).wait(1)
    assert rows_there(run.folder) >= before
    assert len(states["k1", 0]["attempts"]) == 1

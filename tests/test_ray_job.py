"""`ray job submit` runs a sweep on a cluster that `ray start` has started, with and without a token."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_head import RAY, SECONDS, RayHead
from small_sweep import write_model_and_data
from sweep_process import ROOT, SweepProcess, grid_flags, stored_rows

pytestmark = pytest.mark.slow
FLAGS = grid_flags("k1,k2_first", max_new_tokens=40, shard_size=6)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_data(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module", params=["token", "disabled"])
def head(request: pytest.FixtureRequest) -> Iterator[RayHead]:
    """This user has a token in both cases."""
    made = RayHead(RAY_AUTH_MODE=request.param)
    try:
        yield made
    finally:
        made.close()


def job(head: RayHead, *command: str) -> subprocess.CompletedProcess[str]:
    """`ray job …`; the token is sent to a cluster that asks for none as well."""
    return subprocess.run(
        [RAY, "job", command[0], f"--address={head.dashboard}", *command[1:]],
        env={**head.environment, "RAY_AUTH_MODE": "token"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def submit(head: RayHead, case: Path, out: str, name: str) -> subprocess.CompletedProcess[str]:
    """As documented; a dashboard that has just started may not take jobs yet."""
    where = ("--model", str(case / "model"), "--data", str(case / "data"), "--out", out, "--name", "s")
    sweep = (sys.executable, "-m", "orchestrator.sweep", *FLAGS, *where)
    until = time.monotonic() + SECONDS
    while True:
        done = job(head, "submit", f"--submission-id={name}", "--working-dir=.", "--", *sweep)
        if name in done.stdout or time.monotonic() > until:
            return done
        time.sleep(1)


def test_a_submitted_sweep(head: RayHead, case: Path, tmp_path: Path) -> None:
    plain = SweepProcess(
        case, tmp_path / "plain", *FLAGS, "--actors", "2", "--no-dashboard", HOME=head.environment["HOME"]
    )
    plain.wait()
    out = tmp_path / "results"
    done = submit(head, case, str(out), "sweep")
    assert done.returncode == 0, done.stdout + done.stderr
    assert stored_rows(out / "s") == stored_rows(plain.folder)
    log = job(head, "logs", "sweep").stdout
    assert "4 trials to run on 2 actors (1 CPU each)" in log
    assert str(out / "s" / "report.html") in log


def test_results_in_the_uploaded_directory_are_refused(head: RayHead, case: Path) -> None:
    done = submit(head, case, "results", "relative")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "exit code 2" in done.stdout
    assert "error: --out must be outside the working directory that `ray job submit` uploads" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_cluster_of_this_machine_is_joined_whether_it_asks_for_a_token_or_not(
    head: RayHead, case: Path, tmp_path: Path
) -> None:
    """RAY_AUTH_MODE is not set: the token is sent, and if the cluster has none of its own the command starts again."""
    run = SweepProcess(case, tmp_path / "results", *FLAGS, "--address", head.address, HOME=head.environment["HOME"])
    run.wait()
    assert len(stored_rows(run.folder)) == 24

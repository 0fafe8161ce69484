"""A real Slurm of two nodes on this machine runs sweeps, cancelled and requeued ones too. `make test-cluster`."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cage import Cage, reason_against
from sweep_cases import write_case
from sweep_runs import SECRET, Run, outcome, rows_there
from two_node_slurm import NODES, PROGRAMS, TwoNodes

from orchestrator.store import Store

REASON = reason_against(PROGRAMS)
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
POLICIES = "k1,k2_first,k2_middle,k2_last,k3_middle,k3_last"
FLAGS = ("--tasks", "gsm8k", "--policies", POLICIES, "--max-new-tokens", "200", "--shard-size", "2")
SECONDS = 900.0
Rows = dict[tuple[str, str], dict[str, object]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def undisturbed(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    run = Run(case, tmp_path_factory.mktemp("undisturbed") / "results", *FLAGS, "--actors", "2", "--no-dashboard")
    run.wait()
    return outcome(run.folder)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    folder = tmp_path_factory.mktemp("cage")
    cage = Cage(folder)
    try:
        yield TwoNodes(cage, folder / "slurm")
    finally:
        cage.close()


class Sweep:
    """One sweep that is submitted, perhaps several times."""

    def __init__(self, slurm: TwoNodes, case: Path, out: Path) -> None:
        self.slurm, self.folder = slurm, out / "s"
        where = ["--model", str(case / "model"), "--data", str(case / "data"), "--out", str(out), "--name", "s"]
        self._flags = [*where, *FLAGS, "--no-dashboard"]

    def submit(self, *flags: str) -> str:
        """The job's number."""
        done = self.ask(*flags)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(";")[0].removeprefix("job ")

    def ask(self, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "orchestrator.slurm", "submit", *flags, "--", *self._flags]
        return self.slurm.run(*command, HF_TOKEN=SECRET)

    def log(self) -> str:
        """What the jobs said, without Ray's own logs."""
        paths = [path for path in sorted((self.folder / "slurm").glob("*.log")) if ".ray." not in path.name]
        return "\n".join(path.read_text(errors="replace") for path in paths)

    def until_both_work(self, job: str, count: int) -> None:
        """With so many rows there, and a trial begun on each node."""
        until = time.monotonic() + SECONDS
        while rows_there(self.folder) < count or len(nodes_at_work(self.folder)) < len(NODES):
            assert self.slurm.state(job) in ("PENDING", "CONFIGURING", "RUNNING"), self.log()
            assert time.monotonic() < until, self.log()
            time.sleep(0.2)


def nodes_at_work(folder: Path) -> set[str]:
    """Ray's names of the nodes on which trials were begun."""
    attempts = [attempt for facts in Store(folder).trials().values() for attempt in facts["attempts"]]
    return {attempt["node_id"] for attempt in attempts if "node_id" in attempt}


def left_by_jobs(slurm: TwoNodes) -> list[str]:
    """Processes that are neither the cage's nor Slurm's own, and temporary folders."""
    own = ("cage_init.py", "munged", "/usr/sbin/slurm", "slurmstepd", "slurmctld")
    processes = [args for args in slurm.cage.processes().values() if not any(name in args for name in own)]
    return processes + [str(path) for kind in ("rs-*", "reuse-*") for path in slurm.cage.tmp.glob(kind)]


def holds_secret(folder: Path) -> list[Path]:
    held = []
    for path in folder.rglob("*"):
        try:
            held += [path] if path.is_file() and SECRET.encode() in path.read_bytes() else []
        except FileNotFoundError:  # a running job's, and gone
            continue
    return held


def test_a_cancelled_sweep_is_continued_by_the_next_job(
    slurm: TwoNodes, case: Path, tmp_path: Path, undisturbed: Rows
) -> None:
    sweep = Sweep(slurm, case, tmp_path / "results")
    first = sweep.submit("--nodes", "2", "--time", "30")
    sweep.until_both_work(first, 4)
    seen = slurm.cage.processes().values()
    assert any("ray::SweepWorker" in args for args in seen)
    assert not [args for args in seen if SECRET in args], "the token stands in a command line"
    assert not holds_secret(slurm.cage.tmp), "the token stands in Ray's logs"
    before = outcome(sweep.folder)
    assert slurm.run("scancel", first).returncode == 0
    assert slurm.until_ended(first) == "CANCELLED"
    kept = outcome(sweep.folder)
    assert before.items() <= kept.items()
    assert len(kept) < len(undisturbed)
    second = sweep.submit("--nodes", "2", "--time", "30")
    assert slurm.until_ended(second) == "COMPLETED", sweep.log()
    assert outcome(sweep.folder) == undisturbed
    assert sweep.log().count("Ray on 2 of 2 nodes") == 2
    assert len(nodes_at_work(sweep.folder)) == 4, "each job has two nodes, and both have to work"
    told = slurm.run(sys.executable, "-m", "orchestrator.slurm", "status", str(sweep.folder)).stdout
    assert f"job {second}" in told
    assert "complete" in told
    assert "Traceback" not in sweep.log()
    assert not holds_secret(tmp_path)
    assert not left_by_jobs(slurm)


def test_the_warning_before_the_time_limit_stops_and_requeues(
    slurm: TwoNodes, case: Path, tmp_path: Path, undisturbed: Rows
) -> None:
    """Slurm would send the signal so many seconds before the end; here it is sent at once, by Slurm all the same."""
    sweep = Sweep(slurm, case, tmp_path / "results")
    job = sweep.submit("--nodes", "2", "--time", "30", "--requeue")
    sweep.until_both_work(job, 4)
    assert slurm.run("scancel", "--batch", "--signal=USR1", job).returncode == 0
    until = time.monotonic() + SECONDS
    while "requeued" not in sweep.log():
        assert time.monotonic() < until, sweep.log()
        time.sleep(0.5)
    assert "stopped; continue with" in sweep.log()
    assert len(outcome(sweep.folder)) < len(undisturbed)
    slurm.run("scontrol", "release", job)
    assert slurm.until_ended(job) == "COMPLETED", sweep.log()
    assert slurm.details(job)["Restarts"] == "1"
    assert outcome(sweep.folder) == undisturbed
    assert not left_by_jobs(slurm)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--nodes", "5", "--time", "30"), "--nodes=5"),
        (("--nodes", "1", "--gpus-per-node", "2", "--time", "30"), "--gpus-per-node=2"),
        (("--nodes", "1", "--time", "30", "--partition", "nowhere"), "--partition=nowhere"),
    ],
    ids=["more nodes than there are", "GPUs that do not exist", "no such partition"],
)
def test_what_slurm_refuses_is_told(
    slurm: TwoNodes, case: Path, tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    sweep = Sweep(slurm, case, tmp_path / "results")
    done = sweep.ask(*flags)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: Slurm refuses the job: ")
    assert named in done.stderr
    assert not list(sweep.folder.parent.glob("*"))

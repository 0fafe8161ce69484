"""Sweeps on a real Slurm of two nodes, also cancelled and requeued ones. `make test-cluster`.

The nodes share a results directory with the login node, and the model and documents lie there; see two_node_slurm.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_namespaces import machines, reason_against_services
from ray_nodes import attempts, hosts_at_work, model_loads
from small_sweep import write_model_and_data
from sweep_process import SECRET, SweepProcess, count_rows, grid_flags, stored_rows
from two_node_slurm import NODES, PROGRAMS, TwoNodeSlurm

REASON = reason_against_services(PROGRAMS)
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
POLICIES = "k1,k2_first,k2_middle,k2_last,k3_middle,k3_last"
FLAGS = grid_flags(POLICIES, max_new_tokens=200, shard_size=2)
WAIT_SECONDS = 900.0
Rows = dict[tuple[str, str], dict[str, object]]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that all nodes see."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def case(shared: Path) -> Path:
    return write_model_and_data(shared / "case", documents=36)  # enough work for both nodes after a cancellation


@pytest.fixture(scope="module")
def undisturbed(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    run = SweepProcess(
        case, tmp_path_factory.mktemp("undisturbed") / "results", *FLAGS, "--actors", "2", "--no-dashboard"
    )
    run.wait()
    return stored_rows(run.folder)


@pytest.fixture(scope="module")
def slurm(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodeSlurm]:
    with machines(tmp_path_factory.mktemp("nodes"), shared=[shared]) as made:
        yield TwoNodeSlurm(made, shared)


class Sweep:
    """One sweep, submitted once or several times. Its results are in the shared directory."""

    def __init__(self, slurm: TwoNodeSlurm, case: Path, out: Path) -> None:
        self._slurm, self.folder = slurm, out / "s"
        where = ["--model", str(case / "model"), "--data", str(case / "data"), "--out", str(out), "--name", "s"]
        self._flags = [*where, *FLAGS, "--no-dashboard"]

    def submit(self, *flags: str) -> str:
        """The job's number."""
        done = self.try_submit(*flags)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(";")[0].removeprefix("job ")

    def try_submit(self, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "orchestrator.slurm", "submit", *flags, "--", *self._flags]
        return self._slurm.run(*command, HF_TOKEN=SECRET)

    def log(self) -> str:
        """Output of the jobs, without Ray's own logs."""
        paths = [path for path in sorted((self.folder / "slurm").glob("*.log")) if ".ray." not in path.name]
        return "\n".join(path.read_text(errors="replace") for path in paths)

    def until_both_work(self, job: str, rows: int) -> None:
        """Until there are so many rows, and both nodes have begun a trial."""
        until = time.monotonic() + WAIT_SECONDS
        while count_rows(self.folder) < rows or hosts_at_work(self.folder) != set(NODES):
            assert self._slurm.state(job) in ("PENDING", "CONFIGURING", "RUNNING"), self.log()
            assert time.monotonic() < until, self.log()
            time.sleep(0.2)


def ray_nodes_at_work(folder: Path) -> set[str]:
    """Ids of Ray nodes: each job has its own."""
    return {attempt["node_id"] for attempt in attempts(folder)}


def left_by_jobs(slurm: TwoNodeSlurm) -> list[str]:
    """Processes on compute nodes that are not Slurm's own, and temporary directories."""
    own = ("node_init.py", "munged", "slurmd", "slurmstepd")
    processes = [line for node in slurm.nodes for line in node.processes().values()]
    folders = [node.path(place) for node in slurm.nodes for place in ("/tmp", "/var/tmp", node.tmpdir)]
    return [
        *(line for line in processes if not any(name in line for name in own)),
        *(str(path) for folder in folders for kind in ("rs-*", "reuse-*") for path in folder.glob(kind)),
    ]


def files_with_secret(folder: Path) -> list[Path]:
    found = []
    for path in folder.rglob("*"):
        try:
            found += [path] if path.is_file() and SECRET.encode() in path.read_bytes() else []
        except FileNotFoundError:  # of a running job, and deleted since
            continue
    return found


def test_a_cancelled_sweep_is_continued_by_the_next_job(
    slurm: TwoNodeSlurm, case: Path, shared: Path, undisturbed: Rows
) -> None:
    sweep = Sweep(slurm, case, shared / "cancelled")
    first = sweep.submit("--nodes", "2", "--time", "30")
    sweep.until_both_work(first, 4)
    for node in slurm.nodes:
        processes = node.processes().values()
        assert any("ray::SweepWorker" in line for line in processes)
        assert not [line for line in processes if SECRET in line], "a command line holds the token"
        assert not files_with_secret(node.path("/tmp")), "a log of Ray holds the token"
    before = stored_rows(sweep.folder)
    assert slurm.run("scancel", first).returncode == 0
    assert slurm.until_ended(first) == "CANCELLED"
    kept = stored_rows(sweep.folder)
    assert before.items() <= kept.items()
    assert len(kept) < len(undisturbed)
    second = sweep.submit("--nodes", "2", "--time", "30")
    assert slurm.until_ended(second) == "COMPLETED", sweep.log()
    assert stored_rows(sweep.folder) == undisturbed
    assert hosts_at_work(sweep.folder) == set(NODES)
    assert sweep.log().count("Ray on 2 of 2 nodes") == 2
    assert len(ray_nodes_at_work(sweep.folder)) == 4, "both nodes work in both jobs"
    assert {attempt["actor"] for attempt in attempts(sweep.folder)} == {f"worker-{number}" for number in range(1, 5)}
    assert model_loads(sweep.folder) == 4, "one for each node and job"
    status = slurm.run(sys.executable, "-m", "orchestrator.slurm", "status", str(sweep.folder)).stdout
    assert f"job {second}" in status
    assert "complete" in status
    assert "Traceback" not in sweep.log()
    assert not files_with_secret(shared)
    assert not left_by_jobs(slurm)


def test_the_warning_before_the_time_limit_stops_and_requeues(
    slurm: TwoNodeSlurm, case: Path, shared: Path, undisturbed: Rows
) -> None:
    """Slurm sends the signal some time before the limit; here `scancel` makes it send the signal at once."""
    sweep = Sweep(slurm, case, shared / "requeued")
    job = sweep.submit("--nodes", "2", "--time", "30", "--requeue")
    sweep.until_both_work(job, 4)
    assert slurm.run("scancel", "--batch", "--signal=USR1", job).returncode == 0
    until = time.monotonic() + WAIT_SECONDS
    while "requeued" not in sweep.log() or slurm.state(job) != "PENDING":
        assert time.monotonic() < until, sweep.log()
        time.sleep(0.5)
    assert "stopped; continue with" in sweep.log()
    assert len(stored_rows(sweep.folder)) < len(undisturbed)
    # Slurm would wait for two minutes. In the second in which a job ends, nodes reject its next start.
    assert slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+5seconds").returncode == 0
    assert slurm.until_ended(job) == "COMPLETED", sweep.log()
    assert slurm.details(job)["Restarts"] == "1"
    assert stored_rows(sweep.folder) == undisturbed
    assert not left_by_jobs(slurm)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--nodes", "5", "--time", "30"), "--nodes=5"),
        (("--nodes", "1", "--gpus-per-node", "2", "--time", "30"), "--gpus-per-node=2"),
        (("--nodes", "1", "--time", "30", "--partition", "nowhere"), "--partition=nowhere"),
    ],
    ids=["too many nodes", "no GPUs", "unknown partition"],
)
def test_a_job_that_slurm_refuses_is_reported(
    slurm: TwoNodeSlurm, case: Path, shared: Path, flags: tuple[str, ...], named: str
) -> None:
    sweep = Sweep(slurm, case, shared / "refused")
    done = sweep.try_submit(*flags)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: Slurm rejected the job: ")
    assert named in done.stderr
    assert not list(sweep.folder.parent.glob("*"))

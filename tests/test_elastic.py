"""Sweeps on a cluster that starts without workers and adds them by demand.

Ray's own autoscaler starts nodes as processes of this machine. The sweep reads the autoscaler's reports from Ray's
control store, and does not know how many nodes there may be.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_head import RayHead
from ray_nodes import attempts
from small_sweep import write_model_and_data
from sweep_process import SweepProcess, grid_flags, stored_rows

pytestmark = pytest.mark.slow
FLAGS = grid_flags(max_new_tokens=200, shard_size=2)
SMALL = {"CPU": 1, "GPU": 1, "object_store_memory": 80 * 2**20}
TYPES = {"gpu": {"resources": SMALL, "node_config": {}, "min_workers": 0, "max_workers": 2}}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_data(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    made = RayHead(autoscaler=TYPES)
    try:
        yield made
    finally:
        made.close()


def sweep(head: RayHead, case: Path, out: Path, *flags: str) -> SweepProcess:
    return SweepProcess(case, out, *FLAGS, "--address", head.address, *flags, HOME=head.environment["HOME"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--accelerator-type", "H100"), "--accelerator-type H100: no node of the cluster has it; the cluster has 0"),
        (
            ("--gpus-per-actor", "1", "--wait-for-nodes", "0"),
            "--gpus-per-actor must be at most 0",
        ),
    ],
)
def test_resources_that_the_cluster_cannot_provide_are_refused(
    head: RayHead, case: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    assert message in sweep(head, case, tmp_path / "results", *flags).wait(2)


def test_nodes_are_added_for_waiting_actors(head: RayHead, case: Path, tmp_path: Path) -> None:
    plain = SweepProcess(case, tmp_path / "plain", *FLAGS, "--actors", "2", "--no-dashboard")
    plain.wait()
    run = sweep(head, case, tmp_path / "results", "--worker-timeout", "3600")
    first = run.wait_until(lambda: attempts(run.folder), "a trial")[0]
    os.kill(first["process"], signal.SIGSTOP)  # it could finish all trials before the second node has started
    run.wait_until(
        lambda: len({attempt["node_id"] for attempt in attempts(run.folder)}) == 2, "a trial on a second node"
    )
    os.kill(first["process"], signal.SIGCONT)
    text = run.wait()
    assert "(1 GPU and 1 CPU each)" in text, "GPUs are requested before any node has one"
    assert stored_rows(run.folder) == stored_rows(plain.folder)

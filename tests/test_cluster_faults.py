"""Nodes that join late, die in the middle of a trial, or lose their network: the rows stay exact. `make test-cluster`.

The nodes share the Python environment and the project with the bundled model and documents, and nothing else.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_namespaces import Machines, machines, reason_against_nodes
from ray_nodes import (
    NodeSweep,
    attempts,
    hosts_at_work,
    keep_worker,
    ray_nodes_alive,
    start_head,
    start_worker,
    trial_in_progress,
)
from sweep_process import stored_rows

from orchestrator.store import Store

REASON = reason_against_nodes()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
MODEL = ("--model", "tiny", "--data", "bundled", "--tasks", "gsm8k", "--max-new-tokens", "96")
SHARD = 20
GRID = ("--policies", "k1,k2_first,k2_middle,k3_last", "--no-replicate", "--limit", "60", "--shard-size", str(SHARD))
SHORT_CUT_SECONDS = 8  # Ray takes a node for dead after half a minute or so
LONG_CUT_SECONDS = 60
Rows = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = tmp_path_factory.mktemp("undisturbed")
    with machines(folder / "nodes") as made:
        sweep = NodeSweep(made.add("alone"), folder, *MODEL, *GRID, "--actors", "2")
        sweep.wait()
        return stored_rows(sweep.folder)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path / "nodes") as made:
        yield made


def test_a_node_joins_late_and_another_dies(cluster: Machines, tmp_path: Path, undisturbed: Rows) -> None:
    driver, first = cluster.add("driver"), cluster.add("first")
    head = start_head(driver)
    start_worker(first, head)
    sweep = NodeSweep(driver, tmp_path, *MODEL, *GRID, "--address", head)
    sweep.wait_for_rows(1)
    late = cluster.add("late")
    start_worker(late, head)
    sweep.wait_until(lambda: "late" in hosts_at_work(sweep.folder), "a trial on the late node")
    interrupted = sweep.wait_until(lambda: trial_in_progress(sweep.folder, "first", SHARD), "a trial in progress")
    first.kill()
    output = sweep.wait()
    assert "Traceback" not in output
    assert stored_rows(sweep.folder) == undisturbed
    tried_on = [attempt["node"] for attempt in Store(sweep.folder).trials()[interrupted]["attempts"]]
    assert tried_on == ["first", "late"]


def test_a_node_loses_its_network(cluster: Machines, tmp_path: Path, undisturbed: Rows) -> None:
    """Ray tolerates a loss of a few seconds. After a minute, the only worker node has to join again."""
    driver, worker = cluster.add("driver"), cluster.add("worker")
    head = start_head(driver)
    keep_worker(worker, head, output=tmp_path / "worker.out")
    until = time.monotonic() + 300
    while ray_nodes_alive(driver, head) < 2:
        assert time.monotonic() < until, (tmp_path / "worker.out").read_text()
    sweep = NodeSweep(driver, tmp_path, *MODEL, *GRID, "--address", head)
    sweep.wait_until(lambda: trial_in_progress(sweep.folder, "worker", SHARD), "a trial in progress")
    worker.disconnect()
    time.sleep(SHORT_CUT_SECONDS)
    worker.reconnect()
    before = len(Store(sweep.folder).rows(columns=["doc_id"], verify=False))
    sweep.wait_for_rows(before + SHARD // 2)
    sweep.wait_until(lambda: trial_in_progress(sweep.folder, "worker", SHARD), "another trial in progress")
    worker.disconnect()
    cut = time.monotonic()
    while ray_nodes_alive(driver, head) == 2 or time.monotonic() < cut + LONG_CUT_SECONDS:
        assert time.monotonic() < cut + 600, "Ray still considers a node without network alive"
        time.sleep(1)
    worker.reconnect()
    output = sweep.wait()
    assert f"its node {worker.address} died or lost its network; trying again" in output
    assert "Traceback" not in output
    assert stored_rows(sweep.folder) == undisturbed
    assert len({attempt["node_id"] for attempt in attempts(sweep.folder)}) > 1, "the node has not come back"

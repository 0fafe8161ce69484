"""A sweep on eight separate nodes, of which five join late and two die: exact rows, and every node gets work."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from node_namespaces import Machines, machines, reason_against_nodes
from ray_nodes import NodeSweep, hosts_at_work, start_head, start_worker
from sweep_process import SweepProcess, grid_flags, stored_rows

from tools.faults.sweep import write_model_and_data

REASON = reason_against_nodes()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
DOCUMENTS = 150  # enough that the sweep outlasts the start of the late nodes on a busy machine
FLAGS = grid_flags("k1,k2_first,k2_middle,k3_last", max_new_tokens=96, fewshot=0, shard_size=2)
FIRST, LATE, DYING = 3, 5, 2


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("case")
    write_model_and_data(folder, documents=DOCUMENTS)
    return folder


@pytest.fixture
def cluster(tmp_path: Path, case: Path) -> Iterator[Machines]:
    with machines(tmp_path / "nodes", read_only=[case]) as made:
        yield made


def add_workers(cluster: Machines, head: str, names: list[str]) -> None:
    """Each with one core and one GPU, which exists only in Ray's books."""
    nodes = [cluster.add(name) for name in names]
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(lambda node: start_worker(node, head, cpus=1, gpus=1), nodes))


def test_nodes_that_come_and_go(case: Path, tmp_path: Path, cluster: Machines) -> None:
    plain = SweepProcess(case, tmp_path / "undisturbed", *FLAGS, "--actors", "2", "--no-dashboard")
    plain.wait()
    driver = cluster.add("driver")
    head = start_head(driver)
    first = [f"first-{number}" for number in range(FIRST)]
    late = [f"late-{number}" for number in range(LATE)]
    add_workers(cluster, head, first)
    where = ("--model", str(case / "model"), "--data", str(case / "data"), "--address", head, "--gpus-per-actor", "1")
    sweep = NodeSweep(driver, tmp_path, *where, *FLAGS)
    sweep.wait_for_rows(1)
    add_workers(cluster, head, late)
    sweep.wait_until(lambda: len(hosts_at_work(sweep.folder) & set(late)) >= DYING, "work on late nodes")
    for name in sorted(hosts_at_work(sweep.folder) & set(late))[:DYING]:
        cluster.nodes[name].kill()
    output = sweep.wait()
    assert "(raylet)" not in output, "a line of Ray's own"
    assert "Traceback" not in output
    assert stored_rows(sweep.folder) == stored_rows(plain.folder)
    assert set(first) <= hosts_at_work(sweep.folder)

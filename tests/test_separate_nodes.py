"""Two nodes that share nothing but a network: separate file systems, host names, addresses and processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from node_namespaces import Machines, machines, reason_against_nodes
from ray_nodes import NodeSweep, attempts, model_loads, start_head, start_worker
from sweep_runs import outcome

from orchestrator.store import Store

REASON = reason_against_nodes()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
FLAGS = ("--model", "tiny", "--data", "bundled", "--tasks", "gsm8k", "--limit", "4", "--policies", "k1,k2_middle")
SIZE = ("--shard-size", "2", "--max-new-tokens", "64")
PRIVATE = ("/tmp", "/var/tmp", "/run", "/dev/shm", "$HOME", "$TMPDIR")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path / "nodes") as made:
        yield made


def test_nodes_share_no_files_names_or_processes(cluster: Machines, tmp_path: Path) -> None:
    first, second = cluster.add("first"), cluster.add("second")
    first.start("sleep", "1000", output=tmp_path / "output")
    for place in PRIVATE:
        assert first.run("sh", "-c", f"echo from first > {place}/note && cat {place}/note").stdout == "from first\n"
        assert second.run("sh", "-c", f"ls {place}/note").returncode != 0, place
    for node, other in ((first, second), (second, first)):
        assert node.run("cat", "/proc/sys/kernel/hostname").stdout.strip() == node.name
        addresses = node.run("ip", "-4", "address").stdout
        assert f" {node.address}/" in addresses
        assert f" {other.address}/" not in addresses
        assert ("sleep" in node.run("sh", "-c", "cat /proc/[0-9]*/cmdline").stdout) == (node is first)
    assert first.run("touch", "/usr/note").returncode != 0, "the system is writable"


def test_nothing_is_left_of_nodes(tmp_path: Path) -> None:
    with machines(tmp_path / "nodes") as made:
        node = made.add("node")
        node.start("sleep", "1000", output=tmp_path / "output")
        node.start("sh", "-c", "setsid sleep 1000 & sleep 1000", output=tmp_path / "output")
        processes = node.processes()
    assert len(processes) >= 2
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]


def test_a_sweep_needs_no_files_of_another_node(cluster: Machines, tmp_path: Path) -> None:
    alone = NodeSweep(cluster.add("alone"), tmp_path, *FLAGS, *SIZE, "--actors", "1")
    driver, worker = cluster.add("driver"), cluster.add("worker")
    head = start_head(driver)
    start_worker(worker, head)
    sweep = NodeSweep(driver, tmp_path, *FLAGS, *SIZE, "--address", head)
    output = sweep.wait()
    alone.wait()
    assert "Traceback" not in output
    rows = outcome(sweep.folder)
    assert len(rows) == 8
    assert rows == outcome(alone.folder)
    assert set(Store(sweep.folder).rows(columns=["node"])["node"].to_pylist()) == {"worker"}
    assert len(attempts(sweep.folder)) == len(Store(sweep.folder).trials()) == 4
    assert model_loads(sweep.folder) == 1

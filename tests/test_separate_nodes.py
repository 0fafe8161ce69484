"""Two nodes that share nothing but a network: separate file systems, host names, addresses and processes."""

import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from node_namespaces import Machines, machines, reason_against_nodes
from ray_nodes import NodeSweep, attempts, model_loads, start_head, start_worker
from sweep_process import BUNDLED, grid_flags, stored_rows

from orchestrator.store import Store

REASON = reason_against_nodes()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")
FLAGS = (*BUNDLED, *grid_flags("k1,k2_middle", limit=4, shard_size=2, max_new_tokens=64))
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
        node.run("sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &")
        processes = node.processes()
    assert len(processes) >= 2
    assert not running(processes)


def test_nodes_end_with_the_test_that_made_them(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from node_namespaces import Machines
node = Machines(Path({str(tmp_path / "nodes")!r})).add("node")
node.run("sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &")
print(*node.processes(), flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as test:
        assert test.stdout is not None
        processes = [int(pid) for pid in test.stdout.readline().split()]
        test.kill()
    assert len(processes) >= 2
    until = time.monotonic() + 300
    while running(processes):
        assert time.monotonic() < until, running(processes)
        time.sleep(0.05)


def running(processes: Iterable[int]) -> list[int]:
    return [pid for pid in processes if Path(f"/proc/{pid}").exists()]


def test_a_sweep_needs_no_files_of_another_node(cluster: Machines, tmp_path: Path) -> None:
    alone = NodeSweep(cluster.add("alone"), tmp_path, *FLAGS, "--actors", "1")
    driver, worker = cluster.add("driver"), cluster.add("worker")
    head = start_head(driver)
    start_worker(worker, head)
    sweep = NodeSweep(driver, tmp_path, *FLAGS, "--address", head)
    output = sweep.wait()
    alone.wait()
    assert "Traceback" not in output
    rows = stored_rows(sweep.folder)
    assert len(rows) == 8
    assert rows == stored_rows(alone.folder)
    assert set(Store(sweep.folder).rows(columns=["node"])["node"].to_pylist()) == {"worker"}
    assert len(attempts(sweep.folder)) == len(Store(sweep.folder).trials()) == 4
    assert model_loads(sweep.folder) == 1

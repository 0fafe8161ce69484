"""A node that cannot set up a worker costs a warning, and no row; if all fail, the sweep ends. `make test-cluster`.

Each node has its own file system, its own Hub and its own Hub cache, so each can lack or break what the others have.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub_program import MODEL
from node_namespaces import Machines, Node, machines, reason_against_nodes
from ray_nodes import NodeSweep, hosts_at_work, start_head, start_worker
from small_sweep import write_model_and_data
from sweep_process import grid_flags, stored_rows

REASON = reason_against_nodes()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
HUB_PORT = 8900
HUB = {"HF_ENDPOINT": f"http://127.0.0.1:{HUB_PORT}", "HF_HUB_DISABLE_XET": "1"}
GRID = grid_flags(max_new_tokens=40, shard_size=2)
Rows = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_data(tmp_path_factory.mktemp("case"))


@pytest.fixture
def cluster(tmp_path: Path, case: Path) -> Iterator[Machines]:
    with machines(tmp_path / "nodes", read_only=[case]) as made:
        yield made


def give_files(node: Node, case: Path) -> None:
    """The node's own copies of the model and the documents, and a Hub that serves the model."""
    for name in ("model", "data"):
        shutil.copytree(case / name, node.path(f"~/{name}"))
    start_hub(node, case)


def start_hub(node: Node, case: Path, *busy: str) -> None:
    program = str(Path(__file__).with_name("fake_hub_program.py"))
    node.start(sys.executable, program, str(HUB_PORT), str(case / "model"), *busy, output=node.files.parent / "hub.log")


def lacks_the_model(node: Node, case: Path) -> None:
    give_files(node, case)
    shutil.rmtree(node.path("~/model"))


def has_another_model(node: Node, case: Path) -> None:
    give_files(node, case)
    weights = node.path("~/model/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def has_other_documents(node: Node, case: Path) -> None:
    give_files(node, case)
    for path in node.path("~/data").rglob("*test*"):
        if path.is_file() and "gsm8k" in str(path):
            path.write_text(path.read_text().replace("1", "2", 1))


def has_a_busy_hub(node: Node, case: Path) -> None:
    give_files(node, case)
    node.run("pkill", "-f", "fake_hub_program.py")
    start_hub(node, case, "busy")


def has_a_full_cache_disk(node: Node, case: Path) -> None:
    give_files(node, case)
    assert node.run("mkdir", "-p", f"{node.home}/.cache/huggingface").returncode == 0
    mounted = node.run("mount", "-t", "tmpfs", "-o", "size=32k", "none", f"{node.home}/.cache/huggingface")
    assert mounted.returncode == 0, mounted.stderr


LOCAL, FROM_HUB = "~/model", MODEL
REASONS = [
    pytest.param(lacks_the_model, LOCAL, "is not a directory on this node", id="no model"),
    pytest.param(has_another_model, LOCAL, "differs from the one the sweep was planned with", id="another model"),
    pytest.param(has_other_documents, LOCAL, "different documents on this node", id="other documents"),
    pytest.param(has_a_busy_hub, FROM_HUB, "429", id="Hub rate limit"),
    pytest.param(has_a_full_cache_disk, FROM_HUB, "No space left on device", id="full cache disk"),
]


def flags(model: str) -> tuple[str, ...]:
    return ("--model", model, "--data", "~/data", *GRID)


@pytest.mark.parametrize(("spoil", "model", "reason"), REASONS)
def test_one_bad_node_costs_a_warning(
    cluster: Machines, case: Path, tmp_path: Path, spoil: Callable[[Node, Path], None], model: str, reason: str
) -> None:
    driver, good, bad = (cluster.add(name) for name in ("driver", "good", "bad"))
    give_files(driver, case)
    give_files(good, case)
    spoil(bad, case)
    head = start_head(driver, **HUB)
    start_worker(bad, head, **HUB)  # alone at first, so that it gets the first trial
    sweep = NodeSweep(driver, tmp_path, *flags(model), "--address", head, "--actors", "1", **HUB)
    sweep.wait_until(lambda: "on 1 actor" in sweep.output.read_text(), "the plan")
    start_worker(good, head, **HUB)
    check_good_end(sweep, reason)


def check_good_end(sweep: NodeSweep, reason: str, repeats: int = 1) -> None:
    output = sweep.wait()
    warnings = [line for line in output.splitlines() if line.startswith("warning: node bad")]
    assert len(warnings) == 1, output
    assert reason in warnings[0]
    assert "Traceback" not in output
    assert hosts_at_work(sweep.folder) == {"good"}
    assert len(stored_rows(sweep.folder)) == 12 * 3 * repeats


def test_a_node_without_the_project(cluster: Machines, case: Path, tmp_path: Path) -> None:
    driver, good, bad = cluster.add("driver"), cluster.add("good"), cluster.add("bad", project=False)
    for node in (driver, good):
        give_files(node, case)
    head = start_head(driver)
    for node in (bad, good):
        start_worker(node, head)
    sweep = NodeSweep(driver, tmp_path, *flags(LOCAL), "--address", head, "--actors", "2")
    check_good_end(sweep, "No module named 'orchestrator'")


def test_a_late_node_without_the_project(cluster: Machines, case: Path, tmp_path: Path) -> None:
    """It was not there when the devices of all nodes were probed."""
    driver, good = cluster.add("driver"), cluster.add("good")
    for node in (driver, good):
        give_files(node, case)
    head = start_head(driver)
    start_worker(good, head)
    sweep = NodeSweep(driver, tmp_path, *flags(LOCAL), "--repeats", "6", "--address", head)
    sweep.wait_for_rows(1)
    start_worker(cluster.add("bad", project=False), head)
    check_good_end(sweep, "No module named 'orchestrator'", repeats=6)


@pytest.mark.parametrize("same_reason", [True, False])
def test_all_nodes_bad_ends_the_sweep(cluster: Machines, case: Path, tmp_path: Path, same_reason: bool) -> None:
    driver, first, second = cluster.add("driver"), cluster.add("first"), cluster.add("second", project=same_reason)
    give_files(driver, case)
    for node in (first, second):
        lacks_the_model(node, case)
    head = start_head(driver)
    for node in (first, second):
        start_worker(node, head)
    sweep = NodeSweep(driver, tmp_path, *flags(LOCAL), "--address", head, "--actors", "2")
    output = sweep.wait(1)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == (1 if same_reason else 2), output
    assert "is not a directory on this node" in output
    assert "continue with: " in errors[-1]
    assert "Traceback" not in output

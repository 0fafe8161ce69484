"""A sweep on eight nodes of which five come late and two vanish: exact rows, and everybody who is there works."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from many_nodes import ManyNodes
from sweep_runs import Run, outcome

from orchestrator.chaos.case import write_files
from orchestrator.running.environment import LOOPBACK  # else Ray looks for its head at another address of this machine
from orchestrator.store import Store

pytestmark = pytest.mark.slow
DOCUMENTS = 60
FLAGS = ("--tasks", "gsm8k", "--policies", "k1,k2_first,k2_middle,k3_last", "--max-new-tokens", "96", "--fewshot", "0")
SHARDS = ("--shard-size", "2", "--no-dashboard")
FIRST, LATE, VANISHING = 3, 5, 2


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("case")
    write_files(folder, documents=DOCUMENTS)
    return folder


@pytest.fixture
def cluster() -> Iterator[ManyNodes]:
    made = ManyNodes(FIRST)
    try:
        yield made
    finally:
        made.close()


def nodes_at_work(folder: Path) -> dict[str, set[str]]:
    """Ids of nodes, with the trials they began."""
    found: dict[str, set[str]] = {}
    for trial_id, facts in Store(folder).trials().items():
        for attempt in facts["attempts"]:
            if "node_id" in attempt:
                found.setdefault(attempt["node_id"], set()).add(trial_id)
    return found


def test_nodes_that_come_and_go(case: Path, tmp_path: Path, cluster: ManyNodes) -> None:
    plain = Run(case, tmp_path / "undisturbed", *FLAGS, *SHARDS, "--actors", "2")
    plain.wait()
    where = ("--address", cluster.address, "--gpus-per-actor", "1")
    run = Run(case, tmp_path / "results", *FLAGS, *SHARDS, *where, **LOOPBACK)
    run.until_rows(1)
    late = [cluster.add() for _ in range(LATE)]
    run.until(lambda: len(nodes_at_work(run.folder).keys() & set(late)) >= VANISHING, "work on late nodes")
    vanishing = sorted(nodes_at_work(run.folder).keys() & set(late))[:VANISHING]
    for node in vanishing:
        cluster.kill(node)
    said = run.wait()
    assert "(raylet)" not in said  # what Ray's own processes say of it
    assert outcome(run.folder) == outcome(plain.folder)
    assert set(cluster.nodes) <= nodes_at_work(run.folder).keys()

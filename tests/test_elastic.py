"""A cluster that begins without workers: the sweep reads from Ray's control store what its autoscaler does.

Ray's own autoscaler starts nodes as processes of this machine. Nothing tells the sweep how many there may be.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_head import RayHead
from sweep_cases import write_case
from sweep_runs import Run, grid_flags, outcome

from orchestrator.store import Store

pytestmark = pytest.mark.slow
FLAGS = grid_flags(max_new_tokens=200, shard_size=2)
SMALL = {"CPU": 1, "GPU": 1, "object_store_memory": 80 * 2**20}
TYPES = {"gpu": {"resources": SMALL, "node_config": {}, "min_workers": 0, "max_workers": 2}}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    made = RayHead(autoscaler=TYPES)
    try:
        yield made
    finally:
        made.close()


def sweep(head: RayHead, case: Path, out: Path, *flags: str) -> Run:
    return Run(case, out, *FLAGS, "--address", head.address, *flags, HOME=head.environment["HOME"])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("--accelerator-type", "H100"), "--accelerator-type H100: no node of the cluster has it; the cluster has 0"),
        (
            ("--gpus-per-actor", "1", "--wait-for-nodes", "0"),
            "--gpus-per-actor must be at most 0",
        ),
    ],
)
def test_what_will_not_come_is_refused(
    head: RayHead, case: Path, tmp_path: Path, asked: tuple[str, ...], sentence: str
) -> None:
    assert sentence in sweep(head, case, tmp_path / "results", *asked).wait(2)


def test_nodes_come_for_the_actors_that_wait_for_them(head: RayHead, case: Path, tmp_path: Path) -> None:
    plain = Run(case, tmp_path / "plain", *FLAGS, "--repeats", "4", "--actors", "2", "--no-dashboard")
    plain.wait()
    run = sweep(head, case, tmp_path / "results", "--repeats", "4")
    text = run.wait()
    assert "(1 GPU and 1 CPU each)" in text, "GPUs are asked for before there is one"
    assert outcome(run.folder) == outcome(plain.folder)
    attempts = [attempt for facts in Store(run.folder).trials().values() for attempt in facts["attempts"]]
    assert len({attempt["node_id"] for attempt in attempts}) == 2

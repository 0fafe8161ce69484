"""Sweeps on a running Ray cluster, whose GPUs are only declared to Ray and do not exist."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_sweep import write_model_and_data
from sweep_process import SweepProcess, grid_flags

from orchestrator.core import system
from orchestrator.store import Store

pytestmark = pytest.mark.slow
POLICIES = "k1,k2_middle,k3_last,k2_first"
FLAGS = grid_flags(POLICIES, max_new_tokens=40, shard_size=2)
HEAD = """
import sys
from orchestrator.running.environment import prepare
prepare(local=True)
import ray
here = {"_node_ip_address": "127.0.0.1", "_temp_dir": sys.argv[1]}
size = {"num_cpus": 4, "num_gpus": 4, "resources": {"accelerator_type:T4": 1, "highmem": 4}}
ray.init(address="local", include_dashboard=False, log_to_driver=False, **size, **here)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_data(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("r")
    short = Path("/tmp") / f"ray-{os.getpid()}"
    short.symlink_to(folder)
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(short)],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert head.stdout is not None
    assert head.stdin is not None
    yield head.stdout.readline().strip()
    head.stdin.close()
    head.stdout.close()
    head.wait(600)
    short.unlink()


@pytest.mark.parametrize(("share", "actors", "devices"), [("1", 4, 4), ("0.5", 2, 1)])
def test_actors_get_their_share_of_the_gpus(
    case: Path, tmp_path: Path, address: str, share: str, actors: int, devices: int
) -> None:
    """torch finds no GPU, so the rows state that the actors ran on the CPU."""
    enough = ("--repeats", "8")  # that the last actor finds work left, however late it is ready
    where = ("--address", address, "--gpus-per-actor", share, "--actors", str(actors), *enough)
    run = SweepProcess(case, tmp_path / "results", *FLAGS, *where)
    run.wait()
    attempts = [attempt for facts in Store(run.folder).trials().values() for attempt in facts["attempts"]]
    given = {attempt["actor"]: tuple(attempt["gpus"]) for attempt in attempts}
    assert len(given) == actors
    assert [len(gpus) for gpus in given.values()] == [1] * actors
    assert len(set(given.values())) == devices
    assert {attempt["device"]["name"] for attempt in attempts} == {system.describe_device("cpu")["name"]}


def test_actors_get_the_accelerator_and_the_resources_they_ask_for(case: Path, tmp_path: Path, address: str) -> None:
    """Of four GPUs two are used: each actor takes half of the node's custom resource."""
    asked = ("--accelerator-type", "T4", "--resources", "highmem=2")
    run = SweepProcess(case, tmp_path / "results", *FLAGS, "--address", address, *asked)
    text = run.wait()
    assert "on 2 actors (1 GPU (T4), 1 CPU and 2 highmem each)" in text
    attempts = [attempt for facts in Store(run.folder).trials().values() for attempt in facts["attempts"]]
    assert len({attempt["actor"] for attempt in attempts}) <= 2


def test_a_fraction_of_a_gpu_is_in_the_report(case: Path, tmp_path: Path, address: str) -> None:
    run = SweepProcess(
        case, tmp_path / "results", *FLAGS, "--address", address, "--gpus-per-actor", "0.5", "--actors", "2"
    )
    run.wait()
    report = (run.folder / "results.md").read_text()
    assert "Each actor had 0.5 of a GPU and shared the device with others: speeds are not comparable." in report


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (("--accelerator-type", "H100"), "--accelerator-type H100: no node of the cluster has it; the cluster has"),
        (("--resources", "highmem=5"), "4 CPU, 4 GPU (T4) and 4 highmem"),
        (("--cpus-per-actor", "8"), "--cpus-per-actor must be at most 4"),
    ],
)
def test_resources_that_the_cluster_lacks_are_refused_without_waiting(
    case: Path, tmp_path: Path, address: str, asked: tuple[str, ...], sentence: str
) -> None:
    """The cluster has no autoscaler, so the sweep does not wait for nodes."""
    run = SweepProcess(case, tmp_path / "results", *FLAGS, "--address", address, *asked)
    text = run.wait(2)
    assert sentence in text
    assert "waiting" not in text
    assert not run.folder.exists()


def test_ray_client_is_refused_before_ray_is_imported(case: Path, tmp_path: Path) -> None:
    run = SweepProcess(case, tmp_path / "results", *FLAGS, "--address", "ray://127.0.0.1:10001")
    assert run.wait(2) == (
        "error: --address must be the address of the cluster's head, such as HOST:6379 (got ray://127.0.0.1:10001): "
        "Ray Client is not supported; `ray job submit` runs the sweep on the cluster\n"
    )


def test_an_address_without_a_cluster_is_refused(case: Path, tmp_path: Path) -> None:
    run = SweepProcess(case, tmp_path / "results", *FLAGS, "--address", "127.0.0.1:1")
    text = run.wait(2)
    assert text == "error: --address 127.0.0.1:1: no Ray cluster can be joined there (Connection refused)\n"

"""Which model auto means, and how many actors fit; facts come in, so every machine can be tried here."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from orchestrator.core.system import Device, common_dtype
from orchestrator.planning.estimate import check_devices
from orchestrator.planning.machine import (
    Growth,
    Machine,
    Nodes,
    Placement,
    describe_auto_model,
    place,
    resolve_model,
)
from orchestrator.planning.settings import SweepSettings
from sampler import InputError
from sampler.config import FULL_MODEL
from sampler.errors import InputErrors


def nodes(count: int = 1, **resources: float) -> Nodes:
    return Nodes(resources=resources, count=count)


def single(**facts: Any) -> Machine:
    return Machine(nodes=(nodes(CPU=2, GPU=facts.pop("gpus", 0)),), **facts)


BARE, CLUSTER = single(), Machine(nodes=(nodes(2, CPU=32, GPU=4),))
SCALING = Machine(nodes=(nodes(CPU=4),), growth=Growth(groups=(nodes(2, CPU=48, GPU=4),), max_nodes=2))
EXPECTED = Machine(nodes=(nodes(CPU=4),), growth=Growth(groups=(nodes(CPU=1, GPU=1),), max_nodes=1, open_ended=True))
A100, T4 = {"accelerator_type:A100": 1.0}, {"accelerator_type:T4": 1.0}
MIXED = Machine(
    nodes=(
        Nodes(resources={"CPU": 8, "memory": 9e9, "node:__internal_head__": 1}),
        Nodes(resources={"CPU": 8, "GPU": 4, "highmem": 1, "memory": 9e9, "node:10.0.0.2": 1, **A100}),
        Nodes(resources={"CPU": 8, "GPU": 2, "highmem": 2, "object_store_memory": 9e9, **T4}, count=2),
    )
)
IN_CLUSTER = {"address": "auto"}


def placed(machine: Machine, **asked: Any) -> Placement:
    return place(SweepSettings(tasks=("gsm8k",), **asked), machine)


def test_auto_is_the_full_model_where_gpus_are_or_may_come() -> None:
    assert FULL_MODEL == "Efficient-Large-Model/Fast_dLLM_v2_7B"
    assert resolve_model("auto", single(gpus=1, driver_gpus=1), None) == FULL_MODEL
    for cluster in (CLUSTER, SCALING, EXPECTED, single(driver_gpus=1)):
        assert resolve_model("auto", cluster, "10.0.0.1:6379") == FULL_MODEL


def notices(machine: Machine, **changes: Any) -> list[str]:
    """Of a sweep for which no model was named."""
    asked = SweepSettings(tasks=("gsm8k",), address=changes.pop("address", None))
    return describe_auto_model(asked, replace(asked, **changes), machine)


def test_auto_is_the_bundled_model_on_a_bare_machine_and_a_notice_names_it() -> None:
    assert resolve_model("auto", BARE, None) == "tiny"
    (notice,) = notices(BARE, model="tiny", data="bundled")
    assert re.match(
        r"no GPU here \(torch \S+ finds none\): running the small bundled model on the bundled documents; --model Effi",
        notice,
    )
    (notice,) = notices(BARE, model="tiny", data="hub")
    assert "on documents from the Hub or its cache" in notice
    named = SweepSettings(tasks=("gsm8k",), model="tiny")
    assert describe_auto_model(named, named, BARE) == [], "it was named"
    assert notices(BARE, model="owner/name") == [], "it is the one the sweep began with"


@pytest.mark.parametrize(
    ("machine", "address", "beginning"),
    [
        (single(gpus=1, driver_gpus=1), None, "1 GPU here: running Efficient-Large-Model/Fast_dLLM_v2_7B on"),
        (single(gpus=2, driver_gpus=2), None, "2 GPUs here: running "),
        (CLUSTER, "10.0.0.1:6379", "8 GPUs in the cluster at 10.0.0.1:6379: running "),
        (SCALING, "auto", "up to 8 GPUs in the cluster at auto: running "),
        (EXPECTED, "auto", "GPUs that the autoscaler of the cluster at auto adds: running "),
        (single(driver_gpus=1), "auto", "1 GPU here: running "),
    ],
)
def test_where_there_are_gpus_the_full_model_is_named_with_the_reason(
    machine: Machine, address: str | None, beginning: str
) -> None:
    (notice,) = notices(machine, address=address, model=FULL_MODEL, data="hub")
    assert notice.startswith(beginning)
    assert notice.endswith("documents from the Hub or its cache; --model tiny runs the small one")


def test_auto_is_never_the_bundled_model_on_a_cluster() -> None:
    with pytest.raises(InputError, match="--model auto needs a GPU, and the cluster at auto has none"):
        resolve_model("auto", BARE, "auto")


@pytest.mark.parametrize("machine", [BARE, CLUSTER])
def test_a_named_model_is_left_alone(machine: Machine) -> None:
    assert resolve_model("owner/name", machine, "auto") == "owner/name"


@pytest.mark.parametrize(
    ("machine", "asked", "expected"),
    [
        (BARE, {}, (2, 0, 1, 1)),
        (BARE, {"actors": 1}, (1, 0, 1, 1)),
        (BARE, {"threads_per_actor": 2}, (1, 0, 2, 2)),
        (BARE, {"cpus_per_actor": 0.5}, (4, 0, 0.5, 1)),
        (CLUSTER, {}, (8, 1, 1, 1)),
        (CLUSTER, {"gpus_per_actor": 0.5}, (16, 0.5, 1, 1)),
        (CLUSTER, {"gpus_per_actor": 0.3}, (24, 0.3, 1, 1)),
        (CLUSTER, {"gpus_per_actor": 0.1}, (64, 0.1, 1, 1)),
        (CLUSTER, {"gpus_per_actor": 0}, (64, 0, 1, 1)),
        (CLUSTER, {"cpus_per_actor": 16}, (4, 1, 16, 16)),
        (CLUSTER, {"cpus_per_actor": 20}, (2, 1, 20, 20)),
        (SCALING, {}, (8, 1, 1, 1)),
        (SCALING, {"actors": 3, "gpus_per_actor": 1}, (3, 1, 1, 1)),
        (EXPECTED, {}, (1, 1, 1, 1)),
        (EXPECTED, {"actors": 6}, (6, 1, 1, 1)),
        (MIXED, {}, (8, 1, 1, 1)),
        (MIXED, {"accelerator_type": "A100", **IN_CLUSTER}, (4, 1, 1, 1)),
        (MIXED, {"accelerator_type": "T4", "gpus_per_actor": 0.5, **IN_CLUSTER}, (8, 0.5, 1, 1)),
        (MIXED, {"resources": ("highmem=1",), **IN_CLUSTER}, (5, 1, 1, 1)),
        (MIXED, {"resources": ("highmem=2",), **IN_CLUSTER}, (2, 1, 1, 1)),
        (MIXED, {"resources": ("highmem=1",), "gpus_per_actor": 0, **IN_CLUSTER}, (5, 0, 1, 1)),
    ],
)
def test_actors(machine: Machine, asked: dict[str, Any], expected: tuple[float, ...]) -> None:
    found = placed(machine, **asked)
    assert (found.actors, found.gpus_per_actor, found.cpus_per_actor, found.threads_per_actor) == expected


@pytest.mark.parametrize(
    ("machine", "asked", "sentence"),
    [
        (BARE, {"gpus_per_actor": 1}, "--gpus-per-actor must be at most 0"),
        (BARE, {"cpus_per_actor": 3}, "--cpus-per-actor must be at most 2"),
        (BARE, {"threads_per_actor": 3}, "--threads-per-actor must be at most 2, the CPUs of the largest node (got 3)"),
        (BARE, {"actors": 3}, "--actors must be at most 2 with 1 CPU each (got 3)"),
        (CLUSTER, {"cpus_per_actor": 40}, "--cpus-per-actor must be at most 32"),
        (CLUSTER, {"actors": 9}, "--actors must be at most 8 with 1 GPU and 1 CPU each (got 9)"),
        (
            CLUSTER,
            {"actors": 17, "gpus_per_actor": 0.5},
            "must be at most 16 with 0.5 GPU and 1 CPU each",
        ),
        (SCALING, {"actors": 9}, "must be at most 8"),
        (Machine(nodes=(nodes(3, CPU=0.5),)), {"cpus_per_actor": 0.6}, "must be at most 0.5"),
        (
            MIXED,
            {"accelerator_type": "H100", **IN_CLUSTER},
            "--accelerator-type H100: no node of the cluster has it; "
            "the cluster has 32 CPU, 8 GPU (A100, T4) and 5 highmem",
        ),
        (MIXED, {"resources": ("disk=1",), **IN_CLUSTER}, "--resources disk=1: no node of the cluster has it; the"),
        (MIXED, {"resources": ("highmem=3",), **IN_CLUSTER}, "--resources highmem=3: no node of the cluster has it"),
        (
            MIXED,
            {"resources": ("highmem=2",), "accelerator_type": "A100", **IN_CLUSTER},
            "no node has the 1 GPU (A100), 1 CPU and 2 highmem that an actor needs; the cluster has 32 CPU",
        ),
        (
            single(gpus=1),
            {"accelerator_type": "A100"},
            "--accelerator-type A100 selects nodes of a Ray cluster: add --address",
        ),
        (BARE, {"resources": ("highmem=1",)}, "--resources highmem=1 selects nodes of a Ray cluster"),
    ],
)
def test_what_no_node_has_nor_will(machine: Machine, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        placed(machine, **asked)


def test_both_kinds_are_reported() -> None:
    with pytest.raises(InputErrors) as error:
        placed(BARE, gpus_per_actor=1, cpus_per_actor=9)
    assert len(error.value.sentences) == 2


def test_a_job_that_is_not_running_yet_may_have_any_type_of_gpu() -> None:
    job = Machine(nodes=(nodes(4, CPU=8, GPU=2),), names_all=False)
    found = placed(job, accelerator_type="A100", resources=("highmem=1",), address="slurm")
    assert found.actors == 8
    assert found.accelerator_type == "A100"


def test_the_bundle_is_what_ray_asks_for() -> None:
    found = placed(MIXED, accelerator_type="T4", resources=("highmem=2",), gpus_per_actor=0.5, **IN_CLUSTER)
    assert found.bundle == {"CPU": 1, "GPU": 0.5, "accelerator_type:T4": 0.001, "highmem": 2}
    assert found.each == "0.5 GPU (T4), 1 CPU and 2 highmem each"
    assert placed(BARE).bundle == {"CPU": 1}
    assert placed(BARE).each == "1 CPU each"


def device(name: str, dtype: str, *, free: int = 10, total: int = 16) -> Device:
    return Device(name=name, dtype=dtype, free=free, total=total, node=f"node of {name}")


def test_one_dtype_for_devices_that_differ() -> None:
    ampere, turing, pascal = device("A100", "bfloat16"), device("T4", "float16"), device("P100", "float32")
    assert common_dtype([ampere, ampere]) == ("bfloat16", None)
    assert common_dtype([turing]) == ("float16", None)
    assert common_dtype([ampere, turing, ampere]) == (
        "float16",
        "--dtype auto is float16 for the whole sweep: T4 on node of T4 does not support bfloat16, "
        "which A100 on node of A100 does",
    )
    assert common_dtype([turing, pascal])[0] == "float32"


def test_devices_that_are_too_small() -> None:
    large, small = device("large", "bfloat16"), device("small", "bfloat16", free=4, total=8)
    assert check_devices(10, [large, small], remedy="buy more") == [small]
    assert check_devices(4, [large, small], remedy="buy more") == []
    assert check_devices(8, [large, small], remedy="buy more", in_use=True) == [], "their memory will be given back"
    sentence = r"about 11 bytes of memory, but the largest device \(large on node of large\) has 10 bytes for it"
    with pytest.raises(InputError, match=sentence):
        check_devices(11, [small, large], remedy="buy more")
    with pytest.raises(InputError, match="has 5 bytes for it"):
        check_devices(6, [small, large], remedy="buy more", share=0.5)


def test_this_machine_is_a_machine() -> None:
    here = Machine.here()
    assert here.present("CPU") >= 1
    assert here.present("GPU") == here.driver_gpus == here.most("GPU")
    assert here.dtype in ("float32", "bfloat16", "float16")


def test_a_machine_whose_system_tells_less_has_all_its_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(Path, "read_text", mock.Mock(side_effect=FileNotFoundError))
    here = Machine.here()
    assert here.present("CPU") == os.cpu_count()
    assert here.memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""Which model auto means, and how many actors fit; facts come in, so every machine can be tried here."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from orchestrator.planning.machine import FULL_MODEL, Machine, Placement, notice_of, place, resolve_model
from orchestrator.planning.settings import SweepSettings
from sampler import InputError
from sampler.errors import InputErrors

BARE, CLUSTER = Machine(cpus=2), Machine(cpus=64, gpus=8, node_cpus=32, node_gpus=4)
SCALING = Machine(cpus=4, most_cpus=100, most_gpus=8, node_cpus=48, node_gpus=4)


def placed(machine: Machine, **asked: Any) -> Placement:
    return place(SweepSettings(tasks=("gsm8k",), **asked), machine)


def test_auto_is_the_full_model_where_gpus_are_or_may_come() -> None:
    assert FULL_MODEL == "Efficient-Large-Model/Fast_dLLM_v2_7B"
    assert resolve_model("auto", Machine(cpus=2, gpus=1, driver_gpus=1), None) == FULL_MODEL
    for cluster in (CLUSTER, SCALING, Machine(cpus=2, driver_gpus=1)):
        assert resolve_model("auto", cluster, "10.0.0.1:6379") == FULL_MODEL


def notices(machine: Machine, **changes: Any) -> list[str]:
    """Of a sweep for which no model was named."""
    asked = SweepSettings(tasks=("gsm8k",), address=changes.pop("address", None))
    return notice_of(asked, replace(asked, **changes), machine)


def test_auto_is_the_bundled_model_on_a_bare_machine_and_says_so() -> None:
    assert resolve_model("auto", BARE, None) == "tiny"
    (notice,) = notices(BARE, model="tiny", data="bundled")
    assert re.match(
        r"no GPU here \(torch \S+ finds none\): running the small bundled model on the bundled documents; --model Effi",
        notice,
    )
    (notice,) = notices(BARE, model="tiny", data="hub")
    assert "on documents from the Hub or its cache" in notice
    named = SweepSettings(tasks=("gsm8k",), model="tiny")
    assert notice_of(named, named, BARE) == [], "it was named"
    assert notices(BARE, model="owner/name") == [], "it is the one the sweep began with"


@pytest.mark.parametrize(
    ("machine", "address", "beginning"),
    [
        (Machine(cpus=2, gpus=1, driver_gpus=1), None, "1 GPU here: running Efficient-Large-Model/Fast_dLLM_v2_7B on"),
        (Machine(cpus=2, gpus=2, driver_gpus=2), None, "2 GPUs here: running "),
        (CLUSTER, "10.0.0.1:6379", "8 GPUs in the cluster at 10.0.0.1:6379: running "),
        (SCALING, "auto", "up to 8 GPUs in the cluster at auto: running "),
        (Machine(cpus=2, driver_gpus=1), "auto", "1 GPU here: running "),
    ],
)
def test_where_there_are_gpus_the_full_model_is_named_with_the_reason(
    machine: Machine, address: str | None, beginning: str
) -> None:
    (notice,) = notices(machine, address=address, model=FULL_MODEL, data="hub")
    assert notice.startswith(beginning)
    assert notice.endswith("documents from the Hub or its cache; --model tiny runs the small one")


def test_auto_is_never_the_bundled_model_on_a_cluster() -> None:
    with pytest.raises(InputError, match="--model auto: the cluster at auto has no GPU and can bring none"):
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
        (BARE, {"threads_per_actor": 4}, (2, 0, 1, 4)),
        (BARE, {"cpus_per_actor": 0.5}, (4, 0, 0.5, 1)),
        (CLUSTER, {}, (8, 1, 1, 1)),
        (CLUSTER, {"gpus_per_actor": 0.5}, (16, 0.5, 1, 1)),
        (CLUSTER, {"gpus_per_actor": 0.3}, (24, 0.3, 1, 1)),
        (CLUSTER, {"gpus_per_actor": 0.1}, (64, 0.1, 1, 1)),
        (CLUSTER, {"gpus_per_actor": 2}, (4, 2, 1, 1)),
        (CLUSTER, {"gpus_per_actor": 3}, (2, 3, 1, 1)),
        (CLUSTER, {"gpus_per_actor": 0}, (64, 0, 1, 1)),
        (CLUSTER, {"cpus_per_actor": 16}, (4, 1, 16, 16)),
        (SCALING, {}, (8, 1, 1, 1)),
        (SCALING, {"actors": 3, "gpus_per_actor": 1}, (3, 1, 1, 1)),
    ],
)
def test_actors(machine: Machine, asked: dict[str, Any], expected: tuple[float, ...]) -> None:
    found = placed(machine, **asked)
    assert (found.actors, found.gpus_per_actor, found.cpus_per_actor, found.threads_per_actor) == expected


@pytest.mark.parametrize(
    ("machine", "asked", "sentence"),
    [
        (BARE, {"gpus_per_actor": 1}, "--gpus-per-actor 1: no machine here has more than 0"),
        (BARE, {"cpus_per_actor": 3}, "--cpus-per-actor 3: no machine here has more than 2"),
        (BARE, {"actors": 3}, "--actors 3: with 1 CPU each there is room for 2"),
        (CLUSTER, {"gpus_per_actor": 8}, "--gpus-per-actor 8: no machine here has more than 4"),
        (CLUSTER, {"cpus_per_actor": 40}, "--cpus-per-actor 40: no machine here has more than 32"),
        (CLUSTER, {"actors": 9}, "--actors 9: with 1 GPU and 1 CPU each there is room for 8"),
        (
            CLUSTER,
            {"actors": 17, "gpus_per_actor": 0.5},
            "with 0.5 GPU and 1 CPU each there is room for 16",
        ),
        (SCALING, {"actors": 9}, "there is room for 8"),
        (Machine(cpus=1.5, gpus=2, node_cpus=0.5), {"cpus_per_actor": 0.6}, "no machine here has more than 0.5"),
    ],
)
def test_what_neither_machine_nor_autoscaler_can_bring(machine: Machine, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        placed(machine, **asked)


def test_both_kinds_are_told() -> None:
    with pytest.raises(InputErrors) as error:
        placed(BARE, gpus_per_actor=2, cpus_per_actor=9)
    assert len(error.value.sentences) == 2


def test_this_machine_is_a_machine() -> None:
    here = Machine.here()
    assert here.cpus >= 1
    assert here.gpus == here.driver_gpus == here.all_gpus
    assert here.dtype in ("float32", "bfloat16", "float16")


def test_a_machine_whose_system_tells_less_has_all_its_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(Path, "read_text", mock.Mock(side_effect=FileNotFoundError))
    here = Machine.here()
    assert here.cpus == os.cpu_count()
    assert here.memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

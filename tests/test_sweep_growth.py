"""What an autoscaler may bring, from the file that `ray up` leaves on the head; cluster.yaml's own is one of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_variants import FILE, GOOGLE, MACHINES, elsewhere
from ray.autoscaler._private.util import prepare_config

from orchestrator.running.growth import Growth, growth_of

TYPES: dict[str, dict[str, Any]] = {
    "head": {"resources": {"CPU": 64, "GPU": 8}, "max_workers": 9},
    "small": {"resources": {"CPU": 8, "GPU": 1}, "max_workers": 10},
    "large": {"resources": {"CPU": 96, "GPU": 8}, "max_workers": 2},
    "none": {"resources": {"CPU": 200}, "max_workers": 0},
}


def grown(path: Path, text: str) -> Growth:
    path.write_text(text, encoding="utf-8")
    return growth_of(path)


def test_the_largest_machines_count_first_and_no_more_than_there_may_be(tmp_path: Path) -> None:
    described = {"max_workers": 4, "head_node_type": "head", "available_node_types": TYPES}
    growth = grown(tmp_path / "it.yaml", json.dumps(described))
    assert (growth.most("GPU"), growth.largest("GPU")) == (2 * 8 + 2 * 1, 8)
    assert (growth.most("CPU"), growth.largest("CPU")) == (2 * 96 + 2 * 8, 96)


def test_a_type_without_a_limit_has_that_of_all(tmp_path: Path) -> None:
    types = {"head": {}, "gpu": {"resources": {"GPU": 4}}}
    described = {"max_workers": 3, "head_node_type": "head", "available_node_types": types}
    assert grown(tmp_path / "it.yaml", json.dumps(described)).most("GPU") == 12


@pytest.mark.parametrize("text", ["", "a list: [", "- 1", "available_node_types: 3", "\x00"])
def test_what_describes_no_cluster_brings_nothing(tmp_path: Path, text: str) -> None:
    growth = grown(tmp_path / "it.yaml", text)
    assert (growth.most("GPU"), growth.largest("GPU")) == (0, 0)
    assert growth_of(tmp_path / "none.yaml") == Growth()


def test_our_own_file_brings_eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a machine is there: a sweep on a new cluster has to know that they may come."""
    monkeypatch.chdir(FILE.parent)
    own = growth_of(FILE)
    assert (own.most("GPU"), own.largest("GPU"), own.largest("CPU")) == (8, 1, 8)
    google = grown(tmp_path / "google.yaml", yaml.safe_dump(prepare_config(elsewhere(GOOGLE))))
    assert google.most("GPU") == 8
    machines = grown(tmp_path / "machines.yaml", yaml.safe_dump(prepare_config(elsewhere(MACHINES))))
    assert machines.most("GPU") == 0, "those are there, and Ray counts them itself"

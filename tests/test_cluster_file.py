"""cluster.yaml as Ray's own validator sees it, and what is promised about it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from cluster_variants import GOOGLE, MACHINES, as_it_is, elsewhere
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(ROOT)  # file_mounts are relative to it
    return as_it_is()


def test_rays_own_validator_accepts_it(config: dict[str, Any]) -> None:
    validate_config(prepare_config(config))


@pytest.mark.parametrize("beginning", [GOOGLE, MACHINES])
def test_so_it_does_with_what_its_comments_say(beginning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    made = elsewhere(beginning)
    assert made["provider"]["type"] != "aws"
    assert "boto3" not in str(made["head_setup_commands"])
    prepared = prepare_config(made)
    validate_config(prepared)
    assert max(each["max_workers"] for each in prepared["available_node_types"].values()) == made["max_workers"]


def test_a_typing_error_would_be_noticed(config: dict[str, Any]) -> None:
    config["idle_timeout_minuts"] = config.pop("idle_timeout_minutes")
    with pytest.raises(ValidationError, match="idle_timeout_minuts"):
        validate_config(prepare_config(config))


def test_gpus_come_by_demand_and_the_head_has_none(config: dict[str, Any]) -> None:
    head, gpu = (config["available_node_types"][name] for name in (config["head_node_type"], "gpu"))
    assert head["resources"] == {"CPU": 0, "GPU": 0}
    assert (gpu["min_workers"], gpu["max_workers"]) == (0, config["max_workers"])
    assert gpu["resources"]["GPU"] >= 1
    assert config["idle_timeout_minutes"] > 0
    assert config["provider"]["cache_stopped_nodes"] is False


def test_commands_are_good_bash(config: dict[str, Any]) -> None:
    for kind in ("setup", "head_setup", "head_start_ray", "worker_start_ray"):
        for command in config[f"{kind}_commands"]:
            checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
            assert checked.returncode == 0, checked.stderr


def test_every_part_of_the_project_goes_along(config: dict[str, Any]) -> None:
    told = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if told.returncode:
        pytest.skip("no checkout: which files belong to the project is not known")
    parts = {line.split("/")[0] for line in told.stdout.splitlines()} | {".git"}
    mounted = {there.removeprefix("~/reuse-sweep/"): here for there, here in config["file_mounts"].items()}
    assert mounted.pop("~/.ray/auth_token") == "~/.ray/auth_token"
    assert mounted == {part: part for part in parts}


def test_doors_are_shut(config: dict[str, Any]) -> None:
    """Ray opens SSH alone to the outside, unless more is asked for; requests need the token; no secret stands here."""
    assert set(config["provider"]["security_group"]) == {"GroupName"}
    assert "--dashboard-host=127.0.0.1" in " ".join(config["head_start_ray_commands"])
    assert any("RAY_AUTH_MODE=token" in command for command in config["setup_commands"])
    assert "HF_TOKEN" not in (ROOT / "cluster.yaml").read_text(encoding="utf-8")

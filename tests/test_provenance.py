"""What results say they were made with is true, and says nothing about the person who made them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch

from orchestrator.core import system

ROOT = Path(__file__).parents[1]


def test_packages_are_those_installed() -> None:
    found = system.package_versions()
    assert (found["torch"], found["ray"]) == (torch.__version__, ray.__version__)
    assert {"python", "lm_eval", "pyarrow", "transformers"} <= found.keys()


def test_the_code_is_the_checkout_it_lies_in() -> None:
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        pytest.skip("this is no checkout")
    found = system.code_version()
    assert found["commit"] == head.stdout.strip()
    assert found["dirty"] in (True, False)


def test_only_changed_code_is_a_change(tmp_path: Path) -> None:
    for name in ("orchestrator/__init__.py", "orchestrator/core/__init__.py", "orchestrator/core/system.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "README.md").write_text("as it was")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "c"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "README.md").write_text("other")
    assert changed_in(tmp_path) == "False"
    with (tmp_path / "orchestrator" / "__init__.py").open("a") as file:
        file.write("# more\n")
    assert changed_in(tmp_path) == "True"


def changed_in(folder: Path) -> str:
    asked = "from orchestrator.core import system; print(system.code_version()['dirty'])"
    output = subprocess.run([sys.executable, "-c", asked], cwd=folder, capture_output=True, text=True, check=True)
    return output.stdout.strip()


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert system.code_version()["commit"] is None


def test_the_device_has_a_name_and_memory_and_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_a-secret-that-nobody-may-see")
    found = system.describe_device("cpu")
    assert found["name"]
    assert found["memory"] > 2**28
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert "secret" not in json.dumps([found, system.package_versions(), system.code_version()])

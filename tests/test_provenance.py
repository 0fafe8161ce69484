"""What results say they were made with is true, and says nothing about the person who made them."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import ray
import torch

from orchestrator.running import provenance

ROOT = Path(__file__).parents[1]


def test_packages_are_those_installed() -> None:
    found = provenance.packages()
    assert (found["torch"], found["ray"]) == (torch.__version__, ray.__version__)
    assert {"python", "lm_eval", "pyarrow", "transformers"} <= found.keys()


def test_the_code_is_the_checkout_it_lies_in() -> None:
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode:
        pytest.skip("this is no checkout")
    found = provenance.code()
    assert found["commit"] == head.stdout.strip()
    assert found["dirty"] in (True, False)


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance.code()["commit"] is None


def test_the_device_has_a_name_and_memory_and_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_a-secret-that-nobody-may-see")
    found = provenance.device("cpu")
    assert found["name"]
    assert found["memory"] > 2**28
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert "secret" not in json.dumps([found, provenance.packages(), provenance.code()])

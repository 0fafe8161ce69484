"""The files that GitHub, pre-commit and citation tools read agree with the project and with their own schemas."""

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCHEMAS = {
    "vendor.github-workflows": [".github/workflows/test.yml"],
    "custom.github-workflows-require-timeout": [".github/workflows/test.yml"],
    "vendor.github-issue-forms": [".github/ISSUE_TEMPLATE/bug.yml", ".github/ISSUE_TEMPLATE/feature.yml"],
    "vendor.github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.citation-file-format": ["CITATION.cff"],
}


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.skipif(find_spec("check_jsonschema") is None, reason="check-jsonschema is not installed")
@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_linter_accepts_the_file(schema: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *SCHEMAS[schema]]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_workflow_runs_make_test_on_all_supported_versions() -> None:
    (job,) = read(".github/workflows/test.yml")["jobs"].values()
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert job["strategy"]["matrix"]["python"] == [lowest, "3.12", "3.13"]
    assert any(step.get("run", "").startswith("make test ") for step in job["steps"])


def test_citation_and_changelog_state_the_version() -> None:
    assert read("CITATION.cff")["version"] == PROJECT["version"]
    assert read("CITATION.cff")["license"] == PROJECT["license"]
    released = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == PROJECT["version"]


def test_hooks_run_the_checks_of_make_test() -> None:
    (local,) = read(".pre-commit-config.yaml")["repos"]
    checks = {hook["entry"].removesuffix(" --fix") for hook in local["hooks"]}
    made = subprocess.run(
        ["make", "--no-print-directory", "-n", "-o", ".venv/installed-dev", "lint", "types"],
        cwd=ROOT,
        capture_output=True,
    )
    commands = made.stdout.decode().splitlines()
    assert checks == {re.sub("( --check)? [.]$", "", command) for command in commands}

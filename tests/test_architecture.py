"""Imports go down only: orchestrator → tasks → sampler, and each package keeps to what it may know."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "sampler": {"ray", "lm_eval", "datasets", "pyarrow", "tasks", "orchestrator"},
    "tasks": {"ray", "orchestrator"},
    "orchestrator/analysis": {"ray", "torch"},
    "orchestrator/store": {"ray", "torch", "tasks"},
}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        assert not FORBIDDEN[package] & set(imported(path)), path

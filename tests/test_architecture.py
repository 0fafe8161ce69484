"""Imports go down only: orchestrator → tasks → sampler, and inside orchestrator as docs/architecture.md says."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("orchestrator", "tasks", "sampler")
MAX_FILES = 140
MAX_MODULE_LINES = 400
FORBIDDEN = {
    "sampler": {"ray", "lm_eval", "datasets", "pyarrow", "tasks", "orchestrator"},
    "tasks": {"ray", "orchestrator"},
    "orchestrator/core": {"ray", "tasks"},
    "orchestrator/store": {"ray", "torch", "tasks", "sampler.model"},
    "orchestrator/analysis": {"ray", "torch", "tasks"},
    "orchestrator/progress": {"ray", "torch", "tasks"},
}
ALLOWED = {  # the sub-packages of orchestrator that each may import
    "core": set(),
    "store": {"core"},
    "analysis": {"core"},
    "planning": {"core", "store", "analysis"},
    "progress": {"core", "store"},
    "report": {"core", "store", "analysis"},
    "running": {"core", "store", "planning", "progress"},
    "slurm": {"core", "store", "planning", "running"},
    "cli": {"core", "store", "analysis", "planning", "progress", "report", "running", "slurm"},
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Full names of imported modules, also of those imported inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sub_packages(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported(path) if name.startswith("orchestrator.")}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_does_not_import_what_is_above_it(package: str) -> None:
    for path in modules(package):
        tops = {name.split(".")[0] for name in imported(path)}
        assert not FORBIDDEN[package] & tops, path


@pytest.mark.parametrize("package", ALLOWED)
def test_sub_packages_import_along_the_table(package: str) -> None:
    for path in modules(f"orchestrator/{package}"):
        if path.name != "__main__.py":  # `python -m orchestrator.report` starts a command, which is in cli
            assert sub_packages(path) <= ALLOWED[package] | {package}, path


def test_the_table_names_every_sub_package_and_has_no_cycle() -> None:
    found = {path.parent.name for path in (ROOT / "orchestrator").glob("*/__init__.py")}
    assert found == set(ALLOWED)
    order = list(ALLOWED)
    for package, below in ALLOWED.items():
        assert all(order.index(name) < order.index(package) for name in below), package


def test_modules_next_to_the_sub_packages_only_start_commands() -> None:
    """But for the interface for notebooks, which is above all of them, and which `orchestrator` imports when used."""
    for path in (ROOT / "orchestrator").glob("*.py"):
        if path.name != "notebook.py":
            assert sub_packages(path) <= {"cli", "notebook"}, path


def test_files_and_sizes_stay_small() -> None:
    every = [path for package in PACKAGES for path in modules(package)]
    assert len(every) <= MAX_FILES
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in every}
    assert [path for path, lines in sizes.items() if lines > MAX_MODULE_LINES] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_modules_share_a_name(package: str) -> None:
    """But the thin modules that keep `python -m orchestrator.NAME` working are named like their command."""
    names = Counter(path.stem for path in modules(package) if path.parent != ROOT / "orchestrator")
    shared = {name for name, count in names.items() if count > 1} - {"__init__", "__main__"}
    assert not shared


def test_no_class_is_defined_twice() -> None:
    every = [path for package in PACKAGES for path in modules(package)]
    bodies = [ast.parse(path.read_text(encoding="utf-8")).body for path in every]
    names = Counter(node.name for body in bodies for node in body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()

"""What `make`, the image and clusters install: the tested versions, verified by hashes, torch from its own index."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements.lock", "requirements-dev.lock")
LOCKED = re.compile(
    r"^([\w.-]+)==([^\s;]+)(?: ; ([^\\]+?))? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE
)
ELSEWHERE = ("tzdata", "httpx2-jsfetch")  # only on systems on which nothing was tested


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def locked(name: str) -> dict[str, str]:
    """Version by package; every line of the file belongs to a package with hashes."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert LOCKED.sub("", text) == "", "a package without a hash, or an index"
    return {canonicalize_name(found[1]): found[2] for found in LOCKED.finditer(text)}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", LOCKS)
def test_the_locks_agree_with_the_constraints(name: str) -> None:
    pinned, found = constraints(), locked(name)
    assert {package: version for package, version in found.items() if pinned.get(package) != version} == {
        package: found[package] for package in ELSEWHERE if package in found
    }
    if name == "requirements-dev.lock":
        assert set(pinned) - set(found) == {"torch"}, "run `make lock`"
    assert set(found) <= set(locked("requirements-dev.lock"))


@pytest.mark.parametrize(("name", "extras"), [("requirements.lock", ("build",)), ("requirements-dev.lock", ("dev",))])
def test_the_locks_have_what_the_project_needs(project: dict[str, Any], name: str, extras: tuple[str, ...]) -> None:
    needed = list(project["project"]["dependencies"])
    needed += [one for extra in extras for one in project["project"]["optional-dependencies"][extra]]
    found = {**locked(name), "torch": constraints()["torch"]}
    for requirement in map(Requirement, needed):
        version = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(Version(version)), f"{requirement} and {version}: run `make lock`"


def test_the_build_system_is_pinned(project: dict[str, Any]) -> None:
    pinned = f"setuptools=={constraints()['setuptools']}"
    assert project["build-system"]["requires"] == [pinned]
    assert project["project"]["optional-dependencies"]["build"] == [pinned]
    assert pinned in project["project"]["optional-dependencies"]["dev"]


def test_only_torch_comes_from_another_index(project: dict[str, Any]) -> None:
    """A second index for everything would let the owner of a name there replace any package."""
    assert project["tool"]["uv"]["sources"] == {"torch": [{"index": "pytorch-cpu", "extra": "cpu"}]}
    (index,) = project["tool"]["uv"]["index"]
    assert index["explicit"] is True
    for name in ("Makefile", "README.md", "cluster.yaml", "deploy/Dockerfile", "docs/security.md", ".ci/run"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not re.search(r"extra-index|EXTRA_INDEX|UV_INDEX", text), name


@pytest.mark.parametrize("name", ["Makefile", "cluster.yaml", "deploy/Dockerfile"])
def test_installations_verify_hashes(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    commands = [found for found in re.findall(r"pip install ([^\n&]*)", text) if "uv " not in found]
    commands = [command for command in commands if "boto3" not in command and "google" not in command]
    verified, torch, own = commands
    assert "--require-hashes" in verified
    assert "--no-deps" in verified
    assert re.search(r"(-c|--constraint) \S*constraints.txt torch\b", torch)
    assert {"--no-deps", "--no-build-isolation"} <= set(own.split())

"""The software that results are produced with: package versions and the commit of this code. No paths, no secrets."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "ray", "lm_eval", "datasets", "pyarrow", "numpy")
PROJECT = "reuse-sweep"
SOURCE_FOLDERS = ("orchestrator", "sampler", "tasks")  # a change elsewhere, such as in docs, cannot change a row
COMMAND_TIMEOUT_SECONDS = 10


def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that results may depend on."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        if (installed := _installed_version(name)) is not None:
            versions[name] = installed
    return versions


def code_version() -> dict[str, Any]:
    """Installed version, and in a git checkout the commit and whether source files differ from it."""
    root = Path(__file__).resolve().parents[2]
    known: dict[str, Any] = {"version": _installed_version(PROJECT), "commit": None, "dirty": None}
    top = command_output(["git", "-C", str(root), "rev-parse", "--show-toplevel"])
    if top is None or Path(top) != root:  # installed, perhaps inside another project's repository
        return known
    status = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", *SOURCE_FOLDERS]
    commit = command_output(["git", "-C", str(root), "rev-parse", "HEAD"])
    return known | {"commit": commit, "dirty": bool(command_output(status))}


def command_output(command: list[str]) -> str | None:
    """Output of a command; None if it is missing, fails or does not end in time."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

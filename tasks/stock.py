"""Finds a task in lm-eval's own YAML files without loading them all. Knows names and paths, not documents."""

import functools
import re
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml

ROOT = Path(lm_eval.tasks.__file__).parent
NAMED = re.compile(r"""^["']?(task|group)["']?\s*:\s*["']?([\w.+:/-]+)["']?\s*(?:#.*)?$""", re.MULTILINE)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads task files as plain data: a named function stays a name."""


_Loader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


@functools.cache
def index(folder: str = ".") -> dict[str, tuple[str, Path]]:
    """Every task and group of a folder by name: which of the two it is, and its file. All take a second, once."""
    found: dict[str, tuple[str, Path]] = {}
    for path in sorted((ROOT / folder).rglob("*.yaml")):
        names = dict(NAMED.findall(path.read_text(encoding="utf-8")))
        kind = "group" if "group" in names else "task"  # a group's file names its members under task
        if kind in names:
            found.setdefault(names[kind], (kind, path))
    return found


def configuration(path: Path) -> dict[str, Any]:
    """A task file with what it includes, functions unresolved."""
    with path.open(encoding="utf-8") as file:
        own: dict[str, Any] = yaml.load(file, Loader=_Loader) or {}
    merged: dict[str, Any] = {}
    included = own.pop("include", [])
    for name in included if isinstance(included, list) else [included]:
        merged |= configuration(path.parent / name)
    return merged | own

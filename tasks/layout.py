"""Which files of a dataset repository hold which split, by its README or by their names. Knows names, opens nothing."""

import fnmatch
import functools
import re
from collections.abc import Sequence
from typing import Any

import yaml

from sampler import InputError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz")
ALIASES = {"validation": ("valid", "val", "dev"), "train": ("training",), "test": ("testing",)}


def find_files(
    names: Sequence[str], readme: str, *, where: str, configuration: str | None, splits: Sequence[str]
) -> dict[str, list[str]]:
    """Split → its files, of those in `names`. `where` is how the repository is called in complaints."""
    declared = _declared(readme, where)
    data = sorted(name for name in names if name.endswith(SUFFIXES))
    if declared:
        patterns = _patterns(declared, configuration, where)
        return {split: [name for name in data if _matches(name, patterns.get(split, []))] for split in splits}
    return {split: _by_name(data, configuration, split) for split in splits}


@functools.lru_cache(maxsize=64)
def _declared(readme: str, where: str) -> list[dict[str, Any]]:
    """The configurations in a README's YAML head; none where it says nothing about files."""
    head = re.match(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", readme, re.DOTALL)
    if head is None:
        return []
    try:
        fields = yaml.safe_load(head[1])
    except yaml.YAMLError:
        raise InputError(f"{where}: the YAML head of README.md cannot be read") from None
    configurations = fields.get("configs", []) if isinstance(fields, dict) else []
    return [entry for entry in configurations if isinstance(entry, dict) and entry.get("data_files")]


def _patterns(declared: list[dict[str, Any]], wanted: str | None, where: str) -> dict[str, list[str]]:
    by_name = {str(entry.get("config_name", "default")): entry for entry in declared}
    if wanted is None:
        standard = [name for name, entry in by_name.items() if entry.get("default")]
        wanted = standard[0] if standard else "default" if "default" in by_name else next(iter(by_name))
    if wanted not in by_name:
        raise InputError(f"{where} has no configuration {wanted!r}; it has {', '.join(sorted(by_name))}")
    files = by_name[wanted]["data_files"]
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    patterns: dict[str, list[str]] = {}
    for entry in files if isinstance(files, list) else [files]:
        split, paths = (entry["split"], entry["path"]) if isinstance(entry, dict) else ("train", entry)
        patterns.setdefault(split, []).extend(paths if isinstance(paths, list) else [paths])
    return patterns


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern.replace("**/", "*")) for pattern in patterns)


def _by_name(data: Sequence[str], configuration: str | None, split: str) -> list[str]:
    """Files called after the split, in the configuration's folder, in data/ or at the top; or after the former."""
    called = "|".join(re.escape(alias) for alias in (split, *ALIASES.get(split, ())))
    for folder in ([f"{configuration}/"] if configuration else []) + ["data/", ""]:
        pattern = re.compile(rf"{re.escape(folder)}(?:{called})(?:[-_.][^/]*)?")
        if found := [name for name in data if pattern.fullmatch(name.partition(".")[0]) or pattern.fullmatch(name)]:
            return found
    whole = [name for name in data if configuration and name.partition(".")[0] == configuration]
    return whole if split == "train" else []

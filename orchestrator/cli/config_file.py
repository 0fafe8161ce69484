"""The settings of a sweep in a YAML file, by the names of the flags with - or _."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.core.errors import Problems
from orchestrator.planning.fields import Setting, display, read_bool
from orchestrator.planning.settings import ALL_SETTINGS, SweepSettings
from sampler.errors import InputError

COMMANDS = ("config", "save-config", "dry-run", "force", "help")  # flags that are not settings


class _UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses duplicate keys, of which PyYAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise InputError(f"{key!r} occurs twice")
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]


def read(path: Path, settings: Mapping[str, Setting], aliases: Mapping[str, str], problems: Problems) -> dict[str, Any]:
    """Raw values by field name. A key whose value is null is left out: it means the default.

    Wrong keys are added to `problems`; a file that cannot be read at all is an InputError.
    """
    try:
        content = yaml.load(path.read_bytes(), _UniqueKeyLoader)  # a SafeLoader: plain values only
    except OSError as error:
        raise InputError(f"--config {path} cannot be read ({error.strerror})") from None
    except InputError as error:
        raise InputError(f"--config {path}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"--config {path} is not valid YAML ({_first_line(error)})") from None
    if not isinstance(content, dict | None):
        raise InputError(f"--config {path} must contain keys and values such as limit: 100, not a list or a text")
    names = {setting.key: name for name, setting in settings.items()}
    negated = {f"no-{setting.key}": setting.key for setting in settings.values() if setting.negatable}
    values: dict[str, Any] = {}
    for key, value in (content or {}).items():
        written = str(key).replace("_", "-")
        written = aliases.get(written, written)
        with problems.collect():
            name = names.get(negated.get(written, written))
            if name is None:
                raise InputError(f"--config {path}: {_unknown(str(key), written, list(names))}")
            if name in values:
                raise InputError(f"--config {path}: {key!r} occurs twice")
            values[name] = value if written not in negated or value is None else not read_bool(f"{path}: {key}", value)
    return {name: value for name, value in values.items() if value is not None}


def _unknown(key: str, written: str, known: list[str]) -> str:
    if written in COMMANDS:
        return f"{key!r} must be given on the command line, not in a file"
    similar = difflib.get_close_matches(written, known, n=1, cutoff=0.5)
    return f"unknown setting {key!r}; " + (f"did you mean {similar[0]}?" if similar else f"known: {', '.join(known)}")


def save(path: Path, settings: SweepSettings) -> None:
    """Writes the settings for --config, the whole file or nothing. Those that are None are left to the defaults."""
    values = {ALL_SETTINGS[name].key: value for name, value in settings.as_dict().items() if value is not None}
    values |= {
        key: [display(item) if isinstance(item, bool) else item for item in value]
        for key, value in values.items()
        if isinstance(value, list)
    }
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"--save-config {path} cannot be written ({error.strerror})") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

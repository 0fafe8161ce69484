"""A sweep's settings in a YAML file, by the names of the flags with - or _. Knows no meaning of any of them."""

import difflib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from orchestrator.core.errors import Problems
from orchestrator.planning.values import switch
from sampler.errors import InputError

COMMANDS = ("config", "save-config", "dry-run", "force", "help")  # to be asked for each time


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML takes the last of two equal keys without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise InputError(f"{key!r} is given twice")
        return super().construct_mapping(node, deep)  # type: ignore[no-any-return]


def read(path: Path, known: Collection[str], elsewhere: Mapping[str, str], problems: Problems) -> dict[str, Any]:
    """Raw values by flag name; null means that nothing is said. `elsewhere`: other spellings of flags.

    Keys that are wrong are added to `problems`; a file that cannot be read at all is an InputError.
    """
    try:
        content = yaml.load(path.read_bytes(), _Loader)  # a SafeLoader: plain values only
    except OSError as error:
        raise InputError(f"--config {path} cannot be read ({error.strerror}); a YAML file is needed") from None
    except InputError as error:
        raise InputError(f"--config {path}: {error}; each key once is allowed") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, TypeError, ValueError) as error:
        raise InputError(
            f"--config {path} is no valid YAML ({_first_line(error)}); keys and values are needed"
        ) from None
    if not isinstance(content, dict | None):
        raise InputError(
            f"--config {path} holds a {type(content).__name__}; keys and values such as limit: 100 are needed"
        )
    named: dict[str, Any] = {}
    for key, value in (content or {}).items():
        written = str(key).replace("_", "-")
        written = elsewhere.get(f"--{written}", f"--{written}")[2:]
        name = _positive(written)
        problem = _problem(written, known) or ("is given twice; each key once is allowed" if name in named else None)
        with problems.collect():
            if problem:
                raise InputError(f"--config {path}: {key!r} {problem}")
            named[name] = value if name == written or value is None else not switch(f"{path}: {key}", value)
    return {name: value for name, value in named.items() if value is not None}


def _problem(name: str, known: Collection[str]) -> str | None:
    if _positive(name) in known:
        return None
    if name in COMMANDS:
        return "belongs on the command line, not into a file"
    alike = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"is no setting; did you mean {alike[0]}?" if alike else f"is no setting; known are {', '.join(known)}"


def _positive(name: str) -> str:
    """`no-chat-template: true` is `chat-template: false`."""
    return name.removeprefix("no-") if name in ("no-chat-template", "no-dashboard") else name


def save(path: Path, settings: dict[str, Any]) -> None:
    """Written whole or not at all; what is None is left to the defaults."""
    kept = {name.replace("_", "-"): value for name, value in settings.items() if value is not None}
    kept["block-cache"] = ["on" if value else "off" for value in kept["block-cache"]]
    text = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"--save-config {path} cannot be written ({error.strerror}); a file is needed") from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

"""Checks of values from a results folder that another person may have written.

These are names that become part of a path, text that is printed or put into a page, and the types of JSON values.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sampler.errors import InputError

MAX_NAME_BYTES = 255  # of a file name on every common file system
MAX_WHOLE_NUMBER = 2**53  # beyond it, a float is not exact
SHOWN_CHARACTERS = 60  # of a wrong value in a message
# C0 and C1 controls except tab and line feed, which terminals obey; characters that reverse or hide what follows them;
# halves of a surrogate pair and noncharacters, which neither UTF-8 nor XML can hold.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\ufffe\uffff]"
)
CONTROL = re.compile(f"[\t\n]|{UNPRINTABLE.pattern}")  # in a name, which is on one line

Check = Callable[[Any], str | None]  # returns what the value must be, or None if it is valid
Shape = Any  # a Check; [shape] for a list; {key: shape} for an object, whose other keys are ignored


def printable(text: object) -> str:
    """Text without control characters and others that SVG, HTML and Markdown cannot contain."""
    return UNPRINTABLE.sub("", str(text))


def name_problem(name: str) -> str | None:
    """What a file name must be, if this is not a valid one; None if it is."""
    if name in ("", ".", "..") or "/" in name or CONTROL.search(name):
        return "a name without slashes and control characters"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"a name of at most {MAX_NAME_BYTES} bytes"
    return None


def path_below(folder: Path, name: str) -> Path:
    """The path of a relative name below `folder`; InputError if it would lead out of it, also by a symbolic link."""
    for part in name.split("/"):
        if (problem := name_problem(part)) is not None:
            raise InputError(f"{shown(name)} cannot be a file in {folder}: each part must be {problem}")
    path = folder / name
    try:
        inside = path.parent.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links
        inside = False
    if not inside:
        raise InputError(f"{path.parent} is a symbolic link that leads out of {folder}; remove it")
    return path


def shown(value: object) -> str:
    """A value in a message: its beginning, with control characters escaped."""
    text = ascii(value) if isinstance(value, str) and CONTROL.search(value) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


# Shapes of JSON values


def text(value: object) -> str | None:
    return None if isinstance(value, str) else "text"


def line(value: object) -> str | None:
    """Text without line breaks and control characters."""
    return None if isinstance(value, str) and not CONTROL.search(value) else "text on one line"


def file_name(value: object) -> str | None:
    return name_problem(value) if isinstance(value, str) else "a name"


def number(value: object) -> str | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
    return None if good else "a number"


def flag(value: object) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def scalar(value: object) -> str | None:
    """Anything but a list or an object."""
    good = value is None or isinstance(value, bool) or not all((line(value), number(value)))
    return None if good else "text on one line, a number, true, false or null"


def anything(value: object) -> str | None:
    del value
    return None


def whole(low: int = 0, high: int = MAX_WHOLE_NUMBER) -> Check:
    def check(value: object) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
        return None if good else f"a whole number from {low} to {high}"

    return check


def one_of(*choices: str) -> Check:
    return lambda value: None if value in choices and isinstance(value, str) else f"one of {', '.join(choices)}"


def optional(shape: Shape) -> Check:
    return lambda value: None if value is None else _problem(value, shape)


def each(shape: Shape, key: Check = line) -> Check:
    """An object whose keys are data too."""

    def check(value: object) -> str | None:
        if not isinstance(value, dict):
            return "an object"
        for name, item in value.items():
            if (wrong := key(name)) is not None:
                return f"an object whose keys are {wrong} (found {shown(name)})"
            if (wrong := _problem(item, shape)) is not None:
                return f"an object whose values are {wrong} (found {shown(item)})"
        return None

    return check


def like(default: Any) -> Check:
    """A check for values of the same type as `default`, the default of a decode setting."""
    if isinstance(default, bool):
        return flag
    if isinstance(default, int):
        return whole()
    return number if isinstance(default, float) else line


def shape_problem(value: Any, shape: Mapping[str, Shape], required: tuple[str, ...] = ()) -> str | None:
    """What is wrong with the first invalid value, as the end of a sentence about the file; None if all are valid."""
    for key in required:
        if key not in value:
            return f"has no {key!r}"
    for key, part in shape.items():
        if key not in value:
            continue
        item = value[key]
        if isinstance(part, dict) and isinstance(item, dict):
            if (wrong := shape_problem(item, part)) is not None:
                return f"{wrong} (in {key!r})"
        elif (expected := _problem(item, part)) is not None:
            return f"has {shown(item)} as {key!r}, which must be {expected}"
    return None


def _problem(value: Any, shape: Shape) -> str | None:
    """What the value must be; None if it is valid."""
    if callable(shape):
        expected: str | None = shape(value)
        return expected
    if isinstance(shape, list):
        if not isinstance(value, list):
            return "a list"
        return next((f"a list of {wrong}" for item in value if (wrong := _problem(item, shape[0])) is not None), None)
    return "an object" if not isinstance(value, dict) else shape_problem(value, shape)

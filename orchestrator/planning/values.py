"""Turns what was typed, or what a YAML file holds, into values. Knows no flag; `label` says which one is meant."""

import math
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sampler.errors import InputError

T = TypeVar("T")
Reader = Callable[[str, Any], Any]  # label, raw value → value, or an InputError that names both
SWITCHES: Mapping[object, bool] = {True: True, False: False} | {
    word: value for value, words in ((True, ("on", "true", "yes")), (False, ("off", "false", "no"))) for word in words
}


def whole(label: str, raw: Any) -> int:
    value: Any = raw
    if isinstance(raw, str):
        try:
            value = int(raw)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{label} {shown(raw)}: a whole number is allowed")
    return value


def number(label: str, raw: Any) -> float:
    try:
        value = math.nan if isinstance(raw, bool) or not isinstance(raw, str | int | float) else float(raw)
    except (ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{label} {shown(raw)}: a number is allowed")
    return value


def text(label: str, raw: Any) -> str:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return str(raw)  # a name such as 2024 is a number to YAML
    if not isinstance(raw, str):
        raise InputError(f"{label} {shown(raw)}: a text is allowed; in a YAML file put it in quotes")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in raw):
        raise InputError(f"{label} {raw!r}: a text without control characters is allowed")
    return raw.strip()


def switch(label: str, raw: Any) -> bool:
    """YAML reads on and off as true and false."""
    word = raw.strip().lower() if isinstance(raw, str) else raw
    if not isinstance(word, str | bool) or word not in SWITCHES:
        raise InputError(f"{label} {shown(raw)}: on or off is allowed")
    return SWITCHES[word]


def many(read: Callable[[str, Any], T]) -> Callable[[str, Any], tuple[T, ...]]:
    """A list with commas, or one of YAML, or a single value."""

    def read_many(label: str, raw: Any) -> tuple[T, ...]:
        if isinstance(raw, str):
            raw = raw.split(",") if raw.strip() else []
        return tuple(read(label, part) for part in (raw if isinstance(raw, list) else [raw]))

    return read_many


def shown(raw: object) -> str:
    """As typed: YAML's true, false and null in YAML's words."""
    plain = {True: "true", False: "false", None: "null"}
    word = plain[raw] if raw is None or isinstance(raw, bool) else str(raw) if str(raw) else "''"
    return word if len(word) <= 60 else f"{word[:57]}..."

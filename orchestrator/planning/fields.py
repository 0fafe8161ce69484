"""Declares settings. One declaration gives a setting its flag, YAML key, validation and line in docs/settings.md.

A setting is a dataclass field: the annotation is its type, `setting()` adds default, bounds, help and aliases.
"""

import math
import re
import types
import typing
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sampler.errors import InputError, InputErrors, Problems, listed

BOOLEANS: Mapping[object, bool] = {True: True, False: False} | {
    word: value for value, words in ((True, ("on", "true", "yes")), (False, ("off", "false", "no"))) for word in words
}
OPTIONS = "options"  # the group of flags that need no heading of their own
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
RESOURCE = re.compile(r"([A-Za-z_][^=,\s]*)=([0-9]*\.?[0-9]+)")
CALLBACK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(?:\?(.*))?")  # scheme, host, path, options
UPLOAD_SCHEMES = ("s3", "gs", "file")
SECRET_OPTION = re.compile(r"key|secret|token|password|credential|signature", re.IGNORECASE)
METAVARS = {int: "N", float: "X", str: "NAME", Path: "PATH", bool: "on,off"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One declared setting. `settings_of` creates it from a dataclass field."""

    name: str
    kind: type  # int, float, str, bool or Path
    many: bool  # a tuple of that type
    default: Any  # MISSING: required
    help: str
    group: str
    metavar: str = ""
    default_text: str | None = None  # shown in the help instead of the default
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # exclusive minimum
    below: float | None = None  # exclusive maximum
    cap: float | None = None  # larger values are surely mistakes; not part of the documented range
    unit: str = ""
    choices: tuple[str, ...] = ()
    example: str = ""  # shown if the setting is missing or empty
    aliases: tuple[str, ...] = ()  # other flags, with -
    repeatable: bool = False  # the flag may be used several times; an empty list is valid
    verbatim: bool = False  # text is not stripped, split at commas or searched for control characters
    positional: bool = False
    typed_as: str = ""  # the flag without its dashes, if it is not the name of the field
    check: Callable[[Any], str | None] | None = None  # of one value; returns what is wrong with it

    @property
    def key(self) -> str:
        """The YAML key, and the flag without its dashes; a name that Python reserves is declared with _ at its end."""
        return self.typed_as or self.name.removesuffix("_").replace("_", "-")

    @property
    def flag(self) -> str:
        return self.metavar if self.positional else f"--{self.key}"

    @property
    def required(self) -> bool:
        return self.default is MISSING

    @property
    def negatable(self) -> bool:
        """Whether the flag has a --no- form."""
        return self.kind is bool and not self.many and self.default is True

    @property
    def single(self) -> "Setting":
        """A setting with several values, for commands that take one value of it."""
        default = None if self.default is None else self.default[0]
        return replace(self, many=False, default=default, metavar=METAVARS[self.kind], group=OPTIONS)

    @property
    def full_help(self) -> str:
        """The help with the default value."""
        shown = self.default_text
        if shown is None and not self.required and self.default is not None and self.default not in (False, ()):
            shown = display(self.default)
        return f"{self.help} (default: {shown})" if shown else self.help

    def read(self, label: str, raw: Any) -> Any:
        """A value from the command line or a YAML file. `label` names the setting in error messages."""
        if not self.many:
            return self._read_one(label, raw)
        if isinstance(raw, str) and not self.verbatim:
            raw = raw.split(",") if raw.strip() else []
        problems, values = Problems(), []
        for part in raw if isinstance(raw, list) else [raw]:
            with problems.collect():
                values.append(self._read_one(label, part))
        if problems.sentences:  # also report what is wrong with those that can be read
            raise InputErrors([*problems.sentences, *(self.problems(tuple(values)) if values else ())])
        return tuple(values)

    def _read_one(self, label: str, raw: Any) -> Any:
        if self.verbatim and isinstance(raw, str):
            return raw
        return READERS[self.kind](label, raw)

    def problems(self, value: Any) -> Iterator[str]:
        """A sentence for each thing that is wrong with a value of the right type."""
        if value is None:
            return
        values = value if self.many else (value,)
        if not values and not self.repeatable:
            yield f"{self.flag} must not be empty{self._hint}"
        for one in values:
            if one == "" and not self.verbatim:
                yield f"{self.flag} must not {'contain an empty name' if self.many else 'be empty'}{self._hint}"
            elif self.check is not None and (wrong := self.check(one)) is not None:
                yield f"{self.flag}{' ' if wrong.startswith('must') else ': '}{wrong}"
            elif self.choices and one not in self.choices:
                yield f"{self.flag} must be {listed(self.choices)} (got {display(one)})"
            elif self.kind in (int, float) and not self._in_bounds(one):
                yield f"{self.flag} must be {self.bounds or 'a finite number'} (got {display(one)})"
            elif self.cap is not None and one > self.cap:
                yield f"{self.flag} must be at most {display(self.cap)} (got {display(one)})"
        if self.many and not self.repeatable and (twice := repeated(values)) is not None:
            yield f"{self.flag} must not contain {display(twice)} twice"

    @property
    def missing(self) -> str:
        return f"{self.flag} is required{self._hint}"

    @property
    def _hint(self) -> str:
        return f": {self.example}" if self.example else ""

    def _in_bounds(self, value: float) -> bool:
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    @property
    def bounds(self) -> str:
        """The allowed range in words, '' if there is none."""
        low = ("at least", self.minimum) if self.above is None else ("above", self.above)
        high = ("at most", self.maximum) if self.below is None else ("below", self.below)
        if None not in (low[1], high[1]) and (self.above is None) == (self.below is None):
            text = f"between {display(low[1])} and {display(high[1])}"
        else:
            text = " and ".join(f"{word} {display(end)}" for word, end in (low, high) if end is not None)
        return f"{text} {self.unit}".rstrip()


def setting(default: Any = MISSING, **declaration: Any) -> Any:
    """A dataclass field that is a setting; the keyword arguments are those of Setting."""
    return field(default=default, metadata={"setting": declaration})


def shared(cls: type, name: str, **changes: Any) -> Any:
    """A field declared as in another dataclass, for a second command with the same setting."""
    (item,) = (item for item in fields(cls) if item.name == name)
    declaration = {**item.metadata["setting"], "group": OPTIONS, **changes}
    return setting(declaration.pop("default", item.default), **declaration)


def settings_of(cls: type) -> Mapping[str, Setting]:
    """The settings that a dataclass declares, by field name. A group lasts until a field names another."""
    hints = typing.get_type_hints(cls)
    settings: dict[str, Setting] = {}
    group = OPTIONS
    for item in fields(cls):
        if "setting" in item.metadata:
            kind, many = _kind(hints[item.name])
            group = item.metadata["setting"].get("group", group)
            declaration = {"metavar": METAVARS[kind], **item.metadata["setting"], "group": group}
            settings[item.name] = Setting(name=item.name, kind=kind, many=many, default=item.default, **declaration)
    return types.MappingProxyType(settings)


def _kind(hint: Any) -> tuple[type, bool]:
    """`int | None` is (int, False), `tuple[str, ...]` is (str, True)."""
    if typing.get_origin(hint) is tuple:
        return _kind(typing.get_args(hint)[0])[0], True
    if isinstance(hint, types.UnionType):
        return _kind(next(part for part in typing.get_args(hint) if part is not types.NoneType))
    assert hint in READERS, hint
    return hint, False


def problems_of(instance: Any) -> list[str]:
    """Every problem of a dataclass's settings, each checked on its own."""
    declared = settings_of(type(instance))
    return [problem for name in declared for problem in declared[name].problems(getattr(instance, name))]


def as_flags(instance: Any) -> list[str]:
    """The flags of these settings, without those that have their default value."""
    words = []
    for name, declared in settings_of(type(instance)).items():
        value = getattr(instance, name)
        if value != declared.default and value is not None:
            flag = declared.flag if value is not False else declared.flag.replace("--", "--no-", 1)
            several = value if isinstance(value, tuple) else (value,)
            typed = (display(one) if isinstance(one, bool) else str(one) for one in several)
            words += [flag] if isinstance(value, bool) else [flag, ",".join(typed)]
    return words


def read_int(label: str, raw: Any) -> int:
    value: Any = raw
    if isinstance(raw, str):
        try:
            value = int(raw)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{label} must be a whole number (got {display(raw)})")
    return value


def read_float(label: str, raw: Any) -> float:
    try:
        value = math.nan if isinstance(raw, bool) or not isinstance(raw, str | int | float) else float(raw)
    except (ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{label} must be a number (got {display(raw)})")
    return value


def read_text(label: str, raw: Any) -> str:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return str(raw)  # YAML reads a name such as 2024 as a number
    if not isinstance(raw, str):
        raise InputError(f"{label} must be text, in quotes in a YAML file (got {display(raw)})")
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in raw):
        raise InputError(f"{label} must not contain control characters (got {raw!r})")
    return raw.strip()


def read_bool(label: str, raw: Any) -> bool:
    word = raw.strip().lower() if isinstance(raw, str) else raw
    if not isinstance(word, str | bool) or word not in BOOLEANS:
        raise InputError(f"{label} must be on or off (got {display(raw)})")
    return BOOLEANS[word]


def read_path(label: str, raw: Any) -> Path:
    if not isinstance(raw, str | Path) or not str(raw):
        raise InputError(f"{label} must be a path (got {display(raw)})")
    return Path(raw)


READERS: Mapping[type, Callable[[str, Any], Any]] = {
    int: read_int,
    float: read_float,
    str: read_text,
    bool: read_bool,
    Path: read_path,
}


def display(value: object) -> str:
    """A value as a user would type it."""
    if isinstance(value, tuple):
        return ",".join(map(display, value))
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "null"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    text = f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value) or "''"
    return text if len(text) <= 60 else f"{text[:57]}..."


def repeated(values: Iterable[object]) -> object | None:
    """The first value that occurs a second time."""
    seen: list[object] = []
    for value in values:
        if value in seen:
            return value
        seen.append(value)
    return None


# Checks of values that have a format; they return what is wrong


def check_resource(resource: str) -> str | None:
    match = RESOURCE.fullmatch(resource)
    if match is None or float(match[2]) <= 0:
        return f"must be NAME=AMOUNT with an amount above 0, such as highmem=1 (got {display(resource)})"
    if match[1].upper() in ("CPU", "GPU"):
        return f"must not contain {match[1]} (got {resource}): use --{match[1].lower()}s-per-actor"
    return None


def check_address(address: str) -> str | None:
    if not address.startswith("ray://"):
        return None
    return (
        f"must be the address of the cluster's head, such as HOST:6379 (got {address}): Ray Client is not supported; "
        "`ray job submit` runs the sweep on the cluster"
    )


def check_callback(callback: str) -> str | None:
    if CALLBACK.fullmatch(callback):
        return None
    return f"must be MODULE:CLASS, such as my_package.callbacks:MyCallback (got {display(callback)})"


def check_name(name: str) -> str | None:
    if NAME.fullmatch(name):
        return None
    return (
        "must be a valid directory name of up to 100 letters, digits and . _ + -, beginning with a letter or digit "
        f"(got {name!r})"
    )


def check_upload(url: str) -> str | None:
    """The messages leave out every part of the URL that may be a secret."""
    match = URL.fullmatch(url)
    if match is None or match[1] not in UPLOAD_SCHEMES:
        got = f"{url.partition('://')[0]}://…" if is_url(url) else "no URL"
        return f"must be a URL such as s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER (got {got})"
    scheme, host, path, options = match.groups(default="")
    names = [option.partition("=")[0] for option in options.split("&")]
    user, at, _ = host.rpartition("@")
    if (at and (scheme, user) != ("gs", "anonymous")) or "@" in options or any(map(SECRET_OPTION.search, names)):
        return "must not contain credentials: put them into environment variables such as AWS_ACCESS_KEY_ID"
    if scheme == "file" and (host or not path):
        return f"must be an absolute path after file://, such as file:///data/copies (got {url})"
    if scheme != "file" and not host:
        return f"must contain a bucket, as in {scheme}://BUCKET/FOLDER (got {url})"
    return None


def is_url(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None

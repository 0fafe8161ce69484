"""Configurations: what a sweep compares. A configuration is a policy plus decode settings.

A decode setting is a field of `Configuration`; rows, trial.json, settings and flags use its name.
docs/architecture.md says how to add one.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from sampler.errors import InputError, did_you_mean
from sampler.policy import ReusePolicy
from sampler.records import LOGLIKELIHOOD, DecodeSettings
from sampler.reveal import THRESHOLD

DEFAULTS = DecodeSettings()
OWN, FIRST = "own", "first"  # values of --reference: the decode settings of the k=1 run in a comparison


def _decode_setting(default: Any, *, slug: str | tuple[str, str], in_every_id: bool = False) -> Any:
    """A field of `Configuration`. `slug` formats its value for file names; a boolean has a pair, for off and on.

    `in_every_id` is True for the settings of format version 1. A later setting is part of a trial's id only if it is
    not the default, so that the trials of existing sweeps keep their ids.
    """
    return field(default=default, metadata={"slug": slug, "in_every_id": in_every_id})


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Configuration:
    """A policy plus decode settings; the order is by policy name, then by settings."""

    policy: str
    threshold: float = _decode_setting(DEFAULTS.threshold, slug="t{:g}", in_every_id=True)
    small_block: int = _decode_setting(DEFAULTS.small_block, slug="b{}", in_every_id=True)
    block_cache: bool = _decode_setting(DEFAULTS.block_cache, slug=("nocache", "cache"), in_every_id=True)
    reveal: str = _decode_setting(DEFAULTS.reveal, slug="{}")

    def __post_init__(self) -> None:
        if not self.uses("threshold"):  # one value for all, so that equal configurations have one identity
            object.__setattr__(self, "threshold", DEFAULTS.threshold)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "Configuration":
        """From a row or a trial.json; a setting that an older version did not know has its default."""
        return cls(**{name: values[name] for name in CONFIGURATION_KEYS if values.get(name) is not None})

    @classmethod
    def parse(cls, text: str, base: "Configuration | None" = None) -> "Configuration":
        """Reads k2_middle:threshold=0.9:small-block=16; settings that are not named are those of `base`."""
        policy, *parts = text.split(":")
        known = {name.replace("_", "-"): name for name in DECODE_SETTINGS}
        overrides: dict[str, Any] = {}
        for part in parts:
            key, _, value = part.partition("=")
            name = known.get(key.replace("_", "-"))
            if name is None:
                raise InputError(
                    f"{text}: unknown decode setting {key!r}; "
                    + did_you_mean(key, list(known), otherwise=f"known: {', '.join(known)}")
                )
            if name in overrides:
                raise InputError(f"{text}: {key} is given twice")
            overrides[name] = _parse_value(text, key, value, default_of(name))
        inherited = {} if base is None else base.as_dict(DECODE_SETTINGS)
        if "threshold" in overrides:
            inherited["reveal"] = THRESHOLD
        parsed = str(ReusePolicy.parse(policy))
        try:
            decoded = DecodeSettings(**{**inherited, **overrides})
        except InputError as error:
            raise InputError(f"{text}: {error}") from None
        return cls(policy=parsed, **{name: getattr(decoded, name) for name in DECODE_SETTINGS})

    def to_text(self, base: "Configuration") -> str:
        """The text that `parse` reads; it names the settings that differ from `base`."""
        changed = (f"{name.replace('_', '-')}={_format_value(getattr(self, name))}" for name in self.changed_from(base))
        return ":".join([self.policy, *changed])

    @property
    def settings(self) -> tuple[Any, ...]:
        """The decode settings, in the order of DECODE_SETTINGS."""
        return tuple(getattr(self, name) for name in DECODE_SETTINGS)

    @property
    def decode_settings(self) -> DecodeSettings:
        return DecodeSettings(**self.as_dict(DECODE_SETTINGS))

    def as_dict(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (CONFIGURATION_KEYS if names is None else names)}

    def identity(self) -> dict[str, Any]:
        """The values that trial ids are made from."""
        changed = self.changed_from()
        return self.as_dict(["policy", *(name for name in DECODE_SETTINGS if name in IN_EVERY_ID or name in changed)])

    def changed_from(self, reference: "Configuration | None" = None) -> tuple[str, ...]:
        """Decode settings that differ from those of `reference`, or from the defaults."""
        expected = reference or Configuration(policy=self.policy)
        changed = [name for name in DECODE_SETTINGS if getattr(self, name) != getattr(expected, name)]
        return tuple(name for name in changed if name != "threshold" or self.reveal == expected.reveal)

    def uses(self, setting: str) -> bool:
        """Whether a decode setting has an effect, which the threshold does not have under another reveal rule."""
        return setting != "threshold" or self.reveal == THRESHOLD

    def label(self, shown: Collection[str] | None = None) -> str:
        """The displayed name: policy and settings in `shown` (default: those changed), k2_middle threshold 0.9."""
        return " ".join([self.policy, *self._setting_labels(self.changed_from() if shown is None else shown)])

    def settings_label(self, shown: Collection[str] | None = None) -> str:
        """The settings in `shown` (default: all): threshold 0.95, small block 8, block cache on."""
        return ", ".join(self._setting_labels(DECODE_SETTINGS if shown is None else shown))

    def slug(self, shown: Collection[str] | None = None) -> str:
        """For file names and trial names: `label` in short, k2_middle_t0.9."""
        names = self._shown_settings(self.changed_from() if shown is None else shown)
        return "_".join([self.policy, *(self._slug_part(name) for name in names)])

    def _setting_labels(self, shown: Collection[str]) -> list[str]:
        return [
            f"{name.replace('_', ' ')} {_format_value(getattr(self, name))}" for name in self._shown_settings(shown)
        ]

    def _shown_settings(self, shown: Collection[str]) -> list[str]:
        """The settings in `shown`, in the order of DECODE_SETTINGS.

        `threshold` and `reveal` count as one setting: the threshold is shown if the reveal rule uses it, otherwise the
        rule is shown.
        """
        pair = {"threshold", "reveal"}
        included = {*shown, *pair} if pair & set(shown) else shown
        hidden = "reveal" if self.uses("threshold") else "threshold"
        return [name for name in DECODE_SETTINGS if name in included and name != hidden]

    def _slug_part(self, name: str) -> str:
        form, value = _SLUGS[name], getattr(self, name)
        return form.format(value) if isinstance(form, str) else form[bool(value)]


DECODE_SETTINGS = tuple(item.name for item in fields(Configuration) if item.name != "policy")
CONFIGURATION_KEYS = ("policy", *DECODE_SETTINGS)
IN_EVERY_ID = frozenset(item.name for item in fields(Configuration) if item.metadata.get("in_every_id"))
_SLUGS: Mapping[str, str | tuple[str, str]] = {
    item.name: item.metadata["slug"] for item in fields(Configuration) if item.name in DECODE_SETTINGS
}


def grid(settings: Mapping[str, Any], *, decoded: bool = True) -> list[Configuration]:
    """Every policy with every combination of the decode settings listed in `settings` (a sweep's, as a mapping).

    The configurations that are listed individually follow. With decoded=False, for tasks whose options are scored, all
    have the default decode settings.
    """
    axes = [settings.get(name) or [default_of(name)] for name in DECODE_SETTINGS] if decoded else []
    names = DECODE_SETTINGS if decoded else ()
    found = [
        Configuration(policy=policy, **dict(zip(names, values, strict=True)))
        for policy, *values in product(settings["policies"], *axes)
    ]
    listed = listed_configurations(settings)
    found += listed if decoded else [Configuration(policy=one.policy) for one in listed]
    return list(dict.fromkeys(found))  # reveal rules without a threshold would repeat for each one


def first_settings(settings: Mapping[str, Any]) -> Configuration:
    """k1 with the first value that a sweep has for each decode setting."""
    first = {name: settings[name][0] for name in DECODE_SETTINGS if settings.get(name)}
    return Configuration(policy="k1", **first)


def listed_configurations(settings: Mapping[str, Any]) -> list[Configuration]:
    """The configurations that a sweep lists outside its grid; settings that they omit have the sweep's first values."""
    base = first_settings(settings)
    return [Configuration.parse(text, base) for text in settings.get("configurations") or ()]


@dataclass(frozen=True, slots=True)
class BaselineRule:
    """Which k=1 run a configuration is compared with."""

    settings: tuple[Any, ...] | None = None  # the decode settings of that run; None: those of the configuration

    @classmethod
    def by_task(cls, record: Mapping[str, Any]) -> dict[str, "BaselineRule"]:
        """The rule that sweep.json declares for each task. Scored tasks have no decode settings to compare."""
        settings, tasks = record.get("settings", {}), record.get("tasks", {})
        if settings.get("reference") != FIRST:
            return dict.fromkeys(tasks, cls())
        first = cls(first_settings(settings).settings)
        return {task: cls() if facts.get("kind") == LOGLIKELIHOOD else first for task, facts in tasks.items()}

    def settings_for(self, configuration: Configuration) -> tuple[Any, ...]:
        """The decode settings of the k=1 that the configuration is compared with."""
        return configuration.settings if self.settings is None else self.settings

    def is_baseline(self, configuration: Configuration) -> bool:
        """Whether other configurations are compared with this one, which is at k=1."""
        return self.settings in (None, configuration.settings)


OWN_BASELINE = BaselineRule()


def default_of(setting: str) -> Any:
    return next(item.default for item in fields(Configuration) if item.name == setting)


def varying_settings(configurations: Iterable[Configuration]) -> tuple[str, ...]:
    """Decode settings that have more than one value among these configurations."""
    found = list(configurations)
    return tuple(name for name in DECODE_SETTINGS if len({getattr(one, name) for one in found}) > 1)


def _parse_value(text: str, key: str, value: str, default: object) -> Any:
    """Parses a value of the same type as the default; `text` and `key` are for the error message."""
    if isinstance(default, bool):
        if value not in ("on", "off"):
            raise InputError(f"{text}: {key} must be on or off (got {value!r})")
        return value == "on"
    try:
        return type(default)(value)  # type: ignore[call-arg]
    except ValueError:
        raise InputError(f"{text}: {key} must be a number (got {value!r})") from None


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, int | float) else str(value)

"""sweep.json: identity and settings of a sweep, and how a new command continues, extends or contradicts them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import pairwise
from typing import Any

from orchestrator.core.configuration import DECODE_SETTINGS, OWN, default_of
from orchestrator.planning.settings import SweepSettings
from orchestrator.store.schema import SCHEMA_VERSION
from sampler.config import BUNDLED_MODEL
from sampler.errors import InputError
from sampler.reveal import THRESHOLD

SweepRecord = Mapping[str, Any]  # the content of sweep.json
Cut = tuple[int | None, int]  # documents below this index of their subject (None: all) fill this many shards in total
REQUIRED_SETTINGS = ("tasks", "policies", "model", "data", "limit", "repeats")
EXTENDABLE = ("tasks", "policies", "configurations", *DECODE_SETTINGS)  # lists that a later command may add to
FIXED = {  # identity values that a later command must repeat, and their names in messages
    "model": "--model",
    "model_revision": "the model's revision",
    "depth": "the number of layers",
    "dtype": "--dtype",
    "subset_size": "--subset-size",
    "data": "--data",
    "sample": "--sample",
    "seed": "--seed",
    "fewshot": "--fewshot",
    "chat_template": "--chat-template",
    "max_new_tokens": "--max-new-tokens",
    "batch_size": "--batch-size",
    "shard_size": "--shard-size",
    "family": "--family",
    "block_size": "--block-size",
    "thinking": "--thinking",
    "race": "--race",
    "half": "--half",
}

# Not in format version 1: part of a trial's id only if set, so that the trials of existing sweeps keep their ids.
LATER_IDENTITY = ("family", "block_size", "thinking", "race", "half")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepIdentity:
    """What all trials of a sweep have in common: model, prompts and documents.

    Created by preflight; read by the trial ids, sweep.json (which refuses to continue with another one) and the report.
    """

    model: str
    model_revision: str | None
    depth: int
    dtype: str
    subset_size: int
    data: str  # kind of source: hub, folder or bundled
    datasets: Mapping[str, Mapping[str, str]]  # task: dataset: revision
    sample: int | None
    seed: int
    fewshot: int | None
    chat_template: bool
    max_new_tokens: int | None
    batch_size: int
    shard_size: int  # documents per trial, at most; of the first command
    cuts: Mapping[str, Sequence[Cut]] | None = None  # by task; None in older sweeps: shards of exactly shard_size
    family: str | None = None  # --family and --block-size, where config.json was overridden
    block_size: int | None = None
    thinking: bool = False
    race: bool = False  # documents are in a random order that depends on the seed
    half: str | None = None  # of the documents, which depends on the seed

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["datasets"] = {task: dict(revisions) for task, revisions in self.datasets.items()}
        for name in ("race", "half"):
            if not values[name]:
                del values[name]  # an older version can continue the sweep
        if self.cuts is None:
            del values["cuts"]
        else:
            values["cuts"] = {task: [list(cut) for cut in cuts] for task, cuts in self.cuts.items()}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SweepIdentity":
        return cls(**{**values, "cuts": stored_cuts(values)})

    def for_task(self, task: str) -> dict[str, Any]:
        """What can change the rows of every trial of a task."""
        leave_out = {"depth", "datasets", "cuts"} | (set() if self.cuts is None else {"shard_size"})
        common = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in leave_out}
        if self.sample is None and not self.race and self.half is None:
            del common["seed"]
        for name in LATER_IDENTITY:
            if not common[name]:
                del common[name]
        return {**common, "task": task, "datasets": dict(self.datasets[task])}


REQUIRED_IDENTITY = tuple(item.name for item in fields(SweepIdentity) if item.default is MISSING)


def stored_cuts(identity: Mapping[str, Any]) -> dict[str, tuple[Cut, ...]] | None:
    """The cuts in a stored identity; None if an older version made the sweep."""
    if "cuts" not in identity:
        return None
    try:
        by_task = {task: tuple((limit, shards) for limit, shards in cuts) for task, cuts in identity["cuts"].items()}
    except (AttributeError, TypeError, ValueError):
        by_task = {"": ((0, 0),)}  # refused below
    for cuts in by_task.values():
        limits = [limit for limit, _ in cuts[:-1]] + [limit for limit, _ in cuts[-1:] if limit is not None]
        for numbers in (limits, [shards for _, shards in cuts]):
            if not all(type(number) is int and number > before for before, number in pairwise([0, *numbers])):
                raise InputError(
                    "sweep.json is corrupted: 'cuts' must have increasing limits and numbers of shards for each task"
                )
    return by_task


def new_record(
    *, settings: SweepSettings, identity: SweepIdentity, model: Mapping[str, Any], tasks: Mapping[str, Any]
) -> dict[str, Any]:
    """The record of a single command, without the sweep's name, dates and commands."""
    return {
        "schema": SCHEMA_VERSION,
        "identity": identity.as_dict(),
        "settings": settings.as_dict(),
        "margin": settings.margin,
        "speedup": settings.speedup,
        "model": dict(model),
        "tasks": {name: dict(facts) for name, facts in tasks.items()},
    }


def adopt_resolved(settings: SweepSettings, stored: SweepRecord | None) -> SweepSettings:
    """Replaces `auto` and unpinned revisions by what they were when the sweep began."""
    if stored is None:
        return settings
    check_record(stored)
    identity, before = stored["identity"], stored["settings"]
    model, source = settings.model, str(stored["model"]["source"])
    if model == "auto" and not (settings.address is not None and source == BUNDLED_MODEL):
        model = source
    repository, _, pinned = model.partition("@")
    if repository == identity["model"] and (not pinned or model == before["model"]) and _has_commit(stored):
        model = f"{repository}@{identity['model_revision']}"
    return replace(
        settings,
        model=model,
        data=before["data"] if settings.data == "auto" else settings.data,
        dtype=identity["dtype"] if settings.dtype == "auto" else settings.dtype,
        shard_size=identity["shard_size"]
        if settings.shard_size is None and "cuts" not in identity
        else settings.shard_size,
    )


def _has_commit(stored: SweepRecord) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", str(stored["identity"]["model_revision"])) is not None


def check_record(stored: SweepRecord) -> None:
    """Raises InputError if a command of this version cannot continue the sweep of this record."""
    if "imported" in stored:
        raise InputError(
            f"{stored.get('sweep')} contains imported results and cannot be continued; choose another --name"
        )
    missing = [key for key in ("schema", "identity", "settings", "model", "tasks") if stored.get(key) is None]
    missing = missing or [
        *(key for key in REQUIRED_IDENTITY if key not in stored["identity"]),
        *(key for key in REQUIRED_SETTINGS if key not in stored["settings"]),
        *(["source"] if "source" not in stored["model"] else []),
        *("documents" for facts in stored["tasks"].values() if "documents" not in facts),
    ]
    if missing:
        raise InputError(
            f"sweep.json has no {missing[0]!r}: it was edited or does not belong to a sweep; choose another --name"
        )
    unknown = stored["identity"].keys() - SweepIdentity.__dataclass_fields__.keys()
    if unknown:  # its trials depend on something that this version cannot repeat
        raise InputError(
            f"sweep.json has {min(unknown)!r} in its identity, written by a newer version; upgrade to continue this "
            "sweep, or choose another --name"
        )


def unknown_settings(stored: SweepRecord) -> list[str]:
    """Settings of a newer version: kept in sweep.json and otherwise ignored."""
    return sorted(stored["settings"].keys() - {field.name for field in fields(SweepSettings)})


def combine(stored: SweepRecord | None, new: SweepRecord, *, folder: str = "the sweep") -> dict[str, Any]:
    """The stored record extended by a new command's; an InputError if existing trials would change."""
    if stored is None:
        return dict(new)
    check_record(stored)
    changed = list(_changes(stored, new))
    if changed:
        raise InputError(
            f"{folder} was made with {', '.join(changed)}: repeat the old values to continue it, "
            "or start another sweep with --name"
        )
    before, now = stored["settings"], new["settings"]
    kept = {name: before[name] for name in ("model", "data", "dtype", "name", "seed") if name in before}
    settings = {**before, **now, **kept}
    settings |= {name: _union(_values(before, name), _values(now, name)) for name in EXTENDABLE}
    settings["threshold"] = settings["threshold"] or None  # no rule of the sweep uses one
    settings["repeats"] = max(before["repeats"], now["repeats"])
    settings["limit"] = larger_limit(before["limit"], now["limit"])
    by_task = {
        key: {**stored["identity"][key], **new["identity"].get(key, {})}
        for key in ("datasets", "cuts")
        if key in stored["identity"]
    }
    return {
        **stored,
        "identity": {**stored["identity"], **by_task},
        "settings": settings,
        "tasks": {**stored["tasks"], **{name: _combined_task(stored["tasks"], name, new) for name in new["tasks"]}},
    }


def describe_extension(stored: SweepRecord, combined: SweepRecord) -> list[str]:
    """What the combined record adds to the stored one; empty if the command only continues."""
    before, now = stored["settings"], combined["settings"]
    extensions = []
    for name in EXTENDABLE:
        added = [_show(value) for value in _values(now, name) if value not in _values(before, name)]
        extensions += [f"{name.replace('_', ' ')} {', '.join(added)}"] if added else []
    extensions += [f"limit {now['limit'] or 'all'}"] if now["limit"] != before["limit"] else []
    extensions += [f"repeats {now['repeats']}"] if now["repeats"] != before["repeats"] else []
    return extensions


def _changes(stored: SweepRecord, new: SweepRecord) -> Iterator[str]:
    """What a sweep may not change, and the new command does: each with its old and new value."""
    before, now = stored["identity"], new["identity"]
    raced = bool(before.get("race") and now.get("race"))
    halved = bool(before.get("half") and now.get("half"))
    random_order = raced or halved or (before["sample"] is not None and now["sample"] is not None)
    free = {"shard_size"} if "cuts" in before else set()  # it then only concerns documents without a trial
    for key, name in FIXED.items():
        old, current = (identity.get(key, _absent(key)) for identity in (before, now))
        if key not in free and old != current and (key != "seed" or random_order):
            yield f"{name} {_show(old)} (now {_show(current)})"
    for task in before["datasets"].keys() & now["datasets"].keys():
        for dataset in sorted(before["datasets"][task].keys() | now["datasets"][task].keys()):
            old, current = (identity["datasets"][task].get(dataset) for identity in (before, now))
            if old != current:
                yield f"documents of {task} from {dataset} at {_show(old)} (now {_show(current)})"
    compiled = [bool(record["settings"].get("compile")) for record in (stored, new)]  # another speed, and rounding
    if compiled[0] != compiled[1]:
        yield f"--compile {_show(compiled[0])} (now {_show(compiled[1])})"
    references = [record["settings"].get("reference") or OWN for record in (stored, new)]
    if references[0] != references[1]:
        yield f"--reference {references[0]} (now {references[1]})"
    if raced:
        yield from _race_changes(stored["settings"], new["settings"])
    for key in ("margin", "speedup"):  # declared before the first run
        if stored.get(key) != new[key]:
            yield f"--{key} {_show(stored.get(key))} (now {_show(new[key])})"


def _race_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A race declares its documents, configurations and error beforehand; only other tasks may be added to it."""
    for key in ("race_alpha", "limit"):
        if before[key] != now[key]:
            yield f"--{key.replace('_', '-')} {_show(before[key])} (now {_show(now[key])})"
    for key in EXTENDABLE:
        old, current = (", ".join(map(_show, _values(settings, key))) for settings in (before, now))
        if key != "tasks" and not set(_values(now, key)) <= set(_values(before, key)):
            yield f"a race among the {key.replace('_', ' ')} {old} (now {current})"


def _absent(key: str) -> Any:
    """The value of an identity that does not have the key because an earlier version wrote it."""
    default = SweepIdentity.__dataclass_fields__[key].default
    return None if default is MISSING else default


def _combined_task(stored: Mapping[str, Any], name: str, new: SweepRecord) -> dict[str, Any]:
    """The new facts about a task, with the larger of both numbers of documents."""
    now = dict(new["tasks"][name])
    if name in stored:
        now["documents"] = max(now["documents"], stored[name]["documents"])
    return now


def _values(settings: Mapping[str, Any], name: str) -> Sequence[Any]:
    """A list of the settings. A sweep made before a decode setting existed has its default."""
    if name == "threshold" and THRESHOLD not in _values(settings, "reveal"):
        return []  # no rule of the sweep uses one
    return settings.get(name) or ([default_of(name)] if name in DECODE_SETTINGS else [])


def _union(before: Sequence[Any], now: Sequence[Any]) -> list[Any]:
    return [*before, *(value for value in now if value not in before)]


def larger_limit(before: int | None, now: int | None) -> int | None:
    """None is no limit, which is larger than any."""
    return None if before is None or now is None else max(before, now)


def _show(value: object) -> str:
    words: dict[object, str] = {None: "not given", True: "on", False: "off"}
    return words[value] if value is None or isinstance(value, bool) else str(value)

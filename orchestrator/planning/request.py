"""What a sweep's folder already says, against what is asked now: continue, extend or refuse. Dicts only, no files."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from orchestrator.core.configuration import DEFAULTS
from orchestrator.planning.grid import SweepIdentity
from orchestrator.planning.settings import SweepSettings
from orchestrator.store.schema import SCHEMA_VERSION
from sampler.errors import InputError
from sampler.tiny import BUNDLED_MODEL

Request = Mapping[str, Any]  # sweep.json
LISTS = ("tasks", "policies", "threshold", "small_block", "block_cache")  # a sweep may get more of these
FIXED = {  # what each trial was made with, as a person calls it
    "model": "--model",
    "model_revision": "the model's revision",
    "depth": "the model's layers",
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
}


def ask(
    *, settings: SweepSettings, identity: SweepIdentity, model: Mapping[str, Any], tasks: Mapping[str, Any]
) -> dict[str, Any]:
    """A request as sweep.json holds it, but for the sweep's own name, its dates and its commands."""
    return {
        "schema": SCHEMA_VERSION,
        "identity": identity.as_dict(),
        "settings": settings.as_dict(),
        "margin": settings.margin,
        "speedup": settings.speedup,
        "model": dict(model),
        "tasks": {name: dict(facts) for name, facts in tasks.items()},
    }


def adopt(settings: SweepSettings, stored: Request | None) -> SweepSettings:
    """`auto`, or a model whose newest revision is meant, is what it was when the sweep began."""
    if stored is None:
        return settings
    check_form(stored)
    identity, before = stored["identity"], stored["settings"]
    model, source = settings.model, str(stored["model"]["source"])
    if model == "auto" and not (settings.address is not None and source == BUNDLED_MODEL):
        model = source
    repository, _, pinned = model.partition("@")
    if repository == identity["model"] and (not pinned or model == before["model"]) and _is_commit(stored):
        model = f"{repository}@{identity['model_revision']}"
    return replace(
        settings,
        model=model,
        data=before["data"] if settings.data == "auto" else settings.data,
        dtype=identity["dtype"] if settings.dtype == "auto" else settings.dtype,
    )


def _is_commit(stored: Request) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", str(stored["identity"]["model_revision"])) is not None


def check_form(stored: Request) -> None:
    missing = [key for key in ("schema", "identity", "settings", "model", "tasks") if key not in stored]
    if missing:
        raise InputError(f"sweep.json has no {missing[0]!r}: it was edited, or is not a sweep's; give another --name")
    unknown = stored["identity"].keys() - SweepIdentity.__dataclass_fields__.keys()
    if unknown:  # its trials depend on something that this version cannot repeat
        raise InputError(
            f"sweep.json has {min(unknown)!r} in its identity, written by a newer version; upgrade to continue this "
            "sweep, or give another --name"
        )


def unknown_settings(stored: Request) -> list[str]:
    """Settings of a newer version; they are kept in sweep.json and otherwise ignored."""
    return sorted(stored["settings"].keys() - {field.name for field in fields(SweepSettings)})


def combine(stored: Request | None, asked: Request, *, folder: str = "the sweep") -> dict[str, Any]:
    """The request with what is asked now added to it; an InputError if existing trials would be other ones."""
    if stored is None:
        return dict(asked)
    check_form(stored)
    changed = list(_changes(stored, asked))
    if changed:
        raise InputError(
            f"{folder} was made with {', '.join(changed)}: repeat the old values to continue it, "
            "or begin another sweep with --name"
        )
    before, now = stored["settings"], asked["settings"]
    settings = {
        **before,
        **now,
        **{name: before[name] for name in ("model", "data", "dtype", "name", "seed") if name in before},
    }
    settings |= {name: _union(_stored_list(before, name), now[name]) for name in LISTS}
    settings["repeats"] = max(before["repeats"], now["repeats"])
    settings["limit"] = _larger(before["limit"], now["limit"])
    datasets = {**stored["identity"]["datasets"], **asked["identity"]["datasets"]}
    return {
        **stored,
        "identity": {**stored["identity"], "datasets": datasets},
        "settings": settings,
        "tasks": {**stored["tasks"], **{name: _task(stored["tasks"], name, asked) for name in asked["tasks"]}},
    }


def extension(stored: Request, combined: Request) -> list[str]:
    """What a combined request has more than the stored one, in words; nothing if it only continues."""
    before, now = stored["settings"], combined["settings"]
    more = []
    for name in LISTS:
        added = [_shown(value) for value in now[name] if value not in _stored_list(before, name)]
        more += [f"{name.replace('_', ' ')} {', '.join(added)}"] if added else []
    more += [f"limit {now['limit'] or 'all'}"] if now["limit"] != before["limit"] else []
    more += [f"repeats {now['repeats']}"] if now["repeats"] != before["repeats"] else []
    return more


def _changes(stored: Request, asked: Request) -> Iterator[str]:
    before, now = stored["identity"], asked["identity"]
    sampled = before["sample"] is not None and now["sample"] is not None
    for key, name in FIXED.items():
        if before.get(key) != now.get(key) and (key != "seed" or sampled):
            yield f"{name} {_shown(before.get(key))} (now {_shown(now.get(key))})"
    for task in before["datasets"].keys() & now["datasets"].keys():
        for dataset in sorted(before["datasets"][task].keys() | now["datasets"][task].keys()):
            old, new = (request["datasets"][task].get(dataset) for request in (before, now))
            if old != new:
                yield f"documents of {task} from {dataset} at {_shown(old)} (now {_shown(new)})"
    for key in ("margin", "speedup"):  # declared before the run, so not after it
        if stored.get(key) != asked[key]:
            yield f"--{key} {_shown(stored.get(key))} (now {_shown(asked[key])})"


def _task(stored: Mapping[str, Any], name: str, asked: Request) -> dict[str, Any]:
    now = dict(asked["tasks"][name])
    if name in stored:
        now["documents"] = max(now["documents"], stored[name]["documents"])
    return now


def _stored_list(settings: Mapping[str, Any], name: str) -> Sequence[Any]:
    """A sweep made before a decode setting existed has its default."""
    return settings[name] if name in settings else [getattr(DEFAULTS, name)]


def _union(before: Sequence[Any], now: Sequence[Any]) -> list[Any]:
    return [*before, *(value for value in now if value not in before)]


def _larger(before: int | None, now: int | None) -> int | None:
    """No limit is the largest."""
    return None if before is None or now is None else max(before, now)


def _shown(value: object) -> str:
    words: dict[object, str] = {None: "not given", True: "on", False: "off"}
    return words[value] if value is None or isinstance(value, bool) else str(value)

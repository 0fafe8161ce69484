"""Finds a task in lm-eval's own YAML files without loading them all. Knows names and paths, not documents."""

import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml

from sampler.errors import InputError
from tasks.catalog import CATALOG, GENERATE, LOGLIKELIHOOD, Entry

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


def nearest(name: str, known: list[str]) -> InputError:
    """The error for a name nobody knows, with those that look most like it."""
    alike = difflib.get_close_matches(name, sorted(CATALOG), n=3, cutoff=0.5)
    alike += [other for other in difflib.get_close_matches(name, known, n=4) if other not in alike]
    known_here = f"known are {', '.join(CATALOG)} and lm-eval's own tasks"
    hint = f"did you mean {', '.join(alike[:4])}?" if alike else known_here
    return InputError(f"unknown task {name!r}: {hint}")


KINDS = {"generate_until": GENERATE, "multiple_choice": LOGLIKELIHOOD, "loglikelihood": LOGLIKELIHOOD}


def find_entry(name: str) -> Entry:
    """From the catalog, or made up for a task of lm-eval's own."""
    if name in CATALOG:
        return CATALOG[name]
    for entry in CATALOG.values():
        if name in (*entry.subtasks, *entry.also):
            return _subject(entry, name)
    kind, path = index().get(name, (None, None))
    if path is None:
        raise nearest(name, sorted(index()))
    return _other_group(name) if kind == "group" else _other_task(name)


def _subject(entry: Entry, name: str) -> Entry:
    """One subject of a group, with the group's prompts."""
    fields = {field: getattr(entry, field) for field in entry.__dataclass_fields__}
    return Entry(**fields | {"name": name, "subtasks": (name,), "documents": 0})


def _other_task(name: str) -> Entry:
    _, path = index()[name]
    config = configuration(path)
    output = config.get("output_type", "generate_until")
    if "class" in config or output not in KINDS:
        what = "is written in Python" if "class" in config else f"is of the kind {output}"
        raise InputError(f"task {name} {what}; {', '.join(KINDS)} are the kinds that can be run")
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        raise InputError(f"task {name} shows pictures or sounds; only tasks of text can be run")
    return Entry(
        name=name,
        stock=path.parent.relative_to(ROOT).as_posix(),
        subtasks=(name,),
        kind=KINDS[output],
        primary=_first_metric(config),
        metrics=(),
        documents=0,
        dataset=config["dataset_path"] if is_repository(config.get("dataset_path")) else "",
        fewshot=config.get("num_fewshot") or 0,
        runs_code=bool(config.get("unsafe_code")),
    )


def _other_group(name: str) -> Entry:
    """A group outside the catalog must be of one kind and share its metrics."""
    _, path = index()[name]
    members = [leaf for member in configuration(path).get("task", []) for leaf in _leaves(member)]
    entries = [_other_task(member) for member in members]
    if len({(entry.kind, entry.primary, entry.runs_code) for entry in entries}) != 1:
        raise InputError(f"task {name} is a group of unlike tasks; name its tasks instead")
    kept = {field: getattr(entries[0], field) for field in entries[0].__dataclass_fields__}
    return Entry(**kept | {"name": name, "stock": ".", "subtasks": tuple(members), "metrics": (kept["primary"],)})


def _leaves(member: Any) -> Sequence[str]:
    """The tasks behind one entry of a group's list, which may be a task, a group or a task with changes."""
    name = str(member if isinstance(member, str) else member.get("task") or member.get("group"))
    if name not in index():
        raise InputError(f"a group holds {name!r}, which is no task of its own; name its tasks instead")
    kind, path = index()[name]
    if kind == "task":
        return [name]
    return [leaf for inner in configuration(path).get("task", []) for leaf in _leaves(inner)]


def _first_metric(configuration: Mapping[str, Any]) -> str:
    metrics = configuration.get("metric_list") or [{"metric": "acc"}]
    metric, filters = metrics[0]["metric"], configuration.get("filter_list") or []
    return f"{metric},{filters[0]['name']}" if len(filters) > 1 else str(metric)


def is_repository(path: str | None) -> bool:
    return path is not None and path.count("/") == 1

"""Folders of sweeps as what one report is made of: rows of the same identity together, of different models apart.

Of the rows only the columns an analysis reads are loaded; texts are read later, for the few documents shown. Knows no
statistics.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis import COLUMNS, condense
from orchestrator.analysis.trial_facts import COUNTERS
from orchestrator.store import Store
from orchestrator.store.trial_files import ROWS_FILE
from sampler.errors import InputError

A = TypeVar("A")
B = TypeVar("B")
MOST = 4  # each takes memory of its own


class Mapped(Protocol):
    """`map`, wherever it is carried out: results in the order of the items."""

    def __call__(self, function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]: ...


def one_by_one(function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]:
    return map(function, items)


@contextmanager
def side_by_side() -> Iterator[Mapped]:
    """In as many processes as there are cores. Functions and items must be such as can be sent to them."""
    processes = min(MOST, os.cpu_count() or 1)
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_begin)

    def mapped(function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]:
        return pool.map(function, items)

    try:
        yield mapped
    except BrokenProcessPool:
        raise InputError(
            "a process that helped to write the report was ended, perhaps for the memory it took: name fewer folders, "
            "or leave the figures out (--no-figures)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the report's own process ends them
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Killed, it could not end them: they would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


TABLES = 64  # trials read at a time, before their rows are condensed
NEEDED = (*COLUMNS, *COUNTERS, "node")
Part = tuple[pa.Table, Store]
LEFT_OUT = "{}; what cannot be read of it is left out."
SAME = (
    *("model", "model_revision", "depth", "dtype", "subset_size", "data", "sample", "fewshot", "chat_template"),
    *("max_new_tokens", "batch_size"),
)


@dataclass(frozen=True, kw_only=True)
class Material:
    """One or several sweeps whose rows may be compared."""

    stores: tuple[Store, ...]
    request: Mapping[str, Any]  # the first one's sweep.json, with the tasks of all
    rows: pa.Table
    documents: Mapping[str, pa.Table]
    trials: Mapping[str, Mapping[str, Any]]  # trial.json by the trial_id that rows have
    origin: Mapping[str, tuple[int, str]]  # trial_id that rows have → which store, and its name there
    notices: tuple[str, ...]

    @property
    def damage(self) -> list[str]:
        """Of all that was read so far; texts are read last."""
        found = [damage for store in self.stores for damage in store.corrupted.values()]
        newer = [f"{notice}." for store in self.stores for notice in store.notices]
        return [*(LEFT_OUT.format(damage) for damage in found), *newer]


def gather(folders: Sequence[Path], mapped: Mapped = one_by_one) -> list[Material]:
    """One material for each identity, in the order of the folders."""
    if not folders:
        raise InputError("no folder was given; name the folder of a sweep, such as results/my-sweep")
    found: list[Material] = []
    for folder in dict.fromkeys(Path(folder) for folder in folders):
        new = _read(folder, mapped)
        place = next((i for i, old in enumerate(found) if _same_identity(old.request, new.request)), None)
        if place is None:
            found.append(new)
        else:
            found[place] = _merge(found[place], new)
    return found


def open_sweep(folder: Path) -> tuple[Store, dict[str, Any]]:
    """A folder's store and its sweep.json; InputError where it holds no sweep."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; name the folder of a sweep, such as results/my-sweep")
    store = Store(folder)
    request = store.read_request()
    if request is None:
        raise InputError(f"{folder} holds no sweep: it has no sweep.json")
    missing = [key for key in ("identity", "settings", "tasks") if not isinstance(request.get(key), Mapping)]
    if missing:
        raise InputError(f"{folder / 'sweep.json'} has no {missing[0]!r}: it is damaged, or no sweep's")
    return store, request


def _read(folder: Path, mapped: Mapped) -> Material:
    store, request = open_sweep(folder)
    parts = begin_reading(store, mapped)
    trials = store.trials()  # meanwhile, where others read
    rows = join(store, parts)
    check_files(store, trials)
    if not rows.num_rows and store.corrupted:
        raise InputError(f"{next(iter(store.corrupted.values()))}, and {folder} has no other rows; continue the sweep")
    if not rows.num_rows:
        raise InputError(f"{folder} has no rows yet; let the sweep finish some documents first")
    tasks = rows["task"].unique().to_pylist()
    return Material(
        stores=(store,),
        request=request,
        rows=rows,
        documents={task: store.documents(task) for task in tasks},
        trials=trials,
        origin={trial_id: (0, trial_id) for trial_id in store.trial_ids()},
        notices=(),
    )


def check_files(store: Store, trials: Mapping[str, Mapping[str, Any]]) -> None:
    """A trial that has ended has its rows, or a file that is damaged and told of; a file that is gone is refused."""
    for trial_id, facts in trials.items():
        path = store.trial_folder(trial_id) / ROWS_FILE
        ended = facts.get("status") == "finished" and facts.get("rows")
        if ended and not path.exists() and not store.completed_documents(trial_id):
            raise InputError(f"{path} is missing: its trial ended with {ended} rows; restore it, or continue the sweep")


def begin_reading(store: Store, mapped: Mapped = one_by_one) -> Iterator[Part]:
    """What `join` makes one table of. Of large files the pages are checked that are read, small ones as a whole."""
    ids = store.trial_ids()
    return mapped(_read_part, [(store.folder, ids[at : at + TABLES]) for at in range(0, max(1, len(ids)), TABLES)])


def join(store: Store, parts: Iterator[Part]) -> pa.Table:
    """All rows as an analysis needs them; what was damaged is noted in the store."""
    tables = []
    for table, reader in parts:
        tables.append(table)
        store.add_findings(reader)
    return pa.concat_tables(tables).unify_dictionaries()


def _read_part(where: tuple[Path, Sequence[str]]) -> Part:
    folder, trial_ids = where
    store = Store(folder)
    return condense(store.rows(trial_ids, NEEDED, verify=False).combine_chunks()), store


def _same_identity(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """The same model, asked in the same way; documents of a task that both have are of the same revision."""
    a, b = one["identity"], other["identity"]
    if any(a.get(key) != b.get(key) for key in SAME) or (a.get("sample") and a.get("seed") != b.get("seed")):
        return False
    sets_a, sets_b = a.get("datasets", {}), b.get("datasets", {})
    return all(sets_a[task] == sets_b[task] for task in sets_a.keys() & sets_b.keys())


def _merge(old: Material, new: Material) -> Material:
    """Rows of both. A row that is a copy counts once; a trial that was run twice becomes another repeat."""
    rows, renamed = _renamed(old, new)
    place = len(old.stores)
    return Material(
        stores=(*old.stores, *new.stores),
        request=_joined_request(old.request, new.request),
        rows=pa.concat_tables([old.rows, rows]).unify_dictionaries(),
        documents={**new.documents, **old.documents, **_longer(old.documents, new.documents)},
        trials={**{renamed.get(key, key): facts for key, facts in new.trials.items()}, **old.trials},
        origin={**{renamed.get(key, key): (place, key) for key in new.origin}, **old.origin},
        notices=(*old.notices, *new.notices, *_differences(old.request, new.request)),
    )


def _renamed(old: Material, new: Material) -> tuple[pa.Table, dict[str, str]]:
    """New rows that old ones do not hold, reruns under another trial and repeat."""
    keys = ["trial_id", "doc_id", "started_at"]
    known = set(zip(*(old.rows[key].to_pylist() for key in keys), strict=True))
    taken = {(trial, doc) for trial, doc, _ in known}
    keep, rerun = [], set()
    for key in zip(*(new.rows[key].to_pylist() for key in keys), strict=True):
        keep.append(key not in known)
        if key not in known and key[:2] in taken:
            rerun.add(key[0])
    rows = new.rows.filter(pa.array(keep, pa.bool_()))
    if not rerun:
        return rows, {}
    names = {trial: f"{trial}x{len(old.stores)}" for trial in rerun}
    offset = pc.max(old.rows["repeat"]).as_py() + 1
    ids = rows["trial_id"].to_pylist()
    repeats = [r + offset * (trial in names) for r, trial in zip(rows["repeat"].to_pylist(), ids, strict=True)]
    for name, values in (("trial_id", [names.get(trial, trial) for trial in ids]), ("repeat", repeats)):
        column = rows.schema.field(name)
        rows = rows.set_column(rows.schema.get_field_index(name), column, pa.array(values, column.type))
    return rows, names


def _longer(old: Mapping[str, pa.Table], new: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    return {task: max(old[task], new[task], key=len) for task in old.keys() & new.keys()}


def _joined_request(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(old["settings"])
    for name in ("tasks", "policies", "threshold", "small_block", "block_cache"):
        before, now = settings.get(name) or [], new["settings"].get(name) or []
        settings[name] = [*before, *(value for value in now if value not in before)]
    tasks = {**new["tasks"], **old["tasks"]}
    for task in old["tasks"].keys() & new["tasks"].keys():
        tasks[task] = max(old["tasks"][task], new["tasks"][task], key=lambda entry: entry.get("documents", 0))
    commands = [*old.get("commands", ()), *new.get("commands", ())]
    return {**old, "settings": settings, "tasks": tasks, "commands": commands}


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in ("margin", "speedup"):
        if old.get(key) != new.get(key):
            yield f"The folders declare different values for {key}: {old.get(key)} counts, {new.get(key)} does not."

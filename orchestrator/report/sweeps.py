"""Reads sweep directories for a report; sweeps of the same model and settings are merged.

Only the columns that the analysis needs are loaded. Texts are read later, for the few documents that are shown.

Large sweeps are read, and figures drawn, in several processes: both hold the GIL most of the time, so threads would not
help. Starting processes takes about a second: a small report is written faster without them.
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
from orchestrator.analysis.columns import COUNTERS
from orchestrator.core.configuration import DECODE_SETTINGS, OWN
from orchestrator.store import Store
from orchestrator.store.reader import TrialGroup
from orchestrator.store.trial_files import ROWS_FILE, Corruption
from sampler.errors import InputError

NEEDED_COLUMNS = (*COLUMNS, *COUNTERS, "node")
IDENTITY_KEYS = (  # sweeps that differ in one of these are never compared
    *("model", "model_revision", "depth", "dtype", "subset_size", "data", "sample", "fewshot", "chat_template"),
    *("max_new_tokens", "batch_size"),
)
EXAMPLE = "pass a sweep directory, such as results/my-sweep"
Part = tuple[pa.Table, Store]
A = TypeVar("A")
B = TypeVar("B")
MAX_PROCESSES = 4  # each one needs memory


class Map(Protocol):
    """The signature of `map`; results come in the order of the items."""

    def __call__(self, function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]: ...


def sequential_map(function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]:
    return map(function, items)


@contextmanager
def process_pool_map() -> Iterator[Map]:
    """A `map` that runs in one process per core. Functions and items must be picklable."""
    processes = min(MAX_PROCESSES, os.cpu_count() or 1)
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_start_child)

    def pool_map(function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]:
        return pool.map(function, items)

    try:
        yield pool_map
    except BrokenProcessPool:
        raise InputError(
            "a report process was killed, probably because memory ran out: "
            "pass fewer sweep directories, or leave out the figures (--no-figures)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent shuts the pool down
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Without this, children of a killed parent would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@dataclass(frozen=True, kw_only=True)
class SweepData:
    """One sweep, or several whose rows can be compared. `read_sweeps` creates it, `Section` is built from it."""

    stores: tuple[Store, ...]
    request: Mapping[str, Any]  # sweep.json of the first sweep, with the tasks of all sweeps
    rows: pa.Table
    documents: Mapping[str, pa.Table]
    attempts: pa.Table  # the content of trial.json files (store.schema.ATTEMPTS), with the trial ids used in `rows`
    origin: Mapping[str, tuple[int, str]]  # trial_id in `rows` → store index, trial_id there; default (0, same id)
    notices: tuple[str, ...]

    @property
    def reading_notices(self) -> list[str]:
        """Sentences about what could not be read so far, or was ignored."""
        corrupted = [corruption_notice(one) for store in self.stores for one in store.corrupted.values()]
        return [*corrupted, *(f"{notice}." for store in self.stores for notice in store.notices)]


def corruption_notice(corruption: Corruption) -> str:
    return f"{corruption}; the unreadable part is left out."


def open_sweep(folder: Path, record: Mapping[str, Any] | None = None) -> tuple[Store, Mapping[str, Any]]:
    """The store and the content of sweep.json, which is read unless it is given."""
    if not folder.is_dir():
        raise InputError(f"{folder} {'is not a directory' if folder.exists() else 'does not exist'}; {EXAMPLE}")
    store = Store(folder)
    request = store.read_sweep_record() if record is None else record
    if request is None:
        raise InputError(f"{folder} is not a sweep directory: it has no sweep.json; {EXAMPLE}")
    missing = [key for key in ("identity", "settings", "tasks") if not isinstance(request.get(key), Mapping)]
    if missing:
        raise InputError(f"{folder / 'sweep.json'} has no {missing[0]!r} object: it is corrupted or not from a sweep")
    return store, request


def read_sweeps(
    folders: Sequence[Path],
    parallel: Map = sequential_map,
    records: Mapping[Path, Mapping[str, Any]] | None = None,
) -> list[SweepData]:
    """One SweepData for each group of comparable sweeps, in the order of the directories.

    `records` has the content of sweep.json for directories where the caller has read it already.
    """
    if not folders:
        raise InputError(f"no directory was given; {EXAMPLE}")
    groups: list[SweepData] = []
    for folder in dict.fromkeys(Path(folder) for folder in folders):
        new = _read_sweep(folder, parallel, (records or {}).get(folder))
        index = next((i for i, old in enumerate(groups) if _comparable(old.request, new.request)), None)
        if index is None:
            groups.append(new)
        else:
            groups[index] = _merge(groups[index], new)
    return groups


def no_rows(store: Store) -> InputError:
    """The error if there is nothing to report or export."""
    if store.corrupted:
        first = next(iter(store.corrupted.values()))
        return InputError(f"{first}, and {store.folder} has no other rows; continue the sweep")
    return InputError(f"{store.folder} has no rows yet; wait until the sweep has finished some documents")


def _read_sweep(folder: Path, parallel: Map, record: Mapping[str, Any] | None) -> SweepData:
    store, request = open_sweep(folder, record)
    parts = start_reading(store, parallel)
    attempts = store.attempts()  # while other processes read rows
    check_files(store, attempts)
    rows = join_parts(store, parts)
    if not rows.num_rows:
        raise no_rows(store)
    return SweepData(
        stores=(store,),
        request=request,
        rows=rows,
        documents={task: store.documents(task) for task in rows["task"].unique().to_pylist()},
        attempts=attempts,
        origin={},
        notices=(),
    )


def check_files(store: Store, attempts: pa.Table) -> None:
    """Raises InputError if the rows of a finished trial are missing (the store reports corrupted files)."""
    finished = attempts.filter((pc.field("status") == "finished") & (pc.field("rows") > 0))
    rows = dict(zip(finished["trial_id"].to_pylist(), finished["rows"].to_pylist(), strict=True))
    for trial_id in rows.keys() - store.compacted_trial_ids():
        if not store.has_rows_file(trial_id) and not store.completed_documents(trial_id):
            path = store.trial_folder(trial_id) / ROWS_FILE
            raise InputError(
                f"{path} is missing, but its trial finished with {rows[trial_id]} rows; restore it, or rerun"
            )


def start_reading(store: Store, parallel: Map = sequential_map) -> Iterator[Part]:
    """Start reading all rows; pass the result to `join_parts`."""
    groups = store.groups() or [TrialGroup(trial_ids=())]
    return parallel(_read_part, [(store.folder, group) for group in groups])


def join_parts(store: Store, parts: Iterator[Part]) -> pa.Table:
    """All rows in one table; corrupted files are recorded in the store."""
    tables = []
    for table, reader in parts:
        tables.append(table)
        store.add_findings(reader)
    return pa.concat_tables(tables).unify_dictionaries()


def _read_part(job: tuple[Path, TrialGroup]) -> Part:
    folder, group = job
    store = Store(folder)
    return condense(store.group_rows(group, NEEDED_COLUMNS, verify=False).combine_chunks()), store


def _comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two sweeps have the same model and settings, and the same revision of the documents of shared tasks."""
    a, b = one["identity"], other["identity"]
    if any(a.get(key) != b.get(key) for key in IDENTITY_KEYS) or (a.get("sample") and a.get("seed") != b.get("seed")):
        return False
    if (one["settings"].get("reference") or OWN) != (other["settings"].get("reference") or OWN):
        return False
    datasets_a, datasets_b = a.get("datasets", {}), b.get("datasets", {})
    return all(datasets_a[task] == datasets_b[task] for task in datasets_a.keys() & datasets_b.keys())


def _merge(old: SweepData, new: SweepData) -> SweepData:
    """The rows of both. Copies of a row count once; the second run of a trial becomes another repeat."""
    rows, renamed = _new_rows(old, new)
    shared = old.documents.keys() & new.documents.keys()
    attempts, known = _with_names(new.attempts, renamed), old.attempts["trial_id"].combine_chunks()
    origin = {renamed.get(one, one): (len(old.stores), one) for one in new.rows["trial_id"].unique().to_pylist()}
    for trial_id in old.rows["trial_id"].unique().to_pylist():
        origin.pop(trial_id, None)
    return SweepData(
        stores=(*old.stores, *new.stores),
        request=_merge_requests(old.request, new.request),
        rows=pa.concat_tables([old.rows, rows]).unify_dictionaries(),
        documents={
            **new.documents,
            **old.documents,
            **{task: max(old.documents[task], new.documents[task], key=len) for task in shared},
        },
        attempts=pa.concat_tables(
            [old.attempts, attempts.filter(pc.invert(pc.is_in(attempts["trial_id"], known)))]
        ).unify_dictionaries(),
        origin={**origin, **old.origin},
        notices=(*old.notices, *new.notices, *_different_criteria(old.request, new.request)),
    )


def _new_rows(old: SweepData, new: SweepData) -> tuple[pa.Table, dict[str, str]]:
    """Rows of `new` that `old` does not have, and the new ids of trials that both have run."""
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
    renamed = {trial: f"{trial}x{len(old.stores)}" for trial in rerun}
    offset = pc.max(old.rows["repeat"]).as_py() + 1
    again = [trial in renamed for trial in rows["trial_id"].to_pylist()]
    repeats = pc.add(rows["repeat"], pc.multiply(pa.array(again).cast(pa.int32()), offset)).cast(pa.int32())
    rows = rows.set_column(rows.schema.get_field_index("repeat"), rows.schema.field("repeat"), repeats)
    return _with_names(rows, renamed), renamed


def _with_names(table: pa.Table, renamed: Mapping[str, str]) -> pa.Table:
    ids = [renamed.get(trial, trial) for trial in table["trial_id"].to_pylist()]
    column = table.schema.field("trial_id")
    return table.set_column(table.schema.get_field_index("trial_id"), column, pa.array(ids, column.type))


def _merge_requests(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(old["settings"])
    for name in ("tasks", "policies", "configurations", *DECODE_SETTINGS):
        before, now = settings.get(name) or [], new["settings"].get(name) or []
        settings[name] = [*before, *(value for value in now if value not in before)]
    tasks = {**new["tasks"], **old["tasks"]}
    for task in old["tasks"].keys() & new["tasks"].keys():
        tasks[task] = max(old["tasks"][task], new["tasks"][task], key=lambda entry: entry.get("documents", 0))
    commands = [*old.get("commands", ()), *new.get("commands", ())]
    return {**old, "settings": settings, "tasks": tasks, "commands": commands}


def _different_criteria(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in ("margin", "speedup"):
        if old.get(key) != new.get(key):
            yield (
                f"The sweeps declare different values of {key}: {old.get(key)} is used, {new.get(key)} is ignored, "
                "because it comes from a later directory."
            )

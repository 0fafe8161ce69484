"""Reads one trial's folder: trial.json, rows.parquet, rows-<n>.arrows. Changes nothing; knows no locks.

Files may come and go meanwhile, since a writer compacts. It puts rows.parquet in place before it removes the streams it
was made of, so a reader that lists first and opens after sees each row, if it begins again whenever a file is gone or
rows.parquet is another one than before (then a stream may be another one, too: numbers come again).
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.store.errors import Damaged, StoreError
from orchestrator.store.schema import ROWS, SCHEMA_VERSION
from orchestrator.store.sealed_json import read_object
from orchestrator.store.sealed_parquet import part_of, read_copy, read_table, verify_table
from orchestrator.store.segments import Segment, read_segment

FACTS = "trial.json"
TABLE = "rows.parquet"
COPIED = part_of(ROWS, set(ROWS.names) - {"text"})  # what rows.parquet also holds in a quicker form
SUMMARY = "tally"  # in trial.json, of exactly the rows it was finished with; gone when that changes
SEGMENT = re.compile(r"rows-([0-9]+)\.arrows")
TRIES = 100
SPEC = ("trial_id", "task", "policy", "threshold", "small_block", "block_cache", "repeat", "shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A file, or its end, that is not believed."""

    path: Path
    problem: str
    torn: bool = False  # only cut short, as by a crash or by a write that is going on

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Rows of one trial, each document once, and what was not believed."""

    rows: pa.Table
    damage: list[Damage] = field(default_factory=list)


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"rows-{number}.arrows"


def segment_numbers(folder: Path) -> list[int]:
    """Ascending, which is the order in which they were written."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = (SEGMENT.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def is_compact(folder: Path) -> bool:
    """Whether rows.parquet is all there is."""
    return (folder / TABLE).exists() and not segment_numbers(folder)


def read_rows(folder: Path, columns: Sequence[str] | None = None, *, verify: bool = True) -> Reading:
    """Each document's first row. Without `verify` a large rows.parquet is protected by its page checksums only."""
    for _ in range(TRIES):
        before = _identity(folder / TABLE)
        try:
            reading = _read_once(folder, columns, verify)
        except FileNotFoundError:
            if not folder.is_dir():
                break
            continue
        if _identity(folder / TABLE) == before:
            return reading
    else:
        raise StoreError(f"{folder} changes too quickly to be read")
    return Reading(rows=_project(ROWS.empty_table(), columns))


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read_once(folder: Path, columns: Sequence[str] | None, verify: bool) -> Reading:
    numbers = segment_numbers(folder)
    needed = None if columns is None else {*columns, "doc_id"}
    tables, damage = [], []
    try:
        tables.append(_read_parquet(folder, needed if numbers else columns, verify))
    except Damaged as problem:
        damage.append(Damage(path=folder / TABLE, problem=str(problem)))
    except FileNotFoundError:
        if segment_numbers(folder) != numbers:
            raise  # compacted in between
    for number in numbers:
        segment = _read_segment(segment_path(folder, number))
        tables.append(_project(segment.rows, needed))
        if segment.problem is not None:
            damage.append(Damage(path=segment_path(folder, number), problem=segment.problem, torn=segment.torn))
    if not numbers and tables:
        return Reading(rows=tables[0], damage=damage)
    rows = pa.concat_tables(tables) if tables else _project(ROWS.empty_table(), needed)
    return Reading(rows=_project(first_of_each(rows), columns), damage=damage)


def _read_parquet(folder: Path, columns: Sequence[str] | set[str] | None, verify: bool) -> pa.Table:
    if columns is not None and (quick := _read_copy(folder, columns)) is not None:
        return quick
    if verify:
        try:
            verify_table(folder / TABLE)
        except FileNotFoundError:
            raise
        except OSError as problem:
            raise Damaged(f"cannot be read: {problem.strerror}") from problem
    return read_table(folder / TABLE, ROWS, columns)


def _read_copy(folder: Path, columns: Collection[str]) -> pa.Table | None:
    try:
        return read_copy(folder / TABLE, COPIED, columns)
    except FileNotFoundError:
        raise
    except OSError:
        return None  # told of by whoever reads it after this


def _read_segment(path: Path) -> Segment:
    try:
        return read_segment(path)
    except FileNotFoundError:
        raise
    except OSError as problem:
        return Segment(batches=[], size=0, problem=f"cannot be read: {problem.strerror}")


def _project(rows: pa.Table, columns: Sequence[str] | set[str] | None) -> pa.Table:
    return rows if columns is None else rows.select([name for name in ROWS.names if name in columns])


def first_of_each(rows: pa.Table) -> pa.Table:
    """The first row of each document, in the order they came."""
    keep = first_times(rows["doc_id"].to_pylist())
    return rows if all(keep) else rows.filter(pa.array(keep))


def first_times(doc_ids: Iterable[str], done: Set[str] = frozenset()) -> list[bool]:
    """Whether each is neither done nor among those before it."""
    seen: set[str] = set()
    keep = []
    for doc_id in doc_ids:
        keep.append(doc_id not in done and doc_id not in seen)
        seen.add(doc_id)
    return keep


def read_facts(folder: Path) -> dict[str, Any]:
    """trial.json; Damaged or FileNotFoundError where there is none."""
    return read_object(folder / FACTS)


def fresh_facts(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The trial.json of a trial without rows."""
    trial = {"schema": SCHEMA_VERSION, "trial": dict(spec), "status": "running"}
    return {**trial, "rows": None, "sha256": None, SUMMARY: None, "attempts": []}


def lost_attempts(numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Attempts of which a damaged trial.json knew more."""
    return [{"attempt": number, "reason": "trial.json was damaged: what it said is lost"} for number in numbers]


def spec_of(rows: pa.Table | pa.RecordBatch) -> dict[str, Any]:
    """What a row says of its trial."""
    return dict(rows.select(list(SPEC)).slice(0, 1).to_pylist()[0])


def rebuild_facts(rows: pa.Table, *, finished: bool) -> dict[str, Any] | None:
    """A trial.json from what rows say of their trial, if there are any."""
    if not len(rows):
        return None
    facts = fresh_facts(spec_of(rows))
    facts["attempts"] = lost_attempts(range(pc.max(rows["attempt"]).as_py() + 1))
    return {**facts, "status": "finished", "rows": len(rows)} if finished else facts

"""The one writer of a sweep's folder: rows are on disk before they are acknowledged. Knows no Ray and no grids.

Holds the folder's lock from birth to close. append may be called by several threads at once; rows of one trial are
written one batch after the other.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from orchestrator import folder_checks
from orchestrator.atomic import DISK, Disk, make_folders, write_file
from orchestrator.lock import STALE_SECONDS, FolderLock
from orchestrator.recovery import recover_documents, recover_trial, remove_leftovers
from orchestrator.schema import DOCUMENTS, ROWS, SCHEMA_VERSION
from orchestrator.sealed_json import write_object
from orchestrator.sealed_parquet import encode_table, hash_file
from orchestrator.segments import SegmentWriter
from orchestrator.store import Store
from orchestrator.store_errors import StoreError
from orchestrator.trial_folder import FACTS, TABLE, Damage, read_facts, read_rows, segment_numbers, segment_path
from sampler.errors import InputError

TRIAL_LEVEL = ("settings", "layers", "tally")  # facts about the trial; all others are about the attempt


@dataclass(kw_only=True, slots=True)
class OpenTrial:
    """What the writer knows of a trial while rows come: held in memory, made again from disk."""

    facts: dict[str, Any]
    done: set[str]
    segment: SegmentWriter | None = None
    guard: threading.RLock = field(default_factory=threading.RLock)

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()
            self.segment = None


class StoreWriter(Store):
    """Writes one folder, which is made if it is not there. `damage` says what opening it found."""

    def __init__(self, folder: Path, *, disk: Disk = DISK, stale: float = STALE_SECONDS) -> None:
        super().__init__(folder)
        self._disk = disk
        self._open: dict[str, OpenTrial] = {}
        self._guard = threading.Lock()
        folder_checks.read_request(self.folder)
        try:
            make_folders(disk, self.folder)
            self._lock = FolderLock.acquire(self.folder, stale=stale)
        except OSError as problem:
            raise InputError(f"{self.folder} cannot be written to: {problem.strerror}") from problem
        try:
            folder_checks.read_request(self.folder)  # again: now nobody else changes it
            with self._explained("put the folder in order"):
                self._recover()
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for trial in self._open.values():
            trial.close()
        self._open.clear()
        self._lock.release()

    def write_request(self, request: Mapping[str, Any]) -> None:
        with self._explained(f"write {folder_checks.REQUEST}"):
            value = {"schema": SCHEMA_VERSION, **request}
            assert value["schema"] == SCHEMA_VERSION, value["schema"]
            write_object(self._disk, self.folder / folder_checks.REQUEST, value)

    def write_documents(self, task: str, documents: pa.Table) -> None:
        assert documents.schema.equals(DOCUMENTS), documents.schema
        with self._explained(f"write the documents of {task}"):
            make_folders(self._disk, self.folder / "documents")
            write_file(self._disk, self.documents_path(task), encode_table(documents))

    def begin(self, trial: Mapping[str, Any], facts: Mapping[str, Any]) -> int:
        """The number of a new attempt at a trial, which may be new, cut short, failed or to be extended."""
        trial_id = trial["trial_id"]
        with self._explained(f"begin trial {trial_id}"):
            folder = self.trial_folder(trial_id)
            make_folders(self._disk, folder)
            opened = self._opened(trial_id, trial)
            with opened.guard:
                opened.close()
                attempt = len(opened.facts["attempts"])
                opened.facts["attempts"].append({"attempt": attempt, "started_at": _now()})
                self._record(opened, "running", facts)
                return attempt

    def append(self, trial_id: str, attempt: int, batch: pa.RecordBatch) -> int:
        """How many of these rows were new. All are on disk on return; after a StoreError none counts as written."""
        assert batch.schema.equals(ROWS), batch.schema
        assert all(value == trial_id for value in batch["trial_id"].to_pylist()), trial_id
        opened = self._opened(trial_id)
        assert attempt < len(opened.facts["attempts"]), attempt
        with opened.guard:
            fresh = _fresh_rows(batch, opened.done)
            if len(fresh) == 0:
                return 0
            with self._explained(f"write rows of trial {trial_id}"):
                self._append(opened, trial_id, fresh)
            opened.done.update(fresh["doc_id"].to_pylist())
            return len(fresh)

    def _append(self, opened: OpenTrial, trial_id: str, rows: pa.RecordBatch) -> None:
        if opened.facts["status"] == "finished":  # a late row; the trial has to be finished again
            self._record(opened, "running", {})
        if opened.segment is None:
            folder = self.trial_folder(trial_id)
            number = max(segment_numbers(folder), default=-1) + 1
            opened.segment = SegmentWriter(self._disk, segment_path(folder, number))
        try:
            opened.segment.append(rows)
        except OSError:
            opened.close()  # later rows go to a new file
            raise

    def finish(self, trial_id: str, facts: Mapping[str, Any], wanted: Sequence[str]) -> None:
        """All rows into one Parquet file, wanted documents first and in that order; each of them must have a row."""
        opened = self._opened(trial_id)
        with opened.guard, self._explained(f"finish trial {trial_id}"):
            opened.close()
            missing = [doc_id for doc_id in wanted if doc_id not in opened.done]
            if missing:
                raise StoreError(f"trial {trial_id} has no row for {len(missing)} documents, {missing[0]} the first")
            folder = self.trial_folder(trial_id)
            numbers = segment_numbers(folder)
            if numbers or not (folder / TABLE).exists():
                self._merge(opened, folder, wanted)
                numbers = segment_numbers(folder)
            opened.facts |= {"sha256": hash_file(folder / TABLE), "rows": len(opened.done)}
            self._record(opened, "finished", {"ended_at": _now(), **facts})
            self._remove_segments(folder, numbers)
        with self._guard:
            self._open.pop(trial_id, None)

    def _merge(self, opened: OpenTrial, folder: Path, wanted: Sequence[str]) -> None:
        reading = read_rows(folder)
        if reading.damage:
            self._note(recover_trial(self._disk, folder, self.folder / "set-aside" / folder.name))
        rows = reading.rows
        lost = len(opened.done) - len(rows)
        if lost:
            with self._guard:
                self._open.pop(folder.name)
            raise StoreError(f"{lost} rows of trial {folder.name} were damaged on disk and have to be made again")
        order = {doc_id: position for position, doc_id in enumerate(wanted)}
        keys = [(order.get(doc_id, len(order)), doc_id) for doc_id in rows["doc_id"].to_pylist()]
        rows = rows.take(pa.array(sorted(range(len(keys)), key=keys.__getitem__), pa.int64()))
        write_file(self._disk, folder / TABLE, encode_table(rows.combine_chunks()))

    def _remove_segments(self, folder: Path, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._disk.remove(segment_path(folder, number))
        if numbers:
            self._disk.sync_folder(folder)

    def fail(self, trial_id: str, reason: str) -> None:
        """Keeps the rows there are; a later begin tries again."""
        opened = self._opened(trial_id)
        with opened.guard, self._explained(f"mark trial {trial_id} as failed"):
            opened.close()
            self._record(opened, "failed", {"ended_at": _now(), "reason": reason})

    def set_aside(self, trial_id: str) -> Path:
        """Moves all of a trial out of the way, so that it begins anew; where it lies now."""
        with self._guard, self._explained(f"set aside trial {trial_id}"):
            opened = self._open.pop(trial_id, None)
            if opened is not None:
                opened.close()
            aside = self.folder / "set-aside"
            make_folders(self._disk, aside)
            taken = {path.name for path in aside.iterdir()}
            target = aside / next(name for n in count(1) if (name := f"{trial_id}-{n}") not in taken)
            self._disk.rename(self.trial_folder(trial_id), target)
            self._disk.sync_folder(aside)
            self._disk.sync_folder(self.trial_folder(trial_id).parent)
            return target

    def done(self, trial_id: str) -> set[str]:
        opened = self._open.get(trial_id)
        return super().done(trial_id) if opened is None else set(opened.done)

    def check(self) -> list[str]:
        """Reads every byte, and sets aside what is damaged."""
        with self._guard, self._explained("check the folder"):
            for opened in self._open.values():
                opened.close()
            self._open.clear()
            return [str(damage) for damage in self._recover()]

    def _recover(self) -> list[Damage]:
        aside = self.folder / "set-aside"
        remove_leftovers(self.folder)
        found = []
        for task in self._tasks():
            found += recover_documents(self._disk, self.documents_path(task), aside / "documents")
        for trial_id in self.trial_ids():
            found += recover_trial(self._disk, self.trial_folder(trial_id), aside / trial_id)
        self._note(found)
        return found

    def _opened(self, trial_id: str, trial: Mapping[str, Any] | None = None) -> OpenTrial:
        with self._guard:
            if trial_id not in self._open:
                self._open[trial_id] = self._load(trial_id, trial)
            return self._open[trial_id]

    def _load(self, trial_id: str, trial: Mapping[str, Any] | None) -> OpenTrial:
        folder = self.trial_folder(trial_id)
        try:
            facts = read_facts(folder)
        except FileNotFoundError:
            assert trial is not None, f"trial {trial_id} was never begun"
            facts = {"schema": SCHEMA_VERSION, "trial": dict(trial), "rows": None, "sha256": None, "attempts": []}
        return OpenTrial(facts=facts, done=super().done(trial_id))

    def _record(self, opened: OpenTrial, status: str, facts: Mapping[str, Any]) -> None:
        """trial.json with a new status and more facts."""
        opened.facts["status"] = status
        opened.facts |= {key: facts[key] for key in TRIAL_LEVEL if key in facts}
        opened.facts["attempts"][-1] |= {key: value for key, value in facts.items() if key not in TRIAL_LEVEL}
        write_object(self._disk, self.trial_folder(opened.facts["trial"]["trial_id"]) / FACTS, opened.facts)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Refuses where the lock is lost; says in a sentence what the disk refused."""
        if self._lock.lost():
            raise StoreError(f"cannot {what}: another process has taken over {self.folder}")
        try:
            yield
        except OSError as problem:
            raise StoreError(f"cannot {what} in {self.folder}: {problem.strerror or problem}") from problem


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _fresh_rows(batch: pa.RecordBatch, done: set[str]) -> pa.RecordBatch:
    """The first row of each document that is not done, as a batch of exactly the rows' schema."""
    seen: set[str] = set()
    keep = []
    for doc_id in batch["doc_id"].to_pylist():
        keep.append(doc_id not in done and doc_id not in seen)
        seen.add(doc_id)
    rows = batch if all(keep) else batch.filter(pa.array(keep))
    columns = zip(ROWS, rows.columns, strict=True)
    assert all(column.null_count == 0 or column_field.nullable for column_field, column in columns), "a null too many"
    return pa.RecordBatch.from_arrays(rows.columns, schema=ROWS)

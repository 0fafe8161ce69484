"""Writes the files of one trial, and repairs them after a crash or corruption. The caller holds the folder's lock.

Each step leaves files from which every acknowledged row can be read exactly once, so a crash at any point, also during
a repair, loses nothing. Corrupted files are never deleted: their good rows are written again, then they are moved to
the quarantine folder.
"""

import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.store.files import (
    CorruptedFile,
    Disk,
    RowsLost,
    StoreError,
    encode_table,
    hash_file,
    make_folders,
    move_file,
    remove_temporary_files,
    verify_table,
    write_file,
    write_json,
)
from orchestrator.store.schema import ROWS, SCHEMA_VERSION
from orchestrator.store.trial_files import (
    ROWS_FILE,
    TOTALS_KEY,
    TRIAL_FILE,
    Corruption,
    SegmentWriter,
    encode_segment,
    first_occurrences,
    lost_attempts,
    new_trial_record,
    read_merged,
    read_rows,
    read_segment,
    read_trial_record,
    rebuild_trial_record,
    segment_numbers,
    segment_path,
)
from sampler.errors import counted

REQUIRED_COLUMNS = tuple(column.name for column in ROWS if not column.nullable)
TRIAL_LEVEL_KEYS = ("settings", "layers", TOTALS_KEY)  # of trial.json; other facts belong to an attempt


class TrialFolder:
    """The files of one trial, and their repair."""

    def __init__(self, disk: Disk, folder: Path, quarantine: Path) -> None:
        self._disk, self._folder, self._quarantine = disk, folder, quarantine

    def repair(self) -> list[Corruption]:
        """Verifies every byte; returns what was corrupted."""
        remove_temporary_files(self._folder)
        corrupted: list[Corruption] = []
        record, problem = self._stored_record()
        if problem is not None:
            corrupted.append(self._to_quarantine(TRIAL_FILE, problem))
        sha256, documents = None, frozenset[str]()
        try:
            sha256, documents = self._merged_documents(None if record is None else record.get("sha256"))
        except CorruptedFile as error:
            corrupted.append(self._to_quarantine(ROWS_FILE, str(error)))
        except FileNotFoundError:
            if record is not None and record.get("sha256") is not None:
                corrupted.append(Corruption(path=self._folder / ROWS_FILE, problem="is missing"))
        for number in segment_numbers(self._folder):
            corrupted += self._repair_segment(number)
        self._reconcile(record, sha256, documents)
        return corrupted

    def _to_quarantine(self, name: str, problem: str, *, torn: bool = False) -> Corruption:
        move_file(self._disk, self._folder / name, self._quarantine)
        return Corruption(path=self._folder / name, problem=problem, torn=torn)

    def _stored_record(self) -> tuple[dict[str, Any] | None, str | None]:
        """The content of trial.json, if it exists and is intact; else what is wrong with it."""
        try:
            return read_trial_record(self._folder), None
        except FileNotFoundError:
            return None, None
        except CorruptedFile as error:
            return None, str(error)

    def _merged_documents(self, expected: str | None) -> tuple[str, frozenset[str]]:
        """The sha256 of an intact rows.parquet, and the documents in it. Raises CorruptedFile or FileNotFoundError."""
        sha256 = hash_file(self._folder / ROWS_FILE)
        if sha256 != expected:  # after a crash between writing rows.parquet and trial.json
            verify_table(self._folder / ROWS_FILE)
        rows, _ = read_merged(self._folder, verify=False)  # all columns: checks their values
        return sha256, frozenset(rows["doc_id"].to_pylist())

    def _repair_segment(self, number: int) -> list[Corruption]:
        """Writes the good rows of a corrupted segment to a new one: a truncated stream cannot be continued."""
        path = segment_path(self._folder, number)
        segment = read_segment(path)
        if segment.problem is None:
            return []
        if segment.batches:
            free = segment_path(self._folder, segment_numbers(self._folder)[-1] + 1)
            write_file(self._disk, free, encode_segment(segment.rows))
        return [self._to_quarantine(path.name, segment.problem, torn=segment.torn)]

    def _reconcile(self, record: dict[str, Any] | None, sha256: str | None, merged: frozenset[str]) -> None:
        """Makes trial.json agree with the other files; `merged` are the documents in rows.parquet."""
        complete = sha256 is not None and self._remove_merged_segments(merged)
        new = record or rebuild_trial_record(read_rows(self._folder).rows, finished=complete)
        if new is None:
            return
        if new["status"] == "finished" and not complete:
            new = {**new, "status": "running", TOTALS_KEY: None}
        if new["sha256"] != sha256:
            new = {**new, "sha256": sha256, "rows": None if sha256 is None else len(merged)}
        if new != record:
            write_json(self._disk, self._folder / TRIAL_FILE, new)

    def _remove_merged_segments(self, merged: frozenset[str]) -> bool:
        """Removes segments whose documents are all in rows.parquet; returns whether none is left."""
        numbers = segment_numbers(self._folder)
        for number in numbers:
            path = segment_path(self._folder, number)
            if merged.issuperset(read_segment(path).rows["doc_id"].to_pylist()):
                self._disk.remove(path)
        if numbers:
            self._disk.sync_folder(self._folder)
        return not segment_numbers(self._folder)


class TrialWriter(TrialFolder):
    """One trial while it is written. Callers of all methods hold `guard`.

    The content of trial.json and the ids of completed documents are kept in memory; they are read from disk on opening.
    """

    def __init__(self, disk: Disk, folder: Path, quarantine: Path, trial: Mapping[str, Any] | None) -> None:
        super().__init__(disk, folder, quarantine)
        self.guard = threading.RLock()
        self.corrupted: list[Corruption] = []  # quarantined since this trial was opened
        self._segment: SegmentWriter | None = None
        self._record, self._completed = self._load(trial)

    def _load(self, trial: Mapping[str, Any] | None) -> tuple[dict[str, Any], set[str]]:
        """Reads trial.json and the completed documents; repairs what was corrupted since the folder was opened."""
        found = read_rows(self._folder, ["doc_id"])
        record, problem = self._stored_record()
        if problem is not None or found.corrupted:
            self.corrupted += self.repair()
            found = read_rows(self._folder, ["doc_id"])
            record, _ = self._stored_record()
        if record is None and trial is None:
            raise StoreError(f"trial {self._folder.name} has no {TRIAL_FILE}; it must begin first")
        return record or new_trial_record(trial or {}), set(found.rows["doc_id"].to_pylist())

    @property
    def trial(self) -> Mapping[str, Any]:
        """As trial.json describes it."""
        trial: Mapping[str, Any] = self._record["trial"]
        return trial

    def completed_documents(self) -> set[str]:
        return set(self._completed)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def begin(self, trial: Mapping[str, Any], facts: Mapping[str, Any]) -> int:
        self.close()  # each attempt has its own segment
        make_folders(self._disk, self._folder)
        attempt = len(self._record["attempts"])
        attempts = [*self._record["attempts"], {"attempt": attempt, "started_at": _now()}]
        self._update_record({"status": "running", "trial": dict(trial), "attempts": attempts}, facts)
        return attempt

    def append(self, attempt: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Writes the rows of documents that have none yet, and returns those rows."""
        for name in REQUIRED_COLUMNS:
            assert batch[name].null_count == 0, f"{name} must not be null"
        keep = first_occurrences(batch["doc_id"].to_pylist(), self._completed)
        rows = batch if all(keep) else batch.filter(pa.array(keep))
        if len(rows):
            self._reopen(attempt)
            self._write(rows)
            self._completed.update(rows["doc_id"].to_pylist())
        return rows

    def _reopen(self, attempt: int) -> None:
        """A late row makes a finished trial unfinished; attempts missing from a rebuilt trial.json are added."""
        known = self._record["attempts"]
        if self._record["status"] == "finished" or attempt >= len(known):
            attempts = [*known, *lost_attempts(range(len(known), attempt + 1))]
            make_folders(self._disk, self._folder)
            self._update_record({"status": "running", "attempts": attempts}, {})

    def _write(self, rows: pa.RecordBatch) -> None:
        if self._segment is None:
            number = max(segment_numbers(self._folder), default=-1) + 1
            self._segment = SegmentWriter(self._disk, segment_path(self._folder, number))
        try:
            self._segment.append(rows)
        except OSError:
            self.close()  # later rows go to a new segment
            raise

    def finish(self, facts: Mapping[str, Any], wanted: Sequence[str]) -> None:
        """Writes rows.parquet, then trial.json, then removes the segments: in this order a crash loses nothing."""
        self.close()
        missing = [doc_id for doc_id in wanted if doc_id not in self._completed]
        if missing:
            number = counted(len(missing), "document")
            raise StoreError(f"trial {self._folder.name} has no row for {number}, the first is {missing[0]}")
        path = self._folder / ROWS_FILE
        if segment_numbers(self._folder) or not path.exists():
            self._merge(wanted)
        state = {"status": "finished", "sha256": hash_file(path), "rows": len(self._completed)}
        self._update_record(state, {"ended_at": _now(), **facts})
        self._remove_segments()

    def _merge(self, wanted: Sequence[str]) -> None:
        """Writes rows.parquet: wanted documents first and in that order, then others by id."""
        rows = self._read_all_rows()
        order = {doc_id: position for position, doc_id in enumerate(wanted)}
        keys = [(order.get(doc_id, len(order)), doc_id) for doc_id in rows["doc_id"].to_pylist()]
        rows = rows.take(pa.array(sorted(range(len(keys)), key=keys.__getitem__), pa.int64()))
        write_file(self._disk, self._folder / ROWS_FILE, encode_table(rows.combine_chunks()))

    def _read_all_rows(self) -> pa.Table:
        """All rows on disk. Raises RowsLost if a document that was completed has no row any more."""
        before = self._completed
        self._record, self._completed = self._load(self._record["trial"])
        lost = before - self._completed
        if lost:
            files = "; ".join(map(str, self.corrupted))
            raise RowsLost(f"{counted(len(lost), 'row')} of {self._folder.name} must be computed again: {files}")
        found = read_rows(self._folder)
        if found.corrupted:  # although `_load` found them intact or repaired them
            raise StoreError(f"{found.corrupted[0]}; the disk does not read reliably")
        return found.rows

    def _remove_segments(self) -> None:
        numbers = segment_numbers(self._folder)
        for number in numbers:
            self._disk.remove(segment_path(self._folder, number))
        if numbers:
            self._disk.sync_folder(self._folder)

    def fail(self, reason: str, facts: Mapping[str, Any]) -> None:
        self.close()
        self._update_record({"status": "failed"}, {"ended_at": _now(), "reason": reason, **facts})

    def recover(self) -> None:
        """Verifies every byte again and quarantines corrupted files."""
        self.close()
        self.corrupted += self.repair()
        self._record, self._completed = self._load(self._record["trial"])

    def _update_record(self, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Replaces trial.json; the copy in memory changes only after the file has."""
        at_trial = {key: facts[key] for key in TRIAL_LEVEL_KEYS if key in facts}
        at_attempt = {key: value for key, value in facts.items() if key not in TRIAL_LEVEL_KEYS}
        record = {**self._record, "schema": SCHEMA_VERSION, **state, TOTALS_KEY: None, **at_trial}
        *others, last = record["attempts"]
        record["attempts"] = [*others, {**last, **at_attempt}]
        write_json(self._disk, self._folder / TRIAL_FILE, record)
        self._record = record


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")

"""The only writer of a sweep folder: rows are on disk before they are acknowledged.

Holds the folder's lock from construction to `close`. Methods can be called from several threads: different trials are
then written and synced in parallel.
"""

import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from orchestrator.core.untrusted import path_below
from orchestrator.store.compaction import (
    COMPACTED_FOLDER,
    FULL_ROWS,
    MIN_ROWS,
    compacted_names,
    compaction_groups,
    encode_compacted,
    read_trials_rows,
)
from orchestrator.store.files import (
    DISK,
    CorruptedFile,
    Disk,
    StoreError,
    encode_table,
    file_version,
    hash_file,
    make_folders,
    move_file,
    remove_temporary_files,
    write_file,
    write_json,
)
from orchestrator.store.lock import LOCK_FOLDER, FolderLock
from orchestrator.store.reader import QUARANTINE_FOLDER, SWEEP_COPY_FILE, SWEEP_FILE, Store
from orchestrator.store.schema import COMPACTED_SCHEMA_VERSION, DOCUMENTS, ROWS, SCHEMA_VERSION
from orchestrator.store.trial_files import (
    ROWS_FILE,
    TRIAL_FILE,
    Corruption,
    encode_segment,
    read_rows,
    read_trial_record,
    segment_numbers,
    segment_path,
    trial_of,
)
from orchestrator.store.trial_writer import TrialFolder, TrialWriter
from sampler.errors import InputError


class StoreWriter(Store):
    """Writes one folder, which is created if missing. Opening it quarantines corrupted files, listed in `corrupted`."""

    def __init__(
        self,
        folder: Path,
        *,
        disk: Disk = DISK,
        full_rows: int = FULL_ROWS,
    ) -> None:
        super().__init__(folder)
        self._full_rows = full_rows  # of a compacted file
        self._disk = disk
        self._quarantine = self.folder / QUARANTINE_FOLDER
        self._open: dict[str, TrialWriter] = {}
        self._guard = threading.Lock()
        self._compacting = threading.Lock()
        self._finished_rows: Counter[str] = Counter()  # by task: finished by this writer and not compacted
        self.sweep_record = self.read_sweep_record()  # refuses an unusable folder before anything is written into it
        self._require_no_links()
        read_version = file_version(self.folder / SWEEP_FILE)
        self._lock = self._acquire()
        try:
            if file_version(self.folder / SWEEP_FILE) != read_version:  # from now on nobody else changes it
                self.sweep_record = self.read_sweep_record()
            with self._reporting_errors("recover the directory"):
                self._recover()
        except BaseException:
            self._lock.release()
            raise

    def _require_no_links(self) -> None:
        """Raises InputError if the folder has symbolic links, which could make this process write outside of it."""
        for name in (LOCK_FOLDER, "documents", "trials", COMPACTED_FOLDER, QUARANTINE_FOLDER):
            path_below(self.folder, f"{name}/file")
        for name in ("trials", COMPACTED_FOLDER, QUARANTINE_FOLDER):
            try:
                links = [entry.name for entry in os.scandir(self.folder / name) if entry.is_symlink()]
            except FileNotFoundError:
                continue
            except OSError as error:
                raise InputError(f"{self.folder / name} cannot be read: {error.strerror}") from error
            if links:
                raise InputError(f"{self.folder / name / links[0]} is a symbolic link; a sweep has none: remove it")

    def _acquire(self) -> FolderLock:
        try:
            make_folders(self._disk, self.folder)
            return FolderLock.acquire(self.folder)
        except OSError as error:
            raise InputError(f"{self.folder} cannot be written to: {error.strerror or error}") from error

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases the folder; everything acknowledged is already on disk."""
        with self._guard:
            trials = list(self._open.values())
            self._open.clear()
        for trial in trials:
            with trial.guard:
                trial.close()
        self._lock.release()

    def write_sweep_record(self, record: Mapping[str, Any]) -> None:
        """Writes sweep.json twice, since no other file holds the same information."""
        compacted = compacted_names(self._compacted.folder)
        with self._reporting_errors(f"write {SWEEP_FILE}"):
            self._write_sweep_record(record, COMPACTED_SCHEMA_VERSION if compacted else SCHEMA_VERSION)

    def _write_sweep_record(self, record: Mapping[str, Any], version: int) -> None:
        value = {"schema": version, **record} | {"schema": version}  # first, also for a record of another version
        for name in (SWEEP_FILE, SWEEP_COPY_FILE):
            write_json(self._disk, self.folder / name, value)

    def write_documents(self, task: str, documents: pa.Table) -> None:
        assert documents.schema.equals(DOCUMENTS), documents.schema
        with self._reporting_errors(f"write the documents of {task}"):
            make_folders(self._disk, self.folder / "documents")
            write_file(self._disk, self.documents_path(task), encode_table(documents.cast(DOCUMENTS)))

    def begin(self, trial: Mapping[str, Any], facts: Mapping[str, Any]) -> int:
        """Starts an attempt at a new, interrupted, failed or extended trial, and returns its number.

        `settings`, `layers` and `tally` in `facts` are stored for the trial, everything else for this attempt.
        """
        trial_id = trial["trial_id"]
        with self._reporting_errors(f"begin trial {trial_id}"), self._using(trial_id, trial) as writer:
            return writer.begin(trial, facts)

    def append(self, trial_id: str, attempt: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the rows that were new; all rows are on disk on return. After a StoreError none of them counts."""
        assert batch.schema.equals(ROWS), batch.schema
        assert set(batch["trial_id"].to_pylist()) <= {trial_id}, trial_id
        if len(batch) == 0:
            return batch
        with self._reporting_errors(f"write rows of trial {trial_id}"):
            trial = None if trial_id in self._open else trial_of(batch)
            with self._using(trial_id, trial) as writer:
                return writer.append(attempt, batch)

    def finish(self, trial_id: str, facts: Mapping[str, Any], wanted: Sequence[str]) -> None:
        """Merges all rows into one Parquet file, wanted documents first; each of them must have a row.

        Raises RowsLost if rows can no longer be read; their documents are then not completed, and the trial still runs.
        """
        with self._reporting_errors(f"finish trial {trial_id}"), self._using(trial_id) as writer:
            try:
                writer.finish(facts, wanted)
            finally:
                self.corrupted.update((one.path, one) for one in writer.corrupted)
            with self._guard:
                self._open.pop(trial_id, None)
                self._finished_rows[str(writer.trial["task"])] += len(writer.completed_documents())

    def fail(self, trial_id: str, reason: str, facts: Mapping[str, Any] | None = None) -> None:
        """Marks a trial as failed and keeps its rows; a later `begin` tries again. `facts` are about this attempt."""
        with self._reporting_errors(f"mark trial {trial_id} as failed"), self._using(trial_id) as writer:
            writer.fail(reason, facts or {})

    def quarantine(self, trial_ids: Collection[str]) -> None:
        """Moves whole trials to quarantine, so that they start from the beginning."""
        with self._compacting, self._reporting_errors("quarantine trials"):
            self._quarantine_compacted(trial_ids)
            for trial_id in trial_ids:
                self._quarantine_folder(trial_id)

    def _quarantine_folder(self, trial_id: str) -> None:
        with self._guard:
            writer = self._open.pop(trial_id, None)
            if writer is not None:
                writer.close()
            if not self.trial_folder(trial_id).is_dir():
                return
            make_folders(self._disk, self._quarantine)
            taken = {path.name for path in self._quarantine.iterdir()}
            target = self._quarantine / next(name for n in count(1) if (name := f"{trial_id}-{n}") not in taken)
            self._disk.rename(self.trial_folder(trial_id), target)
            self._disk.sync_folder(self._quarantine)
            self._disk.sync_folder(self.trial_folder(trial_id).parent)

    def _quarantine_compacted(self, trial_ids: Collection[str]) -> None:
        """Quarantines each compacted file that has one of the trials, after writing its other trials to a new file."""
        wanted, known = set(trial_ids), self._compacted_now()
        for file in known.files:
            own = file.trials["trial_id"].to_pylist()
            if wanted.isdisjoint(own):
                continue
            keep = {one: record for one, record in file.records() if one not in wanted and known.file_of[one] is file}
            if keep:
                task = str(next(iter(keep.values()))["trial"]["task"])
                self._write_compacted(task, _intact_rows(file.path, list(keep)), keep)
            move_file(self._disk, file.path, self._quarantine / file.path.parent.name)
        self._compacted_now()

    @property
    def compaction_is_due(self) -> bool:
        """Whether this writer has finished enough rows of a task to fill a compacted file."""
        return max(self._finished_rows.values(), default=0) >= self._full_rows

    def compact(self, *, minimum: int | None = None, full: int | None = None) -> int:
        """Moves the rows of finished trials into files of at least `minimum` rows; returns the number of files.

        Other threads may write meanwhile. A crash at any point loses and doubles nothing.
        """
        full = self._full_rows if full is None else full
        minimum = min(MIN_ROWS, full) if minimum is None else minimum
        with self._compacting, self._reporting_errors("compact the rows of finished trials"):
            with self._guard:
                self._finished_rows.clear()
                skipped = set(self._open)
            finished = {
                trial_id: record
                for trial_id, record in self.iter_trials()
                if trial_id not in skipped and record["status"] == "finished" and record["rows"]
            }
            groups = compaction_groups(finished, minimum=minimum, full=full)
            for task, trial_ids in groups:
                self._compact(task, {trial_id: finished[trial_id] for trial_id in trial_ids})
            return len(groups)

    def _compact(self, task: str, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Writes the file first: from then on the folders are only copies."""
        found = {trial_id: read_rows(self.trial_folder(trial_id)) for trial_id in records}
        intact = {
            trial_id: record
            for trial_id, record in records.items()
            if not found[trial_id].corrupted and len(found[trial_id].rows) == record["rows"]
        }
        if not intact:
            return
        if not self._compacted.files:
            record = self.read_sweep_record()
            if record is not None and record["schema"] < COMPACTED_SCHEMA_VERSION:
                self._write_sweep_record(record, COMPACTED_SCHEMA_VERSION)
        tables = [found[trial_id].rows for trial_id in intact]  # some may have columns of a newer version
        self._write_compacted(task, pa.concat_tables(tables, promote_options="default"), intact)
        for trial_id in intact:
            if self._lock.is_lost():
                raise StoreError(f"another process has taken over {self.folder}")
            with self._guard:
                if trial_id not in self._open:
                    self._remove_copy(trial_id, intact[trial_id])
        self._disk.sync_folder(self.folder / "trials")

    def _write_compacted(self, task: str, rows: pa.Table, records: Mapping[str, Mapping[str, Any]]) -> None:
        make_folders(self._disk, self._compacted.folder)
        path = self._compacted.folder / self._compacted.next_name(task)
        write_file(self._disk, path, encode_compacted(rows.combine_chunks(), records))
        self._compacted_now()

    def _remove_copy(self, trial_id: str, record: Mapping[str, Any]) -> bool:
        """Removes the folder of a compacted trial if the compacted file has all its content; returns whether it did.

        `record` is the compacted trial.json. It has a hash of the rows, which differs if the trial was continued.
        """
        folder = self.trial_folder(trial_id)
        try:
            if segment_numbers(folder) or read_trial_record(folder) != record:
                return False
        except FileNotFoundError:  # a removal or restoration was interrupted
            path = self._compacted.file_of[trial_id].path
            here, there = read_rows(folder, ["doc_id"]), read_trials_rows(path, [trial_id], ["doc_id"], verify=False)
            if not set(here.rows["doc_id"].to_pylist()) <= set(there.rows["doc_id"].to_pylist()):
                return False
        except CorruptedFile:
            return False
        for name in (TRIAL_FILE, ROWS_FILE):
            if (folder / name).exists():
                self._disk.remove(folder / name)
        remove_temporary_files(folder)
        if any(folder.iterdir()):
            return False
        self._disk.remove_folder(folder)
        return True

    def _restore(self, trial_id: str) -> None:
        """Gives a compacted trial its folder back, with at least the rows of the compacted file."""
        folder, file = self.trial_folder(trial_id), self._compacted.file_of[trial_id]
        rows = _intact_rows(file.path, [trial_id])
        make_folders(self._disk, folder)
        if not (folder / TRIAL_FILE).exists():
            write_file(self._disk, folder / ROWS_FILE, encode_table(rows.combine_chunks()))
            record = {**file.record(trial_id), "sha256": hash_file(folder / ROWS_FILE)}
            write_json(self._disk, folder / TRIAL_FILE, record)
            return
        done = set(read_rows(folder, ["doc_id"]).rows["doc_id"].to_pylist())
        missing = rows.filter(pa.array([doc_id not in done for doc_id in rows["doc_id"].to_pylist()]))
        if len(missing):
            number = max(segment_numbers(folder), default=-1) + 1
            write_file(self._disk, segment_path(folder, number), encode_segment(missing.combine_chunks()))

    def completed_documents(self, trial_id: str) -> set[str]:
        if trial_id not in self._open:
            return super().completed_documents(trial_id)
        with self._using(trial_id) as writer:
            return writer.completed_documents()

    def check(self) -> list[str]:
        """Reads every byte and quarantines corrupted files."""
        with self._reporting_errors("check the directory"):
            return [str(corruption) for corruption in self._recover()]

    def _recover(self) -> list[Corruption]:
        remove_temporary_files(self.folder)
        found: list[Corruption] = []
        for task in self._tasks():
            found += self._quarantine_files(self._check_documents(task), "documents")
        if self._compacted.folder.is_dir():
            remove_temporary_files(self._compacted.folder)
        for name in compacted_names(self._compacted.folder):
            found += self._quarantine_files(self._check_compacted(self._compacted.folder / name), COMPACTED_FOLDER)
        self._compacted_now()
        for trial_id in self.trial_folders():
            found += self._recover_trial(trial_id)
        self.corrupted.update((one.path, one) for one in found)
        return found

    def _quarantine_files(self, found: list[Corruption], part: str) -> list[Corruption]:
        for one in found:
            move_file(self._disk, one.path, self._quarantine / part)
        return found

    def _recover_trial(self, trial_id: str) -> list[Corruption]:
        if trial_id in self._open:
            with self._using(trial_id) as writer:
                writer.recover()
                return list(writer.corrupted)
        compacted = self._compacted.file_of.get(trial_id)
        if compacted is not None and self._remove_copy(trial_id, compacted.record(trial_id)):
            return []
        found = TrialFolder(self._disk, self.trial_folder(trial_id), self._quarantine / trial_id).repair()
        if compacted is not None and self.trial_folder(trial_id).is_dir():
            self._restore(trial_id)
        return found

    @contextmanager
    def _using(self, trial_id: str, trial: Mapping[str, Any] | None = None) -> Iterator[TrialWriter]:
        """Exclusive use of a trial's writer; opens a new one if another thread has finished the trial meanwhile."""
        while True:
            with self._guard:
                if trial_id not in self._open:
                    folder, quarantine = self.trial_folder(trial_id), self._quarantine / trial_id
                    if trial_id in self._compacted.file_of:
                        self._restore(trial_id)
                    self._open[trial_id] = TrialWriter(self._disk, folder, quarantine, trial)
                writer = self._open[trial_id]
            with writer.guard:
                if self._open.get(trial_id) is writer:
                    yield writer
                    return

    @contextmanager
    def _reporting_errors(self, action: str) -> Iterator[None]:
        """Refuses to write after the lock is lost; turns an OSError into a StoreError."""
        try:
            if self._lock.is_lost():
                raise StoreError(f"cannot {action}: another process has taken over {self.folder}")
            yield
        except OSError as error:
            raise StoreError(f"cannot {action} in {self.folder}: {error.strerror or error}") from error


def _intact_rows(path: Path, trial_ids: Collection[str]) -> pa.Table:
    """All columns of some trials of a compacted file, which opening the folder has checked."""
    found = read_trials_rows(path, trial_ids)
    if found.corrupted:
        raise StoreError(f"{found.corrupted[0]}; repeat the command to repair the directory")
    return found.rows

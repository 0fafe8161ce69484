"""The only writer of a sweep folder: rows are on disk before they are acknowledged.

Holds the folder's lock from construction to `close`. Methods can be called from several threads: different trials are
then written and synced in parallel.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from orchestrator.core.untrusted import path_below
from orchestrator.store.files import (
    DISK,
    Disk,
    StoreError,
    encode_table,
    make_folders,
    remove_temporary_files,
    write_file,
    write_json,
)
from orchestrator.store.lock import LOCK_FOLDER, STALE_SECONDS, FolderLock
from orchestrator.store.reader import QUARANTINE_FOLDER, SWEEP_COPY_FILE, SWEEP_FILE, Store
from orchestrator.store.schema import DOCUMENTS, ROWS, SCHEMA_VERSION
from orchestrator.store.trial_files import Corruption, trial_of
from orchestrator.store.trial_writer import TrialWriter, recover_documents, recover_trial
from sampler.errors import InputError


class StoreWriter(Store):
    """Writes one folder, which is created if missing. Opening it quarantines corrupted files, listed in `corrupted`."""

    def __init__(self, folder: Path, *, disk: Disk = DISK, stale_seconds: float = STALE_SECONDS) -> None:
        super().__init__(folder)
        self._disk = disk
        self._quarantine = self.folder / QUARANTINE_FOLDER
        self._open: dict[str, TrialWriter] = {}
        self._guard = threading.Lock()
        self.sweep_record = self.read_sweep_record()  # refuses an unusable folder before anything is written into it
        self._require_no_links()
        read_version = self._file_version()
        self._lock = self._acquire(stale_seconds)
        try:
            if self._file_version() != read_version:  # from now on nobody else changes it
                self.sweep_record = self.read_sweep_record()
            with self._reporting_errors("recover the folder"):
                self._recover()
        except BaseException:
            self._lock.release()
            raise

    def _require_no_links(self) -> None:
        """A symbolic link in a folder from somebody else could make this process write elsewhere."""
        for name in (LOCK_FOLDER, "documents", "trials", QUARANTINE_FOLDER):
            path_below(self.folder, f"{name}/file")
        for name in ("trials", QUARANTINE_FOLDER):
            try:
                links = [entry.name for entry in os.scandir(self.folder / name) if entry.is_symlink()]
            except FileNotFoundError:
                continue
            except OSError as error:
                raise InputError(f"{self.folder / name} cannot be read: {error.strerror}") from error
            if links:
                raise InputError(f"{self.folder / name / links[0]} is a symbolic link; a sweep has none: remove it")

    def _file_version(self) -> tuple[int, int, int] | None:
        """Differs after sweep.json was replaced; None if it is missing."""
        try:
            found = (self.folder / SWEEP_FILE).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _acquire(self, stale_seconds: float) -> FolderLock:
        try:
            make_folders(self._disk, self.folder)
            return FolderLock.acquire(self.folder, stale_seconds=stale_seconds)
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
        value = {"schema": SCHEMA_VERSION, **record} | {"schema": SCHEMA_VERSION}  # also for an older record
        with self._reporting_errors(f"write {SWEEP_FILE}"):
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

    def fail(self, trial_id: str, reason: str, facts: Mapping[str, Any] | None = None) -> None:
        """Marks a trial as failed and keeps its rows; a later `begin` tries again. `facts` are about this attempt."""
        with self._reporting_errors(f"mark trial {trial_id} as failed"), self._using(trial_id) as writer:
            writer.fail(reason, facts or {})

    def quarantine(self, trial_id: str) -> Path:
        """Moves a whole trial to quarantine, so that it starts from the beginning; returns its new path."""
        with self._guard, self._reporting_errors(f"quarantine trial {trial_id}"):
            writer = self._open.pop(trial_id, None)
            if writer is not None:
                writer.close()
            make_folders(self._disk, self._quarantine)
            taken = {path.name for path in self._quarantine.iterdir()}
            target = self._quarantine / next(name for n in count(1) if (name := f"{trial_id}-{n}") not in taken)
            self._disk.rename(self.trial_folder(trial_id), target)
            self._disk.sync_folder(self._quarantine)
            self._disk.sync_folder(self.trial_folder(trial_id).parent)
            return target

    def completed_documents(self, trial_id: str) -> set[str]:
        if trial_id not in self._open:
            return super().completed_documents(trial_id)
        with self._using(trial_id) as writer:
            return writer.completed_documents()

    def check(self) -> list[str]:
        """Reads every byte and quarantines corrupted files."""
        with self._reporting_errors("check the folder"):
            return [str(corruption) for corruption in self._recover()]

    def _recover(self) -> list[Corruption]:
        remove_temporary_files(self.folder)
        found = []
        for task in self._tasks():
            found += recover_documents(self._disk, self.documents_path(task), self._quarantine / "documents")
        for trial_id in self.trial_ids():
            found += self._recover_trial(trial_id)
        self.corrupted.update((one.path, one) for one in found)
        return found

    def _recover_trial(self, trial_id: str) -> list[Corruption]:
        if trial_id not in self._open:
            return recover_trial(self._disk, self.trial_folder(trial_id), self._quarantine / trial_id)
        with self._using(trial_id) as writer:
            writer.recover()
            return list(writer.corrupted)

    @contextmanager
    def _using(self, trial_id: str, trial: Mapping[str, Any] | None = None) -> Iterator[TrialWriter]:
        """Exclusive use of a trial's writer; opens a new one if another thread has finished the trial meanwhile."""
        while True:
            with self._guard:
                if trial_id not in self._open:
                    folder, quarantine = self.trial_folder(trial_id), self._quarantine / trial_id
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

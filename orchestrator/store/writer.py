"""The one writer of a sweep's folder: rows are on disk before they are acknowledged. Knows no Ray and no grids.

Holds the folder's lock from birth to close. Methods may be called by several threads at once: different trials are then
written, and flushed to disk, side by side.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from orchestrator.store import folder_checks
from orchestrator.store.atomic import DISK, Disk, make_folders, write_file
from orchestrator.store.errors import StoreError
from orchestrator.store.lock import STALE_SECONDS, FolderLock
from orchestrator.store.open_trial import OpenTrial
from orchestrator.store.reader import Store
from orchestrator.store.recovery import recover_documents, recover_trial, remove_leftovers
from orchestrator.store.schema import DOCUMENTS, ROWS, SCHEMA_VERSION
from orchestrator.store.sealed_json import write_object
from orchestrator.store.sealed_parquet import encode_table
from orchestrator.store.trial_folder import Damage, spec_of
from sampler.errors import InputError


class StoreWriter(Store):
    """Writes one folder, which is made if it is not there. `damage` says what opening it found and set aside."""

    def __init__(self, folder: Path, *, disk: Disk = DISK, stale: float = STALE_SECONDS) -> None:
        super().__init__(folder)
        self._disk = disk
        self._aside = self.folder / "set-aside"
        self._open: dict[str, OpenTrial] = {}
        self._guard = threading.Lock()
        folder_checks.read_request(self.folder)
        self._lock = self._acquire(stale)
        try:
            folder_checks.read_request(self.folder)  # again: now nobody else changes it
            with self._explained("put the folder in order"):
                self._recover()
        except BaseException:
            self._lock.release()
            raise

    def _acquire(self, stale: float) -> FolderLock:
        try:
            make_folders(self._disk, self.folder)
            return FolderLock.acquire(self.folder, stale=stale)
        except OSError as problem:
            raise InputError(f"{self.folder} cannot be written to: {problem.strerror or problem}") from problem

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Everything acknowledged is on disk already; this only lets go."""
        with self._guard:
            trials = list(self._open.values())
            self._open.clear()
        for trial in trials:
            with trial.guard:
                trial.close()
        self._lock.release()

    def write_request(self, request: Mapping[str, Any]) -> None:
        """sweep.json, and a copy of it, since no other file says the same."""
        value = {"schema": SCHEMA_VERSION, **request}
        assert value["schema"] == SCHEMA_VERSION, value["schema"]
        with self._explained(f"write {folder_checks.REQUEST}"):
            for name in (folder_checks.REQUEST, folder_checks.COPY):
                write_object(self._disk, self.folder / name, value)

    def write_documents(self, task: str, documents: pa.Table) -> None:
        assert documents.schema.equals(DOCUMENTS), documents.schema
        with self._explained(f"write the documents of {task}"):
            make_folders(self._disk, self.folder / "documents")
            write_file(self._disk, self.documents_path(task), encode_table(documents.cast(DOCUMENTS)))

    def begin(self, trial: Mapping[str, Any], facts: Mapping[str, Any]) -> int:
        """The number of a new attempt at a trial, which may be new, cut short, failed or to be extended.

        `settings`, `layers` and `tally` among the facts are kept for the trial, the others for this attempt.
        """
        trial_id = trial["trial_id"]
        with self._explained(f"begin trial {trial_id}"), self._using(trial_id, trial) as opened:
            return opened.begin(trial, facts)

    def append(self, trial_id: str, attempt: int, batch: pa.RecordBatch) -> int:
        """How many of these rows were new; all are on disk on return. After a StoreError none of them counts."""
        assert batch.schema.equals(ROWS), batch.schema
        assert set(batch["trial_id"].to_pylist()) <= {trial_id}, trial_id
        if len(batch) == 0:
            return 0
        with self._explained(f"write rows of trial {trial_id}"):
            spec = None if trial_id in self._open else spec_of(batch)
            with self._using(trial_id, spec) as opened:
                return opened.append(attempt, batch)

    def finish(self, trial_id: str, facts: Mapping[str, Any], wanted: Sequence[str]) -> None:
        """All rows into one Parquet file, wanted documents first and in that order; each of them must have a row.

        RowsLost if some can no longer be read: they are not done any more, and the trial is still running.
        """
        with self._explained(f"finish trial {trial_id}"), self._using(trial_id) as opened:
            try:
                opened.finish(facts, wanted)
            finally:
                self.damage.update((damage.path, damage) for damage in opened.found())
            with self._guard:
                self._open.pop(trial_id, None)

    def fail(self, trial_id: str, reason: str) -> None:
        """Keeps the rows there are; a later begin tries again."""
        with self._explained(f"mark trial {trial_id} as failed"), self._using(trial_id) as opened:
            opened.fail(reason)

    def set_aside(self, trial_id: str) -> Path:
        """Moves all of a trial out of the way, so that it begins anew; where it lies now."""
        with self._guard, self._explained(f"set aside trial {trial_id}"):
            opened = self._open.pop(trial_id, None)
            if opened is not None:
                opened.close()
            make_folders(self._disk, self._aside)
            taken = {path.name for path in self._aside.iterdir()}
            target = self._aside / next(name for n in count(1) if (name := f"{trial_id}-{n}") not in taken)
            self._disk.rename(self.trial_folder(trial_id), target)
            self._disk.sync_folder(self._aside)
            self._disk.sync_folder(self.trial_folder(trial_id).parent)
            return target

    def done(self, trial_id: str) -> set[str]:
        if trial_id not in self._open:
            return super().done(trial_id)
        with self._using(trial_id) as opened:
            return opened.done()

    def check(self) -> list[str]:
        """Reads every byte, and sets aside what is damaged."""
        with self._explained("check the folder"):
            return [str(damage) for damage in self._recover()]

    def _recover(self) -> list[Damage]:
        remove_leftovers(self.folder)
        found = []
        for task in self._tasks():
            found += recover_documents(self._disk, self.documents_path(task), self._aside / "documents")
        for trial_id in self.trial_ids():
            found += self._recover_trial(trial_id)
        self.damage.update((damage.path, damage) for damage in found)
        return found

    def _recover_trial(self, trial_id: str) -> list[Damage]:
        if trial_id not in self._open:
            return recover_trial(self._disk, self.trial_folder(trial_id), self._aside / trial_id)
        with self._using(trial_id) as opened:
            opened.recover()
            return opened.found()

    @contextmanager
    def _using(self, trial_id: str, spec: Mapping[str, Any] | None = None) -> Iterator[OpenTrial]:
        """A trial for oneself. Who waited for one that was finished meanwhile opens it again."""
        while True:
            with self._guard:
                if trial_id not in self._open:
                    folder = self.trial_folder(trial_id)
                    self._open[trial_id] = OpenTrial(self._disk, folder, self._aside / trial_id, spec)
                opened = self._open[trial_id]
            with opened.guard:
                if self._open.get(trial_id) is opened:
                    yield opened
                    return

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Refuses where the lock is lost; says in a sentence what the disk refused."""
        try:
            if self._lock.lost():
                raise StoreError(f"cannot {what}: another process has taken over {self.folder}")
            yield
        except OSError as problem:
            raise StoreError(f"cannot {what} in {self.folder}: {problem.strerror or problem}") from problem

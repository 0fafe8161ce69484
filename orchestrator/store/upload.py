"""Copies a sweep folder to a URL while the sweep runs, and downloads it from there if the local folder is empty.

Copied are sweep.json, documents/, every finished trial and the report, but not lock/, quarantine/ and slurm/. At every
moment the copy is a sweep that can be continued:

- documents are copied before the sweep.json that lists them;
- rows.parquet is copied before the trial.json that calls the trial finished. If rows change later, the remote
  trial.json is deleted first; a trial without trial.json is not downloaded and runs again;
- compacted files are copied before the folders of their trials are deleted;
- files that no longer exist locally are deleted from the copy last, and only if they were copied from this folder.

The local folder is only read, except for the manifest (upload.jsonl) and for a download into an unused folder.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.core.untrusted import path_below
from orchestrator.store.compaction import COMPACTED_FOLDER, compacted_names
from orchestrator.store.files import (
    DISK,
    CorruptedFile,
    decode_json,
    is_temporary,
    make_folders,
    remove_temporary_files,
    write_file,
)
from orchestrator.store.lock import FolderLock
from orchestrator.store.reader import FETCHING_MARKER, SWEEP_COPY_FILE, SWEEP_FILE, Store
from orchestrator.store.remote_folder import FileState, LocalFile, RemoteFolder, UploadFailed, UploadManifest
from orchestrator.store.trial_files import ROWS_FILE, SEGMENT_NAME, TRIAL_FILE
from sampler.errors import InputError

PARALLEL_COPIES = 8
OWNER_FILE = "uploader.json"  # only in the copy: the id of the manifest that last wrote to it
REPORT_PAGE = "report.html"  # copied after the files it refers to
REPORT_FILES, REPORT_FOLDERS = ("results.md",), ("figures", "summaries")
RECORD_PART, COMPACTED_PART, REPORT_PART = "sweep.json and its documents", "compacted rows", "the report"
COPIED_NAMES = (
    SWEEP_FILE,
    SWEEP_COPY_FILE,
    REPORT_PAGE,
    *REPORT_FILES,
    "documents",
    "trials",
    COMPACTED_FOLDER,
    *REPORT_FOLDERS,
)  # at the top level


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadOutcome:
    """What one pass could not copy, and why; empty if the copy is up to date."""

    missing: tuple[str, ...] = ()  # RECORD_PART, COMPACTED_PART, trials/<id>, REPORT_PART
    problem: str = ""

    def __str__(self) -> str:
        trials = [part for part in self.missing if part.startswith("trials/")]
        parts = [part for part in self.missing if part not in trials]
        parts += [f"{len(trials):,} trial{'s' if len(trials) > 1 else ''}"] if trials else []
        return " and ".join(parts)


class RemoteCopy:
    """The copy of one folder. One pass runs at a time and copies several files in parallel."""

    def __init__(self, folder: Path, remote: RemoteFolder, sizes: dict[str, int]) -> None:
        self.folder, self._remote, self._sizes = folder, remote, sizes
        self._manifest = UploadManifest(folder, remote.identity)
        self._unfinished: dict[str, FileState] = {}  # by trial id: the state of its trial.json

    @property
    def url(self) -> str:
        return self._remote.url

    def claim(self) -> None:
        """Marks the copy as written by this folder; comes before all other writes."""
        owner = json.dumps({"id": self._manifest.id}).encode() + b"\n"
        if OWNER_FILE not in self._sizes or self._remote.read(OWNER_FILE) != owner:
            self._manifest.clear()
            self._remote.write(OWNER_FILE, owner)

    def fetch(self) -> int:
        """Downloads the copy into an unused local folder; returns the number of files. A killed download continues.

        sweep.json comes last, and a marker file prevents the use of the folder until the download is complete.
        """
        make_folders(DISK, self.folder)
        lock = FolderLock.acquire(self.folder)
        try:
            if not (self.folder / FETCHING_MARKER).exists() and Store(self.folder).read_sweep_record() is not None:
                raise InputError(f"{self.folder} was started by another process meanwhile; repeat the command")
            for parent, _, _ in os.walk(self.folder):
                remove_temporary_files(Path(parent))
            write_file(DISK, self.folder / FETCHING_MARKER, json.dumps({"from": self.url}).encode() + b"\n")
            names = [name for name in self._fetchable() if not self._is_current(name, _state(self.folder / name))]
            _in_parallel(self._fetch_file, [name for name in names if name not in (SWEEP_FILE, SWEEP_COPY_FILE)])
            for name in (SWEEP_COPY_FILE, SWEEP_FILE):
                if name in names:
                    self._fetch_file(name)
            (self.folder / FETCHING_MARKER).unlink()
            DISK.sync_folder(self.folder)
            return len(names)
        except OSError as error:
            raise InputError(f"{self.folder} cannot be written to: {error.strerror or error}") from error
        finally:
            lock.release()

    def _fetchable(self) -> list[str]:
        """All files of the sweep, except those of trials that are incomplete in the copy."""
        complete = {name.rpartition("/")[0] for name in self._sizes if name.endswith(f"/{TRIAL_FILE}")}
        return [
            name
            for name in self._sizes
            if name.partition("/")[0] in COPIED_NAMES
            and not is_temporary(name)
            and (not name.startswith("trials/") or name.rpartition("/")[0] in complete)
        ]

    def _fetch_file(self, name: str) -> None:
        path = path_below(self.folder, name)
        make_folders(DISK, path.parent)
        write_file(DISK, path, self._remote.read(name))
        self._manifest.record(name, LocalFile.read(path))

    def copy_finished(self, stopped: Callable[[], bool] = lambda: False) -> UploadOutcome:
        """One pass over finished trials while a sweep runs; `stopped` ends it early."""
        changed = [trial_id for trial_id in Store(self.folder).trial_folders() if self._may_be_finished(trial_id)]
        return self._pass(changed, self._copy_finished_trial, stopped=stopped)

    def copy_all(self) -> UploadOutcome:
        """The last pass, when nothing writes to the folder any more: includes failed trials and the report."""
        try:
            self._sizes = self._remote.list()
        except UploadFailed as error:
            return UploadOutcome(missing=("all new files",), problem=str(error))
        known: dict[str, list[str]] = {}
        for name in self._manifest.names():
            known.setdefault(name.rpartition("/")[0], []).append(name)

        def copy_trial(trial_id: str) -> None:
            self._copy_whole_trial(trial_id, known.get(f"trials/{trial_id}", ()))

        return self._pass(Store(self.folder).trial_folders(), copy_trial, report=True)

    def _pass(
        self,
        trial_ids: Sequence[str],
        copy_trial: Callable[[str], None],
        *,
        report: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> UploadOutcome:
        """Copies part by part and stops at the first failure: the other parts need the same network."""
        trials = [f"trials/{trial_id}" for trial_id in trial_ids]
        compacted = [COMPACTED_PART] if compacted_names(self.folder / COMPACTED_FOLDER) else []
        left = dict.fromkeys([RECORD_PART, *compacted, *trials, *([REPORT_PART] if report else ())])

        def copy_and_count(trial_id: str) -> None:
            if not stopped():
                copy_trial(trial_id)
                del left[f"trials/{trial_id}"]

        try:
            self._copy_sweep_record()
            del left[RECORD_PART]
            self._copy_compacted()
            left.pop(COMPACTED_PART, None)
            _in_parallel(copy_and_count, trial_ids)
            if report:
                self._copy_report()
                del left[REPORT_PART]
        except (UploadFailed, CorruptedFile, OSError) as error:
            return UploadOutcome(missing=tuple(left), problem=str(error))
        return UploadOutcome(missing=tuple(left))

    def _copy_sweep_record(self) -> None:
        """sweep.json is read before the documents: all documents it lists are then on disk."""
        files = [(name, LocalFile.read(self.folder / name)) for name in (SWEEP_FILE, SWEEP_COPY_FILE)]
        for name in _files_below(self.folder, "documents"):
            self._copy_file(name)
        for name, file in files:
            self._copy_if_changed(name, file)

    def _copy_compacted(self) -> None:
        """New compacted files, then without those they replaced, then without the folders of compacted trials."""
        store = Store(self.folder)
        compacted = store.compacted_trial_ids()  # before the files are listed: these files, or newer ones, are copied
        names = [f"{COMPACTED_FOLDER}/{name}" for name in compacted_names(self.folder / COMPACTED_FOLDER)]
        _in_parallel(self._copy_file, names)
        removed = compacted - set(store.trial_folders())
        copied: dict[str, list[str]] = {}
        for name in self._manifest.names():
            if name.startswith(f"{COMPACTED_FOLDER}/") and name not in names:
                self._delete(name)
            elif name.startswith("trials/") and (trial_id := name.split("/")[1]) in removed:
                copied.setdefault(trial_id, []).append(name)
        _in_parallel(lambda trial_id: self._delete_trial(copied[trial_id]), list(copied))

    def _delete_trial(self, names: Sequence[str]) -> None:
        """trial.json first: a trial without it is not downloaded."""
        for name in sorted(names, key=lambda name: not name.endswith(f"/{TRIAL_FILE}")):
            self._delete(name)

    def _may_be_finished(self, trial_id: str) -> bool:
        name = f"trials/{trial_id}/{TRIAL_FILE}"
        state = _state(self.folder / name)
        return state is not None and state != self._unfinished.get(trial_id) and not self._is_current(name, state)

    def _copy_finished_trial(self, trial_id: str) -> None:
        """Skips a trial that changes meanwhile: there will be another pass."""
        folder = Store(self.folder).trial_folder(trial_id)
        try:
            record_file = LocalFile.read(folder / TRIAL_FILE)
            record = decode_json(record_file.data)
            if record["status"] != "finished":
                self._unfinished[trial_id] = record_file.state
                return
            rows = LocalFile.read(folder / ROWS_FILE)
        except (FileNotFoundError, CorruptedFile):
            return
        if rows.sha256 == record["sha256"]:
            self._copy_trial(trial_id, {ROWS_FILE: rows, TRIAL_FILE: record_file})

    def _copy_whole_trial(self, trial_id: str, known: Iterable[str]) -> None:
        prefix = f"trials/{trial_id}"
        names = _files_below(self.folder, prefix)
        if any(not self._is_current(name, _state(self.folder / name)) for name in names):
            files = {name.rpartition("/")[2]: LocalFile.read(self.folder / name) for name in names}
            self._copy_trial(trial_id, files)
        for name in known:
            if name not in names:
                self._delete(name)

    def _copy_trial(self, trial_id: str, files: Mapping[str, LocalFile]) -> None:
        """Rows first, trial.json last."""
        prefix = f"trials/{trial_id}"
        if (
            ROWS_FILE in files
            and f"{prefix}/{TRIAL_FILE}" in self._sizes
            and not self._has(f"{prefix}/{ROWS_FILE}", files[ROWS_FILE])
        ):
            self._delete(f"{prefix}/{TRIAL_FILE}")
        for name in sorted(
            files, key=lambda name: (name == TRIAL_FILE, SEGMENT_NAME.fullmatch(name) is not None, name)
        ):
            self._copy_if_changed(f"{prefix}/{name}", files[name])

    def _copy_report(self) -> None:
        names = [name for name in REPORT_FILES if (self.folder / name).exists()]
        names += [name for part in REPORT_FOLDERS for name in _files_below(self.folder, part)]
        _in_parallel(self._copy_file, names)
        if (self.folder / REPORT_PAGE).exists():
            self._copy_file(REPORT_PAGE)
        for name in self._manifest.names():
            if name.partition("/")[0] in REPORT_FOLDERS and name not in names:
                self._delete(name)
        for name in [name for name in self._sizes if is_temporary(name)]:  # left by killed uploads
            self._delete(name)

    def _copy_file(self, name: str) -> None:
        if not self._is_current(name, _state(self.folder / name)):
            self._copy_if_changed(name, LocalFile.read(self.folder / name))

    def _copy_if_changed(self, name: str, file: LocalFile) -> None:
        if not self._has(name, file):
            self._remote.write(name, file.data)
            self._sizes[name] = len(file.data)
        if not self._is_current(name, file.state):
            self._manifest.record(name, file)

    def _has(self, name: str, file: LocalFile) -> bool:
        """Whether the copy has these bytes: they were copied from here, and the remote file has their size."""
        copied = self._manifest.get(name)
        return copied is not None and copied.sha256 == file.sha256 and self._sizes.get(name) == len(file.data)

    def _is_current(self, name: str, state: FileState | None) -> bool:
        """The same for a file that has not been read, by its state."""
        copied = self._manifest.get(name)
        return copied is not None and copied.state == state and self._sizes.get(name) == copied.state.size

    def _delete(self, name: str) -> None:
        if name in self._sizes:
            self._remote.delete(name)
            del self._sizes[name]
        self._manifest.forget(name)


def open_remote_copy(url: str, folder: Path, *, dry_run: bool, note: Callable[[str], None]) -> RemoteCopy | None:
    """The copy at `url`/<name of the folder>, ready for uploads; downloaded first if only the copy holds the sweep.

    Raises InputError if the URL cannot be used or holds something else. A dry run changes nothing and returns None.
    """
    remote = RemoteFolder(url, folder.name)
    _refuse_overlap(remote, folder)
    try:
        sizes = remote.list()
        there = _remote_sweep_record(remote) if SWEEP_FILE in sizes else None
    except UploadFailed as error:
        raise InputError(f"--upload {remote.url} cannot be used: {error}") from error
    fetching = (folder / FETCHING_MARKER).exists()
    here = None if fetching else Store(folder).read_sweep_record()
    _check_same_sweep(remote, folder, here, there, sizes)
    if fetching and there is None:
        raise InputError(
            f"{folder} holds a partly downloaded sweep, and {remote.url} has no {SWEEP_FILE}; delete the folder"
        )
    if dry_run:
        if here is None and there is not None:
            note(f"{remote.url} holds this sweep and would be downloaded first; the figures below do not include it")
        return None
    copy = RemoteCopy(folder, remote, sizes)
    remote.check_writable()
    try:
        copy.claim()
        if here is None and there is not None:
            note(f"downloading the sweep from {remote.url}")
            copy.fetch()
    except UploadFailed as error:
        raise InputError(f"{error}; repeat the command to try again") from error
    return copy


def _refuse_overlap(remote: RemoteFolder, folder: Path) -> None:
    if remote.local is not None:
        there, here = remote.local.resolve(), folder.resolve()
        if there == here or here in there.parents or there in here.parents:
            raise InputError(f"--upload {remote.url} is the sweep's own folder; use another URL")


def _remote_sweep_record(remote: RemoteFolder) -> dict[str, Any]:
    try:
        return decode_json(remote.read(SWEEP_FILE), checksum_required=False)
    except CorruptedFile as error:
        raise InputError(f"--upload {remote.url}: its {SWEEP_FILE} {error}; delete it or use another URL") from error


def _check_same_sweep(
    remote: RemoteFolder,
    folder: Path,
    here: Mapping[str, Any] | None,
    there: Mapping[str, Any] | None,
    sizes: Mapping[str, int],
) -> None:
    if here is not None and there is not None and here.get("sweep") != there.get("sweep"):
        raise InputError(
            f"--upload {remote.url} holds the sweep {there.get('sweep')}, but {folder} is {here.get('sweep')}; "
            "use another URL or another --name"
        )
    others = sorted({name.partition("/")[0] for name in sizes if not is_temporary(name)} - {"documents", OWNER_FILE})
    if there is None and here is None and others:
        raise InputError(
            f"--upload {remote.url} is not empty (it holds {', '.join(others[:3])}) and has no {SWEEP_FILE}; "
            "use another URL or another --name"
        )


def _state(path: Path) -> FileState | None:
    try:
        return FileState.of(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _files_below(folder: Path, part: str) -> list[str]:
    """Paths of the files in a part of the folder, relative to the folder."""
    found = []
    for parent, _, names in os.walk(folder / part):
        paths = (Path(parent, name) for name in names if not is_temporary(name))
        found += [path.relative_to(folder).as_posix() for path in paths if not path.is_symlink()]  # may lead anywhere
    return sorted(found)


def _in_parallel(act: Callable[[str], None], names: Sequence[str]) -> None:
    """Acts on all names; raises the first failure, after which no other is started."""
    failed = threading.Event()

    def unless_failed(name: str) -> None:
        if not failed.is_set():
            try:
                act(name)
            except BaseException:
                failed.set()
                raise

    pool = ThreadPoolExecutor(PARALLEL_COPIES, thread_name_prefix="copy")
    try:
        futures = [pool.submit(unless_failed, name) for name in names]
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
    finally:
        failed.set()
        pool.shutdown(cancel_futures=True)

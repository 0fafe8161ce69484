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
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.core.untrusted import path_below
from orchestrator.store.compaction import COMPACTED_FOLDER, compacted_names
from orchestrator.store.files import (
    DISK,
    CorruptedFile,
    FileVersion,
    StoreError,
    decode_json,
    file_version,
    is_temporary,
    make_folders,
    remove_temporary_files,
    write_file,
)
from orchestrator.store.lock import FolderLock
from orchestrator.store.reader import FETCHING_MARKER, SWEEP_COPY_FILE, SWEEP_FILE, Store
from orchestrator.store.remote_folder import LocalFile, RemoteFolder, UploadFailed, UploadManifest
from orchestrator.store.trial_files import ROWS_FILE, TRIAL_FILE
from sampler.errors import InputError, counted

PARALLEL_COPIES = 8
OWNER_FILE = "uploader.json"  # only in the copy: the id of the manifest that last wrote to it
REPORT_PAGE = "report.html"  # copied after the files it refers to
REPORT_FILES, REPORT_FOLDERS = ("results.md",), ("figures", "summaries")
RECORD_PART, COMPACTED_PART, REPORT_PART = "sweep.json and its documents", "compacted rows", "the report"
DELETION_PART = "the deletion of old files"
REPORT_NAMES = (REPORT_PAGE, *REPORT_FILES, *REPORT_FOLDERS)
COPIED_NAMES = (SWEEP_FILE, SWEEP_COPY_FILE, "documents", "trials", COMPACTED_FOLDER, *REPORT_NAMES)  # at the top level
POLL_SECONDS = 5.0
MAX_PAUSE_SECONDS = 60.0  # between attempts of an upload that fails
MAX_POLLING_SHARE = 0.05  # of the time, for finding finished trials
FINAL_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts after the sweep has ended
JOIN_TIMEOUT_SECONDS = 2.0  # for the thread, if the sweep was interrupted


class UploadIncomplete(StoreError):
    """All rows are on disk, but the copy lacks some."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadOutcome:
    """What one pass could not copy, and why; empty if the copy is up to date."""

    missing: tuple[str, ...] = ()  # the constants above, and trials/<id>
    problem: str = ""

    def __str__(self) -> str:
        parts = [part for part in self.missing if not part.startswith("trials/")]
        trials = len(self.missing) - len(parts)
        return " and ".join([*parts, counted(trials, "trial")] if trials else parts)


class RemoteCopy:
    """The copy of one folder. One pass runs at a time and copies several files in parallel."""

    def __init__(self, folder: Path, remote: RemoteFolder, sizes: dict[str, int]) -> None:
        self.folder, self._remote, self._sizes = folder, remote, sizes
        self._manifest = UploadManifest(folder, remote.identity)
        self._unfinished: dict[str, FileVersion] = {}  # by trial id: the version of its trial.json

    @property
    def url(self) -> str:
        return self._remote.url

    def claim(self) -> None:
        """Marks the copy as written by this folder; comes before all other writes."""
        owner = json.dumps({"id": self._manifest.id}).encode() + b"\n"
        if OWNER_FILE not in self._sizes or self._remote.read(OWNER_FILE) != owner:
            self._manifest.clear()
            self._remote.write(OWNER_FILE, owner)

    def fetch(self) -> None:
        """Downloads the copy into an unused local folder. A killed download continues.

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
            names = [name for name in self._fetchable() if not self._is_current(name, file_version(self.folder / name))]
            last = [name for name in (SWEEP_COPY_FILE, SWEEP_FILE) if name in names]
            _in_parallel(self._fetch_file, [name for name in names if name not in last])
            for name in last:
                self._fetch_file(name)
            (self.folder / FETCHING_MARKER).unlink()
            DISK.sync_folder(self.folder)
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
        return self._pass(Store(self.folder).trial_folders(), self._copy_whole_trial, final=True)

    def _pass(
        self,
        trial_ids: Sequence[str],
        copy_trial: Callable[[str], None],
        *,
        final: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> UploadOutcome:
        """Copies part by part and stops at the first failure: the other parts need the same network."""
        # Deleted folders are listed first: the compacted files listed after that hold their rows.
        deleted = self._deleted_locally(whole_trials=not final)
        compacted = [f"{COMPACTED_FOLDER}/{name}" for name in compacted_names(self.folder / COMPACTED_FOLDER)]
        missing = dict.fromkeys([RECORD_PART, *([COMPACTED_PART] if compacted else ())])
        missing |= dict.fromkeys([*(f"trials/{trial_id}" for trial_id in trial_ids), *([REPORT_PART] if final else ())])

        def copy_and_count(trial_id: str) -> None:
            if not stopped():
                copy_trial(trial_id)
                del missing[f"trials/{trial_id}"]

        try:
            self._copy_sweep_record()
            del missing[RECORD_PART]
            _in_parallel(self._copy_file, compacted)
            missing.pop(COMPACTED_PART, None)
            _in_parallel(copy_and_count, trial_ids)
            if final:
                self._copy_report()
                del missing[REPORT_PART]
            for names in deleted:
                _in_parallel(self._delete, names)
        except (UploadFailed, CorruptedFile, OSError) as error:
            return UploadOutcome(missing=tuple(missing) or (DELETION_PART,), problem=str(error))
        return UploadOutcome(missing=tuple(missing))

    def _deleted_locally(self, *, whole_trials: bool) -> tuple[list[str], list[str]]:
        """Copied files that no longer exist locally, in the order of deletion: each trial.json, then the others.

        A trial without trial.json is incomplete, so a killed deletion leaves no trial that lacks rows. With
        `whole_trials`, files of a trial are included only if its folder is gone: a running trial may be merging rows.
        """
        trial_files: list[str] = []
        others: list[str] = []
        for name in self._manifest.names():
            path = self.folder / name
            if not (path.parent if whole_trials and name.startswith("trials/") else path).exists():
                (trial_files if path.name == TRIAL_FILE else others).append(name)
        return trial_files, others

    def _copy_sweep_record(self) -> None:
        """Reads sweep.json first, so that all documents it lists are on disk, but copies it last."""
        files = [(name, LocalFile.read(self.folder / name)) for name in (SWEEP_FILE, SWEEP_COPY_FILE)]
        for name in _files_below(self.folder, "documents"):
            self._copy_file(name)
        for name, file in files:
            self._copy_if_changed(name, file)

    def _may_be_finished(self, trial_id: str) -> bool:
        name = f"trials/{trial_id}/{TRIAL_FILE}"
        version = file_version(self.folder / name)
        return version is not None and version != self._unfinished.get(trial_id) and not self._is_current(name, version)

    def _copy_finished_trial(self, trial_id: str) -> None:
        """Skips a trial that is being changed; a later pass copies it."""
        folder = Store(self.folder).trial_folder(trial_id)
        try:
            record_file = LocalFile.read(folder / TRIAL_FILE)
            record = decode_json(record_file.data)
            if record["status"] != "finished":
                self._unfinished[trial_id] = record_file.version
                return
            rows = LocalFile.read(folder / ROWS_FILE)
        except (FileNotFoundError, CorruptedFile):
            return
        if rows.sha256 == record["sha256"]:
            self._copy_trial(trial_id, {ROWS_FILE: rows, TRIAL_FILE: record_file})

    def _copy_whole_trial(self, trial_id: str) -> None:
        names = _files_below(self.folder, f"trials/{trial_id}")
        if any(not self._is_current(name, file_version(self.folder / name)) for name in names):
            files = {name.rpartition("/")[2]: LocalFile.read(self.folder / name) for name in names}
            self._copy_trial(trial_id, files)

    def _copy_trial(self, trial_id: str, files: Mapping[str, LocalFile]) -> None:
        """Copies rows first, trial.json last. If rows.parquet has changed, deletes the copy's trial.json before."""
        prefix = f"trials/{trial_id}"
        rows = files.get(ROWS_FILE)
        if rows is not None and not self._has(f"{prefix}/{ROWS_FILE}", rows):
            self._delete(f"{prefix}/{TRIAL_FILE}")
        for name in sorted(files, key=lambda name: (name == TRIAL_FILE, name)):
            self._copy_if_changed(f"{prefix}/{name}", files[name])

    def _copy_report(self) -> None:
        """Copies the report, then deletes temporary files that killed uploads have left in the copy."""
        names = [name for name in REPORT_FILES if (self.folder / name).exists()]
        names += [name for part in REPORT_FOLDERS for name in _files_below(self.folder, part)]
        _in_parallel(self._copy_file, names)
        if (self.folder / REPORT_PAGE).exists():
            self._copy_file(REPORT_PAGE)
        for name in [name for name in self._sizes if is_temporary(name)]:
            self._delete(name)

    def _copy_file(self, name: str) -> None:
        if not self._is_current(name, file_version(self.folder / name)):
            self._copy_if_changed(name, LocalFile.read(self.folder / name))

    def _copy_if_changed(self, name: str, file: LocalFile) -> None:
        if not self._has(name, file):
            self._remote.write(name, file.data)
            self._sizes[name] = len(file.data)
        if not self._is_current(name, file.version):
            self._manifest.record(name, file)

    def _has(self, name: str, file: LocalFile) -> bool:
        """Whether the copy has these bytes: they were copied from here, and the remote file has their size."""
        copied = self._manifest.get(name)
        return copied is not None and copied.sha256 == file.sha256 and self._sizes.get(name) == len(file.data)

    def _is_current(self, name: str, version: FileVersion | None) -> bool:
        """Whether the copy has this version of a file. Does not read the file."""
        copied = self._manifest.get(name)
        return copied is not None and copied.version == version and self._sizes.get(name) == copied.version.size

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
    if remote.overlaps(folder):
        raise InputError(f"--upload {remote.url} is the sweep's own directory; use another URL")
    copied: dict[str, Any] | None = None
    try:
        sizes = remote.list()
        if SWEEP_FILE in sizes:
            copied = decode_json(remote.read(SWEEP_FILE), checksum_required=False)
    except UploadFailed as error:
        raise InputError(f"--upload {remote.url} cannot be used: {error}") from error
    except CorruptedFile as error:
        raise InputError(f"--upload {remote.url}: its {SWEEP_FILE} {error}; delete it or use another URL") from error
    fetching = (folder / FETCHING_MARKER).exists()
    local = None if fetching else Store(folder).read_sweep_record()
    advice = "use another URL or another --name"
    if local is not None and copied is not None and local.get("sweep") != copied.get("sweep"):
        raise InputError(
            f"--upload {remote.url} holds the sweep {copied.get('sweep')}, but {folder} is "
            f"{local.get('sweep')}; {advice}"
        )
    names = sorted({name.partition("/")[0] for name in sizes if not is_temporary(name)} - {"documents", OWNER_FILE})
    if copied is None and local is None and names:
        some = ", ".join(names[:3])
        raise InputError(f"--upload {remote.url} is not empty (it holds {some}) and has no {SWEEP_FILE}; {advice}")
    if fetching and copied is None:
        raise InputError(
            f"{folder} holds a partly downloaded sweep, and {remote.url} has no {SWEEP_FILE}; delete the directory"
        )
    must_download = local is None and copied is not None
    if dry_run:
        if must_download:
            note(f"{remote.url} holds this sweep and would be downloaded first; the figures below do not include it")
        return None
    copy = RemoteCopy(folder, remote, sizes)
    remote.check_writable()
    try:
        copy.claim()
        if must_download:
            note(f"downloading the sweep from {remote.url}")
            copy.fetch()
    except UploadFailed as error:
        raise InputError(f"{error}; repeat the command to try again") from error
    return copy


def _files_below(folder: Path, part: str) -> list[str]:
    """Paths of the files in a part of the folder, relative to the folder; no symbolic links, which may lead outside."""
    found = []
    for parent, _, names in os.walk(folder / part):
        paths = (Path(parent, name) for name in names if not is_temporary(name))
        found += [path.relative_to(folder).as_posix() for path in paths if not path.is_symlink()]
    return sorted(found)


def _in_parallel(act: Callable[[str], None], names: Sequence[str]) -> None:
    """Calls `act` for all names. After the first failure, which is raised, no other call is started."""
    pool = ThreadPoolExecutor(PARALLEL_COPIES, thread_name_prefix="copy")
    try:
        for ended in as_completed([pool.submit(act, name) for name in names]):
            ended.result()
    finally:
        pool.shutdown(cancel_futures=True)


class Uploader:
    """A context manager that copies finished trials in a thread. With `copy=None` it does nothing.

    A slow or failing upload delays no row. `finish_upload`, or the next run of the command, copies what it missed.
    """

    def __init__(self, copy: RemoteCopy | None, note: Callable[[str], None], *, poll: float = POLL_SECONDS) -> None:
        self._copy, self._note, self._poll = copy, note, poll
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)

    def __enter__(self) -> "Uploader":
        if self._copy is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        if self._copy is not None:
            self._thread.join(None if kind is None else JOIN_TIMEOUT_SECONDS)

    def _run(self) -> None:
        assert self._copy is not None
        pause, warned = 0.0, False
        while not self._ended.wait(pause):
            began = time.monotonic()
            problem = self._copy.copy_finished(self._ended.is_set).problem
            if not problem:
                pause = max(self._poll, (time.monotonic() - began) / MAX_POLLING_SHARE)
                continue
            pause = min(MAX_PAUSE_SECONDS, max(self._poll, 2 * pause))
            if not warned:
                self._note(f"warning: upload failed ({problem}); the sweep continues and the upload is retried")
            warned = True


def finish_upload(copy: RemoteCopy, *, failed: int = 0) -> None:
    """Completes the copy; raises UploadIncomplete if that fails repeatedly. `failed` trials are part of the message."""
    print(f"uploading to {copy.url}", flush=True)
    outcome = copy.copy_all()
    for pause in FINAL_PAUSES_SECONDS:
        if not outcome.missing:
            break
        print(f"warning: upload failed ({outcome.problem}); next try in {pause:.0f} s", file=sys.stderr, flush=True)
        time.sleep(pause)
        outcome = copy.copy_all()
    if outcome.missing:
        trials = f"{counted(failed, 'trial')} failed, and " if failed else "all rows are on disk, but "
        raise UploadIncomplete(f"{trials}the copy at {copy.url} lacks {outcome} ({outcome.problem})")
    print(copy.url)

"""Copies a sweep's folder to a URL while the sweep grows, and fetches it from there where the local folder is empty.

Copied are sweep.json, documents/, every finished trial and the report; not lock/, set-aside/ and slurm/. At every
moment the copy is a sweep that can be continued:

- documents are copied before the sweep.json that promises them;
- rows.parquet is copied before the trial.json that calls the trial finished. If rows change later, the copy's
  trial.json is deleted first; a trial without trial.json is not fetched, and so runs again;
- files that vanish locally are deleted from the copy last, and only those that this folder had copied.

The local folder is only read, except for the manifest (upload.jsonl) and for a fetch into an unused folder.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.store import folder_checks
from orchestrator.store.atomic import DISK, make_folders, write_file
from orchestrator.store.errors import Damaged
from orchestrator.store.folder_checks import COPY, FETCHING, REQUEST
from orchestrator.store.lock import FolderLock
from orchestrator.store.reader import Store
from orchestrator.store.recovery import remove_leftovers
from orchestrator.store.remote_folder import CopyFailed, RemoteFolder, is_temporary
from orchestrator.store.sealed_json import decode_object
from orchestrator.store.trial_folder import FACTS, SEGMENT, TABLE
from orchestrator.store.upload_manifest import FileState, LocalFile, UploadManifest
from sampler.errors import InputError

PARALLEL_COPIES = 8
OWNER = "uploader.json"  # in the copy only: the id of the manifest that wrote to it last
PAGE = "report.html"  # last of the report: it speaks of the other files
REPORT_FILES, REPORT_FOLDERS = ("results.md",), ("figures", "summaries")
REQUEST_PART, REPORT_PART = "sweep.json and its documents", "the report"
COPIED = (REQUEST, COPY, PAGE, *REPORT_FILES, "documents", "trials", *REPORT_FOLDERS)  # at the top of the folder


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyOutcome:
    """What one pass could not copy, and why; nothing if the copy is up to date."""

    missing: tuple[str, ...] = ()  # REQUEST_PART, trials/<id>, REPORT_PART
    problem: str = ""

    def __str__(self) -> str:
        trials = [part for part in self.missing if part.startswith("trials/")]
        parts = [part for part in self.missing if part not in trials]
        parts += [f"{len(trials):,} trial{'s' if len(trials) > 1 else ''}"] if trials else []
        return " and ".join(parts)


class RemoteCopy:
    """The copy of one folder. One pass runs at a time, and copies several files at once."""

    def __init__(self, folder: Path, remote: RemoteFolder, sizes: dict[str, int]) -> None:
        self.folder, self._remote, self._sizes = folder, remote, sizes
        self._manifest = UploadManifest(folder, remote.identity)
        self._unfinished: dict[str, FileState] = {}  # trials, by the state of the trial.json that says so

    @property
    def url(self) -> str:
        return self._remote.url

    def claim(self) -> None:
        """Comes before everything else that is written to the copy."""
        owner = json.dumps({"id": self._manifest.id}).encode() + b"\n"
        if OWNER not in self._sizes or self._remote.read(OWNER) != owner:
            self._manifest.distrust()
            self._remote.write(OWNER, owner)

    def fetch(self) -> int:
        """Makes an unused local folder what the copy is; how many files were fetched. A killed fetch continues.

        sweep.json comes last, and until everything is there a marker keeps the folder from being used.
        """
        make_folders(DISK, self.folder)
        lock = FolderLock.acquire(self.folder)
        try:
            if not (self.folder / FETCHING).exists() and folder_checks.read_request(self.folder) is not None:
                raise InputError(f"{self.folder} was begun by another process meanwhile; repeat the command")
            for parent, _, _ in os.walk(self.folder):
                remove_leftovers(Path(parent))
            write_file(DISK, self.folder / FETCHING, json.dumps({"from": self.url}).encode() + b"\n")
            names = [name for name in self._fetchable() if not self._is_current(name, _state(self.folder / name))]
            _each(self._fetch_file, [name for name in names if name not in (REQUEST, COPY)])
            for name in (COPY, REQUEST):
                if name in names:
                    self._fetch_file(name)
            (self.folder / FETCHING).unlink()
            DISK.sync_folder(self.folder)
            return len(names)
        except OSError as problem:
            raise InputError(f"{self.folder} cannot be written to: {problem.strerror or problem}") from problem
        finally:
            lock.release()

    def _fetchable(self) -> list[str]:
        """Everything of the sweep, but for trials that the copy does not have whole."""
        whole = {name.rpartition("/")[0] for name in self._sizes if name.endswith(f"/{FACTS}")}
        return [
            name
            for name in self._sizes
            if name.partition("/")[0] in COPIED
            and not is_temporary(name)
            and ".." not in name.split("/")
            and (not name.startswith("trials/") or name.rpartition("/")[0] in whole)
        ]

    def _fetch_file(self, name: str) -> None:
        path = self.folder / name
        make_folders(DISK, path.parent)
        write_file(DISK, path, self._remote.read(name))
        self._manifest.record(name, LocalFile.read(path))

    def copy_finished(self, stopped: Callable[[], bool] = lambda: False) -> CopyOutcome:
        """One pass over what is final while a sweep runs; `stopped` ends it early."""
        changed = [trial_id for trial_id in Store(self.folder).trial_ids() if self._may_be_finished(trial_id)]
        return self._pass(changed, self._copy_finished_trial, stopped=stopped)

    def copy_all(self) -> CopyOutcome:
        """The last pass, when nobody writes to the folder any more: trials that failed and the report as well."""
        try:
            self._sizes = self._remote.list()
        except CopyFailed as problem:
            return CopyOutcome(missing=("everything that is new",), problem=str(problem))
        known: dict[str, list[str]] = {}
        for name in self._manifest.names():
            known.setdefault(name.rpartition("/")[0], []).append(name)

        def copy_trial(trial_id: str) -> None:
            self._copy_trial_as_it_is(trial_id, known.get(f"trials/{trial_id}", ()))

        return self._pass(Store(self.folder).trial_ids(), copy_trial, report=True)

    def _pass(
        self,
        trial_ids: Sequence[str],
        copy_trial: Callable[[str], None],
        *,
        report: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> CopyOutcome:
        """Copies part by part until one fails: the others would wait for the same network."""
        trials = [f"trials/{trial_id}" for trial_id in trial_ids]
        left = dict.fromkeys([REQUEST_PART, *trials, *([REPORT_PART] if report else ())])

        def copy_and_count(trial_id: str) -> None:
            if not stopped():
                copy_trial(trial_id)
                del left[f"trials/{trial_id}"]

        try:
            self._copy_request()
            del left[REQUEST_PART]
            _each(copy_and_count, trial_ids)
            if report:
                self._copy_report()
                del left[REPORT_PART]
        except (CopyFailed, OSError) as problem:
            return CopyOutcome(missing=tuple(left), problem=str(problem))
        return CopyOutcome(missing=tuple(left))

    def _copy_request(self) -> None:
        """Read before the documents: those that it promises are then on disk."""
        request = [(name, LocalFile.read(self.folder / name)) for name in (REQUEST, COPY)]
        for name in _files_below(self.folder, "documents"):
            self._copy_file(name)
        for name, file in request:
            self._copy_if_changed(name, file)

    def _may_be_finished(self, trial_id: str) -> bool:
        name = f"trials/{trial_id}/{FACTS}"
        state = _state(self.folder / name)
        return state is not None and state != self._unfinished.get(trial_id) and not self._is_current(name, state)

    def _copy_finished_trial(self, trial_id: str) -> None:
        """Of a trial that changes meanwhile nothing is copied: there will be another pass."""
        folder = Store(self.folder).trial_folder(trial_id)
        try:
            facts = LocalFile.read(folder / FACTS)
            value = decode_object(facts.data)
            if value["status"] != "finished":
                self._unfinished[trial_id] = facts.state
                return
            rows = LocalFile.read(folder / TABLE)
        except (FileNotFoundError, Damaged):
            return
        if rows.sha256 == value["sha256"]:
            self._copy_trial(trial_id, {TABLE: rows, FACTS: facts})

    def _copy_trial_as_it_is(self, trial_id: str, known: Iterable[str]) -> None:
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
        if TABLE in files and f"{prefix}/{FACTS}" in self._sizes and not self._has(f"{prefix}/{TABLE}", files[TABLE]):
            self._delete(f"{prefix}/{FACTS}")
        for name in sorted(files, key=lambda name: (name == FACTS, SEGMENT.fullmatch(name) is not None, name)):
            self._copy_if_changed(f"{prefix}/{name}", files[name])

    def _copy_report(self) -> None:
        names = [name for name in REPORT_FILES if (self.folder / name).exists()]
        names += [name for part in REPORT_FOLDERS for name in _files_below(self.folder, part)]
        _each(self._copy_file, names)
        if (self.folder / PAGE).exists():
            self._copy_file(PAGE)
        for name in self._manifest.names():
            if name.partition("/")[0] in REPORT_FOLDERS and name not in names:
                self._delete(name)
        for name in [name for name in self._sizes if is_temporary(name)]:  # of uploads that were killed
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
        """Whether the copy has these bytes: this folder has copied them, and a file of their size is there."""
        copied = self._manifest.get(name)
        return copied is not None and copied.sha256 == file.sha256 and self._sizes.get(name) == len(file.data)

    def _is_current(self, name: str, state: FileState | None) -> bool:
        """Whether the copy has a file in this state, without reading the file."""
        copied = self._manifest.get(name)
        return copied is not None and copied.state == state and self._sizes.get(name) == copied.state.size

    def _delete(self, name: str) -> None:
        if name in self._sizes:
            self._remote.delete(name)
            del self._sizes[name]
        self._manifest.forget(name)


def open_copy(url: str, folder: Path, *, dry_run: bool, note: Callable[[str], None]) -> RemoteCopy | None:
    """The copy at `url`/<name of the folder>, ready for uploads; fetched first if only the copy holds the sweep.

    InputError where the URL cannot be used or holds something else. A dry run changes nothing, here and there.
    """
    remote = RemoteFolder(url, folder.name)
    _refuse_overlap(remote, folder)
    try:
        sizes = remote.list()
        there = _remote_request(remote) if REQUEST in sizes else None
    except CopyFailed as problem:
        raise InputError(f"--upload {remote.url} cannot be used: {problem}") from problem
    fetching = (folder / FETCHING).exists()
    here = None if fetching else folder_checks.read_request(folder)
    _check_same_sweep(remote, folder, here, there, sizes)
    if fetching and there is None:
        raise InputError(f"{folder} holds a part of a sweep, and {remote.url} has no {REQUEST}; delete the folder")
    if dry_run:
        if here is None and there is not None:
            note(f"{remote.url} holds this sweep and would be fetched first; what follows does not count it")
        return None
    copy = RemoteCopy(folder, remote, sizes)
    remote.check_writable()
    try:
        copy.claim()
        if here is None and there is not None:
            note(f"fetching the sweep from {remote.url}")
            copy.fetch()
    except CopyFailed as problem:
        raise InputError(f"{problem}; repeat the command to try again") from problem
    return copy


def _refuse_overlap(remote: RemoteFolder, folder: Path) -> None:
    if remote.local is not None:
        there, here = remote.local.resolve(), folder.resolve()
        if there == here or here in there.parents or there in here.parents:
            raise InputError(f"--upload {remote.url} is the sweep's own folder; name another place")


def _remote_request(remote: RemoteFolder) -> dict[str, Any]:
    try:
        return decode_object(remote.read(REQUEST), seal_required=False)
    except Damaged as problem:
        raise InputError(
            f"--upload {remote.url}: its {REQUEST} {problem}; delete it there or use another URL"
        ) from problem


def _check_same_sweep(
    remote: RemoteFolder,
    folder: Path,
    here: Mapping[str, Any] | None,
    there: Mapping[str, Any] | None,
    sizes: Mapping[str, int],
) -> None:
    if here is not None and there is not None and here.get("sweep") != there.get("sweep"):
        raise InputError(
            f"--upload {remote.url} holds the sweep {there.get('sweep')}, and {folder} is {here.get('sweep')}; "
            "use another URL or another --name"
        )
    others = sorted({name.partition("/")[0] for name in sizes if not is_temporary(name)} - {"documents", OWNER})
    if there is None and here is None and others:
        raise InputError(
            f"--upload {remote.url} is not empty (it holds {', '.join(others[:3])}) and has no {REQUEST}; "
            "use another URL or another --name"
        )


def _state(path: Path) -> FileState | None:
    try:
        return FileState.of(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _files_below(folder: Path, part: str) -> list[str]:
    """Files in a part of the folder, relative to the folder."""
    found = []
    for parent, _, names in os.walk(folder / part):
        found += [Path(parent, name).relative_to(folder).as_posix() for name in names if not is_temporary(name)]
    return sorted(found)


def _each(act: Callable[[str], None], names: Sequence[str]) -> None:
    """Acts on all names, several at a time; after the first failure, which is raised, no other is begun."""
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

"""Reads a sweep folder, at any time, also while another process writes to it. Never changes anything.

    sweep.json, sweep.copy.json    identity and settings of the sweep, twice
    documents/<task>.parquet       questions, choices and gold answers
    trials/<trial_id>/trial.json   the trial, its status and attempts
                      rows-<n>.arrows   rows of a running trial; one segment per attempt and writer
                      rows.parquet      all rows of a finished trial
    compacted/<task>-….parquet     rows and trial.json of many finished trials, which then have no folder
    quarantine/                    corrupted files and replaced trials; never deleted (older sweeps: set-aside/)
    lock/                          the process that writes
    upload.jsonl                   which versions of which files are in the copy at --upload URL

Rows are the truth: a document is done if it has a row. Corrupted files are skipped and listed in `Store.corrupted`.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.core.untrusted import path_below
from orchestrator.store.compaction import (
    COMPACTED_FOLDER,
    CompactedFiles,
    compacted_names,
    read_compacted,
    read_trials_rows,
)
from orchestrator.store.files import (
    CorruptedFile,
    StoreError,
    is_temporary,
    read_json,
    read_regular,
    read_table,
    verify_table,
)
from orchestrator.store.lock import LOCK_FOLDER, active_writer
from orchestrator.store.record_checks import sweep_record_problem
from orchestrator.store.schema import (
    COMPACTED_SCHEMA_VERSION,
    DOCUMENTS,
    ROWS,
    SCHEMA_VERSION,
    attempts_of,
    check_version,
    select_fields,
)
from orchestrator.store.trial_files import (
    READ_ATTEMPTS,
    ROWS_FILE,
    TRIAL_FILE,
    Corruption,
    TrialRows,
    first_occurrences,
    is_merged,
    read_rows,
    read_trial_record,
    rebuild_trial_record,
)
from sampler.errors import InputError, counted

SWEEP_FILE = "sweep.json"
SWEEP_COPY_FILE = "sweep.copy.json"
FETCHING_MARKER = "fetching.json"  # exists while the sweep is being downloaded into the folder
SLURM_FOLDER = "slurm"  # job scripts and logs, created before the sweep starts
QUARANTINE_FOLDER = "quarantine"
QUARANTINE_FOLDERS = (QUARANTINE_FOLDER, "set-aside")  # the second: in sweeps of older versions
LISTED = 5  # sweeps of a folder that a message names
TRIALS_PER_GROUP = 64  # of trials that are not compacted


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialGroup:
    """Trials whose rows are best read together. Created by `Store.groups`, read by `Store.group_rows`."""

    trial_ids: tuple[str, ...]
    file: str | None = None  # the compacted file that holds them


class Store:
    """Reads one sweep folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.corrupted: dict[Path, Corruption] = {}  # files skipped so far
        self.ignored_columns: set[str] = set()  # of a newer version, ignored so far
        self._compacted = CompactedFiles(folder=self.folder / COMPACTED_FOLDER)

    def read_sweep_record(self) -> dict[str, Any] | None:
        """The content of sweep.json; None for a folder without a sweep; InputError for a folder that cannot be used."""
        path = self.folder / SWEEP_FILE
        if (self.folder / FETCHING_MARKER).exists():
            raise InputError(
                f"{self.folder} holds a partly downloaded sweep; repeat the command with its --upload to download the "
                "rest, or delete the directory"
            )
        try:
            record = read_json(path, checksum_required=False)
        except FileNotFoundError:
            _require_unused(self.folder)
            return None
        except NotADirectoryError as error:
            file = next(path for path in (self.folder, *self.folder.parents) if path.exists())
            raise InputError(f"{file} is a file; a sweep needs a directory") from error
        except CorruptedFile as error:
            check_version(path, _stated_schema(path), f" (or is corrupted: {SWEEP_COPY_FILE} is a copy of it)")
            raise InputError(f"{path} {error}; replace it with {SWEEP_COPY_FILE}, or use another directory") from error
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        check_version(path, record.get("schema"))
        problem = sweep_record_problem(record)
        if problem is not None:
            raise InputError(f"{path} {problem}: it was edited, or does not belong to a sweep; use another directory")
        return record

    def documents(self, task: str) -> pa.Table:
        path = self.documents_path(task)
        try:
            documents, ignored = read_table(path, DOCUMENTS)
        except FileNotFoundError as error:
            raise InputError(f"{path} does not exist: the sweep in {self.folder} has no documents of {task}") from error
        except CorruptedFile as error:
            raise InputError(f"{path} {error}; continue the sweep to restore it") from error
        self.ignored_columns |= ignored
        return documents.select(DOCUMENTS.names)

    def documents_path(self, task: str) -> Path:
        """InputError if the name of a task cannot be a file name."""
        return path_below(self.folder / "documents", f"{task}.parquet")

    def trial_ids(self) -> list[str]:
        folders = self.trial_folders()  # first: a folder is removed after its trial was compacted
        return sorted({*folders, *self._compacted_now().file_of})

    def trial_folders(self) -> list[str]:
        """Ids of trials that have a folder, which are all but the compacted ones. Other folders are ignored."""
        try:
            with os.scandir(self.folder / "trials") as entries:
                folders = (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
                return sorted(name for name in folders if name.isalnum())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def trial_folder(self, trial_id: str) -> Path:
        assert trial_id.isalnum(), trial_id
        return self.folder / "trials" / trial_id

    def trials(self) -> dict[str, dict[str, Any]]:
        """The content of each trial.json, by trial id. Trials may share objects: do not change them."""
        found = dict(self.iter_trials())
        return {**found, **dict(self._compacted_now().records(without=found))}

    def attempts(self) -> pa.Table:
        """The attempts of all trials as a table, `schema.ATTEMPTS`: a tenth of the time and memory of `trials`."""
        found = attempts_of(self.iter_trials())
        compacted = self._compacted_now().attempts(without=set(found["trial_id"].to_pylist()))
        return pa.concat_tables([found, compacted]).unify_dictionaries()

    def iter_trials(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The id and trial.json of each trial that has a folder, one at a time."""
        for trial_id in self.trial_folders():
            record = self.trial(trial_id)
            if record is not None:
                yield trial_id, record

    def compacted_trial_ids(self) -> set[str]:
        return set(self._compacted_now().file_of)

    def compacted_trials(self, without: Collection[str]) -> pa.Table:
        """All compacted trials, as `compaction.SUMMARY`; `without`: ids that `iter_trials` has already yielded."""
        return self._compacted_now().trials(without)

    def _compacted_now(self) -> CompactedFiles:
        self._compacted = self._compacted.refreshed()
        self._add_corrupted(self._compacted.corrupted)
        return self._compacted

    def trial(self, trial_id: str) -> dict[str, Any] | None:
        """The content of trial.json, rebuilt from the trial's rows if it is corrupted or missing."""
        try:
            return read_trial_record(f"{self.folder}/trials/{trial_id}")  # as a string: building a Path takes longer
        except FileNotFoundError:
            if (file := self._compacted_now().file_of.get(trial_id)) is not None:
                return file.record(trial_id)
        except (CorruptedFile, OSError) as error:
            self._add_corrupted([Corruption(path=self.trial_folder(trial_id) / TRIAL_FILE, problem=str(error))])
        folder = self.trial_folder(trial_id)
        return rebuild_trial_record(self._read_rows(trial_id), finished=is_merged(folder))

    def has_rows_file(self, trial_id: str) -> bool:
        """Whether a finished trial has its rows.parquet or is in a compacted file."""
        path = self.trial_folder(trial_id) / ROWS_FILE
        return trial_id in self._compacted.file_of or path.exists() or trial_id in self._compacted_now().file_of

    def completed_documents(self, trial_id: str) -> set[str]:
        """Ids of the documents that have a row."""
        return set(self._read_rows(trial_id, ["doc_id"])["doc_id"].to_pylist())

    def rows(
        self, trial_ids: Iterable[str] | None = None, columns: Sequence[str] | None = None, *, verify: bool = True
    ) -> pa.Table:
        """Rows of some or all trials, one per trial and document, columns in the schema's order.

        verify=False skips the checksums of whole files.
        """
        tables = self.tables(trial_ids, columns, verify=verify)
        return pa.concat_tables([select_fields(ROWS, columns).empty_table(), *tables])

    def tables(
        self,
        trial_ids: Iterable[str] | None = None,
        columns: Sequence[str] | None = None,
        *,
        where: pc.Expression | None = None,
        verify: bool = True,
    ) -> Iterator[pa.Table]:
        """Like `rows`, but yields one table per group of trials, so that few rows are in memory at once.

        `where` filters the rows and can only use the chosen columns.
        """
        unknown = set(columns or ()) - set(ROWS.names)
        assert not unknown, unknown
        for group in self.groups(trial_ids):
            rows = self.group_rows(group, columns, verify=verify)
            yield rows if where is None else rows.filter(where)

    def groups(self, trial_ids: Iterable[str] | None = None) -> list[TrialGroup]:
        """All trials, or some, in groups that are read together."""
        if trial_ids is None:
            folders = self.trial_folders()  # first: a folder is removed after its trial was compacted
            file_of = self._compacted_now().file_of
            compacted = file_of.keys() - set(folders)
        else:
            requested, file_of = list(trial_ids), self._compacted_now().file_of
            compacted = {name for name in requested if name in file_of and not self.trial_folder(name).is_dir()}
            folders = [name for name in requested if name not in compacted]
        by_file: dict[str, list[str]] = {}
        for trial_id in sorted(compacted):
            by_file.setdefault(file_of[trial_id].path.name, []).append(trial_id)
        starts = range(0, len(folders), TRIALS_PER_GROUP)
        return [
            *(TrialGroup(trial_ids=tuple(folders[start : start + TRIALS_PER_GROUP])) for start in starts),
            *(TrialGroup(trial_ids=tuple(ids), file=name) for name, ids in sorted(by_file.items())),
        ]

    def group_rows(self, group: TrialGroup, columns: Sequence[str] | None = None, *, verify: bool = True) -> pa.Table:
        schema = select_fields(ROWS, columns)
        if group.file is not None:
            path = self._compacted.folder / group.file
            try:
                found = read_trials_rows(path, group.trial_ids, columns, verify=verify)
                return self._note_findings(found).select(schema.names)
            except FileNotFoundError:  # replaced meanwhile
                self._compacted_now()
        tables = [self._read_rows(trial_id, columns, verify=verify) for trial_id in group.trial_ids]
        return pa.concat_tables([schema.empty_table(), *tables])

    def _read_rows(self, trial_id: str, columns: Sequence[str] | None = None, *, verify: bool = True) -> pa.Table:
        """The rows in the trial's folder, then those that only a compacted file has."""
        folder = self.trial_folder(trial_id)
        needed = None if columns is None else [*columns, "doc_id"]
        rows = self._note_findings(read_rows(folder, needed, verify=verify))
        if trial_id in self._compacted.file_of or not (folder / ROWS_FILE).exists():  # it may be compacted by now
            more = self._compacted_rows(trial_id, needed, verify=verify)
            keep = first_occurrences(more["doc_id"].to_pylist(), set(rows["doc_id"].to_pylist()))
            rows = pa.concat_tables([rows, more.filter(pa.array(keep, pa.bool_()))], promote_options="default")
        return rows.select(select_fields(ROWS, columns).names)

    def _compacted_rows(self, trial_id: str, columns: Sequence[str] | None, *, verify: bool) -> pa.Table:
        for _ in range(READ_ATTEMPTS):
            file = self._compacted_now().file_of.get(trial_id)
            if file is None:
                return select_fields(ROWS, columns).empty_table()
            with suppress(FileNotFoundError):  # replaced meanwhile
                return self._note_findings(read_trials_rows(file.path, [trial_id], columns, verify=verify))
        raise StoreError(f"{self._compacted.folder} changes too quickly to be read")

    def _note_findings(self, found: TrialRows) -> pa.Table:
        self._add_corrupted(found.corrupted)
        self.ignored_columns |= found.ignored_columns
        return found.rows

    @property
    def notices(self) -> list[str]:
        """Sentences about columns of a newer version that were ignored so far."""
        if not self.ignored_columns:
            return []
        names = ", ".join(sorted(self.ignored_columns))
        return [f"{self.folder} was written by a newer version; its columns {names} are ignored: upgrade to use them"]

    def add_findings(self, other: "Store") -> None:
        """Adds what another reader of the same folder skipped or ignored."""
        self.corrupted.update(other.corrupted)
        self.ignored_columns |= other.ignored_columns

    def count_quarantined_files(self) -> int:
        folders = (self.folder / name for name in QUARANTINE_FOLDERS)
        return sum(path.is_file() for folder in folders for path in folder.rglob("*"))

    def check(self) -> list[str]:
        """Reads every byte; returns a sentence for each corrupted file."""
        found = [corruption for task in self._tasks() for corruption in self._check_documents(task)]
        for name in compacted_names(self._compacted.folder):
            found += self._check_compacted(self._compacted.folder / name)
        for trial_id in self.trial_folders():
            found += self._check_trial(trial_id)
        if active_writer(self.folder) is not None:
            found = [corruption for corruption in found if not corruption.torn]  # being written now
        self._add_corrupted(found)
        return [str(corruption) for corruption in found]

    def _check_trial(self, trial_id: str) -> list[Corruption]:
        folder = self.trial_folder(trial_id)
        try:
            record = read_trial_record(folder)
            found = read_rows(folder, ["doc_id"])
            if read_trial_record(folder) != record:
                return self._check_trial(trial_id)  # changed meanwhile
        except FileNotFoundError:
            return read_rows(folder, ["doc_id"]).corrupted
        except CorruptedFile as error:
            corruption = Corruption(path=folder / TRIAL_FILE, problem=str(error))
            return [*read_rows(folder, ["doc_id"]).corrupted, corruption]
        if record["status"] == "finished" and not found.corrupted and record["rows"] != len(found.rows):
            return [_wrong_row_count(folder / ROWS_FILE, trial_id, record["rows"], len(found.rows))]
        return found.corrupted

    def _check_compacted(self, path: Path) -> list[Corruption]:
        """Reads every byte, and compares each trial's number of rows with its trial.json."""
        try:
            verify_table(path)
            compacted = read_compacted(path)
            list(compacted.parse())  # checks the trial.json of each trial
            rows, _ = read_table(path, ROWS, verify=False)  # checks the values
        except FileNotFoundError:  # replaced meanwhile
            return []
        except CorruptedFile as error:
            return [Corruption(path=path, problem=str(error))]
        counts = Counter(rows["trial_id"].to_pylist())
        trials = compacted.trials
        expected = Counter(dict(zip(trials["trial_id"].to_pylist(), trials["rows"].to_pylist(), strict=True)))
        wrong = sorted(
            trial_id for trial_id in counts.keys() | expected.keys() if counts[trial_id] != expected[trial_id]
        )
        return [_wrong_row_count(path, trial_id, expected[trial_id], counts[trial_id]) for trial_id in wrong[:1]]

    def _tasks(self) -> list[str]:
        return sorted(path.stem for path in (self.folder / "documents").glob("*.parquet"))

    def _check_documents(self, task: str) -> list[Corruption]:
        path = self.documents_path(task)
        try:
            verify_table(path)
        except CorruptedFile as error:
            return [Corruption(path=path, problem=str(error))]
        return []

    def _add_corrupted(self, found: Iterable[Corruption]) -> None:
        self.corrupted.update((one.path, one) for one in found if not one.torn)


def _wrong_row_count(path: Path, trial_id: str, expected: int, found: int) -> Corruption:
    problem = f"should have {counted(expected, 'row')} of trial {trial_id}, but has {found}"
    return Corruption(path=path, problem=problem)


def _stated_schema(path: Path) -> int:
    """The version in a file with a wrong checksum if it is newer, since it may use others; else SCHEMA_VERSION."""
    try:
        schema = json.loads(read_regular(path))["schema"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError, CorruptedFile):
        return SCHEMA_VERSION
    return schema if isinstance(schema, int) and schema > COMPACTED_SCHEMA_VERSION else SCHEMA_VERSION


def _require_unused(folder: Path) -> None:
    """Raises InputError unless the folder is missing, empty, or was abandoned before sweep.json was written."""
    try:
        names = {path.name for path in folder.iterdir() if not is_temporary(path.name)}
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}") from error
    allowed = {SLURM_FOLDER} | ({LOCK_FOLDER, "documents"} if LOCK_FOLDER in names else set())
    if sweeps := sorted(path.parent for path in folder.glob(f"*/{SWEEP_FILE}")):
        some = ", ".join(map(str, sweeps[:LISTED])) + (f" and {len(sweeps) - LISTED} more" if sweeps[LISTED:] else "")
        raise InputError(f"{folder} is not a sweep but holds {counted(len(sweeps), 'sweep')}: choose {some}")
    if names - allowed:
        some = ", ".join(sorted(names - allowed)[:3])
        raise InputError(f"{folder} is not empty (it holds {some}) and has no {SWEEP_FILE}; use another directory")

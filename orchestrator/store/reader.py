"""A sweep's folder as any process may read it, at any time, also while another writes. Changes nothing.

    sweep.json, sweep.copy.json    the request, twice
    documents/<task>.parquet       question, choices and gold, once
    trials/<trial_id>/trial.json   what the trial is, its status and attempts
                      rows-<n>.arrows   rows as they came; one file per attempt and writer
                      rows.parquet      all rows, when the trial has ended; of a small one in Arrow's form too
    set-aside/                     damaged files, moved here and never deleted
    lock/                          who writes
    upload.jsonl                   which files are in the copy at --upload URL, and in which version

Rows are the truth: what is done is what rows say. What is damaged is skipped and noted in `damage`.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.store import folder_checks
from orchestrator.store.errors import Damaged
from orchestrator.store.lock import writer_of
from orchestrator.store.schema import DOCUMENTS, ROWS
from orchestrator.store.sealed_parquet import read_table, verify_table
from orchestrator.store.trial_folder import FACTS, TABLE, Damage, is_compact, read_facts, read_rows, rebuild_facts
from sampler.errors import InputError


class Store:
    """Reads one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.damage: dict[Path, Damage] = {}  # what was skipped so far

    def read_request(self) -> dict[str, Any] | None:
        """sweep.json; None where no sweep has begun; InputError for a folder that cannot be used."""
        return folder_checks.read_request(self.folder)

    def documents(self, task: str) -> pa.Table:
        path = self.documents_path(task)
        try:
            verify_table(path)
            return read_table(path, DOCUMENTS)
        except FileNotFoundError as problem:
            raise InputError(
                f"{path} does not exist: the sweep in {self.folder} has no documents of {task}"
            ) from problem
        except Damaged as problem:
            raise InputError(f"{path} {problem}; continuing the sweep writes it again") from problem

    def documents_path(self, task: str) -> Path:
        assert task == Path(task).name, task
        return self.folder / "documents" / f"{task}.parquet"

    def trial_ids(self) -> list[str]:
        """Folders named as a trial is; whatever else somebody put beside them is left alone."""
        try:
            with os.scandir(self.folder / "trials") as entries:
                return sorted(entry.name for entry in entries if entry.name.isalnum() and entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def trial_folder(self, trial_id: str) -> Path:
        assert trial_id.isalnum(), trial_id
        return self.folder / "trials" / trial_id

    def trials(self) -> dict[str, dict[str, Any]]:
        """Each trial's trial.json. One that is damaged or missing is made from the trial's rows."""
        found = ((trial_id, self.trial(trial_id)) for trial_id in self.trial_ids())
        return {trial_id: facts for trial_id, facts in found if facts is not None}

    def trial(self, trial_id: str) -> dict[str, Any] | None:
        folder = self.trial_folder(trial_id)
        try:
            return read_facts(folder)
        except FileNotFoundError:
            pass
        except (Damaged, OSError) as problem:
            self._note([Damage(path=folder / FACTS, problem=str(problem))])
        reading = read_rows(folder)
        self._note(reading.damage)
        return rebuild_facts(reading.rows, finished=is_compact(folder))

    def done(self, trial_id: str) -> set[str]:
        """The documents that have a row."""
        reading = read_rows(self.trial_folder(trial_id), ["doc_id"])
        self._note(reading.damage)
        return set(reading.rows["doc_id"].to_pylist())

    def counts(self) -> dict[str, int]:
        """Rows of each trial; of finished ones as stated when they ended."""
        return {
            trial_id: facts["rows"] if facts["status"] == "finished" else len(self.done(trial_id))
            for trial_id, facts in self.trials().items()
        }

    def rows(
        self,
        trial_ids: Iterable[str] | None = None,
        columns: Sequence[str] | None = None,
        *,
        where: pc.Expression | None = None,
        verify: bool = True,
    ) -> pa.Table:
        """Rows of some or all trials, each (trial, document) once, columns in the schema's order.

        `where` may only speak of the chosen columns. With verify=False, whole-file checksums are not read.
        """
        tables = list(self.tables(trial_ids, columns, where=where, verify=verify))
        names = [name for name in ROWS.names if columns is None or name in columns]
        return pa.concat_tables([pa.schema([ROWS.field(name) for name in names], ROWS.metadata).empty_table(), *tables])

    def tables(
        self,
        trial_ids: Iterable[str] | None = None,
        columns: Sequence[str] | None = None,
        *,
        where: pc.Expression | None = None,
        verify: bool = True,
    ) -> Iterator[pa.Table]:
        """The same trial by trial, so that one trial's rows are in memory at a time."""
        unknown = set(columns or ()) - set(ROWS.names)
        assert not unknown, unknown
        for trial_id in self.trial_ids() if trial_ids is None else trial_ids:
            reading = read_rows(self.trial_folder(trial_id), columns, verify=verify)
            self._note(reading.damage)
            yield reading.rows if where is None else reading.rows.filter(where)

    def check(self) -> list[str]:
        """Reads every byte; a sentence for each file that is not as it was written."""
        found = [damage for task in self._tasks() for damage in self._check_documents(task)]
        for trial_id in self.trial_ids():
            found += self._check_trial(self.trial_folder(trial_id))
        if writer_of(self.folder) is not None:
            found = [damage for damage in found if not damage.torn]  # it is writing there now
        self._note(found)
        return [str(damage) for damage in found]

    def _check_trial(self, folder: Path) -> list[Damage]:
        try:
            facts = read_facts(folder)
            reading = read_rows(folder, ["doc_id"])
            if read_facts(folder) != facts:
                return self._check_trial(folder)  # written to meanwhile
        except FileNotFoundError:
            return read_rows(folder, ["doc_id"]).damage
        except Damaged as problem:
            return [*read_rows(folder, ["doc_id"]).damage, Damage(path=folder / FACTS, problem=str(problem))]
        if facts["status"] == "finished" and not reading.damage and facts["rows"] != len(reading.rows):
            differs = f"should have {facts['rows']} rows by {FACTS}, but {len(reading.rows)} are there"
            return [Damage(path=folder / TABLE, problem=differs)]
        return reading.damage

    def _tasks(self) -> list[str]:
        return sorted(path.stem for path in (self.folder / "documents").glob("*.parquet"))

    def _check_documents(self, task: str) -> list[Damage]:
        path = self.documents_path(task)
        try:
            verify_table(path)
        except Damaged as problem:
            return [Damage(path=path, problem=str(problem))]
        return []

    def _note(self, damage: Iterable[Damage]) -> None:
        self.damage.update((one.path, one) for one in damage if not one.torn)

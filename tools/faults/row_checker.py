"""Checks what must always hold for the rows of a sweep, no matter which faults hit it.

A row that was once on disk stays as it is, in every column: no document is run again. Only rows of a file that was
corrupted on purpose may be rerun. And apart from times and places, each row equals that of the undisturbed sweep.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.store import Store

Key = tuple[str, str]  # trial and document
Row = Mapping[str, Any]
VARYING_COLUMNS = (
    *("seconds", "batch_seconds", "batch_id", "attempt", "actor", "node", "device", "calibration", "started_at"),
    "sweep",
)
LOST, DUPLICATED, WRONG, RERUN, OTHER = "lost", "doubled", "wrong", "run again", "other"  # as in docs/faults.jsonl
KINDS = (LOST, DUPLICATED, WRONG, RERUN, OTHER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A violation of a check."""

    kind: str
    text: str
    rows: int = 0

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


def other_problem(text: str) -> Problem:
    return Problem(kind=OTHER, text=text)


class RowChecker:
    """Compares the rows of one sweep with those of earlier checks and with the undisturbed sweep."""

    def __init__(self, folder: Path, reference: Mapping[Key, Row]) -> None:
        self._folder, self._reference = folder, reference
        self._seen: dict[Key, Row] = {}

    def allow_rerun(self, trial_id: str) -> None:
        """Accepts that rows of a trial are rerun, because one of its files was corrupted on purpose."""
        for key in [key for key in self._seen if key[0] == trial_id]:
            del self._seen[key]

    def check(self) -> list[Problem]:
        """Compares all rows now on disk and remembers them for the next check."""
        listed = _read_rows(self._folder)
        rows = {_key(row): row for row in listed}
        problems = _problems(DUPLICATED, [_key(row) for row in listed if rows[_key(row)] is not row])
        problems += _problems(LOST, self._seen.keys() - rows.keys())
        kept = self._seen.keys() & rows.keys()
        problems += _problems(RERUN, [key for key in kept if rows[key] != self._seen[key]])
        problems += _problems(WRONG, [key for key, row in rows.items() if self._is_wrong(key, row)])
        self._seen = rows
        return problems

    def _is_wrong(self, key: Key, row: Row) -> bool:
        return key not in self._reference or _fixed_columns(row) != _fixed_columns(self._reference[key])

    def check_finished(self) -> list[Problem]:
        """Also checks that no row is missing, no file is corrupted, and all trials are finished."""
        problems = self.check()
        problems += _problems(LOST, self._reference.keys() - self._seen.keys())
        store = Store(self._folder)
        problems += [other_problem(f"still corrupted: {message}") for message in store.check()]
        states = {trial_id: facts["status"] for trial_id, facts in store.trials().items()}
        unfinished = [(trial, state) for trial, state in states.items() if state != "finished"]
        return problems + [other_problem(f"trial {trial} is {state}") for trial, state in unfinished]


def read_reference(folder: Path) -> dict[Key, Row]:
    return {_key(row): row for row in _read_rows(folder)}


def _read_rows(folder: Path) -> list[Row]:
    return list(Store(folder).rows().to_pylist())


def _key(row: Row) -> Key:
    return row["trial_id"], row["doc_id"]


def _fixed_columns(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in VARYING_COLUMNS}


def _problems(kind: str, keys: Iterable[Key]) -> list[Problem]:
    affected = sorted(keys)
    if not affected:
        return []
    trial, document = affected[0]
    return [
        Problem(kind=kind, rows=len(affected), text=f"{len(affected)} rows {kind}, first {document} of trial {trial}")
    ]

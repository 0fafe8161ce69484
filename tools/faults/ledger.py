"""What must be true of a sweep's rows at every moment, whatever happens to it. Only reads; knows no faults.

A row that was once seen on disk stays as it is, to the last column: a document is not run again. Only rows of a file
that was damaged on purpose may be made again. And each row is that of the undisturbed sweep but for times and places.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.store import Store

Key = tuple[str, str]  # trial and document
Row = Mapping[str, Any]
OF_THE_MOMENT = (
    *("seconds", "batch_seconds", "batch_id", "attempt", "actor", "node", "device", "calibration", "started_at"),
    "sweep",
)
LOST, DOUBLED, WRONG, REMADE, OTHER = "lost", "doubled", "wrong", "run again", "other"
KINDS = (LOST, DOUBLED, WRONG, REMADE, OTHER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that must not be."""

    kind: str
    text: str
    rows: int = 0

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


def other(text: str) -> Problem:
    return Problem(kind=OTHER, text=text)


def lasting(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in OF_THE_MOMENT}


class Ledger:
    """The rows seen so far of one sweep."""

    def __init__(self, folder: Path, reference: Mapping[Key, Row]) -> None:
        self._folder, self._reference = folder, reference
        self._seen: dict[Key, Row] = {}

    def forgive(self, trial_id: str) -> None:
        """Rows of this trial may be gone, since one of its files was damaged."""
        for key in [key for key in self._seen if key[0] == trial_id]:
            del self._seen[key]

    def look(self) -> list[Problem]:
        """What is wrong now."""
        listed = read(self._folder)
        rows = {_key(row): row for row in listed}
        problems = _found(DOUBLED, [_key(row) for row in listed if rows[_key(row)] is not row])
        problems += _found(LOST, self._seen.keys() - rows.keys())
        kept = self._seen.keys() & rows.keys()
        problems += _found(REMADE, [key for key in kept if rows[key] != self._seen[key]])
        problems += _found(WRONG, [key for key, row in rows.items() if self._is_wrong(key, row)])
        self._seen = rows
        return problems

    def _is_wrong(self, key: Key, row: Row) -> bool:
        return key not in self._reference or lasting(row) != lasting(self._reference[key])

    def look_at_the_end(self) -> list[Problem]:
        """The same, and no row may be missing and no file be damaged."""
        problems = self.look()
        problems += _found(LOST, self._reference.keys() - self._seen.keys())
        store = Store(self._folder)
        problems += [other(f"still damaged: {sentence}") for sentence in store.check()]
        states = {trial_id: facts["status"] for trial_id, facts in store.trials().items()}
        problems += [other(f"trial {trial} is {state}") for trial, state in states.items() if state != "finished"]
        return problems


def read(folder: Path) -> list[Row]:
    return list(Store(folder).rows().to_pylist())


def reference_of(folder: Path) -> dict[Key, Row]:
    return {_key(row): row for row in read(folder)}


def _key(row: Row) -> Key:
    return row["trial_id"], row["doc_id"]


def _found(kind: str, keys: Iterable[Key]) -> list[Problem]:
    found = sorted(keys)
    if not found:
        return []
    trial, document = found[0]
    return [Problem(kind=kind, rows=len(found), text=f"{len(found)} rows {kind}, first {document} of trial {trial}")]

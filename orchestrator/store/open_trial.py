"""One trial's folder while it is written to. Knows no locks of folders and no other trials.

What is kept in memory (the facts of trial.json, the documents done) is made again from disk whenever a writer starts.
Every step leaves a folder from which each acknowledged row can be read exactly once.
"""

import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.store.atomic import Disk, make_folders, write_file
from orchestrator.store.errors import Damaged, RowsLost, StoreError
from orchestrator.store.recovery import recover_trial
from orchestrator.store.schema import ROWS
from orchestrator.store.sealed_json import write_object
from orchestrator.store.sealed_parquet import encode_table, hash_file
from orchestrator.store.segments import SegmentWriter
from orchestrator.store.trial_folder import (
    COPIED,
    FACTS,
    SUMMARY,
    TABLE,
    Damage,
    first_times,
    fresh_facts,
    lost_attempts,
    read_facts,
    read_rows,
    segment_numbers,
    segment_path,
)

REQUIRED = tuple(position for position, column in enumerate(ROWS) if not column.nullable)
TRIAL_LEVEL = ("settings", "layers", SUMMARY)  # facts about the trial; all others are about the attempt


class OpenTrial:
    """Whoever calls a method holds `guard`."""

    def __init__(self, disk: Disk, folder: Path, aside: Path, spec: Mapping[str, Any] | None) -> None:
        self._disk, self._folder, self._aside = disk, folder, aside
        self._found: list[Damage] = []  # and set aside
        self.guard = threading.RLock()
        self._segment: SegmentWriter | None = None
        self._facts, self._done = self._load(spec)

    def _load(self, spec: Mapping[str, Any] | None) -> tuple[dict[str, Any], set[str]]:
        """From disk, put in order first if it was damaged since the folder was opened."""
        reading = read_rows(self._folder, ["doc_id"])
        facts, broken = self._stored_facts()
        if broken or reading.damage:
            self._found += recover_trial(self._disk, self._folder, self._aside)
            reading = read_rows(self._folder, ["doc_id"])
            facts, _ = self._stored_facts()
        if facts is None and spec is None:
            raise StoreError(f"trial {self._folder.name} has no {FACTS}; it must begin first")
        return facts or fresh_facts(spec or {}), set(reading.rows["doc_id"].to_pylist())

    def _stored_facts(self) -> tuple[dict[str, Any] | None, bool]:
        """trial.json, and whether it is damaged."""
        try:
            return read_facts(self._folder), False
        except FileNotFoundError:
            return None, False
        except Damaged:
            return None, True

    def found(self) -> list[Damage]:
        """What was damaged since this trial was opened."""
        return list(self._found)

    def done(self) -> set[str]:
        return set(self._done)

    def close(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def begin(self, spec: Mapping[str, Any], facts: Mapping[str, Any]) -> int:
        self.close()  # an attempt has its own file
        make_folders(self._disk, self._folder)
        attempt = len(self._facts["attempts"])
        attempts = [*self._facts["attempts"], {"attempt": attempt, "started_at": _now()}]
        self._record({"status": "running", "trial": dict(spec), "attempts": attempts}, facts)
        return attempt

    def append(self, attempt: int, batch: pa.RecordBatch) -> int:
        rows = _new_rows(batch, self._done)
        if len(rows):
            self._reopen(attempt)
            self._write(rows)
            self._done.update(rows["doc_id"].to_pylist())
        return len(rows)

    def _reopen(self, attempt: int) -> None:
        """A late row of a finished trial makes it unfinished; attempts that a damaged trial.json forgot come back."""
        known = self._facts["attempts"]
        if self._facts["status"] == "finished" or attempt >= len(known):
            attempts = [*known, *lost_attempts(range(len(known), attempt + 1))]
            make_folders(self._disk, self._folder)
            self._record({"status": "running", "attempts": attempts}, {})

    def _write(self, rows: pa.RecordBatch) -> None:
        if self._segment is None:
            number = max(segment_numbers(self._folder), default=-1) + 1
            self._segment = SegmentWriter(self._disk, segment_path(self._folder, number))
        try:
            self._segment.append(rows)
        except OSError:
            self.close()  # later rows go to a new file
            raise

    def finish(self, facts: Mapping[str, Any], wanted: Sequence[str]) -> None:
        """Rows to Parquet, then trial.json, then the streams go: in this order a crash in between loses nothing."""
        self.close()
        missing = [doc_id for doc_id in wanted if doc_id not in self._done]
        if missing:
            raise StoreError(
                f"trial {self._folder.name} has no row for {len(missing)} documents, {missing[0]} the first"
            )
        if segment_numbers(self._folder) or not self._table.exists():
            self._merge(wanted)
        state = {"status": "finished", "sha256": hash_file(self._table), "rows": len(self._done)}
        self._record(state, {"ended_at": _now(), **facts})
        self._remove_segments()

    @property
    def _table(self) -> Path:
        return self._folder / TABLE

    def _merge(self, wanted: Sequence[str]) -> None:
        rows = self._all_rows()
        order = {doc_id: position for position, doc_id in enumerate(wanted)}
        keys = [(order.get(doc_id, len(order)), doc_id) for doc_id in rows["doc_id"].to_pylist()]
        rows = rows.take(pa.array(sorted(range(len(keys)), key=keys.__getitem__), pa.int64()))
        write_file(self._disk, self._table, encode_table(rows.combine_chunks(), COPIED))

    def _all_rows(self) -> pa.Table:
        """What the disk has, which counts; what the memory has only tells that something is gone."""
        before = self._done
        self._facts, self._done = self._load(self._facts["trial"])
        if before - self._done:
            files = "; ".join(str(one) for one in self._found)
            raise RowsLost(f"{len(before - self._done)} rows of {self._folder.name} are to be made again: {files}")
        reading = read_rows(self._folder)
        if reading.damage:  # now, though not a moment ago
            raise StoreError(f"{reading.damage[0]}; the disk does not read reliably")
        return reading.rows

    def _remove_segments(self) -> None:
        numbers = segment_numbers(self._folder)
        for number in numbers:
            self._disk.remove(segment_path(self._folder, number))
        if numbers:
            self._disk.sync_folder(self._folder)

    def fail(self, reason: str) -> None:
        self.close()
        self._record({"status": "failed"}, {"ended_at": _now(), "reason": reason})

    def recover(self) -> None:
        """Looks at every byte again and sets aside what is damaged."""
        self.close()
        self._found += recover_trial(self._disk, self._folder, self._aside)
        self._facts, self._done = self._load(self._facts["trial"])

    def _record(self, state: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """trial.json anew; what is in memory changes only when the file has."""
        new = {**self._facts, **state, SUMMARY: None, **{key: facts[key] for key in TRIAL_LEVEL if key in facts}}
        *others, last = new["attempts"]
        rest = {key: value for key, value in facts.items() if key not in TRIAL_LEVEL}
        new["attempts"] = [*others, {**last, **rest}]
        write_object(self._disk, self._folder / FACTS, new)
        self._facts = new


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _new_rows(batch: pa.RecordBatch, done: set[str]) -> pa.RecordBatch:
    """The first row of each document that is not done."""
    for position in REQUIRED:
        assert batch.column(position).null_count == 0, f"{ROWS.names[position]} must not be null"
    keep = first_times(batch["doc_id"].to_pylist(), done)
    return batch if all(keep) else batch.filter(pa.array(keep))

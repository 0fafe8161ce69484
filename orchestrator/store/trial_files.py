"""The files of one trial: trial.json, rows.parquet and row segments (rows-<n>.arrows). Reads them, encodes segments.

A segment is an append-only Arrow stream that any Arrow reader can open. The metadata of each batch holds its length and
a checksum, chained to the checksum of the batch before it (the first to the schema), so a batch that was changed,
removed or moved is detected before Arrow decodes it. Nothing after the first bad byte is used. A stream may end after
any batch: counts elsewhere tell whether rows are missing.
"""

import hashlib
import io
import os
import re
import struct
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.core.trial import TRIAL_KEYS
from orchestrator.store.files import (
    CHECKSUM_PLACEHOLDER,
    DECODE_ERRORS,
    CorruptedFile,
    Disk,
    StoreError,
    add_checksum,
    checksum_matches,
    file_version,
    find_checksum,
    read_json,
    read_regular,
    read_table,
)
from orchestrator.store.record_checks import trial_record_problem
from orchestrator.store.schema import (
    ROWS,
    SCHEMA_VERSION,
    check_columns,
    convert_table,
    select_fields,
    values_problem,
)

TRIAL_FILE = "trial.json"
ROWS_FILE = "rows.parquet"
SEGMENT_NAME = re.compile(r"rows-([0-9]+)\.arrows")
TOTALS_KEY = "tally"  # in trial.json: totals of a finished trial; null as soon as its rows change
READ_ATTEMPTS = 100

BATCH_CHECKSUM_KEY = "reuse_sweep_check"
LENGTH_DIGITS = 12  # of a batch's length, after its checksum
IPC_CONTINUATION = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """A file, or the end of one, whose content cannot be used."""

    path: Path
    problem: str
    torn: bool = False  # only truncated, as after a crash or during a write

    def __str__(self) -> str:
        return f"{self.path} {self.problem}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The content of a segment up to the first bad byte."""

    batches: list[pa.RecordBatch]
    schema: pa.Schema = ROWS  # of the version that wrote it
    problem: str | None = None
    torn: bool = False  # ends within a batch, as after a crash or during a write

    @property
    def rows(self) -> pa.Table:
        return pa.Table.from_batches(self.batches, self.schema)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRows:
    """The rows of one trial, one per document, and the files that could not be read in full."""

    rows: pa.Table
    corrupted: list[Corruption] = field(default_factory=list)
    ignored_columns: frozenset[str] = frozenset()  # written by a newer version


# Segments


class SegmentWriter:
    """Writes a new segment. A batch is on disk when `append` returns; after an error nothing more is accepted."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._handle: int | None = None
        self._size = 0
        self._schema = schema_message(ROWS)
        self._digest = digest_of_schema(self._schema)

    def append(self, batch: pa.RecordBatch) -> None:
        message, digest = encode_batch(batch, self._digest, ROWS)
        first = self._handle is None
        if self._handle is None:
            self._handle = self._disk.create(self._path)
        data = self._schema + message if first else message
        try:
            self._disk.write(self._handle, data)
            self._disk.sync(self._handle)
            if first:
                self._disk.sync_folder(self._path.parent)
        except OSError:
            self._remove_partial_batch()
            raise
        self._size += len(data)
        self._digest = digest

    def _remove_partial_batch(self) -> None:
        assert self._handle is not None
        try:
            self._disk.truncate(self._handle, self._size)
        except OSError:
            return  # readers stop before the partial batch

    def close(self) -> None:
        if self._handle is not None:
            self._disk.close(self._handle)
            self._handle = None


def encode_segment(rows: pa.Table) -> bytes:
    """A whole segment at once, with the columns that the rows have."""
    schema = schema_message(rows.schema)
    parts, digest = [schema], digest_of_schema(schema)
    for batch in rows.to_batches():
        message, digest = encode_batch(batch, digest, rows.schema)
        parts.append(message)
    return b"".join(parts)


def encode_batch(batch: pa.RecordBatch, previous: bytes, schema: pa.Schema) -> tuple[bytes, bytes]:
    """The batch as an IPC message, and its digest; `previous` is the digest of what precedes it in the file."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(
            batch, custom_metadata={BATCH_CHECKSUM_KEY: CHECKSUM_PLACEHOLDER + b":" + b"0" * LENGTH_DIGITS}
        )
        message = sink.getvalue()[len(schema_message(schema)) :]
    header = _header_size(message)
    at = message.find(CHECKSUM_PLACEHOLDER, 0, header) + len(CHECKSUM_PLACEHOLDER) + 1
    message = message[:at] + f"{len(message):0{LENGTH_DIGITS}d}".encode() + message[at + LENGTH_DIGITS :]
    message = add_checksum(message, stop=header, previous=previous)
    where = find_checksum(message, stop=header)
    assert where is not None
    return message, message[where]


def schema_message(schema: pa.Schema) -> bytes:
    """The schema as an IPC message, which a segment begins with."""
    message: bytes = schema.serialize().to_pybytes()
    return message


def digest_of_schema(message: bytes) -> bytes:
    return hashlib.sha256(message).hexdigest().encode()


def _header_size(message: bytes) -> int:
    """Size of an IPC message without its body: marker, length, metadata; 0 if this is not an IPC message."""
    if len(message) < 8:
        return 0
    marker, size = struct.unpack_from("<II", message)
    return 8 + size if marker == IPC_CONTINUATION and size else 0


def read_segment(path: Path) -> Segment:
    """The usable part of a trial's segment, which may be growing. Its columns can be converted to ROWS."""
    try:
        segment = decode_segment(read_regular(path))
        check_columns(path, segment.schema, ROWS)
        rows = _checked_rows(convert_table(segment.rows, ROWS), path.parent.name)
        problem = values_problem(rows)
    except CorruptedFile as error:
        problem = str(error)
    return segment if problem is None else Segment(batches=[], problem=problem)


def decode_segment(data: bytes) -> Segment:
    """Raises CorruptedFile if bytes with the right checksum cannot be read as Arrow."""
    schema_size = _header_size(data[:8])
    if schema_size == 0 or schema_size > len(data):
        torn = len(data) < 8 or schema_size > len(data)
        return Segment(batches=[], problem="does not begin with a complete Arrow schema", torn=torn)
    schema = ROWS
    batches: list[pa.RecordBatch] = []
    at, digest = schema_size, digest_of_schema(data[:schema_size])
    while at < len(data):
        message, problem = _message_at(data, at)
        if problem is None and not checksum_matches(message, stop=_header_size(message), previous=digest):
            problem = "does not match its checksum"
        if problem is not None:
            torn = problem == "is truncated"
            problem = f"batch {len(batches)} {problem}"
            return Segment(batches=batches, schema=schema, problem=problem, torn=torn)
        where = find_checksum(message, stop=_header_size(message))
        assert where is not None
        digest = message[where]
        try:
            if not batches:  # the first batch's checksum covers the schema
                schema = pa.ipc.read_schema(pa.py_buffer(data[:schema_size]))
            batches.append(pa.ipc.read_record_batch(pa.py_buffer(message), schema))
        except (OSError, *DECODE_ERRORS) as error:
            raise CorruptedFile(f"cannot be read as Arrow ({error})") from error
        at += len(message)
    return Segment(batches=batches, schema=schema)


def _message_at(data: bytes, at: int) -> tuple[bytes, str | None]:
    """The bytes of the message at a position, not yet verified, and None; or no bytes, and what is wrong."""
    header = _header_size(data[at : at + 8])
    if len(data) - at < 8 or (header and at + header > len(data)):
        return b"", "is truncated"
    where = find_checksum(data, start=at, stop=at + header)
    if where is None:
        return b"", "has no checksum"
    length = data[where.stop + 1 : where.stop + 1 + LENGTH_DIGITS]
    if not length.isdigit() or int(length) < header:
        return b"", "has no length"
    if at + int(length) > len(data):
        return b"", "is truncated"
    return data[at : at + int(length)], None


# The rows of a trial


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"rows-{number}.arrows"


def segment_numbers(folder: Path) -> list[int]:
    """The numbers of the segments in a folder, in the order in which they were written."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = (SEGMENT_NAME.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def is_merged(folder: Path) -> bool:
    """Whether rows.parquet holds all rows."""
    return (folder / ROWS_FILE).exists() and not segment_numbers(folder)


def read_rows(folder: Path, columns: Collection[str] | None = None, *, verify: bool = True) -> TrialRows:
    """The first row of each document, converted to this version's columns; without `columns`, newer ones come last.

    With verify=False, a large rows.parquet is checked page by page as it is read.

    A writer may merge the segments meanwhile. It creates rows.parquet before it removes them, so all rows are seen if
    reading starts over whenever a file is gone or rows.parquet was replaced (segment numbers can then be reused).
    """
    for _ in range(READ_ATTEMPTS):
        before = file_version(folder / ROWS_FILE)
        try:
            found = _read_rows_once(folder, columns, verify=verify)
        except FileNotFoundError:
            if not folder.is_dir():
                return TrialRows(rows=select_fields(ROWS, columns).empty_table())
            continue
        if file_version(folder / ROWS_FILE) == before:
            return found
    raise StoreError(f"{folder} changes too quickly to be read")


def _read_rows_once(folder: Path, columns: Collection[str] | None, *, verify: bool) -> TrialRows:
    numbers = segment_numbers(folder)
    needed = None if columns is None else {*columns, "doc_id"}
    tables: list[pa.Table] = []
    corrupted: list[Corruption] = []
    ignored: frozenset[str] = frozenset()
    try:
        table, ignored = read_merged(folder, needed, verify=verify)
        tables.append(table)
    except CorruptedFile as error:
        corrupted.append(Corruption(path=folder / ROWS_FILE, problem=str(error)))
    except FileNotFoundError:
        if segment_numbers(folder) != numbers:
            raise  # merged since
    for number in numbers:
        path = segment_path(folder, number)
        try:
            segment = read_segment(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            segment = Segment(batches=[], problem=f"cannot be read: {error.strerror}")
        tables.append(_select(convert_table(segment.rows, ROWS), needed))
        ignored |= set(segment.schema.names) - set(ROWS.names)
        if segment.problem is not None:
            corrupted.append(Corruption(path=path, problem=segment.problem, torn=segment.torn))
    rows = pa.concat_tables(tables or [select_fields(ROWS, needed).empty_table()], promote_options="default")
    if numbers:
        keep = first_occurrences(rows["doc_id"].to_pylist())
        rows = rows if all(keep) else rows.filter(pa.array(keep))
    return TrialRows(rows=_select(rows, columns), corrupted=corrupted, ignored_columns=ignored)


def read_merged(
    folder: Path, columns: Collection[str] | None = None, *, verify: bool = True
) -> tuple[pa.Table, frozenset[str]]:
    """rows.parquet, and the names of its columns that are newer. Raises CorruptedFile or FileNotFoundError."""
    rows, ignored = read_table(folder / ROWS_FILE, ROWS, columns, verify=verify)
    return _checked_rows(rows, folder.name), ignored


def _checked_rows(rows: pa.Table, trial_id: str) -> pa.Table:
    """Returns the rows; raises CorruptedFile if some of them belong to another trial."""
    others = rows["trial_id"].unique().to_pylist() if "trial_id" in rows.column_names else []
    if set(others) - {trial_id}:
        raise CorruptedFile("holds rows of another trial")
    return rows


def _select(rows: pa.Table, columns: Collection[str] | None) -> pa.Table:
    return rows if columns is None else rows.select(select_fields(ROWS, columns).names)


def first_occurrences(doc_ids: Iterable[str], done: Set[str] = frozenset()) -> list[bool]:
    """For each document, whether it is neither in `done` nor earlier in the list."""
    seen: set[str] = set()
    keep = []
    for doc_id in doc_ids:
        keep.append(doc_id not in done and doc_id not in seen)
        seen.add(doc_id)
    return keep


# trial.json


def read_trial_record(folder: Path | str) -> dict[str, Any]:
    """The content of trial.json. Raises CorruptedFile or FileNotFoundError."""
    record = read_json(f"{folder}/{TRIAL_FILE}")
    problem = trial_record_problem(record, os.path.basename(folder))
    if problem is not None:
        raise CorruptedFile(problem)
    return record


def new_trial_record(trial: Mapping[str, Any]) -> dict[str, Any]:
    """The trial.json of a trial without rows."""
    record = {"schema": SCHEMA_VERSION, "trial": dict(trial), "status": "running"}
    return {**record, "rows": None, "sha256": None, TOTALS_KEY: None, "attempts": []}


def lost_attempts(numbers: Iterable[int]) -> list[dict[str, Any]]:
    """Stand-ins for attempts that only a corrupted trial.json described."""
    return [{"attempt": number, "reason": "unknown: trial.json was corrupted"} for number in numbers]


def trial_of(rows: pa.Table | pa.RecordBatch) -> dict[str, Any]:
    """The trial that rows belong to, as trial.json describes it."""
    return dict(rows.select(["trial_id", *TRIAL_KEYS]).slice(0, 1).to_pylist()[0])


def rebuild_trial_record(rows: pa.Table, *, finished: bool) -> dict[str, Any] | None:
    """A trial.json from the trial's rows; None if there are none."""
    if not len(rows):
        return None
    record = new_trial_record(trial_of(rows))
    record["attempts"] = lost_attempts(range(pc.max(rows["attempt"]).as_py() + 1))
    return {**record, "status": "finished", "rows": len(rows)} if finished else record

"""Record batches in an append-only Arrow IPC stream with a checksum in each. Knows no trials.

Any Arrow reader can read such a file. A batch's own metadata holds its length and a seal over its bytes, chained to the
seal before it (the first to the schema), so a batch that was damaged, removed or moved is noticed before Arrow decodes
it. What follows the first doubtful byte is not believed. An end at a batch's border is a good end: whether rows are
missing there is told by counts elsewhere.
"""

import hashlib
import io
import struct
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from orchestrator.store.atomic import Disk
from orchestrator.store.errors import OTHER_COLUMNS
from orchestrator.store.schema import ROWS
from orchestrator.store.seal import BLANK, find_seal, is_sealed, seal
from sampler.errors import InputError

KEY = "reuse_sweep_check"
LENGTH = 12  # digits behind the digest
CONTINUATION = 0xFFFFFFFF
SCHEMA = ROWS.serialize().to_pybytes()


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """What a file holds up to its first doubtful byte."""

    batches: list[pa.RecordBatch]
    size: int  # bytes that are believed
    problem: str | None = None
    torn: bool = False  # the file ends within a batch, as after a crash or during a write

    @property
    def rows(self) -> pa.Table:
        return pa.Table.from_batches(self.batches, ROWS)


def encode_batch(batch: pa.RecordBatch, after: bytes) -> tuple[bytes, bytes]:
    """The batch as an IPC message and its digest; `after` is the digest of what precedes it in the file."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, ROWS) as stream:
        stream.write_batch(batch, custom_metadata={KEY: BLANK + b":" + b"0" * LENGTH})
        message = sink.getvalue()[len(SCHEMA) :]
    head = _head_size(message)
    at = message.find(BLANK, 0, head) + len(BLANK) + 1
    message = message[:at] + f"{len(message):0{LENGTH}d}".encode() + message[at + LENGTH :]
    message = seal(message, stop=head, after=after)
    where = find_seal(message, stop=head)
    assert where is not None
    return message, message[where]


def digest_of_schema(schema: bytes) -> bytes:
    return hashlib.sha256(schema).hexdigest().encode()


def _head_size(message: bytes) -> int:
    """Length of the part before the body: marker, length, metadata; 0 where there is none."""
    if len(message) < 8:
        return 0
    marker, size = struct.unpack_from("<II", message)
    return 8 + size if marker == CONTINUATION and size else 0


class SegmentWriter:
    """One new file. A batch is on disk, with the file's name, when append returns; after an error no more is taken."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self._path = path
        self._handle: int | None = None
        self._size = 0
        self._digest = digest_of_schema(SCHEMA)

    def append(self, batch: pa.RecordBatch) -> None:
        message, digest = encode_batch(batch, self._digest)
        first = self._handle is None
        if self._handle is None:
            self._handle = self._disk.create(self._path)
        data = SCHEMA + message if first else message
        try:
            self._disk.write(self._handle, data)
            self._disk.sync(self._handle)
            if first:
                self._disk.sync_folder(self._path.parent)
        except OSError:
            self._cut()
            raise
        self._size += len(data)
        self._digest = digest

    def _cut(self) -> None:
        """Takes a half-written batch away again; where even that fails, readers stop before it."""
        assert self._handle is not None
        try:
            self._disk.truncate(self._handle, self._size)
        except OSError:
            return

    def close(self) -> None:
        if self._handle is not None:
            self._disk.close(self._handle)
            self._handle = None


def encode_segment(rows: pa.Table) -> bytes:
    """A whole file at once."""
    parts, digest = [SCHEMA], digest_of_schema(SCHEMA)
    for batch in rows.to_batches():
        message, digest = encode_batch(batch, digest)
        parts.append(message)
    return b"".join(parts)


def read_segment(path: Path) -> Segment:
    """The believed part of a file, which may be growing meanwhile."""
    segment = decode_segment(path.read_bytes())
    if segment.problem == OTHER_COLUMNS:
        raise InputError(f"{path} {OTHER_COLUMNS}; continue with the version that wrote it, or in another folder")
    return segment


def decode_segment(data: bytes) -> Segment:
    schema_size = _head_size(data[:8])
    if schema_size == 0 or schema_size > len(data):
        torn = len(data) < 8 or schema_size > len(data)
        return Segment(batches=[], size=0, problem="does not begin with a whole Arrow schema", torn=torn)
    batches: list[pa.RecordBatch] = []
    at, digest = schema_size, digest_of_schema(data[:schema_size])
    while at < len(data):
        message, problem = _message_at(data, at)
        if problem is None and not is_sealed(message, stop=_head_size(message), after=digest):
            problem = "does not match its checksum"
        if problem is not None:
            torn = problem == "is cut short"
            return Segment(batches=batches, size=at, problem=f"batch {len(batches)} {problem}", torn=torn)
        if not batches and not pa.ipc.read_schema(pa.py_buffer(data[:schema_size])).equals(ROWS):
            return Segment(batches=[], size=0, problem=OTHER_COLUMNS)
        where = find_seal(message, stop=_head_size(message))
        assert where is not None
        digest = message[where]
        batches.append(pa.ipc.read_record_batch(pa.py_buffer(message), ROWS))
        at += len(message)
    return Segment(batches=batches, size=at)


def _message_at(data: bytes, at: int) -> tuple[bytes, str | None]:
    """The bytes of a message by the length it states, not yet verified; or why there are none."""
    head = _head_size(data[at : at + 8])
    if len(data) - at < 8 or (head and at + head > len(data)):
        return b"", "is cut short"
    where = find_seal(data, start=at, stop=at + head)
    if where is None:
        return b"", "holds no checksum"
    length = data[where.stop + 1 : where.stop + 1 + LENGTH]
    if not length.isdigit() or int(length) < head:
        return b"", "holds no length"
    if at + int(length) > len(data):
        return b"", "is cut short"
    return data[at : at + int(length)], None

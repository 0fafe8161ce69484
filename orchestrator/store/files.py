"""Files that are replaced atomically and detect corruption: the disk primitives, checksummed JSON and Parquet.

A checksummed format leaves room for a marker followed by 64 zeros. The zeros are then replaced by the sha256 of the
whole content, zeros included. A reader can detect a changed byte anywhere before it decodes the content, and programs
that do not know the marker see an ordinary file.
"""

import errno
import hashlib
import io
import json
import os
import stat
import struct
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.store.schema import check_columns, convert_table, select_fields, values_problem

TEMPORARY_SUFFIX = ".tmp"

CHECKSUM_MARKER = b"reuse-sweep-check:"
CHECKSUM_ZEROS = b"0" * 64
CHECKSUM_PLACEHOLDER = CHECKSUM_MARKER + CHECKSUM_ZEROS

MAX_JSON_NUMBER = 2.0**63
JSON_CHECKSUM_KEY = "check"  # the last key of the file

PARQUET_CHECKSUM_KEY = "reuse_sweep_check"
PARQUET_MAGIC = b"PAR1"
# The file of a trial has few rows and many columns: zstd and dictionaries would double the time to read it.
PARQUET_OPTIONS = {"compression": "snappy", "use_dictionary": False, "write_page_checksum": True}
MANY_ROWS_OPTIONS = {"compression": "zstd", "use_dictionary": True, "write_page_checksum": True}
ROW_GROUP_ROWS = 16384
DECODE_ERRORS = (pa.ArrowException, ValueError, KeyError, IndexError, OverflowError, MemoryError)  # by corrupted bytes


class StoreError(RuntimeError):
    """The disk failed, or refused an operation. The message is meant for the user."""


class RowsLost(StoreError):
    """Acknowledged rows were corrupted on disk: their documents must run again."""


class CorruptedFile(Exception):
    """A file's content is not what was written. The message describes how, without the file's name."""


class Disk:
    """The primitives that change files; tests substitute one that fails or crashes at a chosen call.

    A change is durable only after `sync` (content) or `sync_folder` (names) has returned.
    """

    def create(self, path: Path) -> int:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)

    def write(self, handle: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)

    def sync_folder(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


DISK = Disk()


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Replaces a file atomically: readers, also after a crash, see the old content or the new content."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}")
    try:
        handle = disk.create(temporary)
        try:
            disk.write(handle, data)
            disk.sync(handle)
        finally:
            disk.close(handle)
        disk.rename(temporary, path)
    except OSError:
        remove_quietly(temporary)
        raise
    disk.sync_folder(path.parent)


def is_temporary(path: str) -> bool:
    """Whether a path is that of a temporary file, which an interrupted write leaves behind."""
    name = path.rpartition("/")[2]
    return name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)


def remove_temporary_files(folder: Path) -> None:
    for path in folder.iterdir():
        if is_temporary(path.name):
            remove_quietly(path)


def remove_quietly(path: Path) -> None:
    """Cleans up after an error; a second error must not hide the first."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def make_folders(disk: Disk, path: Path) -> None:
    """Creates a folder and its missing parents durably."""
    if path.is_dir():
        return
    make_folders(disk, path.parent)
    try:
        disk.make_folder(path)
    except FileExistsError:
        return
    disk.sync_folder(path.parent)


def move_file(disk: Disk, path: Path, folder: Path) -> Path:
    """Moves a file into another folder under an unused name.

    On some file systems a crash during a rename across folders can lose both names. Where hard links are supported,
    the file therefore has both names for a moment.
    """
    make_folders(disk, folder)
    target = folder / path.name
    number = 1
    while target.exists():
        target = folder / f"{path.name}.{number}"
        number += 1
    try:
        disk.link(path, target)
    except OSError:
        disk.rename(path, target)
        disk.sync_folder(folder)
    else:
        disk.sync_folder(folder)
        disk.remove(path)
    disk.sync_folder(path.parent)
    return target


def open_regular(path: Path | str) -> io.FileIO:
    """Opens a file for reading. Raises CorruptedFile for a directory, and for a pipe or device, which may never end."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO) or (error.errno == errno.ENOENT and os.path.islink(path)):
            raise CorruptedFile("is a link to nothing, or a socket, instead of a file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CorruptedFile("is not a regular file")
    return open(handle, "rb", buffering=0)


def read_regular(path: Path | str) -> bytes:
    with open_regular(path) as file:
        return file.read()


class FileVersion(NamedTuple):
    """Changes whenever a file is replaced or appended to; known without reading the file."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileVersion":
        return cls(size=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)


def file_version(path: Path) -> FileVersion | None:
    """None if there is no such file."""
    try:
        return FileVersion.of(path.stat())
    except OSError:
        return None


def hash_file(path: Path) -> str:
    """The sha256 of a file, as sha256sum prints it."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Checksums inside the content


def add_checksum(data: bytes, *, start: int = 0, stop: int | None = None, previous: bytes = b"") -> bytes:
    """Fills in the placeholder within data[start:stop]; `previous` chains the checksum to preceding content."""
    at = data.rfind(CHECKSUM_PLACEHOLDER, start, stop)
    assert at >= 0, "the data has no checksum placeholder"
    digest = hashlib.sha256(previous + data).hexdigest().encode()
    return data[: at + len(CHECKSUM_MARKER)] + digest + data[at + len(CHECKSUM_PLACEHOLDER) :]


def find_checksum(data: bytes, *, start: int = 0, stop: int | None = None) -> slice | None:
    """The position of the digest after the last marker: a row's text may contain the marker, but comes earlier."""
    at = data.rfind(CHECKSUM_MARKER, start, stop)
    if at < 0 or at + len(CHECKSUM_PLACEHOLDER) > (len(data) if stop is None else stop):
        return None
    return slice(at + len(CHECKSUM_MARKER), at + len(CHECKSUM_PLACEHOLDER))


def checksum_matches(data: bytes, *, start: int = 0, stop: int | None = None, previous: bytes = b"") -> bool:
    where = find_checksum(data, start=start, stop=stop)
    if where is None:
        return False
    digest, view = hashlib.sha256(previous), memoryview(data)
    for part in (view[: where.start], CHECKSUM_ZEROS, view[where.stop :]):
        digest.update(part)
    return digest.hexdigest().encode() == data[where]


# JSON


def encode_json(value: Mapping[str, Any]) -> bytes:
    body = {**value, JSON_CHECKSUM_KEY: CHECKSUM_PLACEHOLDER.decode()}
    return add_checksum(json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def decode_json(data: bytes, *, checksum_required: bool = True) -> dict[str, Any]:
    """The encoded object. A file written by hand has no checksum at all; it is accepted if none is required."""
    by_hand = CHECKSUM_MARKER not in data and f'"{JSON_CHECKSUM_KEY}"'.encode() not in data
    if not checksum_matches(data) and (checksum_required or not by_hand):
        raise CorruptedFile("does not match its own checksum: it was corrupted or edited")
    try:
        value = _JSON.decode(data.decode())
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair cannot be written again
    except (ValueError, RecursionError) as error:  # also for bytes that are not UTF-8
        raise CorruptedFile(f"is not readable JSON ({error})") from error
    if not isinstance(value, dict):
        raise CorruptedFile("is JSON, but not an object")
    value.pop(JSON_CHECKSUM_KEY, None)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it contains {name}")


def _within_limit(number: Any) -> Any:
    if not abs(number) < MAX_JSON_NUMBER:
        raise ValueError("a number is too large")
    return number


_JSON = json.JSONDecoder(
    parse_constant=_refuse_constant,
    parse_int=lambda digits: _within_limit(int(digits)),
    parse_float=lambda digits: _within_limit(float(digits)),
)


def write_json(disk: Disk, path: Path, value: Mapping[str, Any]) -> None:
    write_file(disk, path, encode_json(value))


def read_json(path: Path | str, *, checksum_required: bool = True) -> dict[str, Any]:
    return decode_json(read_regular(path), checksum_required=checksum_required)


# Parquet. Pages have Parquet's own checksums; the checksum in the footer also covers page headers and the footer.


def encode_table(table: pa.Table, metadata: Mapping[str, bytes] | None = None, *, many: bool = False) -> bytes:
    """A Parquet file; `metadata` is added to its key-value metadata. `many`: it has a thousand rows or more."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, **(MANY_ROWS_OPTIONS if many else PARQUET_OPTIONS)) as writer:
        writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        writer.add_key_value_metadata({**(metadata or {}), PARQUET_CHECKSUM_KEY: CHECKSUM_PLACEHOLDER})
    data = sink.getvalue()
    return add_checksum(data, start=_footer_start(data))


def _footer_start(data: bytes) -> int:
    if len(data) < 12:
        raise CorruptedFile(f"is truncated ({len(data)} bytes)")
    length, magic = struct.unpack("<I4s", data[-8:])
    if magic != PARQUET_MAGIC or length > len(data) - 12:
        raise CorruptedFile("does not end like a Parquet file: it was truncated or corrupted")
    return int(len(data) - 8 - length)


def verify_table(path: Path) -> None:
    """Reads every byte; raises CorruptedFile if one has changed."""
    data = read_regular(path)
    if not checksum_matches(data, start=_footer_start(data)):
        raise CorruptedFile("does not match its own checksum")


def read_table(
    path: Path, schema: pa.Schema, columns: Collection[str] | None = None, *, verify: bool = True
) -> tuple[pa.Table, frozenset[str]]:
    """Some columns in the schema's order, and the names of the file's columns that the schema does not have.

    Without `columns`, these other columns come last. Without `verify`, only the pages that are read are checked. Raises
    CorruptedFile if a check fails.
    """
    selected = select_fields(schema, columns)
    try:
        if verify:
            verify_table(path)
        else:
            open_regular(path).close()
        with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            found = file.schema_arrow
            names = None if columns is None else [name for name in selected.names if name in found.names]
            table = file.read(columns=names, use_threads=False)
    except FileNotFoundError:
        raise
    except (OSError, *DECODE_ERRORS) as error:
        raise CorruptedFile(f"cannot be read as Parquet ({error})") from error
    if found.equals(schema):
        return _checked(pa.Table.from_arrays(table.columns, schema=selected)), frozenset()  # without Parquet's metadata
    if not verify:
        verify_table(path)  # a corrupted footer can look like other columns
    extra = check_columns(path, found, schema)
    return _checked(convert_table(table, selected)), extra


def _checked(table: pa.Table) -> pa.Table:
    problem = values_problem(table)
    if problem is not None:
        raise CorruptedFile(problem)
    return table

"""Parquet files that notice a flipped byte anywhere in them. Knows no trials.

Pages carry Parquet's own checksums, for every reader; a seal in the footer covers the rest (page headers and the footer
have none), for readers that ask for it before decoding. A small file may hold columns once more as Arrow, in front of
its footer, where Parquet's readers never look; the seal covers these too.
"""

import hashlib
import io
import struct
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.store.arrow_copy import decode_copy, encode_copy, find_copy
from orchestrator.store.errors import OTHER_COLUMNS, Damaged
from orchestrator.store.seal import BLANK, is_sealed, is_sealed_file, seal
from sampler.errors import InputError

KEY = "reuse_sweep_check"
MAGIC = b"PAR1"
DECODING = (pa.ArrowException, ValueError, KeyError, IndexError, OverflowError, MemoryError)  # from damaged bytes
ROW_GROUP = 16384  # rows; what a reader holds at a time
SMALL = 200  # rows; the more there are, the less Parquet's reader takes for each
LARGEST = 8 << 20  # bytes; a file that may hold a copy has fewer
# Most files hold some fifty rows in as many columns: zstd and a dictionary for each would take a reader twice as long.
LAYOUT = {"compression": "snappy", "use_dictionary": False, "write_page_checksum": True}


def encode_table(table: pa.Table, copied: pa.Schema | None = None) -> bytes:
    """`copied` are the columns that a reader may want quickly; of a large table they are not copied."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, **LAYOUT) as writer:
        writer.write_table(table, row_group_size=ROW_GROUP)
        writer.add_key_value_metadata({KEY: BLANK})
    data = sink.getvalue()
    footer = _footer_start(io.BytesIO(data), len(data))
    copy = b""
    if copied is not None and len(table) <= SMALL:
        copy = encode_copy(table.select(copied.names), at=footer)
    return seal(data[:footer] + copy + data[footer:], start=footer + len(copy))


def _footer_start(file: BinaryIO, size: int) -> int:
    """Where the footer begins, by the length at the end of the file."""
    if size < 12:
        raise Damaged(f"is cut short ({size} bytes)")
    file.seek(size - 8)
    length, magic = struct.unpack("<I4s", file.read(8))
    if magic != MAGIC or length > size - 12:
        raise Damaged("does not end as a Parquet file does: it was cut short or damaged")
    return int(size - 8 - length)


def verify_table(path: Path) -> None:
    """Reads every byte; Damaged if one is not as written."""
    with path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        if not is_sealed_file(file, start=_footer_start(file, size), size=size):
            raise Damaged("does not match its own checksum")


def read_copy(path: Path, copied: pa.Schema, columns: Collection[str]) -> pa.Table | None:
    """Some of the copied columns, every byte of the file verified; None where only Parquet's reader can help."""
    names = [name for name in copied.names if name in columns]
    if len(names) < len(set(columns)) or path.stat().st_size > LARGEST:
        return None
    data = path.read_bytes()
    try:
        footer = _footer_start(io.BytesIO(data), len(data))
    except Damaged:
        return None
    where = find_copy(data, stop=footer)
    if where is None or not is_sealed(data, start=footer):
        return None
    table = decode_copy(data, where)
    return table.select(names) if table.schema.equals(copied, check_metadata=True) else None


def part_of(schema: pa.Schema, columns: Collection[str]) -> pa.Schema:
    """Some columns of it, in its order."""
    return pa.schema([field for field in schema if field.name in columns], schema.metadata)


def hash_file(path: Path) -> str:
    """sha256 of the whole file, as other programs compute it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_table(path: Path, schema: pa.Schema, columns: Collection[str] | None = None) -> pa.Table:
    """Some columns, in the schema's order; Damaged if Parquet itself sees that something is wrong."""
    exact = schema if columns is None else part_of(schema, columns)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            known = file.schema_arrow.equals(schema)
            table = file.read(columns=exact.names, use_threads=False) if known else None
    except FileNotFoundError:
        raise
    except (OSError, *DECODING) as problem:
        raise Damaged(f"cannot be read as Parquet ({problem})") from problem
    if table is None:
        verify_table(path)  # a damaged footer would say the same
        raise InputError(f"{path} {OTHER_COLUMNS}; continue with the version that wrote it, or in another folder")
    return pa.Table.from_arrays(table.columns, schema=exact)  # without Parquet's own remarks

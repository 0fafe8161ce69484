"""Parquet files that notice a flipped byte anywhere in them. Knows no trials.

Pages carry Parquet's own checksums, for every reader; a seal in the footer covers the rest (page headers and the footer
have none), for readers that ask for it before decoding.
"""

import hashlib
import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.store.errors import OTHER_COLUMNS, Damaged
from orchestrator.store.seal import BLANK, is_sealed_file, seal
from sampler.errors import InputError

KEY = "reuse_sweep_check"
MAGIC = b"PAR1"
DECODING = (pa.ArrowException, ValueError, KeyError, IndexError, OverflowError, MemoryError)  # from damaged bytes
ROW_GROUP = 16384  # rows; what a reader holds at a time
# Most files hold some fifty rows in as many columns: zstd and a dictionary for each would take a reader twice as long.
LAYOUT = {"compression": "snappy", "use_dictionary": False, "write_page_checksum": True}


def encode_table(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, table.schema, **LAYOUT) as writer:
        writer.write_table(table, row_group_size=ROW_GROUP)
        writer.add_key_value_metadata({KEY: BLANK})
    data = sink.getvalue()
    return seal(data, start=_footer_start(io.BytesIO(data), len(data)))


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


def hash_file(path: Path) -> str:
    """sha256 of the whole file, as other programs compute it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_table(path: Path, schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Some columns, in the schema's order; Damaged if Parquet itself sees that something is wrong."""
    names = [name for name in schema.names if columns is None or name in columns]
    try:
        with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            known = file.schema_arrow.equals(schema)
            table = file.read(columns=names, use_threads=False) if known else None
    except FileNotFoundError:
        raise
    except (OSError, *DECODING) as problem:
        raise Damaged(f"cannot be read as Parquet ({problem})") from problem
    if table is None:
        verify_table(path)  # a damaged footer would say the same
        raise InputError(f"{path} {OTHER_COLUMNS}; continue with the version that wrote it, or in another folder")
    exact = pa.schema([schema.field(name) for name in names], schema.metadata)
    return pa.Table.from_arrays([table[name] for name in names], schema=exact)  # without Parquet's own remarks

"""Reads data files row by row and says which row is damaged. Knows formats, not benchmarks."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from sampler import InputError

Row = dict[str, Any]
Check = Callable[[Mapping[str, Any]], str | None]


def read_split(files: Sequence[Path], check: Check) -> datasets.Dataset:
    """All rows of some files as one dataset in memory; the first row that is damaged or refused is named."""
    parts = [_read(path, check) for path in files]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _read(path: Path, check: Check) -> datasets.Dataset:
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        table = _parquet(path)
        _checked(path, table.to_pylist(), check)
        return datasets.Dataset(table)
    rows = list(READERS[Path(name).suffix](path))
    _checked(path, rows, check)
    return datasets.Dataset(_table(path, rows))


def _checked(path: Path, rows: Sequence[Row], check: Check) -> None:
    if not rows:
        raise InputError(f"{path} holds no rows")
    for number, row in enumerate(rows, start=1):
        if problem := check(row):
            raise InputError(f"{path}: row {number} cannot be used: {problem}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, out of a compressed file or a plain one."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: row {number} is not valid UTF-8") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: damaged after row {number} ({error})") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}: row {number} is not valid JSON ({error.msg})") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}: row {number} is no JSON object")
        yield row


def _json(path: Path) -> Iterator[Row]:
    """One list of objects, or lines of them."""
    text = "".join(line for _, line in _lines(path))
    if not text.lstrip().startswith("["):
        yield from _json_lines(path)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON ({error.msg} at line {error.lineno})") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f"{path}: row {number} is no JSON object")
        yield row


def _csv(path: Path) -> Iterator[Row]:
    text = "".join(line for _, line in _lines(path))
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    number = 0
    try:
        for number, row in enumerate(reader, start=1):
            if None in row or None in row.values():
                raise InputError(f"{path}: row {number} has not as many fields as the head")
            yield {name: value or None for name, value in row.items()}
    except csv.Error as error:
        raise InputError(f"{path}: row {number + 1} is not valid CSV ({error})") from None


def _parquet(path: Path) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            batches.extend(file.iter_batches(batch_size=256))
    except (pa.ArrowException, OSError):
        good = sum(batch.num_rows for batch in batches)
        raise InputError(f"{path}: not readable as Parquet after row {good}") from None
    return pa.Table.from_batches(batches, schema)


def _table(path: Path, rows: Sequence[Row]) -> pa.Table:
    """Rows as columns; the first row whose value does not fit those above it is named."""
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if not _fits(values):
            row = next(count for count in range(1, len(rows) + 1) if not _fits(values[:count]))
            raise InputError(f"{path}: row {row} has a {name!r} unlike those above it")
        columns[name] = pa.array(values)
    return pa.table(columns)


def _fits(values: Sequence[Any]) -> bool:
    try:
        pa.array(values)
    except (pa.ArrowException, OverflowError):
        return False
    return True


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {".jsonl": _json_lines, ".json": _json, ".csv": _csv}

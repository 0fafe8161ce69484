"""Which files of a dataset repository hold which split, by its README or by their names. Knows names, opens nothing."""

import csv
import fnmatch
import functools
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from sampler import InputError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz")


ALIASES = {"validation": ("valid", "val", "dev"), "train": ("training",), "test": ("testing",)}


def find_files(
    names: Sequence[str], readme: str, *, where: str, configuration: str | None, splits: Sequence[str]
) -> dict[str, list[str]]:
    """Split → its files, of those in `names`. `where` is how the repository is called in complaints."""
    declared = _declared(readme, where)
    data = sorted(name for name in names if name.endswith(SUFFIXES))
    if declared:
        patterns = _patterns(declared, configuration, where)
        return {split: [name for name in data if _matches(name, patterns.get(split, []))] for split in splits}
    return {split: _by_name(data, configuration, split) for split in splits}


@functools.lru_cache(maxsize=64)
def _declared(readme: str, where: str) -> list[dict[str, Any]]:
    """The configurations in a README's YAML head; none where it says nothing about files."""
    head = re.match(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", readme, re.DOTALL)
    if head is None:
        return []
    try:
        fields = yaml.safe_load(head[1])
    except yaml.YAMLError:
        raise InputError(f"{where}: the YAML head of README.md cannot be read") from None
    configurations = fields.get("configs", []) if isinstance(fields, dict) else []
    return [entry for entry in configurations if isinstance(entry, dict) and entry.get("data_files")]


def _patterns(declared: list[dict[str, Any]], wanted: str | None, where: str) -> dict[str, list[str]]:
    by_name = {str(entry.get("config_name", "default")): entry for entry in declared}
    if wanted is None:
        standard = [name for name, entry in by_name.items() if entry.get("default")]
        wanted = standard[0] if standard else "default" if "default" in by_name else next(iter(by_name))
    if wanted not in by_name:
        raise InputError(f"{where} has no configuration {wanted!r}; it has {', '.join(sorted(by_name))}")
    files = by_name[wanted]["data_files"]
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    patterns: dict[str, list[str]] = {}
    for entry in files if isinstance(files, list) else [files]:
        split, paths = (entry["split"], entry["path"]) if isinstance(entry, dict) else ("train", entry)
        patterns.setdefault(split, []).extend(paths if isinstance(paths, list) else [paths])
    return patterns


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern.replace("**/", "*")) for pattern in patterns)


def _by_name(data: Sequence[str], configuration: str | None, split: str) -> list[str]:
    """Files called after the split, in the configuration's folder, in data/ or at the top; or after the former."""
    called = "|".join(re.escape(alias) for alias in (split, *ALIASES.get(split, ())))
    for folder in ([f"{configuration}/"] if configuration else []) + ["data/", ""]:
        pattern = re.compile(rf"{re.escape(folder)}(?:{called})(?:[-_.][^/]*)?")
        if found := [name for name in data if pattern.fullmatch(name.partition(".")[0]) or pattern.fullmatch(name)]:
            return found
    whole = [name for name in data if configuration and name.partition(".")[0] == configuration]
    return whole if split == "train" else []


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

"""Files of a dataset repository: which of them hold a split, and reading their rows."""

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

from sampler.errors import InputError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz")
SPLIT_ALIASES = {"validation": ("valid", "val", "dev"), "train": ("training",), "test": ("testing",)}

Row = dict[str, Any]
CheckRow = Callable[[Mapping[str, Any]], str | None]


def find_files(
    names: Sequence[str], readme: str, *, repository: str, configuration: str | None, splits: Sequence[str]
) -> dict[str, list[str]]:
    """The data files of each split, by the README or else by file name. `repository` is for error messages."""
    configurations = _readme_configurations(readme, repository)
    data = sorted(name for name in names if name.endswith(SUFFIXES))
    if configurations:
        patterns = _split_patterns(configurations, configuration, repository)
        return {split: [name for name in data if _matches(name, patterns.get(split, []))] for split in splits}
    return {split: _files_named_after(split, data, configuration) for split in splits}


@functools.lru_cache(maxsize=64)
def _readme_configurations(readme: str, repository: str) -> list[dict[str, Any]]:
    """The configurations with data files in a README's YAML header."""
    header = re.match(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", readme, re.DOTALL)
    if header is None:
        return []
    try:
        fields = yaml.safe_load(header[1])
    except yaml.YAMLError:
        raise InputError(f"{repository}: the YAML header of README.md cannot be parsed") from None
    configurations = fields.get("configs", []) if isinstance(fields, dict) else []
    return [entry for entry in configurations if isinstance(entry, dict) and entry.get("data_files")]


def _split_patterns(configurations: list[dict[str, Any]], name: str | None, repository: str) -> dict[str, list[str]]:
    """The file patterns of each split in the named or the default configuration."""
    by_name = {str(entry.get("config_name", "default")): entry for entry in configurations}
    if name is None:
        defaults = [key for key, entry in by_name.items() if entry.get("default")]
        name = defaults[0] if defaults else "default" if "default" in by_name else next(iter(by_name))
    if name not in by_name:
        raise InputError(f"{repository} has no configuration {name!r}; it has {', '.join(sorted(by_name))}")
    files = by_name[name]["data_files"]
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    patterns: dict[str, list[str]] = {}
    for entry in files if isinstance(files, list) else [files]:
        split, paths = (entry["split"], entry["path"]) if isinstance(entry, dict) else ("train", entry)
        patterns.setdefault(split, []).extend(paths if isinstance(paths, list) else [paths])
    return patterns


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern.replace("**/", "*")) for pattern in patterns)


def _files_named_after(split: str, data: Sequence[str], configuration: str | None) -> list[str]:
    """Files named after the split, in the configuration's folder, in data/ or at the top.

    A single file named after the configuration is its train split.
    """
    aliases = "|".join(re.escape(alias) for alias in (split, *SPLIT_ALIASES.get(split, ())))
    for folder in ([f"{configuration}/"] if configuration else []) + ["data/", ""]:
        pattern = re.compile(rf"{re.escape(folder)}(?:{aliases})(?:[-_.][^/]*)?")
        if found := [name for name in data if pattern.fullmatch(name.partition(".")[0]) or pattern.fullmatch(name)]:
            return found
    if split != "train" or not configuration:
        return []
    return [name for name in data if name.partition(".")[0] == configuration]


def read_split(files: Sequence[Path], check_row: CheckRow) -> datasets.Dataset:
    """All rows of the files as one dataset in memory. An InputError names the first unreadable or rejected row."""
    parts = [_read_file(path, check_row) for path in files]
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _read_file(path: Path, check_row: CheckRow) -> datasets.Dataset:
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        table = _read_parquet(path)
        rows = table.to_pylist()
    else:
        table, rows = None, list(READERS[Path(name).suffix](path))
    if not rows:
        raise InputError(f"{path} has no rows")
    for number, row in enumerate(rows, start=1):
        if problem := check_row(row):
            raise InputError(f"{path}: row {number} cannot be used: {problem}")
    return datasets.Dataset(_to_table(path, rows) if table is None else table)


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a plain or gzip-compressed file."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: row {number} is not valid UTF-8") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: corrupted after row {number} ({error})") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _read_json_lines(path: Path) -> Iterator[Row]:
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}: row {number} is not valid JSON ({error.msg})") from None
        yield _json_object(path, number, row)


def _read_json(path: Path) -> Iterator[Row]:
    """A list of objects, or one object per line."""
    text = "".join(line for _, line in _read_lines(path))
    if not text.lstrip().startswith("["):
        yield from _read_json_lines(path)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not valid JSON ({error.msg} at line {error.lineno})") from None
    for number, row in enumerate(rows, start=1):
        yield _json_object(path, number, row)


def _json_object(path: Path, number: int, row: Any) -> Row:
    if not isinstance(row, dict):
        raise InputError(f"{path}: row {number} is not a JSON object")
    return row


def _read_csv(path: Path) -> Iterator[Row]:
    text = "".join(line for _, line in _read_lines(path))
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    number = 0
    try:
        for number, row in enumerate(reader, start=1):
            if None in row or None in row.values():
                raise InputError(f"{path}: row {number} does not have as many fields as the header")
            yield {name: value or None for name, value in row.items()}
    except csv.Error as error:
        raise InputError(f"{path}: row {number + 1} is not valid CSV ({error})") from None


def _read_parquet(path: Path) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            batches.extend(file.iter_batches(batch_size=256))
    except (pa.ArrowException, OSError):
        readable = sum(batch.num_rows for batch in batches)
        raise InputError(f"{path}: not readable as Parquet after row {readable}") from None
    return pa.Table.from_batches(batches, schema)


def _to_table(path: Path, rows: Sequence[Row]) -> pa.Table:
    """Rows as a table. An InputError names the first row whose value has another type than those before it."""
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if not _have_one_type(values):
            number = next(count for count in range(1, len(rows) + 1) if not _have_one_type(values[:count]))
            raise InputError(f"{path}: row {number} has a {name!r} of another type than the rows before it")
        columns[name] = pa.array(values)
    return pa.table(columns)


def _have_one_type(values: Sequence[Any]) -> bool:
    try:
        pa.array(values)
    except (pa.ArrowException, OverflowError):
        return False
    return True


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
}

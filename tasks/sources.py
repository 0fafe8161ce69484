"""Load documents from a source: the Hugging Face Hub, a directory laid out like it, or the bundled documents.

A source finds a dataset's files, reads and checks their rows, and reports the revision of what it loaded, which is part
of a result's identity. There is no fallback from one source to another: a missing dataset is an error.
"""

import csv
import fnmatch
import gzip
import hashlib
import io
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from huggingface_hub import DatasetInfo, HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from sampler.errors import InputError, UnavailableError
from sampler.hub import REQUEST_TIMEOUT_SECONDS, Clock, hub_problem, retry_hub
from tasks.hooks import CheckRow

BUNDLED = Path(__file__).with_name("bundled")
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz")
SPLIT_ALIASES = {"validation": ("valid", "val", "dev"), "train": ("training",), "test": ("testing",)}

Row = dict[str, Any]


def choose_source(data: str, revisions: Mapping[str, str] | None = None) -> "Source":
    """The source for `TaskOptions.data`. `revisions` maps datasets on the Hub to commits."""
    if data == "hub":
        return Hub(revisions)
    if data == "bundled":
        if not BUNDLED.is_dir():
            raise InputError("--data bundled: the bundled documents are not installed; use --data hub or a directory")
        return Folder(BUNDLED, kind="bundled")
    if not Path(data).is_dir():
        problem = "is not a directory" if Path(data).exists() else "does not exist"
        raise InputError(f"--data {data} {problem}; use hub, bundled or a directory laid out like the Hub")
    return Folder(Path(data))


class Folder:
    """A directory of datasets laid out like the Hub: owner/name/README.md and data files."""

    def __init__(self, root: Path, *, kind: str = "folder") -> None:
        self.root, self.kind = root, kind
        self._file_hashes: dict[str, dict[str, str]] = {}
        self._listings: dict[str, tuple[list[str], str]] = {}

    def check(self, dataset: str, *, gated: bool) -> None:
        del gated
        if not (self.root / dataset).is_dir():
            if self.kind == "bundled":
                raise InputError(f"the bundled documents do not include {dataset}; use --data hub or a directory")
            raise InputError(f"{self.root} has no {dataset}/; --data takes a directory laid out like the Hub")

    def has(self, dataset: str, configuration: str | None) -> bool:
        try:
            self.check(dataset, gated=False)
            return any(self._files(dataset, configuration, ("train", "validation", "test", "dev")).values())
        except InputError:
            return False

    def load(
        self, dataset: str, configuration: str | None, splits: Sequence[str], check_row: CheckRow
    ) -> Mapping[str, datasets.Dataset]:
        self.check(dataset, gated=False)
        folder = self.root / dataset
        files = self._files(dataset, configuration, splits)
        for name in sorted({name for names in files.values() for name in names}):
            self._file_hashes.setdefault(dataset, {})[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        return _read_splits(folder, files, check_row)

    def revision(self, dataset: str) -> str:
        """A hash of the names and contents of the files that were read, independent of where the directory is."""
        listing = "".join(f"{digest} {name}\n" for name, digest in sorted(self._file_hashes.get(dataset, {}).items()))
        return f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"

    def _files(self, dataset: str, configuration: str | None, splits: Sequence[str]) -> dict[str, list[str]]:
        if dataset not in self._listings:
            self._listings[dataset] = _names_and_readme(self.root / dataset)
        names, readme = self._listings[dataset]
        repository = str(self.root / dataset)
        return find_files(names, readme, repository=repository, configuration=configuration, splits=splits)


def _names_and_readme(folder: Path) -> tuple[list[str], str]:
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    readme = folder / "README.md"
    return names, readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""


class Hub:
    """The Hugging Face Hub and its cache. A revision is resolved once; everything is read at that commit."""

    kind = "hub"

    def __init__(self, revisions: Mapping[str, str] | None = None, *, clock: Clock = time) -> None:
        self._pinned, self._clock = dict(revisions or {}), clock
        self._commits: dict[str, tuple[str, list[str]]] = {}

    def check(self, dataset: str, *, gated: bool) -> None:
        if gated and get_token() is None and not self._cached(dataset):
            raise _no_access(dataset)
        self._commit(dataset, gated=gated)

    def revision(self, dataset: str) -> str:
        return self._commit(dataset)[0]

    def load(
        self, dataset: str, configuration: str | None, splits: Sequence[str], check_row: CheckRow
    ) -> Mapping[str, datasets.Dataset]:
        commit, names = self._commit(dataset)
        _, readme = _names_and_readme(self._fetch(dataset, commit, [name for name in names if name == "README.md"]))
        files = find_files(
            names, readme, repository=f"{dataset} on the Hub", configuration=configuration, splits=splits
        )
        folder = self._fetch(dataset, commit, sorted({name for names in files.values() for name in names}))
        return _read_splits(folder, files, check_row)

    def _commit(self, dataset: str, *, gated: bool = False) -> tuple[str, list[str]]:
        """The commit to read and its files: from the Hub, or from the cache if the Hub is unreachable."""
        if dataset not in self._commits:
            self._commits[dataset] = self._resolve(dataset, gated)
        return self._commits[dataset]

    def _resolve(self, dataset: str, gated: bool) -> tuple[str, list[str]]:
        api = HfApi()

        def request_info() -> DatasetInfo:
            info = api.dataset_info(dataset, revision=self._pinned.get(dataset), timeout=REQUEST_TIMEOUT_SECONDS)
            if gated:
                api.auth_check(dataset, repo_type="dataset")
            return info

        try:
            info = retry_hub(request_info, clock=self._clock)
        except GatedRepoError:
            raise _no_access(dataset) from None
        except RevisionNotFoundError:
            pinned = self._pinned.get(dataset)
            return self._cached_commit(dataset, InputError(f"the Hub no longer has dataset {dataset} at {pinned}"))
        except (RepositoryNotFoundError, HFValidationError):
            if gated:
                raise _no_access(dataset) from None
            raise InputError(f"the Hub has no dataset {dataset!r}, or you have no access to it") from None
        except (HTTPError, OSError, ValueError) as error:
            missing = UnavailableError(
                f"dataset {dataset} is not in the Hub cache, and {hub_problem(error)}; "
                "try again later, or use --data with a directory laid out like the Hub"
            )
            return self._cached_commit(dataset, missing)
        return info.sha or "", [file.rfilename for file in info.siblings or []]

    def _cached_commit(self, dataset: str, missing: InputError) -> tuple[str, list[str]]:
        """The commit and files of the cached snapshot; raises `missing` if there is none."""
        folder = self._cached(dataset)
        if folder is None:
            raise missing from None
        return folder.name, _names_and_readme(folder)[0]

    def _cached(self, dataset: str) -> Path | None:
        """The cached snapshot of the pinned commit, or else of the last known main branch, or else the newest."""
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=dataset, repo_type="dataset")
        pattern = self._pinned.get(dataset, "*")
        snapshots = [path for path in (folder / "snapshots").glob(pattern) if path.is_dir()]
        main = folder / "refs" / "main"
        main_commit = main.read_text().strip() if main.is_file() else None
        return max(snapshots, key=lambda path: (path.name == main_commit, path.stat().st_mtime), default=None)

    def _fetch(self, dataset: str, commit: str, names: Sequence[str]) -> Path:
        """Download missing files and return the snapshot folder."""
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=dataset, repo_type="dataset")
        snapshot = folder / "snapshots" / commit
        try:
            for name in names:
                if not (snapshot / name).is_file():
                    download = partial(hf_hub_download, dataset, name, repo_type="dataset", revision=commit)
                    retry_hub(download, clock=self._clock)
        except GatedRepoError:
            raise _no_access(dataset) from None
        except (HTTPError, OSError, ValueError, RuntimeError) as error:  # RuntimeError: from Xet downloads
            kind = UnavailableError if isinstance(error, ConnectionError) else InputError
            raise kind(f"dataset {dataset}: {name} cannot be downloaded: {hub_problem(error)}") from None
        return snapshot


def _no_access(dataset: str) -> InputError:
    offline = " and unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else ""
    return InputError(
        f"{dataset} is gated: accept its terms at https://huggingface.co/datasets/{dataset}, "
        f"then provide a token with access in HF_TOKEN or with `hf auth login`{offline}"
    )


Source = Folder | Hub


def find_files(
    names: Sequence[str], readme: str, *, repository: str, configuration: str | None, splits: Sequence[str]
) -> dict[str, list[str]]:
    """The data files of each split: as the README lists them, or else by name. `repository` is for error messages."""
    configurations = _readme_configurations(readme, repository)
    data = sorted(name for name in names if name.endswith(SUFFIXES))
    if configurations:
        patterns = _split_patterns(configurations, configuration, repository)
        return {split: [name for name in data if _matches(name, patterns.get(split, []))] for split in splits}
    return {split: _files_named_after(split, data, configuration) for split in splits}


@lru_cache(maxsize=64)
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
    """Files named after the split, in the configuration's folder, in data/ or at the top level.

    Without such files, a file named after the configuration is its train split.
    """
    aliases = "|".join(re.escape(alias) for alias in (split, *SPLIT_ALIASES.get(split, ())))
    for folder in ([f"{configuration}/"] if configuration else []) + ["data/", ""]:
        pattern = re.compile(rf"{re.escape(folder)}(?:{aliases})(?:[-_.][^/]*)?")
        if files := [name for name in data if pattern.fullmatch(name.partition(".")[0]) or pattern.fullmatch(name)]:
            return files
    if split != "train" or not configuration:
        return []
    return [name for name in data if name.partition(".")[0] == configuration]


def _read_splits(folder: Path, files: Mapping[str, Sequence[str]], check_row: CheckRow) -> dict[str, datasets.Dataset]:
    """The rows of each split that has files. Raises an InputError that names the first unreadable or rejected row."""
    splits = {}
    for split, names in files.items():
        parts = [_read_file(folder / name, check_row) for name in names]
        if parts:
            splits[split] = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    return splits


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
        raise InputError(f"{path} is corrupted after row {number} ({error})") from None
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
        raise InputError(f"{path} cannot be read as Parquet after row {readable}") from None
    return pa.Table.from_batches(batches, schema)


def _to_table(path: Path, rows: Sequence[Row]) -> pa.Table:
    """The rows as a table. Raises an InputError that names the first row whose types differ from those before it."""
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if not _have_one_type(values):
            number = next(count for count in range(1, len(rows) + 1) if not _have_one_type(values[:count]))
            raise InputError(f"{path}: row {number} has a {name!r} of a different type than the rows before it")
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

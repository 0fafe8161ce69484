"""Sources of documents: the Hugging Face Hub, a directory laid out like it, or the bundled documents.

A source also reports the revision of what it loaded, which is part of a result's identity. There is no fallback from
one source to another: a missing dataset is an error.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import datasets
from huggingface_hub import DatasetInfo, HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from sampler.config import BUNDLED_MODEL
from sampler.errors import InputError, UnavailableError
from sampler.hub import REQUEST_TIMEOUT_SECONDS, Clock, hub_problem, retry_hub
from tasks.dataset_files import CheckRow, find_files, read_split

BUNDLED = Path(__file__).with_name("bundled")
DATASETS_URL = "https://huggingface.co/datasets/"


def resolve_data(data: str, model: str) -> str:
    """Replace `auto` by the bundled documents for the bundled model, by the Hub for others."""
    if data != "auto":
        return data
    return "bundled" if model == BUNDLED_MODEL else "hub"


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
                raise InputError(f"the bundled documents have none of {dataset}; use --data hub or a directory")
            raise InputError(f"{self.root} has no {dataset}/; --data takes a directory laid out like the Hub")

    def has(self, dataset: str, configuration: str | None) -> bool:
        if not (self.root / dataset).is_dir():
            return False
        try:
            files = self._files(dataset, configuration, ("train", "validation", "test", "dev"))
        except InputError:
            return False
        return any(files.values())

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
        """A hash of the files that were read; does not depend on the location of the directory."""
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


def _read_splits(folder: Path, files: Mapping[str, Sequence[str]], check_row: CheckRow) -> dict[str, datasets.Dataset]:
    return {split: read_split([folder / name for name in names], check_row) for split, names in files.items() if names}


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
        folder = self._fetch(dataset, commit, sorted({name for found in files.values() for name in found}))
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
            folder = self._cached(dataset)
            if folder is None:
                raise InputError(f"the Hub no longer has dataset {dataset} at {self._pinned.get(dataset)}") from None
            return folder.name, _names_and_readme(folder)[0]
        except (RepositoryNotFoundError, HFValidationError):
            if gated:
                raise _no_access(dataset) from None
            raise InputError(f"the Hub has no dataset {dataset!r}, or you have no access to it") from None
        except (HTTPError, OSError, ValueError) as error:
            return self._resolve_offline(dataset, hub_problem(error))
        return info.sha or "", [file.rfilename for file in info.siblings or []]

    def _resolve_offline(self, dataset: str, problem: str) -> tuple[str, list[str]]:
        """The newest cached commit. `problem` is why the Hub could not be used."""
        folder = self._cached(dataset)
        if folder is None:
            raise UnavailableError(
                f"dataset {dataset} is not in the Hub cache, and {problem}; "
                "try again later, or use --data with a directory laid out like the Hub"
            ) from None
        return folder.name, _names_and_readme(folder)[0]

    def _cached(self, dataset: str) -> Path | None:
        """The cached snapshot: of the pinned commit, else of the last known main branch, else the newest."""
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=dataset, repo_type="dataset")
        pattern = self._pinned.get(dataset, "*")
        snapshots = [path for path in (folder / "snapshots").glob(pattern) if path.is_dir()]
        main = folder / "refs" / "main"
        main_commit = main.read_text().strip() if main.is_file() else None
        return max(snapshots, key=lambda path: (path.name == main_commit, path.stat().st_mtime), default=None)

    def _fetch(self, dataset: str, commit: str, names: Sequence[str]) -> Path:
        """Download missing files; returns the snapshot folder."""
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
        f"{dataset} is gated: accept its terms at {DATASETS_URL}{dataset}, then provide a token with access "
        f"in HF_TOKEN or with `hf auth login`{offline}"
    )


Source = Folder | Hub

"""Where documents come from: the Hub, a folder laid out like it, or what ships with the project. Knows no prompts.

A source hands out splits and remembers what they were made of, because that is part of a result's identity. Nothing is
substituted: what a source does not hold is an error.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

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

from sampler.errors import InputError, UnavailableError
from sampler.hub import REQUEST_TIMEOUT_SECONDS, Clock, hub_problem, retry_hub
from sampler.tiny import BUNDLED_MODEL
from tasks.dataset_files import Check, find_files, read_split

BUNDLED = Path(__file__).with_name("bundled")
PAGE = "https://huggingface.co/datasets/"


class Source(Protocol):
    """Splits by dataset and configuration, and the revision of what has been handed out."""

    kind: str

    def load(
        self, dataset: str, configuration: str | None, splits: Sequence[str], check: Check
    ) -> Mapping[str, datasets.Dataset]: ...

    def holds(self, dataset: str, configuration: str | None) -> bool: ...

    def revision(self, dataset: str) -> str: ...

    def check(self, dataset: str, *, gated: bool) -> None:
        """An InputError now, if this dataset cannot be had from here."""
        ...


def resolve_auto(data: str, model: str) -> str:
    """`auto` is the bundled documents for the bundled model, else the Hub."""
    if data != "auto":
        return data
    return "bundled" if model == BUNDLED_MODEL else "hub"


def choose_source(data: str, revisions: Mapping[str, str] | None = None) -> Source:
    """By its name in TaskOptions; `revisions` are commits of datasets on the Hub."""
    if data == "hub":
        return Hub(revisions)
    if data == "bundled":
        if not BUNDLED.is_dir():
            raise InputError("--data bundled: no bundled documents are installed; name a folder or use --data hub")
        return Folder(BUNDLED, kind="bundled")
    if not Path(data).is_dir():
        what = "is not a folder" if Path(data).exists() else "does not exist"
        raise InputError(f"--data {data} {what}; hub, bundled or a folder laid out like the Hub is allowed")
    return Folder(Path(data))


class Folder:
    """A folder with datasets in it as on the Hub: owner/name/README.md and data files."""

    def __init__(self, root: Path, *, kind: str = "folder") -> None:
        self.root, self.kind = root, kind
        self._read: dict[str, dict[str, str]] = {}
        self._listed: dict[str, tuple[list[str], str]] = {}

    def check(self, dataset: str, *, gated: bool) -> None:
        del gated
        if not (self.root / dataset).is_dir():
            raise InputError(f"{self.root} holds no {dataset}/; --data names a folder laid out like the Hub")

    def holds(self, dataset: str, configuration: str | None) -> bool:
        if not (self.root / dataset).is_dir():
            return False
        try:
            files = self._files(dataset, configuration, ("train", "validation", "test", "dev"))
        except InputError:
            return False
        return any(files.values())

    def load(
        self, dataset: str, configuration: str | None, splits: Sequence[str], check: Check
    ) -> Mapping[str, datasets.Dataset]:
        self.check(dataset, gated=False)
        folder = self.root / dataset
        files = self._files(dataset, configuration, splits)
        for name in sorted({name for names in files.values() for name in names}):
            self._read.setdefault(dataset, {})[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        return {split: read_split([folder / name for name in names], check) for split, names in files.items() if names}

    def revision(self, dataset: str) -> str:
        """A hash of the files that were read, whatever the folder is called here."""
        listing = "".join(f"{digest} {name}\n" for name, digest in sorted(self._read.get(dataset, {}).items()))
        return f"sha256:{hashlib.sha256(listing.encode()).hexdigest()}"

    def _files(self, dataset: str, configuration: str | None, splits: Sequence[str]) -> dict[str, list[str]]:
        if dataset not in self._listed:
            self._listed[dataset] = _names_and_readme(self.root / dataset)
        names, readme = self._listed[dataset]
        where = str(self.root / dataset)
        return find_files(names, readme, where=where, configuration=configuration, splits=splits)


def _names_and_readme(folder: Path) -> tuple[list[str], str]:
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    readme = folder / "README.md"
    return names, readme.read_text(encoding="utf-8", errors="replace") if readme.is_file() else ""


class Hub:
    """The Hub and its cache. A dataset's revision is resolved once and everything is read at that commit."""

    kind = "hub"

    def __init__(self, revisions: Mapping[str, str] | None = None, *, clock: Clock = time) -> None:
        self._pinned, self._clock = dict(revisions or {}), clock
        self._commits: dict[str, tuple[str, list[str]]] = {}

    def check(self, dataset: str, *, gated: bool) -> None:
        if gated and get_token() is None and not self._cached(dataset):
            raise _no_access(dataset)
        self._commit(dataset, gated=gated)

    def holds(self, dataset: str, configuration: str | None) -> bool:
        del configuration
        return bool(self._commit(dataset))

    def revision(self, dataset: str) -> str:
        return self._commit(dataset)[0]

    def load(
        self, dataset: str, configuration: str | None, splits: Sequence[str], check: Check
    ) -> Mapping[str, datasets.Dataset]:
        commit, names = self._commit(dataset)
        _, readme = _names_and_readme(self._fetch(dataset, commit, [name for name in names if name == "README.md"]))
        files = find_files(names, readme, where=f"{dataset} on the Hub", configuration=configuration, splits=splits)
        folder = self._fetch(dataset, commit, sorted({name for found in files.values() for name in found}))
        return {split: read_split([folder / name for name in found], check) for split, found in files.items() if found}

    def _commit(self, dataset: str, *, gated: bool = False) -> tuple[str, list[str]]:
        """The commit to read at and its files: the Hub's newest, or the cache's when the Hub cannot be reached."""
        if dataset not in self._commits:
            self._commits[dataset] = self._resolve(dataset, gated)
        return self._commits[dataset]

    def _resolve(self, dataset: str, gated: bool) -> tuple[str, list[str]]:
        api = HfApi()

        def ask() -> DatasetInfo:
            info = api.dataset_info(dataset, revision=self._pinned.get(dataset), timeout=REQUEST_TIMEOUT_SECONDS)
            if gated:
                api.auth_check(dataset, repo_type="dataset")
            return info

        try:
            info = retry_hub(ask, clock=self._clock)
        except GatedRepoError:
            raise _no_access(dataset) from None
        except RevisionNotFoundError:
            folder = self._cached(dataset)
            if folder is None:
                raise InputError(f"the Hub no longer has {dataset} at {self._pinned.get(dataset)}") from None
            return folder.name, _names_and_readme(folder)[0]
        except (RepositoryNotFoundError, HFValidationError):
            if gated:
                raise _no_access(dataset) from None
            raise InputError(f"the Hub has no dataset {dataset!r} that can be read from here") from None
        except (HTTPError, OSError, ValueError) as error:
            return self._offline(dataset, hub_problem(error))
        return info.sha or "", [file.rfilename for file in info.siblings or []]

    def _offline(self, dataset: str, problem: str) -> tuple[str, list[str]]:
        """The newest download in the cache. `problem`: why the Hub itself did not help."""
        folder = self._cached(dataset)
        if folder is None:
            raise UnavailableError(
                f"dataset {dataset} is not in the Hub cache, and {problem}; "
                "try again later, or name a folder laid out like the Hub with --data"
            ) from None
        return folder.name, _names_and_readme(folder)[0]

    def _cached(self, dataset: str) -> Path | None:
        """The snapshot in the Hub's cache: as pinned, else the one its main branch was last seen at or the newest."""
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=dataset, repo_type="dataset")
        pattern = self._pinned.get(dataset, "*")
        snapshots = [path for path in (folder / "snapshots").glob(pattern) if path.is_dir()]
        main = folder / "refs" / "main"
        named = main.read_text().strip() if main.is_file() else None
        return max(snapshots, key=lambda path: (path.name == named, path.stat().st_mtime), default=None)

    def _fetch(self, dataset: str, commit: str, names: Sequence[str]) -> Path:
        """The snapshot folder, with these files in it."""
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
    offline = " (and go online)" if constants.HF_HUB_OFFLINE else ""
    return InputError(
        f"{dataset} is gated: accept its terms at {PAGE}{dataset}, then give a token that may read it{offline}, "
        "in the variable HF_TOKEN or by `hf auth login`"
    )

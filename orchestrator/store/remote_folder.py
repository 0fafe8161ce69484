"""A folder in an object store (S3, Google Cloud Storage) or on a mounted disk, and the manifest of its files.

A file appears under its name completely or not at all. Object stores guarantee that for one upload; on a disk the file
is written under a temporary name, synced and renamed.

The manifest (upload.jsonl in the local folder) lists the files that are in the remote folder, and in which version. A
line is appended after a file was copied, so it never lists more than the remote folder has. The remote folder names the
manifest that last wrote to it; if that is another one, because the sweep was continued elsewhere, this one is ignored.
Losing the manifest only costs another upload.
"""

import hashlib
import json
import mimetypes
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import fs

from orchestrator.store.files import (
    DISK,
    TEMPORARY_SUFFIX,
    FileVersion,
    StoreError,
    make_folders,
    open_regular,
    write_file,
)
from sampler.errors import InputError

MANIFEST_FILE = "upload.jsonl"
WRITE_TEST_FILE = f".write-test{TEMPORARY_SUFFIX}"
# S3: small files in one request instead of three. Google's client would retry for 15 minutes before it fails.
DEFAULT_OPTIONS = {"s3": "allow_delayed_open=true", "gs": "retry_limit_seconds=60"}
MAX_REASON_CHARACTERS = 300


class UploadFailed(StoreError):
    """A file could not be copied; the message is the reason, which may be temporary."""


class RemoteFolder:
    """The folder `url`/`name`. Methods can be called from several threads; they raise UploadFailed."""

    def __init__(self, url: str, name: str) -> None:
        """Opens the folder without writing to it; raises InputError if that is not possible."""
        address, _, options = url.partition("?")
        self.url = f"{address.rstrip('/')}/{name}"  # without options, for messages
        self.identity = f"{self.url}?{options}"
        try:
            self._system, root = fs.FileSystem.from_uri(_with_default_options(url))
        except (NotImplementedError, pa.ArrowNotImplementedError) as error:
            scheme = url.partition(":")[0]
            raise InputError(
                f"--upload {self.url} cannot be opened: this pyarrow was built without {scheme}:// support; "
                "install the wheel from PyPI"
            ) from error
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"--upload {self.url} cannot be opened: {_reason(error)}") from error
        self._root = f"{root.rstrip('/')}/{name}"
        self.local = Path(self._root) if isinstance(self._system, fs.LocalFileSystem) else None

    def overlaps(self, folder: Path) -> bool:
        """Whether one of the two folders is, or is inside, the other."""
        there, here = Path(self._root).resolve(), folder.resolve()
        return self.local is not None and (there == here or here in there.parents or there in here.parents)

    def list(self) -> dict[str, int]:
        """Sizes of all files, by path relative to the folder; empty if the folder does not exist."""
        with _reporting_errors("list", self.url):
            found = self._system.get_file_info(fs.FileSelector(self._root, recursive=True, allow_not_found=True))
        start = len(self._root) + 1
        return {entry.path[start:]: entry.size for entry in found if entry.type == fs.FileType.File}

    def read(self, name: str) -> bytes:
        with (
            _reporting_errors("read", f"{self.url}/{name}"),
            self._system.open_input_file(f"{self._root}/{name}") as file,
        ):
            data: bytes = file.read()
            return data

    def write(self, name: str, data: bytes) -> None:
        """Replaces a file. All bytes are written at once: closing an object early would publish a part of it."""
        with _reporting_errors("write", f"{self.url}/{name}"):
            if self.local is not None:
                make_folders(DISK, (self.local / name).parent)
                write_file(DISK, self.local / name, data)
                return
            kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
            metadata = {"Content-Type": kind}  # so that a browser shows the report instead of saving it
            with self._system.open_output_stream(f"{self._root}/{name}", compression=None, metadata=metadata) as file:
                file.write(data)

    def delete(self, name: str) -> None:
        """Deletes a file if it exists."""
        with _reporting_errors("delete", f"{self.url}/{name}"), suppress(FileNotFoundError):
            if self.local is not None:
                (self.local / name).unlink()
            else:
                self._system.delete_file(f"{self._root}/{name}")

    def check_writable(self) -> None:
        """Raises InputError unless files can be written and deleted."""
        try:
            self.write(WRITE_TEST_FILE, b"")
            self.delete(WRITE_TEST_FILE)
        except UploadFailed as error:
            raise InputError(
                f"--upload {self.url} cannot be used: {error}; check the address, the credentials in the environment "
                "and their permissions"
            ) from error


def _with_default_options(url: str) -> str:
    address, _, options = url.partition("?")
    default = DEFAULT_OPTIONS.get(url.partition(":")[0], "")
    if default.partition("=")[0] not in options:
        options = f"{options}&{default}".strip("&")
    return f"{address}?{options}" if options else address


@contextmanager
def _reporting_errors(action: str, where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise UploadFailed(f"cannot {action} {where}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """One line: messages of the client libraries contain no credentials, but can be pages long."""
    if isinstance(error, OSError) and error.strerror and error.errno:
        return os.strerror(error.errno)
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_REASON_CHARACTERS else f"{text[:MAX_REASON_CHARACTERS]}…"


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A file's bytes and its version. The store replaces files, so one handle sees one version."""

    data: bytes
    version: FileVersion

    @classmethod
    def read(cls, path: Path) -> "LocalFile":
        with open_regular(path) as file:
            version = FileVersion.of(os.fstat(file.fileno()))
            return cls(data=file.read(), version=version)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


class CopiedFile(NamedTuple):
    """The version of a file that was copied last."""

    version: FileVersion
    sha256: str


class UploadManifest:
    """The manifest of one folder for one URL; another URL starts a new one. Can be used from several threads."""

    def __init__(self, folder: Path, url: str) -> None:
        self._path, self._url = folder / MANIFEST_FILE, url
        self._guard = threading.Lock()
        self.id = secrets.token_hex(8)
        self._files = self._load()
        self._rewritten = False  # by this process, so that all lines before an appended one are complete

    def _load(self) -> dict[str, CopiedFile]:
        files: dict[str, CopiedFile] = {}
        with suppress(OSError):
            entries = [_parse_line(line) for line in self._path.read_bytes().splitlines()]
            if not entries or entries[0].get("url") != self._url:
                return {}
            self.id = str(entries[0].get("id"))
            for entry in entries[1:]:
                with suppress(KeyError, TypeError):
                    name, sha256 = entry.pop("name"), entry.pop("sha256")
                    files.pop(name, None)
                    if sha256 is not None:
                        files[name] = CopiedFile(version=FileVersion(**entry), sha256=sha256)
        return files

    def clear(self) -> None:
        """Forgets all files: another process has written to the remote folder."""
        self._files.clear()

    def get(self, name: str) -> CopiedFile | None:
        return self._files.get(name)

    def names(self) -> list[str]:
        with self._guard:
            return list(self._files)

    def record(self, name: str, file: LocalFile) -> None:
        copied = CopiedFile(version=file.version, sha256=file.sha256)
        with self._guard:
            self._files[name] = copied
            self._append(_format_line(name, copied))

    def forget(self, name: str) -> None:
        with self._guard:
            if self._files.pop(name, None) is not None:
                self._append(_format_line(name, None))

    def _append(self, line: str) -> None:
        """Rewrites the file the first time. A disk error only costs another upload."""
        with suppress(OSError):
            if self._rewritten:
                with self._path.open("ab") as file:
                    file.write(f"{line}\n".encode())
            else:
                first = json.dumps({"url": self._url, "id": self.id})
                lines = [first, *(_format_line(name, copied) for name, copied in self._files.items())]
                write_file(DISK, self._path, "".join(f"{line}\n" for line in lines).encode())
                self._rewritten = True


def _format_line(name: str, file: CopiedFile | None) -> str:
    values = {"sha256": None} if file is None else {"sha256": file.sha256, **file.version._asdict()}
    return json.dumps({"name": name, **values})


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:  # incomplete
        return {}
    return value if isinstance(value, dict) else {}

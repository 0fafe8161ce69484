"""A folder in an object store (S3, Google Cloud Storage) or on a mounted disk, opened through pyarrow.fs.

A file appears under its name whole or not at all. Object stores guarantee that for one upload; on a disk the file is
written under a temporary name, flushed and renamed.
"""

import mimetypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import pyarrow as pa
from pyarrow import fs

from orchestrator.store.atomic import DISK, TEMPORARY, make_folders, write_file
from orchestrator.store.errors import StoreError
from sampler.errors import InputError

WRITE_TEST = f".write-test{TEMPORARY}"
# Small files in one request instead of three. Google's client would retry for 15 minutes before it reports anything.
DEFAULT_OPTIONS = {"s3": "allow_delayed_open=true", "gs": "retry_limit_seconds=60"}
LONGEST_REASON = 300  # characters


class CopyFailed(StoreError):
    """A file could not be copied; the message is the reason, which may go away."""


class RemoteFolder:
    """`url`/`name`. Methods may be called from several threads; they raise CopyFailed."""

    def __init__(self, url: str, name: str) -> None:
        """Opens it without writing; InputError where that is not possible."""
        address, _, options = url.partition("?")
        self.url = f"{address.rstrip('/')}/{name}"  # without options: this is what people are shown
        self.identity = f"{self.url}?{options}"
        try:
            self._system, root = fs.FileSystem.from_uri(_with_defaults(url))
        except (NotImplementedError, pa.ArrowNotImplementedError) as problem:
            kind = url.partition(":")[0]
            raise InputError(
                f"--upload {self.url} cannot be opened: this pyarrow was built without {kind}:// support; "
                "install the wheel from PyPI"
            ) from problem
        except (OSError, pa.ArrowException) as problem:
            raise InputError(f"--upload {self.url} cannot be opened: {_reason(problem)}") from problem
        self._root = f"{root.rstrip('/')}/{name}"
        self.local = Path(self._root) if isinstance(self._system, fs.LocalFileSystem) else None

    def list(self) -> dict[str, int]:
        """Sizes of all files, by their paths relative to the folder; empty where the folder does not exist."""
        with _explained("list", self.url):
            found = self._system.get_file_info(fs.FileSelector(self._root, recursive=True, allow_not_found=True))
        start = len(self._root) + 1
        return {entry.path[start:]: entry.size for entry in found if entry.type == fs.FileType.File}

    def read(self, name: str) -> bytes:
        with _explained("read", f"{self.url}/{name}"), self._system.open_input_file(f"{self._root}/{name}") as file:
            data: bytes = file.read()
            return data

    def write(self, name: str, data: bytes) -> None:
        """Replaces a file. All bytes are given at once: closing an object after half of them would publish it."""
        with _explained("write", f"{self.url}/{name}"):
            if self.local is not None:
                make_folders(DISK, (self.local / name).parent)
                write_file(DISK, self.local / name, data)
                return
            kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
            metadata = {"Content-Type": kind}  # so that a browser shows the report instead of saving it
            with self._system.open_output_stream(f"{self._root}/{name}", compression=None, metadata=metadata) as file:
                file.write(data)

    def delete(self, name: str) -> None:
        """A file that is gone already is no failure."""
        with _explained("delete", f"{self.url}/{name}"), suppress(FileNotFoundError):
            if self.local is not None:
                (self.local / name).unlink()
            else:
                self._system.delete_file(f"{self._root}/{name}")

    def check_writable(self) -> None:
        """InputError unless files can be written and deleted there."""
        try:
            self.write(WRITE_TEST, b"")
            self.delete(WRITE_TEST)
        except CopyFailed as problem:
            raise InputError(
                f"--upload {self.url} cannot be used: {problem}; check the address, the credentials in the environment "
                "and their permissions"
            ) from problem


def is_temporary(name: str) -> bool:
    """Whether a file is what a killed writer left behind."""
    last = PurePosixPath(name).name
    return last.startswith(".") and last.endswith(TEMPORARY)


def _with_defaults(url: str) -> str:
    address, _, options = url.partition("?")
    default = DEFAULT_OPTIONS.get(url.partition(":")[0], "")
    if default.partition("=")[0] not in options:
        options = f"{options}&{default}".strip("&")
    return f"{address}?{options}" if options else address


@contextmanager
def _explained(what: str, where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as problem:
        raise CopyFailed(f"cannot {what} {where}: {_reason(problem)}") from problem


def _reason(problem: BaseException) -> str:
    """One line; the libraries' messages hold no credentials, but some go on for pages."""
    if isinstance(problem, OSError) and problem.strerror and problem.errno:
        return os.strerror(problem.errno)
    text = " ".join(str(problem).split())
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"

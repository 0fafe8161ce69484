"""Which files of a sweep's folder are in its remote copy, and in which version: upload.jsonl in the local folder.

A line is appended after a file was copied, so the manifest never promises more than the copy has. The copy names the
manifest that wrote to it last; if that is another one, because the sweep was continued elsewhere, this one is not
trusted. A lost, torn or distrusted manifest costs nothing but another upload.
"""

import hashlib
import json
import os
import secrets
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.store.atomic import DISK, write_file

MANIFEST = "upload.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileState:
    """Changes whenever a file is replaced or appended to, and is known without reading the file."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        return cls(size=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)


@dataclass(frozen=True, kw_only=True)
class LocalFile:
    """A file's bytes with the state they were read in. The store replaces files, so one handle sees one version."""

    data: bytes
    state: FileState

    @classmethod
    def read(cls, path: Path) -> "LocalFile":
        with path.open("rb") as file:
            state = FileState.of(os.fstat(file.fileno()))
            return cls(data=file.read(), state=state)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedFile:
    """What was copied last under a name."""

    state: FileState
    sha256: str


class UploadManifest:
    """The manifest of one folder for one URL; another URL begins a new one. Several threads may use it."""

    def __init__(self, folder: Path, url: str) -> None:
        self._path, self._url = folder / MANIFEST, url
        self._guard = threading.Lock()
        self.id = secrets.token_hex(8)
        self._files = self._load()
        self._written = False  # by this process: what it appends follows lines that it knows to be whole

    def _load(self) -> dict[str, CopiedFile]:
        files: dict[str, CopiedFile] = {}
        with suppress(OSError):
            entries = [_parsed(line) for line in self._path.read_bytes().splitlines()]
            if not entries or entries[0].get("url") != self._url:
                return {}
            self.id = str(entries[0].get("id"))
            for entry in entries[1:]:
                with suppress(KeyError, TypeError):
                    name, sha256 = entry.pop("name"), entry.pop("sha256")
                    files.pop(name, None)
                    if sha256 is not None:
                        files[name] = CopiedFile(state=FileState(**entry), sha256=sha256)
        return files

    def distrust(self) -> None:
        """Someone else has written to the copy: what this manifest says of it may be wrong."""
        self._files.clear()

    def get(self, name: str) -> CopiedFile | None:
        return self._files.get(name)

    def names(self) -> list[str]:
        with self._guard:
            return list(self._files)

    def record(self, name: str, file: LocalFile) -> None:
        copied = CopiedFile(state=file.state, sha256=file.sha256)
        with self._guard:
            self._files[name] = copied
            self._append(_line(name, copied))

    def forget(self, name: str) -> None:
        with self._guard:
            if self._files.pop(name, None) is not None:
                self._append(_line(name, None))

    def _append(self, line: str) -> None:
        """The first time everything is written anew. A disk that refuses costs another upload, and no more."""
        with suppress(OSError):
            if self._written:
                with self._path.open("ab") as file:
                    file.write(f"{line}\n".encode())
            else:
                first = json.dumps({"url": self._url, "id": self.id})
                lines = [first, *(_line(name, known) for name, known in self._files.items())]
                write_file(DISK, self._path, "".join(f"{line}\n" for line in lines).encode())
                self._written = True


def _line(name: str, file: CopiedFile | None) -> str:
    known = {"sha256": None} if file is None else {"sha256": file.sha256, **asdict(file.state)}
    return json.dumps({"name": name, **known})


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:  # torn
        return {}
    return value if isinstance(value, dict) else {}

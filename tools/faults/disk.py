"""A small disk of our own that can be filled up and frozen. Knows no sweeps.

An ext4 image behind a loop device can do both; where that is not allowed a tmpfs can be full, but not slow; where
nothing can be mounted an ordinary folder can be neither.
"""

import errno
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

SIZE = 48 * 2**20  # bytes
FILLER = "filler"


class SmallDisk:
    """Mounted at `folder`, which it makes, until `close`."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self._image = folder, image
        folder.mkdir()
        self.kind = self._mount()
        self._frozen = False

    def _mount(self) -> str:
        with self._image.open("wb") as file:
            file.truncate(SIZE)
        made = _done("mkfs.ext4", "-q", "-m", "0", "-F", str(self._image))
        if made and _done("mount", "-o", "loop,noatime", str(self._image), str(self.folder)):
            return "ext4"
        if _done("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(self.folder)):
            return "tmpfs"
        return "folder"

    @property
    def can_be_full(self) -> bool:
        return self.kind != "folder"

    @property
    def can_be_slow(self) -> bool:
        return self.kind == "ext4" and shutil.which("fsfreeze") is not None

    def fill(self) -> None:
        """Until not one byte more fits."""
        assert self.can_be_full
        handle = os.open(self.folder / FILLER, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            for size in (1 << 20, 1 << 12, 1):
                _write_all(handle, b"x" * size)
        finally:
            os.close(handle)

    def free(self) -> None:
        with suppress(FileNotFoundError):
            (self.folder / FILLER).unlink()

    def freeze(self, seconds: float) -> None:
        """Whoever writes waits so long."""
        assert self.can_be_slow
        self._frozen = _done("fsfreeze", "--freeze", str(self.folder))
        time.sleep(seconds)
        self._thaw()

    def _thaw(self) -> None:
        if self._frozen:
            self._frozen = not _done("fsfreeze", "--unfreeze", str(self.folder))

    def close(self) -> None:
        self._thaw()
        if self.kind != "folder":
            _done("umount", "--lazy", str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        self._image.unlink(missing_ok=True)


def _write_all(handle: int, data: bytes) -> None:
    """As often as it goes."""
    try:
        while True:
            os.write(handle, data)
    except OSError as problem:
        if problem.errno != errno.ENOSPC:
            raise


def _done(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return False

"""A small disk that can be filled up and frozen.

An ext4 image on a loop device can do both. Without permission for that, a tmpfs can be full but not slow. Where nothing
can be mounted, an ordinary directory can be neither.
"""

import errno
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

DISK_BYTES = 48 * 2**20
FILLER = "filler"


class SmallDisk:
    """A disk that is mounted at the new directory `folder` until `close`."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self._image = folder, image
        folder.mkdir()
        self.kind = self._mount()
        self._frozen = False

    def _mount(self) -> str:
        with self._image.open("wb") as file:
            file.truncate(DISK_BYTES)
        formatted = _succeeds("mkfs.ext4", "-q", "-m", "0", "-F", str(self._image))
        if formatted and _succeeds("mount", "-o", "loop,noatime", str(self._image), str(self.folder)):
            return "ext4"
        if _succeeds("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.folder)):
            return "tmpfs"
        return "folder"

    @property
    def can_be_full(self) -> bool:
        return self.kind != "folder"

    @property
    def can_be_slow(self) -> bool:
        return self.kind == "ext4" and shutil.which("fsfreeze") is not None

    def fill(self) -> None:
        """Writes until the disk has no byte left."""
        assert self.can_be_full
        handle = os.open(self.folder / FILLER, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        try:
            for size in (1 << 20, 1 << 12, 1):
                _write_until_full(handle, b"x" * size)
        finally:
            os.close(handle)

    def free(self) -> None:
        with suppress(FileNotFoundError):
            (self.folder / FILLER).unlink()

    def freeze(self, seconds: float) -> None:
        """Blocks all writers for `seconds`."""
        assert self.can_be_slow
        self._frozen = _succeeds("fsfreeze", "--freeze", str(self.folder))
        time.sleep(seconds)
        self._thaw()

    def _thaw(self) -> None:
        if self._frozen:
            self._frozen = not _succeeds("fsfreeze", "--unfreeze", str(self.folder))

    def close(self) -> None:
        self._thaw()
        if self.kind != "folder":
            _succeeds("umount", "--lazy", str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)
        self._image.unlink(missing_ok=True)


def _write_until_full(handle: int, data: bytes) -> None:
    try:
        while True:
            os.write(handle, data)
    except OSError as problem:
        if problem.errno != errno.ENOSPC:
            raise


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return False

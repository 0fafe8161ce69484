"""Changes a folder so that a change is there whole or not at all, and stays. Knows no formats.

`Disk` holds every primitive by which files change; tests put one in its place that fails or crashes at a chosen call.
"""

import os
import uuid
from pathlib import Path

TEMPORARY = ".tmp"


class Disk:
    """The primitives. None of them is durable until sync or sync_folder has returned."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)

    def write(self, handle: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def sync_folder(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


DISK = Disk()


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Replaces a file: readers see the old one or the new one, and after a crash there is one of the two."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        handle = disk.create(temporary)
        try:
            disk.write(handle, data)
            disk.sync(handle)
        finally:
            disk.close(handle)
        disk.rename(temporary, path)
    except OSError:
        remove_quietly(temporary)
        raise
    disk.sync_folder(path.parent)


def remove_quietly(path: Path) -> None:
    """Tidies up after a failure, where a second failure would hide the first."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def make_folders(disk: Disk, path: Path) -> None:
    """A folder with its missing parents, each on disk before something is put into it."""
    if path.is_dir():
        return
    make_folders(disk, path.parent)
    try:
        disk.make_folder(path)
    except FileExistsError:
        return
    disk.sync_folder(path.parent)


def move_file(disk: Disk, path: Path, folder: Path) -> Path:
    """Moves a file into another folder under a name that is free there.

    A rename from one folder to another may, on some disks, be half done after a crash: with neither name. So the file
    has both names for a moment, where the file system allows that.
    """
    make_folders(disk, folder)
    target = folder / path.name
    number = 1
    while target.exists():
        target = folder / f"{path.name}.{number}"
        number += 1
    try:
        disk.link(path, target)
    except OSError:  # there are no second names there
        disk.rename(path, target)
        disk.sync_folder(folder)
    else:
        disk.sync_folder(folder)
        disk.remove(path)
    disk.sync_folder(path.parent)
    return target

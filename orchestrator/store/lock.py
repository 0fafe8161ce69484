"""One writer per folder, and how to tell whether it still lives. Knows no sweeps.

A folder `lock/` holds one small file per generation of writers: 000001.json, 000002.json, … The newest one counts. To
take the folder one creates the next number, which the file system grants to exactly one; a number is never used again
while it matters, because the newest file is only ever renamed (to .released), not removed. File locks are not used:
network file systems do not keep them.

A writer on this machine lives if the kernel has its process, with the same start time. One elsewhere lives if it has
touched its file lately; both times come from the file system's clock, so the machines' clocks may differ.
"""

import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sampler.errors import InputError

NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
FOLDER = "lock"
STALE_SECONDS = 60.0
BEATS = 6  # signs of life in that time
TRIES = 50


class FolderInUse(InputError):
    """Another living process writes to the folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who wrote a lock file; empty where it could not be read yet."""

    host: str = "?"
    pid: int = 0
    start: str = ""  # of the process, in the kernel's ticks
    machine: str = ""  # this boot of this machine, and the namespace the pid counts in
    since: str = "?"

    @classmethod
    def this_process(cls) -> "Holder":
        now = datetime.now(UTC).isoformat(timespec="seconds")
        pid = os.getpid()
        return cls(host=socket.gethostname(), pid=pid, start=_start_time(pid), machine=_machine(), since=now)

    @classmethod
    def read(cls, path: Path) -> "Holder":
        try:
            value = json.loads(path.read_bytes())
            return cls(**value)
        except (ValueError, TypeError, OSError):  # half-written, damaged, or gone
            return cls()

    def as_dict(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in ("host", "pid", "start", "machine", "since")}


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""  # no Linux: only signs of life count


def _start_time(pid: int) -> str:
    """Empty for a process that is not there or has ended without being reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _generations(folder: Path) -> list[tuple[int, Path]]:
    found = ((path.name.partition(".")[0], path) for path in folder.iterdir())
    return sorted((int(number), path) for number, path in found if number.isdigit())


def _now(folder: Path) -> float:
    """The file system's clock."""
    probe = folder / f".{uuid.uuid4().hex}.tmp"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _refusal(path: Path, now: float, stale: float) -> str | None:
    """Why the folder cannot be taken, if the holder of this lock file lives."""
    if path.suffix == ".released":
        return None
    try:
        age = now - path.stat().st_mtime
    except FileNotFoundError:
        return None  # released or taken over since; whoever tries for the next number will see
    holder = Holder.read(path)
    who = f"process {holder.pid} on {holder.host} has been writing to it since {holder.since}"
    if holder.machine and holder.machine == _machine():
        lives = _start_time(holder.pid) == holder.start
        return f"{who}; wait until it ends, or stop it (kill {holder.pid}) and repeat the command" if lives else None
    if age >= stale:
        return None
    return (
        f"{who} and gave a sign of life {max(age, 0):.0f} s ago; wait until it ends, or {stale:.0f} s after its death"
    )


def writer_of(folder: Path, *, stale: float = STALE_SECONDS) -> Holder | None:
    """The living writer of a folder, if there is one; for readers, who change nothing and trust their own clock."""
    try:
        generations = _generations(folder / FOLDER)
    except FileNotFoundError:
        return None
    if not generations or _refusal(generations[-1][1], time.time(), stale) is None:
        return None
    return Holder.read(generations[-1][1])


class FolderLock:
    """Held from acquire to release, or until this process ends. A thread gives the signs of life."""

    def __init__(self, path: Path, number: int, handle: int, *, stale: float) -> None:
        self._path = path
        self._next = _path_of(path.parent, number + 1)
        self._handle = handle
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(stale / BEATS,), name="folder-lock", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, folder: Path, *, stale: float = STALE_SECONDS) -> "FolderLock":
        """Takes an existing folder; FolderInUse, naming the holder, if another process that lives has it."""
        locks = folder / FOLDER
        locks.mkdir(exist_ok=True)
        for _ in range(TRIES):
            newest = max(_generations(locks), default=None)
            refusal = _refusal(newest[1], _now(locks), stale) if newest else None
            if refusal is not None:
                raise FolderInUse(f"{folder} is in use: {refusal}")
            number = newest[0] + 1 if newest else 1
            handle = _create(locks, number)
            if handle is not None:
                _remove_older(locks, number)
                return cls(_path_of(locks, number), number, handle, stale=stale)
        raise FolderInUse(f"{folder} is in use: others keep taking it; try again later")

    def lost(self) -> bool:
        """Whether someone took this process for dead (it was stopped, or cut off from the disk, for too long)."""
        return self._next.exists() or not self._path.exists()

    def release(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        if not self.lost():
            self._path.rename(self._path.with_suffix(".released"))
        os.close(self._handle)

    def _beat(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            try:
                os.utime(self._handle)  # by handle: never another's file
            except OSError:
                continue  # a disk that is away for a moment


def _path_of(locks: Path, number: int) -> Path:
    return locks / f"{number:06d}.json"


def _create(locks: Path, number: int) -> int | None:
    """The next lock file, if nobody else was faster. It appears with its content, also if this process is killed."""
    path = _path_of(locks, number)
    content = json.dumps(Holder.this_process().as_dict())
    draft = locks / f".{uuid.uuid4().hex}.tmp"
    try:
        draft.write_text(content, encoding="utf-8")
        os.link(draft, path)
    except FileExistsError:
        return None
    except OSError as problem:
        if problem.errno not in NO_HARD_LINKS:
            raise
        if not _create_without_link(path, content):
            return None
    finally:
        draft.unlink(missing_ok=True)
    if max(_generations(locks))[1] == path:
        return os.open(path, os.O_RDONLY)
    path.unlink(missing_ok=True)  # so slow that this number had come, gone and been followed by others
    return None


def _create_without_link(path: Path, content: str) -> bool:
    """For file systems without hard links; a process killed in it keeps others away until its lock is stale."""
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with file:  # closed at once: a network file system shows it to others only then
            file.write(content)
    except OSError:  # a full disk
        path.unlink(missing_ok=True)
        raise
    return True


def _remove_older(locks: Path, number: int) -> None:
    for other, path in _generations(locks):
        if other < number:
            path.unlink(missing_ok=True)

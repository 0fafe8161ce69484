"""One writer per folder, and how to tell whether that writer is still alive.

The folder `lock/` holds one small file per generation of writers: 000001.json, 000002.json, … The newest one counts. A
process takes the folder by creating the next number, which the file system grants to exactly one. Numbers are not
reused while they matter: the newest file is only renamed (to .released), never removed. File locks are not used because
network file systems do not support them reliably.

A writer on this machine is alive if its process exists and has the same start time. A writer on another machine is
alive if it has touched its file recently; both times come from the file system, so the machines' clocks can differ.
"""

import errno
import json
import os
import re
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from orchestrator.core.untrusted import line, shape_problem, whole
from orchestrator.store.files import CorruptedFile, read_regular
from sampler.errors import InputError

LOCK_FOLDER = "lock"
STALE_SECONDS = 60.0
HEARTBEATS_PER_STALE_TIME = 6
ACQUIRE_ATTEMPTS = 50
LOCK_NUMBER = re.compile("[0-9]{1,18}")
LOCK_SHAPE = {"host": line, "pid": whole(), "start": line, "machine": line, "since": line}
NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class FolderInUse(InputError):
    """Another live process writes to the folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LockHolder:
    """The process that wrote a lock file; defaults if the file could not be read."""

    host: str = "?"
    pid: int = 0
    start: str = ""  # start time of the process, in kernel ticks
    machine: str = ""  # this boot of the machine, and the pid's namespace
    since: str = "?"

    @classmethod
    def this_process(cls) -> "LockHolder":
        now = datetime.now(UTC).isoformat(timespec="seconds")
        pid = os.getpid()
        return cls(host=socket.gethostname(), pid=pid, start=_start_time(pid), machine=_machine(), since=now)

    @classmethod
    def read(cls, path: Path) -> "LockHolder":
        try:
            holder = cls(**json.loads(read_regular(path)))
        except (ValueError, TypeError, RecursionError, OSError, CorruptedFile):  # incomplete, corrupted or gone
            return cls()
        return holder if shape_problem(asdict(holder), LOCK_SHAPE) is None else cls()


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""  # not Linux: only heartbeats count


def _start_time(pid: int) -> str:
    """Empty for a process that does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _generations(locks: Path) -> list[tuple[int, Path]]:
    found = ((path.name.partition(".")[0], path) for path in locks.iterdir())
    return sorted((int(number), path) for number, path in found if LOCK_NUMBER.fullmatch(number))


def _file_system_time(folder: Path) -> float:
    probe = folder / f".{uuid.uuid4().hex}.tmp"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _refusal(path: Path, now: float, stale_seconds: float) -> str | None:
    """Why the folder cannot be taken; None if the holder of this lock file is not alive."""
    if path.suffix == ".released":
        return None
    try:
        age = now - path.stat().st_mtime
    except FileNotFoundError:
        return None  # released or taken over since: creating the next number decides
    holder = LockHolder.read(path)
    who = f"process {holder.pid} on {holder.host} has been writing to it since {holder.since}"
    if holder.machine and holder.machine == _machine():
        alive = _start_time(holder.pid) == holder.start
        return f"{who}; wait until it ends, or stop it (kill {holder.pid}) and repeat the command" if alive else None
    if age >= stale_seconds:
        return None
    return (
        f"{who}, and its last heartbeat was {max(age, 0):.0f} s ago; wait until it ends, "
        f"or {stale_seconds:.0f} s after it was killed"
    )


def active_writer(folder: Path) -> LockHolder | None:
    """The live writer of a folder, if any. For readers: writes nothing and uses the local clock."""
    try:
        generations = _generations(folder / LOCK_FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not generations or _refusal(generations[-1][1], time.time(), STALE_SECONDS) is None:
        return None
    return LockHolder.read(generations[-1][1])


class FolderLock:
    """Held from `acquire` to `release`, or until this process ends. A thread writes the heartbeats."""

    def __init__(self, path: Path, number: int, handle: int, *, stale_seconds: float) -> None:
        self._path = path
        self._next = _lock_path(path.parent, number + 1)
        self._handle = handle
        self._released = threading.Event()
        interval = stale_seconds / HEARTBEATS_PER_STALE_TIME
        self._thread = threading.Thread(target=self._send_heartbeats, args=(interval,), name="folder-lock", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls, folder: Path, *, stale_seconds: float = STALE_SECONDS) -> "FolderLock":
        """Takes an existing folder; raises FolderInUse, with the holder, if another live process has it."""
        locks = folder / LOCK_FOLDER
        locks.mkdir(exist_ok=True)
        for _ in range(ACQUIRE_ATTEMPTS):
            newest = max(_generations(locks), default=None)
            refusal = _refusal(newest[1], _file_system_time(locks), stale_seconds) if newest else None
            if refusal is not None:
                raise FolderInUse(f"{folder} is in use: {refusal}")
            number = newest[0] + 1 if newest else 1
            handle = _create(locks, number)
            if handle is not None:
                _remove_older(locks, number)
                return cls(_lock_path(locks, number), number, handle, stale_seconds=stale_seconds)
        raise FolderInUse(f"{folder} is in use: other processes keep taking it; try again later")

    def is_lost(self) -> bool:
        """Whether another process took over because this one was stopped, or cut off from the disk, for too long."""
        return self._next.exists() or not self._path.exists()

    def release(self) -> None:
        if self._released.is_set():
            return
        self._released.set()
        self._thread.join()
        if not self.is_lost():
            self._path.rename(self._path.with_suffix(".released"))
        os.close(self._handle)

    def _send_heartbeats(self, interval_seconds: float) -> None:
        while not self._released.wait(interval_seconds):
            try:
                os.utime(self._handle)  # by handle: never the file of another process
            except OSError:
                continue  # the disk may come back


def _lock_path(locks: Path, number: int) -> Path:
    return locks / f"{number:06d}.json"


def _create(locks: Path, number: int) -> int | None:
    """Creates the next lock file with its content in one step; None if another process was faster."""
    path = _lock_path(locks, number)
    content = json.dumps(asdict(LockHolder.this_process()))
    draft = locks / f".{uuid.uuid4().hex}.tmp"
    try:
        draft.write_text(content, encoding="utf-8")
        os.link(draft, path)
    except FileExistsError:
        return None
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        if not _create_without_link(path, content):
            return None
    finally:
        draft.unlink(missing_ok=True)
    if max(_generations(locks))[1] == path:
        return os.open(path, os.O_RDONLY)
    path.unlink(missing_ok=True)  # so slow that this number was already taken, removed and followed by others
    return None


def _create_without_link(path: Path, content: str) -> bool:
    """For file systems without hard links. A process killed here blocks others until its lock is stale."""
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with file:  # closed at once: a network file system shows it to others only then
            file.write(content)
    except OSError:  # such as a full disk
        path.unlink(missing_ok=True)
        raise
    return True


def _remove_older(locks: Path, number: int) -> None:
    for other, path in _generations(locks):
        if other < number:
            path.unlink(missing_ok=True)

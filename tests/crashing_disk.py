"""Synthetic rows, and a disk that can lose power at any call.

The disk remembers what has not been flushed: when the power goes, unflushed data shrinks to a random length and
unflushed changes of folders are undone, last first, as a file system may do.
"""

import functools
import os
import random
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.store.files import Disk
from orchestrator.store.schema import DOCUMENTS, ROWS

VALUES = {
    pa.string(): "a few words",
    pa.int32(): 3,
    pa.int64(): 300,
    pa.float64(): 0.5,
    pa.bool_(): True,
    pa.list_(pa.int32()): [3, 4, 5],
    pa.list_(pa.float64()): [],
    pa.list_(pa.string()): ["a", "b"],
    pa.timestamp("us", tz="UTC"): datetime(2026, 1, 1, tzinfo=UTC),
}
TRIAL = "0123456789ab"


def _value(name: str) -> Any:
    return "threshold" if name == "reveal" else VALUES[ROWS.field(name).type]  # other rules have no threshold


@functools.cache
def _constant(name: str, rows: int) -> pa.Array:
    return pa.array([_value(name)] * rows, ROWS.field(name).type)


def trial_columns(trial_id: str = TRIAL) -> dict[str, object]:
    names = ("task", "policy", "threshold", "small_block", "block_cache", "reveal", "repeat", "shard")
    return {"trial_id": trial_id, **{name: _value(name) for name in names}}


def make_rows(
    doc_ids: Sequence[str], *, trial_id: str = TRIAL, attempt: int = 0, tokens: int = 7, text: str = "a few words"
) -> pa.RecordBatch:
    """`tokens` marks who made a row: whatever comes later under the same key must not replace it."""
    count = len(doc_ids)
    own = {
        "trial_id": [trial_id] * count,
        "doc_id": list(doc_ids),
        "attempt": [attempt] * count,
        "tokens": [tokens] * count,
        "text": [text] * count,
    }
    columns = [pa.array(own[f.name], f.type) if f.name in own else _constant(f.name, count) for f in ROWS]
    return pa.RecordBatch.from_arrays(columns, schema=ROWS)


def make_documents(doc_ids: Sequence[str]) -> pa.Table:
    columns = [doc_ids if f.name == "doc_id" else [VALUES[f.type]] * len(doc_ids) for f in DOCUMENTS]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, DOCUMENTS, strict=True)], schema=DOCUMENTS)


def tokens_by_key(rows: pa.Table) -> dict[tuple[str, str], int]:
    """(trial, document) to the mark; fails if a key comes twice or another value of a row is not as it was made."""
    keys = list(zip(rows["trial_id"].to_pylist(), rows["doc_id"].to_pylist(), strict=True))
    assert len(keys) == len(set(keys)), "a document has two rows"
    for name in set(rows.column_names) - {"trial_id", "doc_id", "attempt", "tokens", "text"}:
        assert rows[name].combine_chunks().equals(_constant(name, len(keys))), name
    return dict(zip(keys, rows["tokens"].to_pylist(), strict=True))


class PowerCut(BaseException):
    """Not an Exception: nothing in the store may go on after it."""


class CrashingDisk(Disk):
    """A real disk until `calls_left` reaches zero. `watch` is called before each primitive."""

    def __init__(self, scratch: Path, seed: int = 0) -> None:
        self.calls_left: int | None = None
        self.calls = 0
        self.watch: Callable[[], None] = lambda: None
        self._random = random.Random(seed)
        self._scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)
        self._flushed: dict[int, int] = {}  # inode to size
        self._paths: dict[int, Path] = {}  # handle to a spare name of its file
        self._unflushed: list[tuple[Path, Callable[[], None]]] = []  # folder, how to undo

    def _step(self) -> bool:
        """Whether this call is the one during which the power goes: it then may or may not have happened."""
        self.watch()
        self.calls += 1
        if self.calls_left is None:
            return False
        if self.calls_left < 0:
            raise PowerCut
        self.calls_left -= 1
        return self.calls_left < 0

    def _maybe_first(self, last: bool, act: Callable[[], None]) -> None:
        if not last or self._random.random() < 0.5:
            act()
        if last:
            raise PowerCut

    def _keep(self, path: Path) -> Path:
        """A second name, by which a file can be brought back."""
        spare = self._scratch / f"{len(os.listdir(self._scratch))}-{self._random.getrandbits(64):x}"
        os.link(path, spare)
        return spare

    def create(self, path: Path) -> int:
        last = self._step()
        handle = super().create(path)
        self._flushed[os.fstat(handle).st_ino] = 0
        self._paths[handle] = self._keep(path)
        self._unflushed.append((path.parent, lambda: path.unlink(missing_ok=True)))
        if last:
            os.close(handle)
            raise PowerCut
        return handle

    def write(self, handle: int, data: bytes) -> None:
        if self._step():
            super().write(handle, data[: self._random.randrange(len(data) + 1)])
            raise PowerCut
        super().write(handle, data)

    def truncate(self, handle: int, size: int) -> None:
        self._maybe_first(self._step(), lambda: super(CrashingDisk, self).truncate(handle, size))

    def sync(self, handle: int) -> None:
        if self._step():
            raise PowerCut
        self._flushed[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    def rename(self, source: Path, target: Path) -> None:
        last = self._step()
        if source.is_dir():
            super().rename(source, target)
            self._unflushed.append((target.parent, lambda: os.rename(target, source)))
            if last:
                raise PowerCut
            return
        spare, old = self._keep(source), self._keep(target) if target.exists() else None
        super().rename(source, target)

        def put_back_target() -> None:
            target.unlink(missing_ok=True)
            if old is not None:
                os.link(old, target)

        self._unflushed.append((target.parent, put_back_target))
        self._unflushed.append((source.parent, lambda: None if source.exists() else os.link(spare, source)))
        if last:
            raise PowerCut

    def link(self, source: Path, target: Path) -> None:
        last = self._step()
        super().link(source, target)
        self._unflushed.append((target.parent, lambda: target.unlink(missing_ok=True)))
        if last:
            raise PowerCut

    def remove(self, path: Path) -> None:
        last = self._step()
        spare = self._keep(path)
        super().remove(path)
        self._unflushed.append((path.parent, lambda: os.link(spare, path)))
        if last:
            raise PowerCut

    def make_folder(self, path: Path) -> None:
        last = self._step()
        super().make_folder(path)
        self._unflushed.append((path.parent, lambda: shutil.rmtree(path)))
        if last:
            raise PowerCut

    def remove_folder(self, path: Path) -> None:
        last = self._step()
        super().remove_folder(path)
        self._unflushed.append((path.parent, path.mkdir))
        if last:
            raise PowerCut

    def sync_folder(self, path: Path) -> None:
        if self._step():
            raise PowerCut
        self._unflushed = [entry for entry in self._unflushed if entry[0] != path]

    def lose(self) -> None:
        """What a power cut does to all that was not flushed; afterwards the disk works again."""
        folders = sorted({folder for folder, _ in self._unflushed})
        lost = {folder: self._random.randrange(len(self._unflushed) + 1) for folder in folders}
        for folder, undo in reversed(self._unflushed):
            if lost[folder] > 0 and folder.exists():
                undo()
            lost[folder] -= 1
        for spare in self._scratch.iterdir():
            size = spare.stat().st_size
            flushed = self._flushed.get(spare.stat().st_ino, size)
            if size > flushed:
                os.truncate(spare, self._random.randint(flushed, size))
        self._unflushed, self.calls_left = [], None
        self._flushed.clear()
        for spare in list(self._scratch.iterdir()):
            spare.unlink()

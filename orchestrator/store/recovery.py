"""Puts a folder in order: what a crash left half-done, and what was damaged. The caller holds the lock.

Nothing that was written is deleted: damaged files move to set-aside/, after their good rows have been written again.
Each step leaves a folder that can be read and recovered, so a crash in here does no harm.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.store.atomic import TEMPORARY, Disk, move_file, remove_quietly, write_file
from orchestrator.store.errors import Damaged
from orchestrator.store.schema import ROWS
from orchestrator.store.sealed_json import write_object
from orchestrator.store.sealed_parquet import hash_file, read_table, verify_table
from orchestrator.store.segments import encode_segment, read_segment
from orchestrator.store.trial_folder import (
    FACTS,
    SUMMARY,
    TABLE,
    Damage,
    read_facts,
    read_rows,
    rebuild_facts,
    segment_numbers,
    segment_path,
)


def recover_trial(disk: Disk, folder: Path, aside: Path) -> list[Damage]:
    """What was found damaged in a trial's folder, which is in order afterwards."""
    remove_leftovers(folder)
    facts, damage = _recover_facts(disk, folder, aside)
    sha256, more = _recover_table(disk, folder, aside, None if facts is None else facts.get("sha256"))
    damage += more
    for number in segment_numbers(folder):
        damage += _recover_segment(disk, folder, number, aside)
    _reconcile(disk, folder, facts, sha256)
    return damage


def recover_documents(disk: Disk, path: Path, aside: Path) -> list[Damage]:
    try:
        verify_table(path)
    except Damaged as problem:
        move_file(disk, path, aside)
        return [Damage(path=path, problem=str(problem))]
    return []


def remove_leftovers(folder: Path) -> None:
    """Files whose renaming never came: nobody was told that they exist."""
    for path in folder.iterdir():
        if path.name.startswith(".") and path.name.endswith(TEMPORARY):
            remove_quietly(path)


def _recover_facts(disk: Disk, folder: Path, aside: Path) -> tuple[dict[str, Any] | None, list[Damage]]:
    try:
        return read_facts(folder), []
    except FileNotFoundError:
        return None, []
    except Damaged as problem:
        move_file(disk, folder / FACTS, aside)
        return None, [Damage(path=folder / FACTS, problem=str(problem))]


def _recover_table(disk: Disk, folder: Path, aside: Path, known: str | None) -> tuple[str | None, list[Damage]]:
    """The hash of rows.parquet, if there is one to believe."""
    path = folder / TABLE
    if not path.exists():
        lost = [] if known is None else [Damage(path=path, problem="is missing")]
        return None, lost
    sha256 = hash_file(path)
    try:
        if sha256 != known:  # a crash came between the two files; the seal decides
            verify_table(path)
    except Damaged as problem:
        move_file(disk, path, aside)
        return None, [Damage(path=path, problem=str(problem))]
    return sha256, []


def _recover_segment(disk: Disk, folder: Path, number: int, aside: Path) -> list[Damage]:
    """A stream with a doubtful end: its good rows go to a new one, since a cut stream cannot be continued."""
    path = segment_path(folder, number)
    segment = read_segment(path)
    if segment.problem is None:
        return []
    if segment.batches:
        write_file(disk, segment_path(folder, segment_numbers(folder)[-1] + 1), encode_segment(segment.rows))
    move_file(disk, path, aside)
    return [Damage(path=path, problem=segment.problem, torn=segment.torn)]


def _reconcile(disk: Disk, folder: Path, facts: dict[str, Any] | None, sha256: str | None) -> None:
    """Makes trial.json say what the files say."""
    compact = sha256 is not None and _drop_merged(disk, folder)
    new = facts or rebuild_facts(read_rows(folder).rows, finished=compact)
    if new is None:
        return
    if new["status"] == "finished" and not compact:
        new = {**new, "status": "running", SUMMARY: None}
    if new["sha256"] != sha256:
        new = {**new, "sha256": sha256, "rows": None if sha256 is None else _count(folder)}
    if new != facts:
        write_object(disk, folder / FACTS, new)


def _drop_merged(disk: Disk, folder: Path) -> bool:
    """Removes streams all of whose rows are in rows.parquet; whether there are none left."""
    numbers = segment_numbers(folder)
    if not numbers:
        return True
    merged = set(_ids(read_table(folder / TABLE, ROWS, ["doc_id"])))
    for number in numbers:
        if merged.issuperset(_ids(read_segment(segment_path(folder, number)).rows)):
            disk.remove(segment_path(folder, number))
    disk.sync_folder(folder)
    return not segment_numbers(folder)


def _ids(rows: pa.Table) -> list[str]:
    return list(rows["doc_id"].to_pylist())


def _count(folder: Path) -> int:
    return len(read_table(folder / TABLE, ROWS, ["doc_id"]))

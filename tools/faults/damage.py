"""Damages one file of a sweep's folder: a torn end or a changed bit. Knows no processes."""

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

from orchestrator.store.trial_files import read_segment

LONGEST_TEAR = 2000  # bytes


def files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Of all trials, in an order that does not depend on the disk."""
    return sorted(path for pattern in patterns for path in (folder / "trials").glob(f"*/{pattern}"))


def newest(paths: Sequence[Path]) -> Path | None:
    return max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)


def tear(path: Path, chance: Random) -> bool:
    """Takes some last bytes away; whether that can be seen (at the border of a batch it cannot)."""
    size = path.stat().st_size
    os.truncate(path, size - chance.randint(1, min(size, LONGEST_TEAR)))
    return read_segment(path).problem is not None


def flip(path: Path, chance: Random) -> int:
    """Changes one bit; of which byte."""
    with path.open("r+b") as file:
        at = chance.randrange(os.fstat(file.fileno()).st_size)
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    return at

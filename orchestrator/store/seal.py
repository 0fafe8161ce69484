"""A checksum that lies inside the bytes it covers. Knows no file formats.

A file format leaves room for a mark followed by 64 zeros; sealing replaces the zeros by the sha256 of everything, zeros
included. Whoever reads can then tell a flipped byte, wherever it is, before any decoder looks at the bytes, and
programs that do not know the mark see an ordinary file.
"""

import hashlib
from typing import BinaryIO

MARK = b"reuse-sweep-check:"
BLANK = MARK + b"0" * 64
CHUNK = 1 << 20


def seal(data: bytes, *, start: int = 0, stop: int | None = None, after: bytes = b"") -> bytes:
    """The same bytes with the blank in data[start:stop] filled; `after` chains this seal to what came before it."""
    at = data.rfind(BLANK, start, stop)
    assert at >= 0, "nothing to fill in"
    digest = hashlib.sha256(after + data).hexdigest().encode()
    return data[: at + len(MARK)] + digest + data[at + len(BLANK) :]


def find_seal(data: bytes, *, start: int = 0, stop: int | None = None) -> slice | None:
    """Where the digest lies. The last mark counts: text of rows that happens to hold one comes earlier."""
    at = data.rfind(MARK, start, stop)
    if at < 0 or at + len(BLANK) > (len(data) if stop is None else stop):
        return None
    return slice(at + len(MARK), at + len(BLANK))


def is_sealed(data: bytes, *, start: int = 0, stop: int | None = None, after: bytes = b"") -> bool:
    """Whether every byte is as it was when sealed."""
    where = find_seal(data, start=start, stop=stop)
    if where is None:
        return False
    digest = hashlib.sha256(after)
    for part in (data[: where.start], b"0" * 64, data[where.stop :]):
        digest.update(part)
    return digest.hexdigest().encode() == data[where]


def is_sealed_file(file: BinaryIO, *, start: int, size: int) -> bool:
    """The same for a file too large to hold, whose seal lies at or behind `start`."""
    file.seek(start)
    tail = file.read(size - start)
    where = find_seal(tail)
    if where is None:
        return False
    digest = hashlib.sha256()
    file.seek(0)
    left = start
    while left and (chunk := file.read(min(CHUNK, left))):
        digest.update(chunk)
        left -= len(chunk)
    for part in (tail[: where.start], b"0" * 64, tail[where.stop :]):
        digest.update(part)
    return left == 0 and digest.hexdigest().encode() == tail[where]

"""JSON objects in files that notice a flipped byte. Knows no meaning of their keys."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.store.atomic import Disk, write_file
from orchestrator.store.errors import Damaged
from orchestrator.store.seal import BLANK, MARK, is_sealed, seal

KEY = "check"  # comes last in the file


def encode_object(value: Mapping[str, Any]) -> bytes:
    body = {**value, KEY: BLANK.decode()}
    return seal(json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def decode_object(data: bytes, *, seal_required: bool = True) -> dict[str, Any]:
    """What was encoded. A file written by hand has no seal at all: that is allowed where it is not required."""
    by_hand = MARK not in data and f'"{KEY}"'.encode() not in data
    if not is_sealed(data) and (seal_required or not by_hand):
        raise Damaged("does not match its own checksum: it was damaged or edited")
    try:
        value = json.loads(data)
    except ValueError as problem:  # also what is not UTF-8
        raise Damaged(f"is not readable JSON ({problem})") from problem
    if not isinstance(value, dict):
        raise Damaged("is JSON, but not an object")
    value.pop(KEY, None)
    return value


def write_object(disk: Disk, path: Path, value: Mapping[str, Any]) -> None:
    write_file(disk, path, encode_object(value))


def read_object(path: Path, *, seal_required: bool = True) -> dict[str, Any]:
    return decode_object(path.read_bytes(), seal_required=seal_required)

"""Decides whether a folder is a sweep's that this version can use. Changes nothing."""

import json
from pathlib import Path
from typing import Any

from orchestrator.store.atomic import TEMPORARY
from orchestrator.store.errors import Damaged
from orchestrator.store.lock import FOLDER as LOCK
from orchestrator.store.schema import SCHEMA_VERSION
from orchestrator.store.sealed_json import read_object
from sampler.errors import InputError

REQUEST = "sweep.json"
COPY = "sweep.copy.json"
FETCHING = "fetching.json"  # there while a remote copy is being fetched into the folder; says from where
SLURM = "slurm"  # scripts and logs of jobs, there before the sweep begins


def read_request(folder: Path) -> dict[str, Any] | None:
    """sweep.json, or nothing where a sweep has not begun; InputError for a folder that is no sweep's or unreadable."""
    path = folder / REQUEST
    if (folder / FETCHING).exists():
        raise InputError(
            f"{folder} holds a part of a sweep whose copy was being fetched; repeat the command with its --upload to "
            "fetch the rest, or delete the folder"
        )
    try:
        request = read_object(path, seal_required=False)
    except FileNotFoundError:
        _require_unused(folder)
        return None
    except NotADirectoryError as problem:
        raise InputError(f"{folder} is a file; a sweep needs a folder") from problem
    except Damaged as problem:
        _require_known_schema(path, _stated_schema(path), f" (or damaged: {COPY} is a copy of it)")
        raise InputError(f"{path} {problem}; put {COPY} in its place, or use another folder") from problem
    except OSError as problem:
        raise InputError(f"{path} cannot be read: {problem.strerror}") from problem
    _require_known_schema(path, request.get("schema"))
    return request


def _stated_schema(path: Path) -> int:
    """Of a file whose seal does not match, since a newer version may seal in another way; ours where it states none."""
    try:
        schema = json.loads(path.read_bytes())["schema"]
    except (OSError, ValueError, TypeError, KeyError):
        return SCHEMA_VERSION
    return schema if isinstance(schema, int) and schema > SCHEMA_VERSION else SCHEMA_VERSION


def _require_known_schema(path: Path, schema: object, doubt: str = "") -> None:
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise InputError(f"{path} states no schema number: it is not this project's")
    if schema > SCHEMA_VERSION:
        raise InputError(
            f"{path} has schema {schema}, written by a newer version{doubt}; this one reads up to {SCHEMA_VERSION}: "
            "upgrade, or use another folder"
        )


def _require_unused(folder: Path) -> None:
    """Empty, absent, or begun and left before the request was there."""
    try:
        names = {path.name for path in folder.iterdir() if not path.name.endswith(TEMPORARY)}
    except FileNotFoundError:
        return
    except OSError as problem:
        raise InputError(f"{folder} cannot be read: {problem.strerror}") from problem
    allowed = {SLURM} | ({LOCK, "documents"} if LOCK in names else set())
    if names - allowed:
        some = ", ".join(sorted(names - allowed)[:3])
        raise InputError(f"{folder} is not empty (it holds {some}) and has no {REQUEST}; name another folder")

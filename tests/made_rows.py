"""Rows of sweeps that never ran, with the full schema: a test says only the columns it is about."""

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from orchestrator.store.schema import ROWS

_ZERO: list[tuple[Any, Any]] = [
    (pa.types.is_string, ""),
    (pa.types.is_list, []),
    (pa.types.is_timestamp, datetime(2026, 1, 1, tzinfo=UTC)),
    (pa.types.is_boolean, True),
    (pa.types.is_floating, 1.0),
    (pa.types.is_integer, 0),
]
DEFAULTS: dict[str, Any] = {
    field.name: None if field.nullable else next(value for matches, value in _ZERO if matches(field.type))
    for field in ROWS
} | {"threshold": 0.95, "small_block": 8, "metrics": "{}", "calibration": 50.0}


def made_rows(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist([DEFAULTS | row for row in rows], schema=ROWS)

"""The columns of a sweep's tables, and how tables of other versions are read.

ROWS has one row per trial and document, DOCUMENTS one per document. A row holds what was requested, the result and its
cost, so rows of many trials can be compared without other files. Columns that do not apply are null.

Adding a nullable column keeps SCHEMA_VERSION: older files then have nulls in it, and older versions ignore it. Anything
else (a required column, another type or meaning, a removed column) needs the next SCHEMA_VERSION, see docs/format.md.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.core.configuration import DECODE_SETTINGS, IN_EVERY_ID, Configuration, default_of
from orchestrator.core.trial import TRIAL_KEYS
from orchestrator.core.untrusted import CONTROL, name_problem, shown
from sampler.errors import InputError

SCHEMA_VERSION = 1  # in sweep.json and trial.json ("schema"), and in the metadata of tables
COMPACTED_SCHEMA_VERSION = 2  # in the sweep.json of a folder with compacted files, which version 1 would not see
VERSION_KEY = b"reuse_sweep_schema"
MAX_VERSION_DIGITS = 10

# What values a table may hold, beyond the types of its columns: anything else was not written by a sweep.
FILE_NAMES = ("task", "subtask", "policy")  # parts of the paths of a report
LINES = ("sweep", "trial_id", "subset", "mode", "dtype", "doc_id", "doc_hash", "finish", "actor", "node", "device")
LONGEST_NAME_CHARACTERS = 1000
MAX_ATTEMPTS = 100_000
MAY_BE_NAN = ("batch_seconds", "calibration")  # where it could not be measured
LATEST_MICROSECONDS = 253_370_764_800 * 10**6  # the year 9999, after which Python has no dates


def check_version(path: Path, version: object, hint: str = "") -> None:
    """Raises InputError if a file was written by a newer, incompatible version, or has no valid version.

    `hint` is added to the message about a newer version.
    """
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InputError(f"{path} has no schema number: it does not belong to this project")
    if version > COMPACTED_SCHEMA_VERSION:
        raise InputError(
            f"{path} has schema {version}, written by a newer version{hint}; this version reads up to "
            f"{COMPACTED_SCHEMA_VERSION}: upgrade, or use another directory"
        )


def check_columns(path: Path, found: pa.Schema, expected: pa.Schema) -> frozenset[str]:
    """The names of columns that this version does not know; raises InputError if the table cannot be converted."""
    if found.equals(expected):
        return frozenset()
    version = (found.metadata or {}).get(VERSION_KEY, b"1")
    check_version(path, int(version) if version.isdigit() and len(version) < MAX_VERSION_DIGITS else None)
    if len(set(found.names)) < len(found.names):
        raise InputError(f"{path} has two columns of the same name: restore the file, or use another directory")
    for field in expected:
        if field.name not in found.names and not field.nullable:
            raise InputError(f"{path} has no column {field.name!r}: restore the file, or use another directory")
        if field.name in found.names and found.field(field.name).type != field.type:
            raise InputError(
                f"{path} has the type {found.field(field.name).type} in the column {field.name!r}, where this version "
                f"expects {field.type}: use the version that wrote it, or another directory"
            )
    return frozenset(found.names) - frozenset(expected.names)


def values_problem(table: pa.Table) -> str | None:
    """Which values a sweep cannot have written, as the end of a sentence about the file; None if all are valid.

    Runs for every file that is read, so it must be fast.
    """
    try:
        table.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        return f"holds bytes that are not of their column's type ({error})"
    for name in table.column_names:
        field, column = _FIELDS.get(name), table[name]
        if field is not None and not field.nullable and column.null_count:
            return f"has no value in some rows of the column {name!r}"
        if field is not None and pa.types.is_list(field.type) and any(c.flatten().null_count for c in column.chunks):
            return f"has an empty value in a list of the column {name!r}"
    return _name_problem(table) or _range_problem(table)


def _name_problem(table: pa.Table) -> str | None:
    for column in FILE_NAMES:
        for value in table[column].unique().to_pylist() if column in table.column_names else ():
            if value and (expected := name_problem(value)) is not None:
                return f"has {shown(value)} in the column {column!r}, which must be {expected}"
    for name in (name for name in LINES if name in table.column_names):
        column = table[name]
        unusual = column.filter(pc.invert(pc.ascii_is_printable(column))).unique().to_pylist()
        if (pc.max(pc.binary_length(column)).as_py() or 0) > LONGEST_NAME_CHARACTERS:
            unusual = column.unique().to_pylist()
        for value in unusual:
            if len(value) > LONGEST_NAME_CHARACTERS or CONTROL.search(value):
                return f"has {shown(value)} in the column {name!r}, which must be a name on one line"
    return None


def _range_problem(table: pa.Table) -> str | None:
    for column, highest in (("attempt", MAX_ATTEMPTS), ("started_at", LATEST_MICROSECONDS)):
        if column in table.column_names and len(table):
            values = table[column].cast(pa.int64())
            low, high = pc.min_max(values).as_py().values()
            if low < 0 or high > highest:
                return f"has a value out of range in the column {column!r}"
    for column in ("threshold", "seconds", "batch_seconds", "calibration"):
        if column in table.column_names:
            wrong = pc.is_inf(table[column]) if column in MAY_BE_NAN else pc.invert(pc.is_finite(table[column]))
            if pc.any(wrong).as_py():
                return f"has a value that is not finite in the column {column!r}"
    return None


def convert_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The columns of `schema`, then the table's other columns, which a newer version wrote.

    A column that the table lacks is null, but a decode setting has its default: that is what the rows were made with.
    """
    fields = [*schema, *(field.with_nullable(True) for field in table.schema if field.name not in schema.names)]
    names = frozenset(table.column_names)
    columns = [table[field.name] if field.name in names else _missing(field, len(table)) for field in fields]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, schema.metadata))


def _missing(field: pa.Field, length: int) -> pa.Array:
    if field.name in DECODE_SETTINGS:
        return pa.repeat(pa.scalar(default_of(field.name), field.type), length)
    return pa.nulls(length, field.type)


def select_fields(schema: pa.Schema, columns: Collection[str] | None) -> pa.Schema:
    """Some fields of a schema, in its order; None: all."""
    return schema if columns is None else pa.schema([f for f in schema if f.name in columns], schema.metadata)


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _decode_setting(name: str) -> pa.Field:
    """The column of a decode setting. Rows older than the setting have none, so it is nullable."""
    kind = _SETTING_TYPES[type(default_of(name))]
    return pa.field(name, kind, nullable=name not in IN_EVERY_ID)


_SETTING_TYPES = {bool: pa.bool_(), int: pa.int32(), float: pa.float64(), str: pa.string()}

ROWS = pa.schema(
    [
        _required("sweep", pa.string()),
        _required("trial_id", pa.string()),
        _required("task", pa.string()),
        _required("subtask", pa.string()),
        _required("shard", pa.int32()),
        _required("policy", pa.string()),
        pa.field("k", pa.int32()),
        pa.field("subset", pa.string()),
        pa.field("mode", pa.string()),
        _required("layers", pa.list_(pa.int32())),  # layer indices of the policy in this model
        *map(_decode_setting, DECODE_SETTINGS),
        _required("batch_size", pa.int32()),
        _required("dtype", pa.string()),
        _required("doc_id", pa.string()),
        _required("doc_hash", pa.string()),
        pa.field("correct", pa.bool_()),  # by the task's primary metric; null if that is not a yes/no metric
        _required("metrics", pa.string()),  # JSON object, from the task's scorer
        _required("prompt_tokens", pa.int32()),
        _required("tokens", pa.int32()),
        _required("seconds", pa.float64()),  # of device time for this document
        _required("batch_id", pa.int32()),  # numbered within a trial and attempt
        _required("batch_seconds", pa.float64()),  # wall time of the whole batch, equal in all its rows
        _required("passes_prefill", pa.int32()),
        _required("passes_full", pa.int32()),
        _required("passes_small", pa.int32()),
        _required("passes_commit", pa.int32()),
        _required("layers_computed", pa.int64()),
        _required("layers_reused", pa.int64()),
        _required("layer_positions", pa.int64()),
        _required("prefill_tokens", pa.int64()),
        _required("eligible", pa.int32()),  # denoising passes in which the policy requested a replay
        _required("replayed", pa.int32()),  # denoising passes in which something was replayed
        pa.field("finish", pa.string()),  # stop or length; null for multiple-choice tasks
        pa.field("text", pa.string()),
        _required("token_ids", pa.list_(pa.int32())),
        _required("scores", pa.list_(pa.float64())),  # log-likelihood of each option
        # With --store-steps, for each token: the step of its block that revealed it (-1: the pass before the block),
        # its probability in that step, and how many characters of the text are complete after it
        pa.field("token_steps", pa.list_(pa.int32())),
        pa.field("token_confidences", pa.list_(pa.float64())),
        pa.field("token_ends", pa.list_(pa.int32())),
        _required("repeat", pa.int32()),
        _required("attempt", pa.int32()),
        _required("actor", pa.string()),
        _required("node", pa.string()),
        _required("device", pa.string()),
        _required("calibration", pa.float64()),  # tokens/s of fixed k1 documents on this actor at that time
        _required("started_at", pa.timestamp("us", tz="UTC")),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION)},
)

DOCUMENTS = pa.schema(
    [
        _required("doc_id", pa.string()),
        _required("subtask", pa.string()),
        _required("doc_hash", pa.string()),
        _required("shard", pa.int32()),
        pa.field("level", pa.string()),  # difficulty, if the dataset states it
        _required("question", pa.string()),
        pa.field("choices", pa.list_(pa.string())),
        _required("gold", pa.string()),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION)},
)

ATTEMPT_TEXTS = ("actor", "node_id", "started_at", "model_revision", "reason")
ATTEMPT_NUMBERS = ("load_seconds", "warm_up_seconds", "calibration_seconds", "peak_memory")
ATTEMPT_VALUES = ("device", "packages", "code", "gpus")  # as JSON
ATTEMPTS = pa.schema(  # trial.json files as a table: one row per attempt, those of a trial one after the other
    [
        _required("trial_id", pa.string()),
        *(pa.field(name, ROWS.field(name).type) for name in TRIAL_KEYS),
        pa.field("status", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("attempt", pa.int64()),  # null: the trial has no attempt
        *(pa.field(name, pa.string()) for name in ATTEMPT_TEXTS),
        *(pa.field(name, pa.float64()) for name in ATTEMPT_NUMBERS),
        *(pa.field(name, pa.dictionary(pa.int32(), pa.string())) for name in ATTEMPT_VALUES),
    ]
)

_FIELDS = {field.name: field for field in (*DOCUMENTS, *ROWS)}  # a name in both has the same type


def attempts_of(records: Iterable[tuple[str, Mapping[str, Any]]]) -> pa.Table:
    """The attempts of trials as a table, ATTEMPTS; `records` has the id and trial.json of each trial."""
    lines: list[dict[str, Any]] = []
    for trial_id, record in records:
        trial = {**record["trial"], **Configuration.from_mapping(record["trial"]).as_dict()}
        own = {**trial, "trial_id": trial_id, "status": record.get("status"), "rows": record.get("rows")}
        for attempt in record["attempts"] or [{}]:
            values = {name: _to_json(attempt[name]) for name in ATTEMPT_VALUES if attempt.get(name) is not None}
            lines.append({**attempt, **own, **values})
    return pa.Table.from_pylist(lines, schema=ATTEMPTS)


_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode

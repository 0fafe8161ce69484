"""The columns of a sweep's tables, and how tables of other versions are read.

ROWS has one row per trial and document, DOCUMENTS one per document. A row holds what was requested, the result and its
cost, so rows of many trials can be compared without other files. Columns that do not apply are null.

Adding a nullable column keeps SCHEMA_VERSION: older files then have nulls in it, and older versions ignore it. Anything
else (a required column, another type or meaning, a removed column) needs the next SCHEMA_VERSION, see docs/format.md.
"""

from collections.abc import Collection
from pathlib import Path

import pyarrow as pa

from orchestrator.core.configuration import DECODE_SETTINGS, default_of
from sampler.errors import InputError

SCHEMA_VERSION = 1  # in sweep.json and trial.json ("schema"), and in the metadata of tables
VERSION_KEY = b"reuse_sweep_schema"


def check_version(path: Path, version: object, doubt: str = "") -> None:
    """Raises InputError if a file was written by a newer, incompatible version, or has no valid version."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InputError(f"{path} has no schema number: it does not belong to this project")
    if version > SCHEMA_VERSION:
        raise InputError(
            f"{path} has schema {version}, written by a newer version{doubt}; this version reads up to "
            f"{SCHEMA_VERSION}: upgrade, or use another folder"
        )


def check_columns(path: Path, found: pa.Schema, expected: pa.Schema) -> frozenset[str]:
    """The columns that this version does not know; raises InputError if the table cannot be converted."""
    if found.equals(expected):
        return frozenset()
    version = (found.metadata or {}).get(VERSION_KEY, b"1")
    check_version(path, int(version) if version.isdigit() else None)
    for field in expected:
        if field.name not in found.names and not field.nullable:
            raise InputError(f"{path} has no column {field.name!r}: restore the file, or use another folder")
        if field.name in found.names and found.field(field.name).type != field.type:
            raise InputError(
                f"{path} has the type {found.field(field.name).type} in the column {field.name!r}, where this version "
                f"expects {field.type}: use the version that wrote it, or another folder"
            )
    return frozenset(found.names) - frozenset(expected.names)


def convert_table(table: pa.Table, schema: pa.Schema, *, keep_extra: bool = False) -> pa.Table:
    """The columns of `schema`; with keep_extra, then the table's other columns.

    A column that the table lacks is null, but a decode setting has its default: that is what the rows were made with.
    """
    fields = list(schema)
    if keep_extra:
        fields += [field.with_nullable(True) for field in table.schema if field.name not in schema.names]
    names = frozenset(table.column_names)
    columns = [table[field.name] if field.name in names else _missing(field, len(table)) for field in fields]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, schema.metadata))


def _missing(field: pa.Field, length: int) -> pa.Array:
    if field.name in DECODE_SETTINGS:
        return pa.repeat(pa.scalar(default_of(field.name), field.type), length)
    return pa.nulls(length, field.type)


def select_fields(schema: pa.Schema, columns: Collection[str]) -> pa.Schema:
    """Some fields of a schema, in its order."""
    return pa.schema([field for field in schema if field.name in columns], schema.metadata)


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


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
        _required("threshold", pa.float64()),
        _required("small_block", pa.int32()),
        _required("block_cache", pa.bool_()),
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

ARROW_COPY = select_fields(ROWS, set(ROWS.names) - {"text"})  # columns that small row files also hold as Arrow

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

"""The columns of a sweep's tables: ROWS has one row per trial and document, DOCUMENTS one per document.

A row holds what was requested, the result and its cost, so rows of many trials can be compared without other files.
Columns that do not apply to a policy or task are null.
"""

from collections.abc import Collection

import pyarrow as pa

SCHEMA_VERSION = 1


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
    metadata={"reuse_sweep_schema": str(SCHEMA_VERSION)},
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
    metadata={"reuse_sweep_schema": str(SCHEMA_VERSION)},
)

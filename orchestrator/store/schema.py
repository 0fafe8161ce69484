"""The columns of a sweep's tables: one row per document and trial, and one per document. Knows no files.

A row states what was asked for, what came out and what it cost, so that rows of many trials can be compared without
looking anywhere else. Columns that a policy or task does not have are null.
"""

import pyarrow as pa

SCHEMA_VERSION = 1


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
        _required("layers", pa.list_(pa.int32())),  # indices the policy names in this model
        _required("threshold", pa.float64()),
        _required("small_block", pa.int32()),
        _required("block_cache", pa.bool_()),
        _required("batch_size", pa.int32()),
        _required("dtype", pa.string()),
        _required("doc_id", pa.string()),
        _required("doc_hash", pa.string()),
        pa.field("correct", pa.bool_()),  # by the task's primary metric; null where that is no yes or no
        _required("metrics", pa.string()),  # JSON object, as the task's scorer gave it
        _required("prompt_tokens", pa.int32()),
        _required("tokens", pa.int32()),
        _required("seconds", pa.float64()),  # on the device, for this document
        _required("batch_id", pa.int32()),  # counts within (trial, attempt)
        _required("batch_seconds", pa.float64()),  # wall time of the whole batch, the same in each of its rows
        _required("passes_prefill", pa.int32()),
        _required("passes_full", pa.int32()),
        _required("passes_small", pa.int32()),
        _required("passes_commit", pa.int32()),
        _required("layers_computed", pa.int64()),
        _required("layers_reused", pa.int64()),
        _required("layer_positions", pa.int64()),
        _required("prefill_tokens", pa.int64()),
        _required("eligible", pa.int32()),  # denoising passes in which the policy asked for a replay
        _required("replayed", pa.int32()),  # denoising passes in which something was replayed
        pa.field("finish", pa.string()),  # stop or length; null for scored options
        pa.field("text", pa.string()),
        _required("token_ids", pa.list_(pa.int32())),
        _required("scores", pa.list_(pa.float64())),  # log-likelihood of each option
        _required("repeat", pa.int32()),
        _required("attempt", pa.int32()),
        _required("actor", pa.string()),
        _required("node", pa.string()),
        _required("device", pa.string()),
        _required("calibration", pa.float64()),  # tokens/s of the fixed k1 documents on this actor, of the moment
        _required("started_at", pa.timestamp("us", tz="UTC")),
    ],
    metadata={"reuse_sweep_schema": str(SCHEMA_VERSION)},
)

DOCUMENTS = pa.schema(
    [
        _required("doc_id", pa.string()),
        _required("subtask", pa.string()),
        _required("doc_hash", pa.string()),
        _required("shard", pa.int32()),
        pa.field("level", pa.string()),  # how hard the document is, where its dataset says so
        _required("question", pa.string()),
        pa.field("choices", pa.list_(pa.string())),
        _required("gold", pa.string()),
    ],
    metadata={"reuse_sweep_schema": str(SCHEMA_VERSION)},
)

"""A trial's results as Arrow record batches, one row per document."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from orchestrator.core.trial import Trial
from orchestrator.store.schema import ROWS
from sampler.policy import ReusePolicy

if TYPE_CHECKING:
    from tasks.evaluate import Result


@dataclass(frozen=True, kw_only=True, slots=True)
class RowContext:
    """What all rows of one attempt share, besides the trial. Created by the trainable, read by `build_batches`."""

    sweep: str
    attempt: int
    actor: str
    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """The loaded model and how it runs. Created by the worker, read by `build_batches`."""

    device: str  # its name
    dtype: str
    batch_size: int
    depth: int
    subset_size: int | None


@dataclass(kw_only=True, slots=True)
class TrialTotals:
    """Totals of a trial's batches so far."""

    documents: int = 0
    correct: int = 0
    tokens: int = 0
    seconds: float = 0.0  # decoding

    def add(self, batch: pa.RecordBatch) -> None:
        self.documents += batch.num_rows
        self.correct += sum(filter(None, batch.column("correct").to_pylist()))
        self.tokens += sum(batch.column("tokens").to_pylist())
        self.seconds += batch.column("batch_seconds")[0].as_py()

    @property
    def metrics(self) -> dict[str, float]:
        """As reported to Ray Tune while the trial runs."""
        if not self.documents:
            return {"documents": 0}
        return {
            "documents": self.documents,
            "accuracy": self.correct / self.documents,
            "tokens_per_s": self.tokens / self.seconds,
        }


def build_batches(
    results: "Iterable[Result]", trial: Trial, context: RowContext, model: ModelInfo, speed: Callable[[], float]
) -> Iterator[pa.RecordBatch]:
    """Yields a record batch for each batch of documents, as soon as its last document is decoded.

    `speed` returns the worker's current calibration, in tokens/s.
    """
    shared = _attempt_columns(trial, context, model)
    remaining = iter(results)
    batch_id = 0
    while batch := list(islice(remaining, model.batch_size)):
        seconds = sum(result.wall_seconds for result in batch)
        common = shared | {"batch_id": batch_id, "batch_seconds": seconds, "calibration": speed()}
        rows = [common | _result_columns(result) for result in batch]
        yield pa.RecordBatch.from_pylist(rows, schema=ROWS)
        batch_id += 1


def _attempt_columns(trial: Trial, context: RowContext, model: ModelInfo) -> dict[str, Any]:
    policy = ReusePolicy.parse(trial.policy)
    return {
        "sweep": context.sweep,
        "trial_id": trial.trial_id,
        "task": trial.task,
        "shard": trial.shard,
        **trial.configuration.as_dict(),
        "k": policy.k,
        "subset": policy.layers,
        "mode": None if policy.layers is None else policy.mode,
        "layers": list(policy.layer_indices(model.depth, model.subset_size)),
        "batch_size": model.batch_size,
        "dtype": model.dtype,
        "repeat": trial.repeat,
        "attempt": context.attempt,
        "actor": context.actor,
        "node": context.node,
        "device": model.device,
    }


def _result_columns(result: "Result") -> dict[str, Any]:
    counters = result.counters
    return {
        "subtask": result.document.subtask,
        "doc_id": result.document.doc_id,
        "doc_hash": result.document.doc_hash,
        "correct": result.correct,
        "metrics": json.dumps(result.metrics, ensure_ascii=False, default=str),
        "prompt_tokens": result.prompt_tokens,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "passes_prefill": counters.prefill,
        "passes_full": counters.full,
        "passes_small": counters.small,
        "passes_commit": counters.commit,
        "layers_computed": counters.layers_computed,
        "layers_reused": counters.layers_reused,
        "layer_positions": counters.layer_positions,
        "prefill_tokens": counters.prefill_tokens,
        "eligible": counters.eligible,
        "replayed": counters.replayed,
        "finish": result.finish,
        "text": None if result.text is None else _storable(result.text),
        "token_ids": list(result.token_ids),
        "scores": list(result.scores),
        "started_at": datetime.now(UTC) - timedelta(seconds=result.seconds),
    }


def _storable(text: str) -> str:
    """Replaces half characters, which cannot be stored as UTF-8; the token ids keep them."""
    return text.encode("utf-8", "replace").decode("utf-8")

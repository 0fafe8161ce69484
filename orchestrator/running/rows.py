"""A trial's results as Arrow record batches, one row per document."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from orchestrator.store.schema import ROWS

if TYPE_CHECKING:
    from tasks.evaluate import Result


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
    results: "Iterable[Result]", shared: Mapping[str, Any], speed: Callable[[], float]
) -> Iterator[pa.RecordBatch]:
    """Yields a record batch for each batch of documents, as soon as its last document is decoded.

    `shared` are the columns that are the same in all rows of an attempt. `speed` returns the worker's current
    calibration, in tokens/s.
    """
    remaining = iter(results)
    batch_id = 0
    while batch := list(islice(remaining, shared["batch_size"])):
        seconds = sum(result.wall_seconds for result in batch)
        common = {**shared, "batch_id": batch_id, "batch_seconds": seconds, "calibration": speed()}
        rows = [common | _result_columns(result) for result in batch]
        yield pa.RecordBatch.from_pylist(rows, schema=ROWS)
        batch_id += 1


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
        "token_steps": None if result.reveals is None else [reveal.step for reveal in result.reveals],
        "token_confidences": None if result.reveals is None else [reveal.confidence for reveal in result.reveals],
        "token_ends": result.token_ends,
        "started_at": datetime.now(UTC) - timedelta(seconds=result.seconds),
    }


def _storable(text: str) -> str:
    """Replaces half characters, which cannot be stored as UTF-8; the token ids keep them."""
    return text.encode("utf-8", "replace").decode("utf-8")

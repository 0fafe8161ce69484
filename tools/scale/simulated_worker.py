"""A sweep worker without a model, of known speed.

It sleeps for each document and returns a row of constants. Everything else is the same as in a sweep: the trainable,
the result actor, the store with its flushes to disk, and Tune.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

import pyarrow as pa
import ray

from orchestrator.core.trial import Trial
from orchestrator.running.trainable import SweepWorker
from orchestrator.store.schema import ROWS
from tools.scale.synthetic_sweep import constant_row

CALIBRATION = 100.0  # tokens/s
POLL_SECONDS = 2.0  # between checks whether all actors have started


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedWorkerSettings:
    seconds_per_document: float
    actors: int  # number of actors to wait for before any of them begins
    timeout: float = 600.0


class SimulatedWorker(SweepWorker):
    """A sweep worker without a model."""

    def load(self, settings: Any) -> Any:
        results = self._results
        return SimulatedDecoder(settings, lambda: int(ray.get(results.progress.remote()).warm))


class SimulatedDecoder:
    """Takes the place of a Worker and sleeps instead of decoding."""

    recalibration_seconds = 0.0
    failed_documents: ClassVar[dict[str, str]] = {}

    def __init__(self, settings: SimulatedWorkerSettings, warm: Callable[[], int]) -> None:
        self._settings, self._warm = settings, warm
        self._all_started = False

    def open_task(self, name: str) -> None:
        """Does nothing: there is no task."""

    def calibrate(self) -> float:
        """The first call waits until all actors have started, so that their combined rate can be measured."""
        while not self._all_started and self._warm() < self._settings.actors:
            time.sleep(POLL_SECONDS)
        self._all_started = True
        return 0.0

    def facts(self, trial: Trial, calibration_seconds: float) -> dict[str, Any]:
        del trial
        spent = {"load_seconds": 0.0, "warm_up_seconds": 0.0, "calibration_seconds": calibration_seconds}
        return {"process": os.getpid(), "calibration": CALIBRATION, **spent}

    def run(self, trial: Trial, documents: Sequence[str], attempt: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        due = time.perf_counter()
        for number, doc_id in enumerate(documents):
            due = max(due + self._settings.seconds_per_document, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            own = {
                **trial.as_dict(),
                **attempt,
                "doc_id": doc_id,
                "batch_id": number,
                "batch_seconds": self._settings.seconds_per_document,
                "started_at": datetime.now(UTC),
            }
            yield pa.RecordBatch.from_pylist([constant_row(ROWS) | own], schema=ROWS)

    def peak_memory(self) -> int:
        return 0

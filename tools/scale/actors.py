"""Many logical actors with a stand-in for the decoder, of known speed: do the result actor and Tune keep up?

The stand-in sleeps for each document and makes a row of constants; everything else is as in a sweep: the trainable, the
result actor, the store with its flushes to disk, Tune.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import ray

from orchestrator.core.trial import Trial
from orchestrator.running.rows import RowContext
from orchestrator.running.trainable import SweepWorker
from orchestrator.store.schema import ROWS
from tools.scale.million import constants

LOOK = 2.0  # seconds between two looks at whether all actors are there


@dataclass(frozen=True, kw_only=True, slots=True)
class StandInSettings:
    """In place of a worker's."""

    seconds: float  # for each document
    actors: int  # that begin together
    timeout: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Slept:
    """In place of a calibration."""

    speed: float = 100.0
    seconds: float = 0.0


class StandIn(SweepWorker):
    """A worker without a model."""

    def load(self, settings: Any) -> Any:
        results = self._results
        return Sleeper(settings, lambda: int(ray.get(results.progress.remote()).warm))


class Sleeper:
    """Does what a Worker does, in time but not in substance."""

    recalibration_seconds = 0.0

    def __init__(self, settings: StandInSettings, warm: Callable[[], int]) -> None:
        self._settings, self._warm = settings, warm
        self._together = False

    def open_task(self, name: str) -> None:
        """There is no task."""

    def calibrate(self) -> Slept:
        """Waits, once, until all actors are there: only then is their common pace measured."""
        while not self._together and self._warm() < self._settings.actors:
            time.sleep(LOOK)
        self._together = True
        return Slept()

    def facts(self, trial: Trial, calibration: Slept) -> dict[str, Any]:
        del trial
        spent = {"load_seconds": 0.0, "warm_up_seconds": 0.0, "calibration_seconds": calibration.seconds}
        return {"process": os.getpid(), "calibration": calibration.speed, **spent}

    def run(self, trial: Trial, documents: Sequence[str], context: RowContext) -> Iterator[pa.RecordBatch]:
        due = time.perf_counter()
        for number, doc_id in enumerate(documents):
            due = max(due + self._settings.seconds, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            own = trial.as_dict() | {
                "doc_id": doc_id,
                "batch_id": number,
                "attempt": context.attempt,
                "actor": context.actor,
                "sweep": context.sweep,
                "batch_seconds": self._settings.seconds,
                "started_at": datetime.now(UTC),
            }
            yield pa.RecordBatch.from_pylist([constants(ROWS) | own], schema=ROWS)

    def peak_memory(self) -> int:
        return 0

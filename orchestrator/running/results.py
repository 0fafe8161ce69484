"""The result actor: takes record batches, has them on disk, and only then says so. Keeps the totals for the view.

It is the only writer of rows. All it knows is in the folder, so it can be restarted at any moment: what was
acknowledged is there, and a call that is repeated adds nothing. `Results` itself is a plain class and knows no Ray.
"""

import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.planning.grid import TrialSpec
from orchestrator.planning.plan import Plan
from orchestrator.running.metrics import SweepMetrics
from orchestrator.store.errors import StoreError
from orchestrator.store.writer import StoreWriter
from orchestrator.watching.progress import Progress
from orchestrator.watching.stored import stored_tally
from orchestrator.watching.tally import COLUMNS, trial_sums
from sampler.errors import InputError

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # seconds
WORKER = re.compile(r"worker-([0-9]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A trial and those of its documents that have no row yet."""

    trial: TrialSpec
    missing: tuple[str, ...]
    pause: float = 0.0  # seconds to wait first


class Results:
    """One sweep's folder, open for writing. Methods may be called from several threads."""

    def __init__(self, plan: Plan, *, actors: int, metrics: bool = False) -> None:
        self._plan, self._actors = plan, actors
        self._trials = {trial.trial_id: trial for trial in plan.trials}
        self._guard = threading.Lock()
        self._metrics = SweepMetrics(plan.sweep) if metrics else None
        self._failed: set[str] = set()
        self._running: set[str] = set()
        self._warm: set[str] = set()
        self._made: Counter[str] = Counter()  # workers made for a trial, in this run
        self._assigned: Counter[str] = Counter()  # how often a trial was given to a worker, in this run
        self._waited: dict[str, str] = {}  # workers that waited before they loaded, and the trial because of which
        self._workers, self._problem = 0, ""
        try:
            self._open()
        except (InputError, StoreError) as problem:  # a full disk, say: whoever calls is told, instead of Ray's trace
            self._problem = str(problem)

    def _open(self) -> None:
        self._writer = StoreWriter(Path(self._plan.folder))
        known = self._writer.trials()
        self._tally = stored_tally(self._plan, self._writer, known)
        unfinished = {trial.trial_id for trial in self._plan.unfinished(known)}
        self._finished = self._trials.keys() - unfinished
        self._workers = max((_number(attempt) for facts in known.values() for attempt in facts["attempts"]), default=0)

    @property
    def _store(self) -> StoreWriter:
        if self._problem:
            raise StoreError(self._problem)
        return self._writer

    def register(self, trial_id: str) -> tuple[str, float]:
        """A name for a new worker, not used by any before it that ran a trial, and how long it should wait first.

        It is made for a trial. If that is not the first try, something went wrong there, and may again if it is tried
        at once.
        """
        with self._guard:
            self._workers += 1
            name = f"worker-{self._workers}"
            pause = _pause(max(self._made[trial_id], self._assigned[trial_id]))
            self._made[trial_id] += 1
            if pause:
                self._waited[name] = trial_id
            return name, pause

    def ready(self, worker: str) -> None:
        with self._guard:
            self._warm.add(worker)

    def assign(self, trial_id: str, worker: str) -> Assignment:
        """What is to be done, and how long to wait before a try that is not the first."""
        trial = self._trials[trial_id]
        done = self._store.done(trial_id)
        with self._guard:
            pause = 0.0 if self._waited.pop(worker, None) == trial_id else _pause(self._assigned[trial_id])
            self._assigned[trial_id] += 1
        missing = tuple(d for d in self._plan.wanted(trial) if d not in done)
        return Assignment(trial=trial, missing=missing, pause=pause)

    def begin(self, trial_id: str, facts: Mapping[str, Any]) -> int:
        """The number of the attempt."""
        attempt = self._store.begin(self._trials[trial_id].as_dict(), facts)
        with self._guard:
            self._running.add(trial_id)
        return attempt

    def append(self, trial_id: str, attempt: int, batch: pa.RecordBatch) -> int:
        """How many rows were new; all of them are on disk."""
        done = self._store.done(trial_id)
        new = self._store.append(trial_id, attempt, batch)
        if new:
            keep = pa.array([doc_id not in done for doc_id in batch.column("doc_id").to_pylist()])
            with self._guard:
                self._tally.add(batch.filter(keep))
        return new

    def finish(self, trial_id: str, facts: Mapping[str, Any]) -> None:
        sums = trial_sums(self._store.rows([trial_id], COLUMNS, verify=False))
        summed = {**facts, "tally": sums.as_json()}
        self._store.finish(trial_id, summed, self._plan.wanted(self._trials[trial_id]))
        self._ended(trial_id, self._finished)

    def fail(self, trial_id: str, reason: str) -> None:
        """Marks a trial as failed, also one that no worker lived long enough to begin."""
        if self._store.trial(trial_id) is None:
            self._store.begin(self._trials[trial_id].as_dict(), {})
        self._store.fail(trial_id, reason)
        self._ended(trial_id, self._failed)

    def unfinished(self) -> tuple[list[str], list[str]]:
        """Trials that are not done, and a sentence for each damaged file that was found and set aside.

        A file that this actor, coming back, found damaged is one of a trial that Tune has seen end.
        """
        damage = [str(damage) for damage in self._store.damage.values()]
        with self._guard:
            return sorted(self._trials.keys() - self._finished), damage

    def progress(self) -> Progress:
        if self._problem:
            raise StoreError(self._problem)
        with self._guard:
            totals = self._tally.totals()
            if self._metrics is not None:
                self._metrics.update(totals)
            actors = max(self._actors, len(self._running))  # nodes that came later bring more
            return Progress(
                sweep=self._plan.sweep,
                totals=totals,
                trials=len(self._trials),
                finished=len(self._finished),
                failed=len(self._failed),
                running=tuple(self._trials[trial_id].label for trial_id in sorted(self._running)),
                actors=actors,
                started=sum(self._made.values()),
                warm=min(len(self._warm), actors),
            )

    def close(self) -> None:
        if not self._problem:
            self._writer.close()

    def _ended(self, trial_id: str, where: set[str]) -> None:
        with self._guard:
            self._running.discard(trial_id)
            where.add(trial_id)


def _pause(failures: int) -> float:
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (failures - 1)) if failures else 0.0


def _number(attempt: Mapping[str, Any]) -> int:
    named = WORKER.fullmatch(str(attempt.get("actor")))
    return int(named[1]) if named else 0

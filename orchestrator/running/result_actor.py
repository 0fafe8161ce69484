"""The result actor: stores record batches, acknowledges them once they are on disk, and keeps the running totals.

It is the only writer of rows. Ray may restart it at any time: acknowledged rows are on disk, and a repeated call adds
no row twice. What it knows about workers is lost then; it is only used to find out why they failed.
"""

import os
import re
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.core.evidence import ROW_COLUMNS
from orchestrator.core.race import DECISIONS_KEY, Race
from orchestrator.core.totals import COLUMNS, trial_sums
from orchestrator.core.trial import Trial, TrialKey
from orchestrator.planning.run_plan import RunPlan
from orchestrator.progress.progress import Progress, stored_race, stored_totals
from orchestrator.running.dashboard import SweepMetrics
from orchestrator.store import StoreError, StoreWriter
from orchestrator.store.compaction import FULL_ROWS
from orchestrator.store.trial_files import TOTALS_KEY
from sampler.errors import InputError

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 2.0, 60.0
KILLED_IN_SETUP = "its process died while it was being set up (killed, perhaps for lack of memory)"
COMPACT_ROWS_VARIABLE = "REUSE_SWEEP_COMPACT_ROWS"
WORKER_NAME = re.compile(r"worker-([0-9]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A trial and its documents without a row. Created by the result actor, read by the worker that runs the trial."""

    trial: Trial
    missing: tuple[str, ...]
    pause: float = 0.0  # seconds to wait before starting
    needed: bool = True  # False: a race has decided the configuration in the meantime


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """`node_id` is Ray's; several nodes may share a host name."""

    node_id: str
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedSetup:
    """A worker that failed before it was ready to decode."""

    node: Node
    reason: str
    is_input_error: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailure:
    """What is known about a failed trial's worker and the others. Created by the result actor, read by the driver."""

    was_known: bool = True  # the worker had registered, or a trial was assigned to it
    setup: FailedSetup | None = None  # None: it did not fail during its set-up
    alive: int  # workers that are ready, and not known to have died
    successful_setups: Mapping[str, int]  # by node id


class Results:
    """Writes one sweep's directory. Methods may be called from several threads."""

    def __init__(self, plan: RunPlan, *, actors: int, metrics: bool = False) -> None:
        self._plan, self._actors = plan, actors
        self._trials = {trial.trial_id: trial for trial in plan.trials}
        self._by_key = {trial.key: trial for trial in plan.trials}
        self._lock = threading.Lock()
        self._metrics = SweepMetrics(plan.sweep) if metrics else None
        self._failed: set[str] = set()
        self._running: set[str] = set()
        self._warm: set[str] = set()
        self._setup_failures: dict[str, FailedSetup] = {}  # by worker until it is ready; recorded before it can die
        self._worker_of: dict[TrialKey, str] = {}
        self._successful_setups: Counter[str] = Counter()  # by node id
        self._started: Counter[TrialKey] = Counter()  # workers started for a trial, in this run
        self._assigned: Counter[TrialKey] = Counter()  # how often a trial was assigned, in this run
        self._waited: dict[str, TrialKey] = {}  # by worker: the trial for which it waited before loading
        self._first_worker, self._problem = 1, ""
        self._compaction = threading.Thread()
        self._race: Race | None = None
        try:
            self._open()
        except (InputError, StoreError) as problem:  # such as a full disk; each call raises it, without Ray's traceback
            self._problem = str(problem)

    def _open(self) -> None:
        self._writer = StoreWriter(Path(self._plan.folder), full_rows=_rows_per_compaction())
        known = self._writer.trials()
        record, wanted = self._writer.sweep_record or self._plan.record, self._plan.wanted
        self._totals = stored_totals(record, self._plan.trials, wanted, self._writer, known)
        unfinished = {trial.trial_id for trial in self._plan.unfinished(known)}
        self._finished = self._trials.keys() - unfinished
        self._race = stored_race(record, wanted, self._writer, known)
        self._store_decisions()
        numbers = [
            _worker_number(str(attempt.get("actor"))) for facts in known.values() for attempt in facts["attempts"]
        ]
        self._first_worker = 1 + max(numbers, default=0)

    @property
    def _store(self) -> StoreWriter:
        if self._problem:
            raise StoreError(self._problem)
        return self._writer

    def first_worker(self) -> int:
        """The number for the next worker's name, higher than that of any earlier worker of this sweep."""
        return self._first_worker

    def register(self, key: TrialKey, worker: str, node: Node) -> float:
        """Records a worker that is about to load, and returns how many seconds it should wait first.

        After a failed attempt at its trial an immediate second one would probably fail too.
        """
        with self._lock:
            self._first_worker = max(self._first_worker, 1 + _worker_number(worker))
            self._setup_failures[worker] = FailedSetup(node=node, reason=KILLED_IN_SETUP)
            self._worker_of[key] = worker
            pause = _pause_seconds(max(self._started[key], self._assigned[key]))
            self._started[key] += 1
            if pause:
                self._waited[worker] = key
            return pause

    def ready(self, worker: str) -> None:
        with self._lock:
            self._warm.add(worker)
            if (setup := self._setup_failures.pop(worker, None)) is not None:
                self._successful_setups[setup.node.node_id] += 1

    def setup_failed(self, worker: str, failure: FailedSetup) -> None:
        with self._lock:
            self._setup_failures[worker] = failure

    def worker_failed(self, key: TrialKey) -> WorkerFailure:
        """Removes the worker of a failed trial, and returns what is known about it."""
        with self._lock:
            worker = self._worker_of.pop(key, "")
            self._warm.discard(worker)
            return WorkerFailure(
                was_known=bool(worker),
                setup=self._setup_failures.pop(worker, None),
                alive=len(self._warm),
                successful_setups=dict(self._successful_setups),
            )

    def assign(self, key: TrialKey, worker: str) -> Assignment:
        """The missing documents of a trial, and a pause if an earlier attempt failed."""
        trial = self._by_key[key]
        done = self._store.completed_documents(trial.trial_id)
        with self._lock:
            self._worker_of[key] = worker
            self._warm.add(worker)  # needed only if this actor was restarted since
            pause = 0.0 if self._waited.pop(worker, None) == key else _pause_seconds(self._assigned[key])
            self._assigned[key] += 1
        missing = tuple(doc_id for doc_id in self._plan.wanted.of(trial) if doc_id not in done)
        return Assignment(trial=trial, missing=missing, pause=pause, needed=self.is_needed(key))

    def is_needed(self, key: TrialKey) -> bool:
        """False if the trial belongs to a configuration that the race has decided on without it."""
        return self._race is None or self._race.is_needed(self._by_key[key])

    def begin(self, trial_id: str, facts: Mapping[str, Any]) -> int:
        """Starts an attempt and returns its number."""
        attempt = self._store.begin(self._trials[trial_id].as_dict(), facts)
        with self._lock:
            self._running.add(trial_id)
        return attempt

    def append(self, trial_id: str, attempt: int, batch: pa.RecordBatch) -> int:
        """Writes the rows to disk and returns how many were new."""
        new = self._store.append(trial_id, attempt, batch)
        if len(new):
            with self._lock:
                self._totals.add_rows(new)
        return len(new)

    def finish(self, trial_id: str, facts: Mapping[str, Any]) -> None:
        sums = trial_sums(self._store.rows([trial_id], COLUMNS, verify=False))
        facts = {**facts, TOTALS_KEY: sums.as_json()}
        self._store.finish(trial_id, facts, self._plan.wanted.of(self._trials[trial_id]))
        self._end(trial_id, self._finished)
        if self._race is not None:
            rows = self._store.rows([trial_id], ROW_COLUMNS, verify=False)
            with self._lock:
                if self._race.add_rows(rows):
                    self._store_decisions()
        if self._store.compaction_is_due:
            self._start_compaction()

    def _store_decisions(self) -> None:
        """Stores the race's decisions in sweep.json. If one is lost, the rows lead to the same decision again."""
        record = None if self._race is None else self._writer.read_sweep_record()
        if self._race is not None and record is not None:
            decisions = self._race.merged_decisions(record)
            if decisions != record.get(DECISIONS_KEY, []):
                self._writer.write_sweep_record({**record, DECISIONS_KEY: decisions})

    def _start_compaction(self) -> None:
        """In a separate thread, so that workers do not wait. After a disk error rows stay in their trials' files."""
        with self._lock:
            if not self._compaction.is_alive():
                self._compaction = threading.Thread(target=self._compact, name="compaction", daemon=True)
                self._compaction.start()

    def _compact(self) -> None:
        with suppress(StoreError):
            self._store.compact(minimum=_rows_per_compaction())

    def fail(self, trial_id: str, reason: str, facts: Mapping[str, Any] | None = None) -> None:
        """Marks a trial as failed, even if no worker has begun it."""
        if self._store.trial(trial_id) is None:
            self._store.begin(self._trials[trial_id].as_dict(), {})
        self._store.fail(trial_id, reason, facts)
        self._end(trial_id, self._failed)

    def unfinished(self) -> tuple[list[str], list[str]]:
        """Ids of trials that are not finished, and a sentence for each file that was found corrupted and quarantined.

        After a restart such a file may belong to a trial that has already ended in Tune.
        """
        corruption = [str(found) for found in self._store.corrupted.values()]
        with self._lock:
            missing = self._trials.keys() - self._finished
            needed = [trial_id for trial_id in missing if self.is_needed(self._trials[trial_id].key)]
            return sorted(needed), corruption

    def progress(self) -> Progress:
        if self._problem:
            raise StoreError(self._problem)
        with self._lock:
            actors = max(self._actors, len(self._running))  # more if nodes were added
            race, trials = self._race, len(self._trials)
            if race is not None:
                skipped = self._trials.keys() - self._finished
                trials -= sum(not race.is_needed(self._trials[trial_id]) for trial_id in skipped)
                self._totals.reduce_wanted(race.needed_documents())
            progress = Progress(
                sweep=self._plan.sweep,
                totals=self._totals.totals(),
                trials=trials,
                race=() if race is None else race.entries(),
                finished=len(self._finished),
                failed=len(self._failed),
                running=tuple(self._trials[trial_id].label for trial_id in sorted(self._running)),
                actors=actors,
                started=sum(self._started.values()),
                warm=min(len(self._warm), actors),
            )
            if self._metrics is not None:
                self._metrics.update(progress)
            return progress

    def close(self) -> None:
        if not self._problem:
            if self._compaction.is_alive():
                self._compaction.join()
            with suppress(StoreError):
                self._writer.compact()
                self._store_decisions()
            self._writer.close()

    def _end(self, trial_id: str, ended: set[str]) -> None:
        with self._lock:
            self._running.discard(trial_id)
            ended.add(trial_id)


def _rows_per_compaction() -> int:
    """Rows of a task that are compacted together while the sweep runs; the fault campaign sets a smaller number."""
    return int(os.environ.get(COMPACT_ROWS_VARIABLE) or FULL_ROWS)


def _pause_seconds(failures: int) -> float:
    return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (failures - 1)) if failures else 0.0


def _worker_number(worker: str) -> int:
    named = WORKER_NAME.fullmatch(worker)
    return int(named[1]) if named else 0

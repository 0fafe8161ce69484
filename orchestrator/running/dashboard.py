"""What Ray's dashboard shows of a sweep: its trials as tasks, and its totals as gauges for Prometheus.

Each trial is represented by a task that needs no resources and waits for the trial's end, so it is pending, running,
finished or failed whenever the trial is. The task has the name of the trial's configuration, and the dashboard draws
one progress bar per name. A running task occupies a process, so there is one idle process for each worker, spread over
the nodes. All other calls of a sweep are hidden from the dashboard (`enable_task_events=False`). deploy/grafana.json is
a dashboard of the gauges.
"""

import asyncio
import sys
from collections.abc import Iterable
from typing import Any

import ray
from ray import cloudpickle
from ray.util.metrics import Gauge

from orchestrator.core.race import CONFIRMED, REJECTED, RaceEntry
from orchestrator.core.totals import Totals
from orchestrator.core.trial import Trial
from orchestrator.progress.progress import Progress

MAX_TRIALS = 10_000  # each costs the driver about 35 kB of memory and half a millisecond
PREFIX = "ray_"  # Ray adds it to the name of every gauge
TAGS = ("sweep", "task", "policy", "settings")
DONE, WANTED, TRIALS = "reuse_sweep_documents_done", "reuse_sweep_documents_wanted", "reuse_sweep_trials"
ACCURACY, SPEED, SPEEDUP = "reuse_sweep_accuracy", "reuse_sweep_tokens_per_s", "reuse_sweep_speedup"
DECIDED, SAVED, SAVED_AT_END = (
    f"reuse_sweep_race_{name}" for name in ("state", "seconds_saved", "seconds_saved_at_end")
)
EVIDENCE_FOR, EVIDENCE_AGAINST = "reuse_sweep_race_evidence_for", "reuse_sweep_race_evidence_against"
SPEED_LOW, SPEED_HIGH = "reuse_sweep_race_speedup_low", "reuse_sweep_race_speedup_high"
GAUGES = {  # description and tags
    DONE: ("Documents answered and stored.", TAGS),
    WANTED: ("Documents that the sweep will answer.", TAGS),
    ACCURACY: ("Share of correct answers so far, 0 to 1.", TAGS),
    SPEED: ("Tokens per second of decoding.", TAGS),
    SPEEDUP: ("Calibrated tokens per second relative to k1.", TAGS),
    DECIDED: ("State in the race: 1 confirmed, -1 rejected, 0 racing or finished.", TAGS),
    EVIDENCE_FOR: ("Log e-value for a drop inside the margin, relative to the threshold that confirms.", TAGS),
    EVIDENCE_AGAINST: ("Log e-value for a drop beyond the margin, relative to the threshold that rejects.", TAGS),
    SPEED_LOW: ("Lower bound of the speed-up in the race.", TAGS),
    SPEED_HIGH: ("Upper bound of the speed-up in the race.", TAGS),
    SAVED: ("Seconds of decoding that the race has saved so far.", TAGS),
    SAVED_AT_END: ("Seconds of decoding that the race will have saved, if nothing else is decided.", TAGS),
    TRIALS: ("Trials by state: finished, failed, running or pending.", ("sweep", "state")),
}


class TrialFailed(Exception):
    """Makes a trial's task fail; the message is the trial's reason."""


class TrialBoard:
    """An actor that tracks which trials have started and ended. Its methods may be called in any order."""

    def __init__(self) -> None:
        self._started: dict[str, asyncio.Future[None]] = {}
        self._ended: dict[str, asyncio.Future[str | None]] = {}

    async def until_started(self, trial_id: str) -> None:
        await _future(self._started, trial_id)

    async def until_ended(self, trial_id: str) -> str | None:
        """Returns why the trial failed; None if it did not."""
        reason: str | None = await _future(self._ended, trial_id)
        return reason

    async def start(self, trial_id: str) -> None:
        _resolve(_future(self._started, trial_id), None)

    async def end(self, trial_id: str, reason: str | None) -> None:
        await self.start(trial_id)
        _resolve(_future(self._ended, trial_id), reason)


def _future(futures: dict[str, Any], trial_id: str) -> Any:
    if trial_id not in futures:
        futures[trial_id] = asyncio.get_running_loop().create_future()
    return futures[trial_id]


def _resolve(future: Any, value: str | None) -> None:
    if not future.done():  # a trial that is retried starts more than once
        future.set_result(value)


def show_trial(board: Any, trial_id: str, started: None) -> None:
    """The task that represents a trial: pending while `started` is, then running until the trial ends."""
    del started
    reason = ray.get(board.until_ended.remote(trial_id))
    if reason is not None:
        raise TrialFailed(reason)


class DashboardTrials:
    """Reports the driver's trials to the board. Without a board, or with too many trials, it does nothing."""

    def __init__(self, board: Any | None) -> None:
        self._board = board
        self._shown: set[str] = set()

    def add(self, trials: Iterable[Trial]) -> None:
        new = [trial for trial in trials if trial.trial_id not in self._shown]
        if self._board is None or len(self._shown) + len(new) > MAX_TRIALS:
            return
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a node may lack this project
        task = ray.remote(num_cpus=0, max_retries=-1, scheduling_strategy="SPREAD")(show_trial)
        for trial in new:
            started = self._board.until_started.remote(trial.trial_id)
            task.options(name=f"{trial.task}/{trial.configuration.slug()}").remote(self._board, trial.trial_id, started)
            self._shown.add(trial.trial_id)

    def start(self, trial_id: str) -> None:
        if self._board is not None and trial_id in self._shown:
            self._board.start.remote(trial_id)

    def end(self, trial_id: str, reason: str | None = None) -> None:
        if self._board is not None and trial_id in self._shown:
            self._board.end.remote(trial_id, reason)


class SweepMetrics:
    """The gauges of one sweep. Ray exports them as long as the process that sets them lives; it must be an actor."""

    def __init__(self, sweep: str) -> None:
        self._sweep = sweep
        self._gauges = {name: Gauge(name, description, tags) for name, (description, tags) in GAUGES.items()}

    def update(self, progress: Progress) -> None:
        for totals in progress.totals:
            self._set(gauge_tags(self._sweep, totals), gauge_values(totals))
        for entry in progress.race:
            self._set(gauge_tags(self._sweep, entry), race_gauge_values(entry))
        for state, count in trials_by_state(progress).items():
            self._gauges[TRIALS].set(count, {"sweep": self._sweep, "state": state})

    def _set(self, tags: dict[str, str], values: dict[str, float]) -> None:
        for name, value in values.items():
            self._gauges[name].set(value, tags)


def gauge_tags(sweep: str, totals: Totals | RaceEntry) -> dict[str, str]:
    """`settings` distinguishes configurations of the same policy."""
    configuration = totals.configuration
    settings = configuration.settings_label()
    return {"sweep": sweep, "task": totals.task, "policy": configuration.policy, "settings": settings}


def gauge_values(totals: Totals) -> dict[str, float]:
    """The known values, by gauge."""
    values = {
        DONE: totals.documents,
        WANTED: totals.wanted,
        ACCURACY: totals.accuracy,
        SPEED: totals.tokens_per_s,
        SPEEDUP: totals.speedup,
    }
    return {name: value for name, value in values.items() if value is not None}


def race_gauge_values(entry: RaceEntry) -> dict[str, float]:
    return {
        DECIDED: {CONFIRMED: 1.0, REJECTED: -1.0}.get(entry.state, 0.0),
        SAVED: entry.seconds_saved,
        SAVED_AT_END: entry.seconds_saved_at_end,
        **{f"reuse_sweep_race_{name}": value for name, value in entry.measures.items()},
    }


def trials_by_state(progress: Progress) -> dict[str, int]:
    """The number of trials in each state; the sum is the number of trials in the sweep."""
    known = {"finished": progress.finished, "failed": progress.failed, "running": len(progress.running)}
    return {**known, "pending": max(0, progress.trials - sum(known.values()))}

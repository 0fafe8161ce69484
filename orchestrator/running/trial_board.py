"""Shows a sweep's trials in the Ray dashboard, as tasks that are pending, running, finished or failed as trials are.

The dashboard knows tasks, not trials. An actor without CPUs therefore holds one call for each trial, open from the
trial's start to its end and named after the trial's configuration, so that the dashboard draws a bar for each
configuration. All other calls of a sweep are kept out of the dashboard (`enable_task_events=False`).
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from orchestrator.planning.grid import TrialSpec

MAX_TRIALS = 10_000  # more would cost the driver over half a gigabyte of memory


class TrialFailed(Exception):
    """Makes a trial's task fail; the message is the trial's reason."""


class TrialBoard:
    """The actor's class. Its calls may come in any order."""

    def __init__(self) -> None:
        self._started: dict[str, asyncio.Future[None]] = {}
        self._ended: dict[str, asyncio.Future[str | None]] = {}

    async def trial(self, trial_id: str, started: None) -> None:
        """The call that stands for a trial: pending while `started` is, then running until the trial ends."""
        del started
        reason = await _future(self._ended, trial_id)
        if reason is not None:
            raise TrialFailed(reason)

    async def until_started(self, trial_id: str) -> None:
        await _future(self._started, trial_id)

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
    if not future.done():  # a trial that is retried starts again
        future.set_result(value)


class DashboardTrials:
    """The driver's side of the board. Without an actor, or with too many trials, it does nothing."""

    def __init__(self, actor: Any | None) -> None:
        self._actor = actor
        self._shown: set[str] = set()

    def add(self, trials: Iterable[TrialSpec]) -> None:
        new = [trial for trial in trials if trial.trial_id not in self._shown]
        if self._actor is None or len(self._shown) + len(new) > MAX_TRIALS:
            return
        for trial in new:
            started = self._actor.until_started.remote(trial.trial_id)
            task = self._actor.trial.options(name=trial.configuration_label, enable_task_events=True)
            task.remote(trial.trial_id, started)
            self._shown.add(trial.trial_id)

    def start(self, trial_id: str) -> None:
        if self._actor is not None and trial_id in self._shown:
            self._actor.start.remote(trial_id)

    def end(self, trial_id: str, reason: str | None = None) -> None:
        if self._actor is not None and trial_id in self._shown:
            self._actor.end.remote(trial_id, reason)

"""Shows a sweep's trials in the Ray dashboard, as tasks that are pending, running, finished or failed as trials are.

The dashboard knows tasks, not trials. So each trial gets a task that needs no resources and waits for the trial's end.
It is named after the trial's configuration, and the dashboard draws one bar for each name. A task takes a process while
it runs, so there is one more idle process for each worker, spread over the nodes. All other calls of a sweep are kept
out of the dashboard (`enable_task_events=False`).
"""

import asyncio
import sys
from collections.abc import Iterable
from typing import Any

import ray
from ray import cloudpickle

from orchestrator.planning.grid import TrialSpec

MAX_TRIALS = 10_000  # each costs the driver about 35 kB of memory and half a millisecond


class TrialFailed(Exception):
    """Makes a trial's task fail; the message is the trial's reason."""


class TrialBoard:
    """An actor that knows which trials have started and ended. Its calls may come in any order."""

    def __init__(self) -> None:
        self._started: dict[str, asyncio.Future[None]] = {}
        self._ended: dict[str, asyncio.Future[str | None]] = {}

    async def until_started(self, trial_id: str) -> None:
        await _future(self._started, trial_id)

    async def until_ended(self, trial_id: str) -> str | None:
        """Why the trial failed, or None."""
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
    if not future.done():  # a trial that is retried starts again
        future.set_result(value)


def show_trial(board: Any, trial_id: str, started: None) -> None:
    """The task that stands for a trial: pending while `started` is, then running until the trial ends."""
    del started
    reason = ray.get(board.until_ended.remote(trial_id))
    if reason is not None:
        raise TrialFailed(reason)


class DashboardTrials:
    """The driver's side of the board. Without a board, or with too many trials, it does nothing."""

    def __init__(self, board: Any | None) -> None:
        self._board = board
        self._shown: set[str] = set()

    def add(self, trials: Iterable[TrialSpec]) -> None:
        new = [trial for trial in trials if trial.trial_id not in self._shown]
        if self._board is None or len(self._shown) + len(new) > MAX_TRIALS:
            return
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a node may lack this project
        task = ray.remote(num_cpus=0, max_retries=-1, scheduling_strategy="SPREAD")(show_trial)
        for trial in new:
            started = self._board.until_started.remote(trial.trial_id)
            task.options(name=trial.configuration_label).remote(self._board, trial.trial_id, started)
            self._shown.add(trial.trial_id)

    def start(self, trial_id: str) -> None:
        if self._board is not None and trial_id in self._shown:
            self._board.start.remote(trial_id)

    def end(self, trial_id: str, reason: str | None = None) -> None:
        if self._board is not None and trial_id in self._shown:
            self._board.end.remote(trial_id, reason)

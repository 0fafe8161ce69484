"""Runs a sweep's unfinished trials with Ray Tune and shows the progress.

The store decides which trials are unfinished. Each run uses a new Tuner, and Tune's own state is never read back.
"""

import importlib
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, tune
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from orchestrator.core.trial import Trial, TrialKey, trial_key
from orchestrator.planning.machine import Placement
from orchestrator.planning.run_plan import RunPlan
from orchestrator.progress.progress import Progress
from orchestrator.progress.view import SweepView, duration
from orchestrator.running.autoscaler import describe_shortage
from orchestrator.running.cluster import usable_nodes
from orchestrator.running.dashboard import DashboardTrials
from orchestrator.running.environment import AccessTokens
from orchestrator.running.result_actor import FailedSetup, Node, WorkerFailure
from orchestrator.running.scheduling import (
    RPC_TIMEOUT_SECONDS,
    ElasticGridSearch,
    KeepLoadingActors,
    NodeHealth,
    RacedTrials,
    WorkerClasses,
    WorkerRequest,
    search_space,
)
from orchestrator.running.stop import Aborted, StopSignals
from orchestrator.running.trainable import (
    FAILED,
    FINISHED,
    MAX_REASON_CHARACTERS,
    REFUSED,
    HasTimeout,
    SweepWorker,
    error_message,
)
from orchestrator.store import StoreError
from sampler.errors import InputError, counted

MAX_FAILURES = 2  # a trial is tried three times
MAX_ROUNDS = 3  # rerunning trials whose rows turned out to be corrupted; if more are needed, the disk is broken
POLL_SECONDS = 0.5
FAILURE_RPC_TIMEOUT_SECONDS = 60.0
START_NOTICE_SECONDS, LOAD_NOTICE_SECONDS = 30.0, 120.0  # until a worker should have started, and be ready
WORKER_DIED = "its worker died (killed, perhaps for lack of memory, or ended by --worker-timeout because it hung)"
NODE_DIED = "its node has died"  # part of Ray's message about an actor on a dead node
EXCEPTION_LINE = re.compile(r"^(\w*(?:Error|Exception): .*)$", re.MULTILINE)  # last line of a traceback in a message
WORKER_ADDRESS = re.compile(r"\bip(?:=|: )([0-9A-Fa-f.:]+)")  # in Ray's message about a dead actor


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRun:
    """One run of a plan on a cluster. Created by the sweep command; read by `run_trials` and the Tune callback."""

    plan: RunPlan
    results: Any  # handle of the result actor
    settings: HasTimeout  # of the workers
    placement: Placement
    view: SweepView
    stop: StopSignals
    worker: type[SweepWorker] = SweepWorker
    capacity: Callable[[], int] | None = None  # trials that may run at a time now; None: one per placed actor
    health: NodeHealth = field(default_factory=NodeHealth)
    dashboard: DashboardTrials = field(default_factory=lambda: DashboardTrials(None))
    callbacks: Sequence[Any] = ()  # of Ray Tune


def run_trials(run: SweepRun, trials: Sequence[Trial]) -> set[str]:
    """Runs the trials and returns the ids of those that failed or were stopped; raises Interrupted on a signal.

    Trials whose rows turn out to be corrupted after the trial has ended are run again.
    """
    not_done: set[str] = set()
    reported: set[str] = set()
    for _ in range(MAX_ROUNDS):
        not_done |= _run_round(run, trials)
        unfinished, corruption = _call(run.results.unfinished.remote())
        for sentence in corruption:
            if sentence not in reported:
                run.view.note(f"corrupted and quarantined: {sentence}")
        reported.update(corruption)
        trials = [trial for trial in run.plan.trials if trial.trial_id in unfinished and trial.trial_id not in not_done]
        if not trials:
            return not_done
        run.view.note(f"running {counted(len(trials), 'trial')} again: rows that were stored are missing now")
    return not_done | {trial.trial_id for trial in trials}


def _run_round(run: SweepRun, trials: Sequence[Trial]) -> set[str]:
    """One round: returns the ids of the trials that failed or were stopped."""
    notes: queue.SimpleQueue[str] = queue.SimpleQueue()
    run.dashboard.add(trials)
    by_key = {trial.key: trial for trial in trials}
    callback = SweepCallback(run, by_key, notes)
    trainable = tune.with_parameters(
        run.worker,
        results=run.results,
        settings=run.settings,
        sweep=run.plan.sweep,
        access=AccessTokens.from_environment(),
    )
    trainable.__qualname__ = SweepWorker.__qualname__  # Ray names processes after it; Tune's wrapper has another name
    first_worker = ray.get(run.results.first_worker.remote(), timeout=FAILURE_RPC_TIMEOUT_SECONDS)
    request = WorkerRequest(run.placement.bundle, run.health.excluded)
    raced = [RacedTrials(run.results)] if run.plan.is_race else []
    actors = run.placement.actors  # Tune pickles the functions it is given: they must not refer to `run`
    with tempfile.TemporaryDirectory(prefix="reuse-tune-", ignore_cleanup_errors=True) as scratch:
        tuner = tune.Tuner(
            trainable,
            param_space=search_space(trials),
            tune_config=tune.TuneConfig(
                num_samples=len(trials),
                reuse_actors=True,
                search_alg=ElasticGridSearch(trials, run.capacity or (lambda: actors), *raced),
                scheduler=KeepLoadingActors(request, WorkerClasses(first_worker)),
                trial_name_creator=lambda trial: by_key[trial_key(trial.config)].label,
                trial_dirname_creator=lambda trial: by_key[trial_key(trial.config)].trial_id,
            ),
            run_config=tune.RunConfig(
                # An absolute path. Otherwise Tune would put its files, including pickled errors that it reads back,
                # into Ray's session directory, which other users of a joined cluster can often write to.
                name=f"{scratch}/sweep",
                storage_path=scratch,
                failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # workers cannot see `scratch`
                callbacks=[callback, *run.callbacks],
                verbose=0,
            ),
        )
        with ProgressPoller(run.results, run.view, notes, run.placement), run.stop.deferred():
            tuner.fit()
    _call(callback.failure_writes, timeout=FAILURE_RPC_TIMEOUT_SECONDS)
    for trial in trials if raced else ():
        run.dashboard.end(trial.trial_id)  # including those that the race no longer needed
    return callback.not_done


def _call(calls: Any, timeout: float | None = None) -> Any:
    """The result of calls to the result actor; raises an error of the store without Ray's traceback."""
    try:
        return ray.get(calls, timeout=timeout)
    except StoreError as error:
        raise StoreError(error_message(error)) from None


class SweepCallback(tune.Callback):  # type: ignore[misc]
    """Follows trials through Tune, finds out why they fail, and stops Tune between two of its steps on a signal."""

    def __init__(self, run: SweepRun, by_key: Mapping[TrialKey, Trial], notes: "queue.SimpleQueue[str]") -> None:
        self._run, self._by_key, self._notes = run, by_key, notes
        self.not_done: set[str] = set()  # ids of trials that failed, or that a scheduler stopped early
        self.failure_writes: list[Any] = []  # calls that store failures

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves a copy that is never read

    def _trial(self, trial: Any) -> Trial:
        return self._by_key[trial_key(trial.config)]

    def setup(self, *_: Any, **__: Any) -> None:
        self._run.stop.install()  # Tune has just installed its own handler

    def on_step_begin(self, **_: Any) -> None:
        self._run.stop.raise_if_received()

    def on_trial_start(self, *, trial: Any, **_: Any) -> None:
        self._run.dashboard.start(self._trial(trial).trial_id)

    def on_trial_recover(self, *, trial: Any, **_: Any) -> None:
        reason = self._trial_failure(trial)
        if reason is None:
            trial.run_metadata.num_failures -= 1  # Tune has counted the node's failure against the trial
        else:
            self._notes.put(f"{self._trial(trial).label}: {reason}; trying again")

    def on_trial_error(self, *, trial: Any, **_: Any) -> None:
        reason = self._trial_failure(trial)
        if reason is not None:  # otherwise `run_trials` runs the trial again
            self.failure_writes.append(self._run.results.fail.remote(self._trial(trial).trial_id, reason))
            self._note_failure(trial, reason)

    def on_trial_complete(self, *, trial: Any, **_: Any) -> None:
        result = trial.last_result or {}
        if REFUSED in result:  # the store would refuse rows of other trials too
            raise Aborted(result[REFUSED])
        if FINISHED in result:
            self._run.dashboard.end(self._trial(trial).trial_id)
        else:
            self._note_failure(trial, result.get(FAILED, "it was stopped before it was finished"))

    def _note_failure(self, trial: Any, reason: str) -> None:
        failed = self._trial(trial)
        self.not_done.add(failed.trial_id)
        self._run.dashboard.end(failed.trial_id, reason)
        self._notes.put(f"{failed.label} failed: {reason}")

    def _trial_failure(self, trial: Any) -> str | None:
        """Why a trial failed; None if its node caused it, which is recorded. Raises Aborted if no node is left."""
        path = Path(trial.pickled_error_file or "")
        error = cloudpickle.loads(path.read_bytes()) if path.is_file() else None  # written by Tune, in this process
        call = self._run.results.worker_failed.remote(self._trial(trial).key)
        try:
            failed: WorkerFailure = ray.get(call, timeout=FAILURE_RPC_TIMEOUT_SECONDS)
        except GetTimeoutError:  # the result actor is restarting, and its disk is slow
            return describe_failure(error)
        nodes, health = ray.nodes(), self._run.health
        usable = {node["NodeID"] for node in usable_nodes(nodes, self._run.placement.bundle)}
        setup = failed.setup or (None if failed.was_known else _failed_before_setup(error, nodes))
        if setup is None:
            health.check(failed, usable)
            return describe_failure(error)
        for notice in health.record(setup, failed, usable):
            self._notes.put(notice)
        return None


def _failed_before_setup(error: BaseException | None, nodes: Sequence[dict[str, Any]]) -> FailedSetup | None:
    """The failed set-up of an actor that died before it could register, such as on a node that lacks a package."""
    address = WORKER_ADDRESS.search(str(error)) if isinstance(error, RayActorError) else None
    for node in nodes:
        if address is not None and node["NodeManagerAddress"] == address[1]:
            exceptions = EXCEPTION_LINE.findall(str(error))
            reason = exceptions[-1][:MAX_REASON_CHARACTERS] if exceptions else WORKER_DIED
            return FailedSetup(node=Node(node_id=node["NodeID"], host=node["NodeManagerHostname"]), reason=reason)
    return None


def describe_failure(error: BaseException | None) -> str:
    """Why a worker failed, in one line."""
    if isinstance(error, RayActorError) and NODE_DIED in str(error):
        address = WORKER_ADDRESS.search(str(error))
        return f"its node{f' {address[1]}' if address else ''} died or lost its network"
    if isinstance(error, RayActorError):
        return f"its worker could not be set up ({_last_line(error)})" if error.actor_init_failed else WORKER_DIED
    if isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:MAX_REASON_CHARACTERS] if error is not None else "no reason is known"


def _last_line(error: BaseException) -> str:
    """The reason in a message that begins with a traceback."""
    return str(error).strip().splitlines()[-1][:MAX_REASON_CHARACTERS]


class ProgressPoller:
    """A thread that asks the result actor for the progress and updates the view while it is entered."""

    def __init__(self, results: Any, view: SweepView, notes: "queue.SimpleQueue[str]", placement: Placement) -> None:
        self._results, self._view, self._notes, self._placement = results, view, notes, placement
        self._began, self._delay_noted = time.monotonic(), False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="view", daemon=True)

    def __enter__(self) -> "ProgressPoller":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(RPC_TIMEOUT_SECONDS)
        self._show_notes()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            progress = read_progress(self._results)
            if progress is not None:
                self._view.update(progress)
                self._note_delay(progress)
            self._show_notes()

    def _note_delay(self, progress: Progress) -> None:
        """Explains once why no worker is ready yet."""
        waited = time.monotonic() - self._began
        if self._delay_noted or progress.warm:
            self._delay_noted = True
        elif progress.started and waited > LOAD_NOTICE_SECONDS:
            self._delay_noted = True
            self._view.note(f"{progress.started} workers have started, and none is ready after {duration(waited)}")
        elif not progress.started and waited > START_NOTICE_SECONDS:
            self._delay_noted = True
            free, total = ray.available_resources(), ray.cluster_resources()
            shortage = describe_shortage(self._placement, free=free, total=total)
            self._view.note(f"no worker has started after {duration(waited)}: {shortage}")

    def _show_notes(self) -> None:
        while not self._notes.empty():
            self._view.note(self._notes.get())


def read_progress(results: Any) -> Progress | None:
    """The current progress; None if the result actor does not answer in time, for example because it is restarting."""
    try:
        progress: Progress = ray.get(results.progress.remote(), timeout=RPC_TIMEOUT_SECONDS)
    except (GetTimeoutError, RayActorError, StoreError):
        return None
    return progress


def close_results(results: Any) -> None:
    """Makes the result actor release the lock of the sweep's directory; a dead actor no longer holds it."""
    try:
        ray.get(results.close.remote(), timeout=RPC_TIMEOUT_SECONDS)
    except (GetTimeoutError, RayActorError):
        return


def load_callback(name: str) -> Any:
    """A Ray Tune callback from MODULE:CLASS, created without arguments."""
    module, _, attribute = name.partition(":")
    try:
        callback = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise InputError(f"--callback {name}: cannot import {module} ({error})") from None
    if not isinstance(callback, type) or not issubclass(callback, tune.Callback):
        raise InputError(f"--callback {name}: {attribute} must be a subclass of ray.tune.Callback in {module}")
    try:
        return callback()
    except TypeError as error:
        raise InputError(f"--callback {name}: {attribute} must be created without arguments ({error})") from None

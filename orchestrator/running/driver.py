"""Runs a sweep's missing trials with Ray Tune and shows the progress.

What is missing was computed from the folder. Each run uses a new Tuner, and Tune's own state is thrown away.
"""

import importlib
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
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
from orchestrator.running.nodes import FailedSetup, Node, NodeHealth
from orchestrator.running.result_actor import WorkerFailure
from orchestrator.running.scheduling import (
    ElasticGridSearch,
    KeepLoadingActors,
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
    SweepWorker,
    Watched,
    sentence,
)
from orchestrator.store import StoreError
from sampler.errors import InputError

MAX_FAILURES = 2  # a trial is tried three times
ROUNDS = 3  # of trials whose rows were found corrupted after they had ended; a disk that goes on like that is broken
POLL_SECONDS = 0.5
RPC_TIMEOUT_SECONDS = 2.0
FAILURE_RPC_TIMEOUT_SECONDS = 60.0
START_NOTICE_SECONDS, LOAD_NOTICE_SECONDS = 30.0, 120.0  # until a worker should have started, and be ready
WORKER_DIED = "its worker died (killed, perhaps for lack of memory, or ended by --worker-timeout because it hung)"
NODE_DIED = "its node has died"  # in the message of Ray's error about a dead actor
EXCEPTION_LINE = re.compile(r"^(\w*(?:Error|Exception): .*)$", re.MULTILINE)  # at the end of a traceback
WORKER_ADDRESS = re.compile(r"\bip(?:=|: )([0-9A-Fa-f.:]+)")  # likewise


def run_trials(
    trials: Sequence[Trial],
    *,
    results: Any,
    settings: Watched,
    placement: Placement,
    sweep: str,
    view: SweepView,
    stop: StopSignals,
    worker: type[SweepWorker] = SweepWorker,
    capacity: Callable[[], int] | None = None,
    health: NodeHealth | None = None,
    dashboard: DashboardTrials | None = None,
    callbacks: Sequence[Any] = (),
) -> set[str]:
    """Runs the trials and returns the ids of those that failed or were stopped; raises Interrupted on a signal.

    `capacity` returns how many trials may run at a time now; by default as many as were placed.
    """
    notes: queue.SimpleQueue[str] = queue.SimpleQueue()
    bundle = placement.bundle
    health, dashboard = health or NodeHealth(), dashboard or DashboardTrials(None)
    dashboard.add(trials)
    specs = {trial.key: trial for trial in trials}
    watch = SweepCallback(
        specs,
        results=results,
        notes=notes,
        stop=stop,
        health=health,
        bundle=bundle,
        dashboard=dashboard,
    )
    trainable = tune.with_parameters(
        worker, results=results, settings=settings, sweep=sweep, access=AccessTokens.from_environment()
    )
    trainable.__qualname__ = SweepWorker.__qualname__  # what Ray calls its processes, instead of Tune's wrapper
    first_worker = ray.get(results.first_worker.remote(), timeout=FAILURE_RPC_TIMEOUT_SECONDS)
    request = WorkerRequest(bundle, health.excluded)
    with tempfile.TemporaryDirectory(prefix="reuse-tune-", ignore_cleanup_errors=True) as scratch:
        tuner = tune.Tuner(
            trainable,
            param_space=search_space(trials),
            tune_config=tune.TuneConfig(
                num_samples=len(trials),
                reuse_actors=True,
                search_alg=ElasticGridSearch(trials, capacity or (lambda: placement.actors)),
                scheduler=KeepLoadingActors(request, WorkerClasses(first_worker)),
                trial_name_creator=lambda trial: specs[trial_key(trial.config)].label,
                trial_dirname_creator=lambda trial: specs[trial_key(trial.config)].trial_id,
            ),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=scratch,
                failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # workers cannot see `scratch`
                callbacks=[watch, *callbacks],
                verbose=0,
            ),
        )
        with ProgressPoller(results, view, notes, placement), stop.deferred():
            tuner.fit()
    _call(watch.marks, timeout=FAILURE_RPC_TIMEOUT_SECONDS)
    return watch.not_done


def run_all(plan: RunPlan, trials: Sequence[Trial], *, results: Any, view: SweepView, **how: Any) -> set[str]:
    """`run_trials`, again for trials whose rows were found corrupted after they had ended; ids of those not done."""
    not_done: set[str] = set()
    reported: set[str] = set()
    for _ in range(ROUNDS):
        not_done |= run_trials(trials, results=results, view=view, sweep=plan.sweep, **how)
        unfinished, damage = _call(results.unfinished.remote())
        for found in damage:
            if found not in reported:
                view.note(f"corrupted and quarantined: {found}")
        reported.update(damage)
        trials = [trial for trial in plan.trials if trial.trial_id in unfinished and trial.trial_id not in not_done]
        if not trials:
            return not_done
        view.note(f"running {len(trials):,} trials again: they had ended, but rows are missing now")
    return not_done | {trial.trial_id for trial in trials}


def _call(calls: Any, timeout: float | None = None) -> Any:
    """The answer of the result actor; an error of the store without Ray's traceback."""
    try:
        return ray.get(calls, timeout=timeout)
    except StoreError as error:
        raise StoreError(sentence(error)) from None


class SweepCallback(tune.Callback):  # type: ignore[misc]
    """Follows trials through Tune, judges failures, and stops Tune where that is safe: between two of its steps."""

    def __init__(
        self,
        specs: Mapping[TrialKey, Trial],
        *,
        results: Any,
        notes: "queue.SimpleQueue[str]",
        stop: StopSignals,
        health: NodeHealth,
        bundle: dict[str, float],
        dashboard: DashboardTrials,
    ) -> None:
        self._specs, self._results, self._notes, self._stop = specs, results, notes, stop
        self._health, self._bundle, self._dashboard = health, bundle, dashboard
        self.not_done: set[str] = set()  # ids of trials that failed, or that somebody stopped early
        self.marks: list[Any] = []  # calls that mark trials as failed on disk

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves a copy of its state, which nobody reads

    def _spec(self, trial: Any) -> Trial:
        return self._specs[trial_key(trial.config)]

    def setup(self, *_: Any, **__: Any) -> None:
        self._stop.install()  # Tune has just put its own handler there

    def on_step_begin(self, **_: Any) -> None:
        self._stop.raise_if_received()

    def on_trial_start(self, *, trial: Any, **_: Any) -> None:
        self._dashboard.start(self._spec(trial).trial_id)

    def on_trial_recover(self, *, trial: Any, **_: Any) -> None:
        reason = self._judge(trial)
        if reason is None:
            trial.run_metadata.num_failures -= 1  # Tune counts the node's failure against the trial
        else:
            self._notes.put(f"{self._spec(trial).label}: {reason}; trying again")

    def on_trial_error(self, *, trial: Any, **_: Any) -> None:
        reason = self._judge(trial)
        if reason is not None:  # else the node failed, and `run_all` runs the trial again
            trial_id = self._spec(trial).trial_id
            self.marks.append(self._results.fail.remote(trial_id, reason))
            self._note_failure(trial, reason)

    def on_trial_complete(self, *, trial: Any, **_: Any) -> None:
        result = trial.last_result or {}
        if REFUSED in result:  # rows of other trials would be refused too
            raise Aborted(result[REFUSED])
        if FINISHED in result:
            self._dashboard.end(self._spec(trial).trial_id)
        else:
            self._note_failure(trial, result.get(FAILED, "it was stopped before it was finished"))

    def _note_failure(self, trial: Any, reason: str) -> None:
        spec = self._spec(trial)
        self.not_done.add(spec.trial_id)
        self._dashboard.end(spec.trial_id, reason)
        self._notes.put(f"{spec.label} failed: {reason}")

    def _judge(self, trial: Any) -> str | None:
        """Why a trial failed; None if its node is at fault, which is then recorded. Raises Aborted if none is left."""
        path = Path(trial.pickled_error_file or "")
        error = cloudpickle.loads(path.read_bytes()) if path.is_file() else None  # written by Tune, in this process
        known = self._results.worker_failed.remote(self._spec(trial).key)
        try:
            failed: WorkerFailure = ray.get(known, timeout=FAILURE_RPC_TIMEOUT_SECONDS)
        except GetTimeoutError:  # the result actor is restarting, and its disk is slow
            return describe(error)
        nodes = ray.nodes()
        usable = {node["NodeID"] for node in usable_nodes(nodes, self._bundle)}
        setup = failed.setup or (None if failed.was_known else _failed_before_setup(error, nodes))
        if setup is None:
            self._health.check(failed.counts, usable)
            return describe(error)
        for notice in self._health.record(setup, failed.counts, usable):
            self._notes.put(notice)
        return None


def _failed_before_setup(error: BaseException | None, nodes: Sequence[dict[str, Any]]) -> FailedSetup | None:
    """An actor that died before it could say where it runs, such as on a node that lacks a package."""
    found = WORKER_ADDRESS.search(str(error)) if isinstance(error, RayActorError) else None
    for node in nodes:
        if found is not None and node["NodeManagerAddress"] == found[1]:
            raised = EXCEPTION_LINE.findall(str(error))
            reason = raised[-1][:MAX_REASON_CHARACTERS] if raised else WORKER_DIED
            return FailedSetup(node=Node(node_id=node["NodeID"], host=node["NodeManagerHostname"]), reason=reason)
    return None


def describe(error: BaseException | None) -> str:
    """Why a worker failed, in one line."""
    if isinstance(error, RayActorError) and NODE_DIED in str(error):
        found = WORKER_ADDRESS.search(str(error))
        return f"its node{f' {found[1]}' if found else ''} died or lost its network"
    if isinstance(error, RayActorError):
        return f"its worker could not be set up ({_last_line(error)})" if error.actor_init_failed else WORKER_DIED
    if isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:MAX_REASON_CHARACTERS] if error is not None else "no reason is known"


def _last_line(error: BaseException) -> str:
    """Of a message that begins with a traceback."""
    return str(error).strip().splitlines()[-1][:MAX_REASON_CHARACTERS]


class ProgressPoller:
    """A thread that asks the result actor for the progress and updates the view, as long as it is entered."""

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
            progress = progress_of(self._results)
            if progress is not None:
                self._view.update(progress)
                self._note_delay(progress)
            self._show_notes()

    def _note_delay(self, progress: Progress) -> None:
        """Explains once what keeps the first worker from working."""
        waited = time.monotonic() - self._began
        if self._delay_noted or progress.warm:
            self._delay_noted = True
        elif progress.started and waited > LOAD_NOTICE_SECONDS:
            self._delay_noted = True
            self._view.note(f"{progress.started} workers have started, and none is ready after {duration(waited)}")
        elif not progress.started and waited > START_NOTICE_SECONDS:
            self._delay_noted = True
            why = describe_shortage(self._placement, free=ray.available_resources(), total=ray.cluster_resources())
            self._view.note(f"no worker has started after {duration(waited)}: {why}")

    def _show_notes(self) -> None:
        while not self._notes.empty():
            self._view.note(self._notes.get())


def progress_of(results: Any) -> Progress | None:
    """None while the result actor does not answer: it may be restarting."""
    try:
        progress: Progress = ray.get(results.progress.remote(), timeout=RPC_TIMEOUT_SECONDS)
    except (GetTimeoutError, RayActorError, StoreError):
        return None
    return progress


def close(results: Any) -> None:
    """Releases the folder; an actor that has died has released it already."""
    try:
        ray.get(results.close.remote(), timeout=RPC_TIMEOUT_SECONDS)
    except (GetTimeoutError, RayActorError):
        return


def load_callbacks(names: Sequence[str]) -> list[Any]:
    """Ray Tune callbacks from MODULE:CLASS, created without arguments."""
    return [_load_callback(name) for name in names]


def _load_callback(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise InputError(f"--callback {name}: cannot import {module} ({error})") from None
    if not isinstance(found, type) or not issubclass(found, tune.Callback):
        raise InputError(f"--callback {name}: {attribute} must be a subclass of ray.tune.Callback in {module}")
    try:
        return found()
    except TypeError as error:
        raise InputError(f"--callback {name}: {attribute} must be created without arguments ({error})") from None

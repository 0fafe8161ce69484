"""Runs a sweep's missing trials with Ray Tune and shows how it goes. Decides nothing about what is done.

What is missing was computed from the folder; a fresh Tuner runs it, and Tune's own state is thrown away.
"""

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, tune
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import BasicVariantGenerator

from orchestrator.planning.grid import TrialSpec
from orchestrator.planning.machine import Placement
from orchestrator.planning.plan import Plan
from orchestrator.running.access import Access
from orchestrator.running.stop import Aborted, Stop
from orchestrator.running.trainable import FAILED, REFUSED, TRIAL, SweepWorker, Watched, sentence
from orchestrator.running.waiting import asked_and_free
from orchestrator.store.errors import StoreError
from orchestrator.watching.progress import Progress
from orchestrator.watching.view import SweepView, duration
from sampler.errors import InputError

MAX_FAILURES = 2  # a trial is tried three times
ROUNDS = 3  # of trials whose rows were damaged meanwhile; a disk that goes on like that is broken
LOOK = 0.5  # seconds between looks at the result actor
ANSWER = 2.0  # seconds it has to answer
STARTING, LOADING = 30.0, 120.0  # seconds until a worker should have started, and be ready; then a sentence says so
MARKED = 60.0  # seconds until failures are on disk
DIED = "its worker died (killed, perhaps for the memory it took, or ended by --worker-timeout because it hung)"


def run_trials(
    trials: Sequence[TrialSpec],
    *,
    results: Any,
    settings: Watched,
    placement: Placement,
    sweep: str,
    view: SweepView,
    stop: Stop,
    worker: type[SweepWorker] = SweepWorker,
    room: Callable[[], int] | None = None,
) -> dict[str, str]:
    """Runs them all; those that failed, by id, with their reasons. Interrupted if someone asked for the end.

    `room` says how many may run at a time, now; without it, as many as were placed.
    """
    notes: queue.SimpleQueue[str] = queue.SimpleQueue()
    watch = Watch(results=results, labels={trial.trial_id: trial.label for trial in trials}, notes=notes, stop=stop)
    trainable = tune.with_resources(
        tune.with_parameters(worker, results=results, settings=settings, sweep=sweep, access=Access.of_this_process()),
        tune.PlacementGroupFactory([placement.bundle]),
    )
    trainable.__qualname__ = SweepWorker.__qualname__  # what Ray calls its processes, and not Tune's wrappers
    with tempfile.TemporaryDirectory(prefix="reuse-tune-", ignore_cleanup_errors=True) as scratch:
        tuner = tune.Tuner(
            trainable,
            param_space={TRIAL: tune.grid_search([trial.trial_id for trial in trials])},
            tune_config=tune.TuneConfig(
                reuse_actors=True,
                search_alg=Trials(room or (lambda: placement.actors)),
                scheduler=Patient(),
                trial_name_creator=_name_of,
                trial_dirname_creator=_name_of,
            ),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=scratch,
                failure_config=tune.FailureConfig(max_failures=MAX_FAILURES),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # workers cannot see `storage_path`
                callbacks=[watch],
                verbose=0,
            ),
        )
        with Looking(results, view, notes, placement), stop.deferred():
            tuner.fit()
    _answered(watch.marks, timeout=MARKED)
    return watch.failed


def run_all(plan: Plan, trials: Sequence[TrialSpec], *, results: Any, view: SweepView, **how: Any) -> set[str]:
    """`run_trials`, and again for those whose rows were found damaged after they had ended; ids of those not done."""
    failed: set[str] = set()
    told: set[str] = set()
    for _ in range(ROUNDS):
        failed |= run_trials(trials, results=results, view=view, sweep=plan.sweep, **how).keys()
        unfinished, damage = _answered(results.unfinished.remote())
        for found in damage:
            if found not in told:
                view.note(f"damaged and set aside: {found}")
        told.update(damage)
        trials = [trial for trial in plan.trials if trial.trial_id in unfinished and trial.trial_id not in failed]
        if not trials:
            return failed
        view.note(f"trials that had ended and miss rows now: {len(trials):,}; running them again")
    return failed | {trial.trial_id for trial in trials}


def _answered(calls: Any, timeout: float | None = None) -> Any:
    """What the result actor said; a disk that refuses is told in its own sentence, not in Ray's trace of the call."""
    try:
        return ray.get(calls, timeout=timeout)
    except StoreError as error:
        raise StoreError(sentence(error)) from None


class Trials(BasicVariantGenerator):  # type: ignore[misc]
    """Tune's own way through a grid, but for how many trials it hands out at a time: that may change."""

    def __init__(self, room: Callable[[], int]) -> None:
        super().__init__(max_concurrent=room())
        self._room = room

    def next_trial(self) -> Any:
        self.max_concurrent = self._room()
        return super().next_trial()


class Patient(FIFOScheduler):  # type: ignore[misc]
    """Leaves actors that are still loading alone.

    Tune's own gives the trial that such an actor is loaded for to whoever is free first, and ends the actor: where
    loading takes longer than the others' next trial, no late worker would ever get to work. Without a choice of the
    scheduler's Tune gives a free actor a trial that has none yet, and takes those that wait for theirs last.
    """

    def choose_trial_to_run(self, tune_controller: Any) -> None:
        del tune_controller


def _name_of(trial: Any) -> str:
    return str(trial.config[TRIAL])


class Watch(tune.Callback):  # type: ignore[misc]
    """Hears from Tune what happens to trials, and stops it where that is safe: between two of its steps."""

    def __init__(self, *, results: Any, labels: dict[str, str], notes: "queue.SimpleQueue[str]", stop: Stop) -> None:
        self._results, self._labels, self._notes, self._stop = results, labels, notes, stop
        self.failed: dict[str, str] = {}
        self.marks: list[Any] = []  # answers to come: that failures are on disk

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune keeps a copy of itself, which nobody reads

    def setup(self, *_: Any, **__: Any) -> None:
        self._stop.install()  # Tune has just put its own handler there

    def on_step_begin(self, **_: Any) -> None:
        self._stop.check()

    def on_trial_recover(self, *, trial: Any, **_: Any) -> None:
        reason = self._reason(trial)
        if InputError.__name__ in reason:  # the same on every worker: trying again would not help
            raise Aborted(reason)
        self._notes.put(f"{self._labels[_name_of(trial)]}: {reason}; trying again")

    def on_trial_error(self, *, trial: Any, **_: Any) -> None:
        trial_id, reason = _name_of(trial), self._reason(trial)
        self.marks.append(self._results.fail.remote(trial_id, reason))
        self._note_failure(trial_id, reason)

    def on_trial_complete(self, *, trial: Any, **_: Any) -> None:
        result = trial.last_result or {}
        if REFUSED in result:  # rows of other trials would be refused too
            raise Aborted(result[REFUSED])
        if FAILED in result:
            self._note_failure(_name_of(trial), result[FAILED])

    def _note_failure(self, trial_id: str, reason: str) -> None:
        self.failed[trial_id] = reason
        self._notes.put(f"{self._labels[trial_id]} failed: {reason}")

    def _reason(self, trial: Any) -> str:
        path = Path(trial.pickled_error_file or "")
        return describe(cloudpickle.loads(path.read_bytes()) if path.is_file() else None)


def describe(error: BaseException | None) -> str:
    """What went wrong with a worker, in one line."""
    if isinstance(error, RayActorError):
        reason = str(error).strip().splitlines()[-1] if error.actor_init_failed else ""  # behind Ray's traceback
        return f"its worker could not be set up ({reason})" if reason else DIED
    if isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500] if error is not None else "no reason is known"


class Looking:
    """A thread that asks the result actor how far it is and tells the view, as long as it is entered."""

    def __init__(self, results: Any, view: SweepView, notes: "queue.SimpleQueue[str]", placement: Placement) -> None:
        self._results, self._view, self._notes, self._placement = results, view, notes, placement
        self._began, self._said = time.monotonic(), False  # what keeps workers waiting, or that nothing does
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="view", daemon=True)

    def __enter__(self) -> "Looking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(ANSWER)
        self._tell()

    def _look(self) -> None:
        while not self._ended.wait(LOOK):
            progress = progress_of(self._results)
            if progress is not None:
                self._view.update(progress)
                self._say_if_late(progress)
            self._tell()

    def _say_if_late(self, progress: Progress) -> None:
        waited = time.monotonic() - self._began
        if self._said or progress.warm:
            self._said = True
        elif progress.started and waited > LOADING:
            self._said = True
            self._view.note(f"{progress.started} workers have started, and none is ready after {duration(waited)}")
        elif not progress.started and waited > STARTING:
            self._said = True
            why = asked_and_free(self._placement, free=ray.available_resources(), there=ray.cluster_resources())
            self._view.note(f"no worker has started after {duration(waited)}: {why}")

    def _tell(self) -> None:
        while not self._notes.empty():
            self._view.note(self._notes.get())


def progress_of(results: Any) -> Progress | None:
    """None while the actor does not answer: it may be coming back."""
    try:
        look = results.progress.options(enable_task_events=False)  # twice a second: the dashboard shows work instead
        progress: Progress = ray.get(look.remote(), timeout=ANSWER)
    except (GetTimeoutError, RayActorError, StoreError):
        return None
    return progress


def close(results: Any) -> None:
    """Releases the folder; an actor that is away has left it already."""
    try:
        ray.get(results.close.remote(), timeout=ANSWER)
    except (GetTimeoutError, RayActorError):
        return

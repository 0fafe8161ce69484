"""How Ray Tune schedules a sweep: the order of trials, the names of workers, and the nodes that may run them."""

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from itertools import count
from typing import Any

import ray
from ray import tune
from ray.exceptions import GetTimeoutError, RayActorError
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import BasicVariantGenerator
from ray.util import placement_group

from orchestrator.core.trial import TRIAL_KEYS, Trial, TrialKey, trial_key
from orchestrator.running.result_actor import FailedSetup, WorkerFailure
from orchestrator.running.stop import Aborted
from orchestrator.store import StoreError

MAX_FAILED_SETUPS = 3  # in a row, on one node, which is then excluded for the rest of the run
RPC_TIMEOUT_SECONDS = 2.0
NODE_ID_LABEL = "ray.io/node-id"  # Ray gives it to every node


class WorkerRequest(tune.PlacementGroupFactory):  # type: ignore[misc]
    """The resources of one worker, on any node that is not excluded when Ray places it.

    All trials share one request, so that a warm worker can run any trial, even if nodes are excluded in the meantime.
    """

    def __init__(self, bundle: dict[str, float], excluded: Set[str]) -> None:
        super().__init__([bundle])
        self._excluded = excluded  # grows during the run

    def to_placement_group(self) -> Any:
        if not self._excluded:
            return super().to_placement_group()
        not_excluded = {NODE_ID_LABEL: f"!in({','.join(sorted(self._excluded))})"}
        return placement_group(self.bundles, strategy=self.strategy, bundle_label_selector=[not_excluded])


class ElasticGridSearch(BasicVariantGenerator):  # type: ignore[misc]
    """Suggests the planned trials in order, and limits concurrent ones to the current capacity of the cluster.

    In a race, `is_needed` skips trials of configurations that have been decided in the meantime.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        capacity: Callable[[], int],
        is_needed: Callable[[TrialKey], bool] = lambda _: True,
    ) -> None:
        super().__init__(points_to_evaluate=[trial.tune_config for trial in trials], max_concurrent=capacity())
        self._capacity, self._is_needed = capacity, is_needed

    def next_trial(self) -> Any:
        self.max_concurrent = self._capacity()
        while (trial := super().next_trial()) is not None and not self._is_needed(trial_key(trial.config)):
            self.on_trial_complete(trial.trial_id)
        return trial


class RacedTrials:
    """Asks the result actor whether a race still needs a trial; without an answer, the trial counts as needed."""

    def __init__(self, results: Any) -> None:
        self._results = results

    def __call__(self, key: TrialKey) -> bool:
        try:
            return bool(ray.get(self._results.is_needed.remote(key), timeout=RPC_TIMEOUT_SECONDS))
        except (GetTimeoutError, RayActorError, StoreError):
            return True


def search_space(trials: Sequence[Trial]) -> dict[str, Any]:
    """The values that occur among the trials, by name, as Tune requires them."""
    configs = [trial.tune_config for trial in trials]
    values = {name: dict.fromkeys(config[name] for config in configs) for name in TRIAL_KEYS}
    return {name: tune.choice(list(choices)) for name, choices in values.items()}


class WorkerClasses:
    """Replaces Tune's cache of actor classes: names the workers and hides their calls from the dashboard."""

    def __init__(self, first: int) -> None:
        self._numbers = count(first)

    def get(self, trainable: type) -> Any:
        """A class for the next worker."""
        environment = {"env_vars": {"RAY_CHDIR_TO_TRIAL_DIR": "0"}}
        options = {"name": f"worker-{next(self._numbers)}", "enable_task_events": False, "runtime_env": environment}
        return ray.remote(**options)(trainable)


class KeepLoadingActors(FIFOScheduler):  # type: ignore[misc]
    """Never takes a trial away from an actor that is still loading for it.

    Tune's own scheduler gives such a trial to the next free actor and ends the loading one, so where loading takes
    longer than a trial, late workers would never start. If the scheduler makes no choice, Tune gives a free actor a
    trial that has no actor yet, and chooses trials whose actors are loading last.
    """

    def __init__(self, request: WorkerRequest, worker_classes: WorkerClasses) -> None:
        super().__init__()
        self._request, self._worker_classes = request, worker_classes

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        trial.update_resources(self._request)  # this object: as resources of the trainable, Tune would copy it
        tune_controller._tune_controller._class_cache = self._worker_classes  # Tune has no option for it

    def choose_trial_to_run(self, tune_controller: Any) -> None:
        del tune_controller

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves a copy that is never read


class NodeHealth:
    """Counts failed set-ups, and decides which nodes to exclude and whether the sweep can continue."""

    def __init__(self) -> None:
        self.excluded: set[str] = set()  # node ids; read whenever Ray places a worker
        self._failures: dict[str, list[FailedSetup]] = {}  # by node id, since its last successful set-up
        self._earlier_setups: dict[str, int] = {}  # by node id: successful ones at the last failure
        self._reported: set[tuple[str, str]] = set()

    def exclude(self, failure: FailedSetup) -> str:
        """Excludes a node that failed before the first worker was placed; returns a warning."""
        self.excluded.add(failure.node.node_id)
        self._failures[failure.node.node_id] = [failure]
        self._reported.add((failure.node.node_id, failure.reason))
        return _warning(failure)

    def record(self, failure: FailedSetup, worker: WorkerFailure, usable: Collection[str]) -> list[str]:
        """Records a failed set-up and returns notices for the user; raises Aborted if no node can run the sweep.

        `usable`: ids of the nodes alive that are large enough for a worker.
        """
        node = failure.node
        successful = worker.successful_setups.get(node.node_id, 0)
        if successful > self._earlier_setups.get(node.node_id, 0):
            self._failures.pop(node.node_id, None)
        self._earlier_setups[node.node_id] = successful
        failures = self._failures.setdefault(node.node_id, [])
        failures.append(failure)
        if failure.is_input_error and not worker.alive and self._is_same_everywhere(failure, usable):
            raise Aborted(failure.reason)
        notices = []
        if (node.node_id, failure.reason) not in self._reported:
            self._reported.add((node.node_id, failure.reason))
            notices.append(_warning(failure))
        if len(failures) == MAX_FAILED_SETUPS:
            self.excluded.add(node.node_id)
            notices.append(f"node {node.host} is not used again in this run: {len(failures)} set-ups failed in a row")
        self.check(worker, usable)
        return notices

    def check(self, worker: WorkerFailure, usable: Collection[str]) -> None:
        """Raises Aborted if every usable node is excluded and no worker is left."""
        if usable and not worker.alive and set(usable) <= self.excluded:
            raise Aborted(*failure_sentences([failure for failures in self._failures.values() for failure in failures]))

    def _is_same_everywhere(self, failure: FailedSetup, usable: Collection[str]) -> bool:
        """Whether another node failed for the same reason, or there is no other node."""
        others = set(usable) - {failure.node.node_id}
        return not others or any(
            earlier.reason == failure.reason
            for node_id, failures in self._failures.items()
            for earlier in failures
            if node_id != failure.node.node_id
        )


def failure_sentences(failures: Iterable[FailedSetup]) -> list[str]:
    """One sentence for each distinct reason, with the nodes it was seen on."""
    hosts: dict[str, dict[str, None]] = {}
    for failure in failures:
        hosts.setdefault(failure.reason, {})[failure.node.host] = None
    return [
        f"no worker could be set up on node{'s' * (len(where) > 1)} {', '.join(where)}: {reason}"
        for reason, where in hosts.items()
    ]


def _warning(failure: FailedSetup) -> str:
    return f"warning: node {failure.node.host} could not set up a worker: {failure.reason}"

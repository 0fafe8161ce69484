"""What Ray Tune needs to schedule a sweep: the grid and its order, the resources and the names of workers."""

from collections.abc import Callable, Sequence, Set
from itertools import count
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import BasicVariantGenerator
from ray.util import placement_group

from orchestrator.core.trial import TRIAL_KEYS, Trial

NODE_ID_LABEL = "ray.io/node-id"  # Ray gives it to every node


class WorkerRequest(tune.PlacementGroupFactory):  # type: ignore[misc]
    """The resources of one worker, on any node that is not excluded when Ray places it.

    All trials share one request, so that a warm worker can run every trial, whichever nodes are excluded meanwhile.
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
    """Hands out the planned trials in order, at most as many at a time as the cluster has capacity for now."""

    def __init__(self, trials: Sequence[Trial], capacity: Callable[[], int]) -> None:
        super().__init__(points_to_evaluate=[trial.tune_config for trial in trials], max_concurrent=capacity())
        self._capacity = capacity

    def next_trial(self) -> Any:
        self.max_concurrent = self._capacity()
        return super().next_trial()


def search_space(trials: Sequence[Trial]) -> dict[str, Any]:
    """The values that occur among the trials, by name, as Tune requires them."""
    configs = [trial.tune_config for trial in trials]
    values = {name: dict.fromkeys(config[name] for config in configs) for name in TRIAL_KEYS}
    return {name: tune.choice(list(found)) for name, found in values.items()}


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

    Tune's scheduler gives such a trial to the next free actor and ends the loading one: where loading takes longer than
    a trial, no late worker would ever start. If the scheduler makes no choice, Tune gives a free actor a trial that has
    no actor yet, and the trials whose actors are loading last.
    """

    def __init__(self, request: WorkerRequest, worker_classes: WorkerClasses) -> None:
        super().__init__()
        self._request, self._worker_classes = request, worker_classes

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        trial.update_resources(self._request)  # the object itself: resources of a trainable would be a copy
        tune_controller._tune_controller._class_cache = self._worker_classes  # Tune has no option for it

    def choose_trial_to_run(self, tune_controller: Any) -> None:
        del tune_controller

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves a copy that nobody reads

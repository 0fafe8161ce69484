"""A program: a sweep of two simulated workers, of which the second loads while the first runs many short trials.

Prints how many rows each worker wrote. For tests; starts its own Ray.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.core.trial import Trial, WantedDocuments
from orchestrator.planning.machine import Machine, Placement
from orchestrator.planning.run_plan import RunPlan
from orchestrator.progress.view import SweepView
from orchestrator.running import environment
from orchestrator.running.stop import StopSignals
from orchestrator.store import Store
from tools.scale.synthetic_sweep import TASK, write_planned_sweep

TRIALS = 54
TRIALS_WHILE_LOADING = 20  # of the first worker, before the second has loaded
TRIALS_BEFORE_WAITING = 40  # of the first worker, before it waits for the second one's
LATE_TRIALS = 5  # of the second worker, before the first continues
MAX_WAIT_SECONDS = 300.0

environment.prepare(local=True)
from orchestrator.running import cluster, driver  # noqa: E402  after environment.prepare
from tools.scale.simulated_worker import SimulatedDecoder, SimulatedWorker, SimulatedWorkerSettings  # noqa: E402


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowLoadingWorkerSettings(SimulatedWorkerSettings):
    folder: str


class SlowLoadingWorker(SimulatedWorker):
    """All workers but the first load until the first has run TRIALS_WHILE_LOADING trials."""

    def load(self, settings: Any) -> Any:
        if self._name != "worker-1":
            wait_for_rows(settings.folder, TRIALS_WHILE_LOADING, lambda actor: actor == "worker-1")
        return WaitingDecoder(settings, super().load(settings)._warm)


class WaitingDecoder(SimulatedDecoder):
    """Leaves trials to late workers: after TRIALS_BEFORE_WAITING trials, waits until they have run some."""

    def run(self, trial: Trial, documents: Sequence[str], attempt: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        folder = self._settings.folder
        if attempt["actor"] == "worker-1" and sum(count_rows(folder).values()) >= TRIALS_BEFORE_WAITING:
            wait_for_rows(folder, LATE_TRIALS, lambda actor: actor != "worker-1")
        yield from super().run(trial, documents, attempt)


def count_rows(folder: str | Path) -> Counter[str]:
    """By worker."""
    return Counter(Store(folder).rows(columns=["actor"], verify=False)["actor"].to_pylist())


def wait_for_rows(folder: str, count: int, is_counted: Callable[[str], bool]) -> None:
    """Gives up after a while, so that a test fails instead of hanging."""
    until = time.monotonic() + MAX_WAIT_SECONDS
    while sum(rows for actor, rows in count_rows(folder).items() if is_counted(actor)) < count:
        if time.monotonic() > until:
            return
        time.sleep(0.1)


def main(folder: Path) -> None:
    trials = write_planned_sweep(folder, documents=TRIALS // 9, shard_size=1)
    documents = {trial.shard: (f"{trial.task}/{trial.shard}",) for trial in trials}
    plan = RunPlan(
        folder=str(folder),
        sweep="made-00000000",
        trials=tuple(trials),
        wanted=WantedDocuments(by_shard={TASK: documents}),
    )
    placement = Placement(actors=2, gpus_per_actor=0, cpus_per_actor=1, threads_per_actor=1)
    with cluster.start_local(placement, Machine.here(), dashboard=False), SweepView(quiet=True) as view:
        results = cluster.start_result_actor(plan, actors=2, metrics=False)
        run = driver.SweepRun(
            plan=plan,
            results=results,
            settings=SlowLoadingWorkerSettings(seconds_per_document=0.05, actors=1, folder=str(folder)),
            placement=placement,
            view=view,
            stop=StopSignals(),
            worker=SlowLoadingWorker,
        )
        driver.run_trials(run, plan.trials)
        driver.close_results(results)
    print(json.dumps(count_rows(folder)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A program: two workers without models, of which the second loads for long while the first has many short trials.

Prints how many rows each worker wrote. For tests; starts its own Ray.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.core.trial import WantedDocuments
from orchestrator.planning.machine import Machine, Placement
from orchestrator.planning.run_plan import RunPlan
from orchestrator.progress.view import SweepView
from orchestrator.running import environment
from orchestrator.running.stop import StopSignals
from orchestrator.store import Store
from tools.scale.synthetic_sweep import TASK, write_planned_sweep

TRIALS, SECONDS, LOADING = 54, 0.3, 6.0

environment.prepare(local=True)
from orchestrator.running import cluster, driver  # noqa: E402  after environment.prepare
from tools.scale.simulated_worker import SimulatedWorker, SimulatedWorkerSettings  # noqa: E402


class Slow(SimulatedWorker):
    def load(self, settings: Any) -> Any:
        if self._name != "worker-1":
            time.sleep(LOADING)
        return super().load(settings)


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
            settings=SimulatedWorkerSettings(seconds_per_document=SECONDS, actors=1),
            placement=placement,
            view=view,
            stop=StopSignals(),
            worker=Slow,
        )
        driver.run_trials(run, plan.trials)
        driver.close_results(results)
    rows = Store(folder).rows(columns=["actor"])["actor"].to_pylist()
    print(json.dumps({actor: rows.count(actor) for actor in sorted(set(rows))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

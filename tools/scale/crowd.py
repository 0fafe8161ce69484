"""Runs the crowd of stand-ins, on a Ray of this machine alone, and says how close to their own pace they came."""

import time
from pathlib import Path

import pyarrow.compute as pc

from orchestrator.core.trial import Trial, WantedDocuments
from orchestrator.planning.machine import Machine, Placement
from orchestrator.planning.run_plan import RunPlan
from orchestrator.planning.settings import PolicyGrid
from orchestrator.progress.view import SweepView
from orchestrator.running import environment
from orchestrator.running.stop import StopSignals
from orchestrator.store import Store
from tools.scale.figure import Figure
from tools.scale.million import TASK, write_begun

PACE = 2.0  # documents per second of each actor
SHARD = 50  # documents of a trial, as a sweep has them
TRIALS = 2  # of each actor


def crowd(folder: Path, *, actors: int = 64) -> list[Figure]:
    environment.prepare(local=True)
    from orchestrator.running import cluster, driver  # only now: the environment is prepared
    from tools.scale.actors import StandIn, StandInSettings

    plan = _plan(folder / "s", actors)
    placement = Placement(actors=actors, gpus_per_actor=0, cpus_per_actor=1, threads_per_actor=1)
    began = time.perf_counter()
    with cluster.start_local(placement, Machine.here(), dashboard=False), SweepView(quiet=True) as view:
        results = cluster.start_result_actor(plan, actors=actors, metrics=False)
        run = driver.SweepRun(
            plan=plan,
            results=results,
            settings=StandInSettings(seconds=1 / PACE, actors=actors),
            placement=placement,
            view=view,
            stop=StopSignals(),
            worker=StandIn,
        )
        driver.run_trials(run, plan.trials)
        driver.close_results(results)
    return _figures(Store(Path(plan.folder)), actors, time.perf_counter() - began)


def _plan(folder: Path, actors: int) -> RunPlan:
    policies = PolicyGrid().policies
    trials = write_begun(folder, documents=-(-actors * TRIALS // len(policies)) * SHARD, shard=SHARD)
    documents = {trial.shard: _ids(trial) for trial in trials}
    return RunPlan(
        folder=str(folder),
        sweep="made-00000000",
        trials=tuple(trials),
        wanted=WantedDocuments(by_shard={TASK: documents}),
    )


def _ids(trial: Trial) -> tuple[str, ...]:
    return tuple(f"{trial.task}/{trial.shard * SHARD + place}" for place in range(SHARD))


def _figures(store: Store, actors: int, seconds: float) -> list[Figure]:
    """The pace while all are at work: from when the last has its first row to when the first has its last."""
    rows = store.rows(columns=["actor", "started_at"])
    by_actor = rows.group_by("actor").aggregate([("started_at", "min"), ("started_at", "max")])
    first, last = pc.max(by_actor["started_at_min"]), pc.min(by_actor["started_at_max"])
    within = pc.sum(pc.and_(pc.greater_equal(rows["started_at"], first), pc.less_equal(rows["started_at"], last)))
    window = (last.as_py() - first.as_py()).total_seconds()
    return [
        Figure(
            what=f"{len(by_actor)} actors of {PACE:g} documents/s: acknowledged in a second",
            value=within.as_py() / window,
            unit="documents",
            wanted=0.95 * actors * PACE,
            at_least=True,
        ),
        Figure(what="  of these seconds were measured", value=window, unit="s"),
        Figure(what="  the whole run, with the start of all actors", value=seconds, unit="s"),
    ]

"""The measurements of `python -m tools.scale`. Each works in the given folder and returns figures."""

import time
from pathlib import Path

import pyarrow.compute as pc

from orchestrator.core.trial import Trial, WantedDocuments
from orchestrator.planning.machine import Machine, Placement
from orchestrator.planning.run_plan import RunPlan
from orchestrator.planning.settings import PolicyGrid
from orchestrator.progress.progress import timeline
from orchestrator.progress.view import SweepView
from orchestrator.running import environment
from orchestrator.running.stop import StopSignals
from orchestrator.store import Store
from tools.faults.sweep import write_model_and_data
from tools.scale.figures import Figure, measure_command
from tools.scale.synthetic_sweep import SHARD_SIZE, SWEEP_ID, TASK, write_finished_sweep, write_planned_sweep

DOCUMENTS_PER_SECOND = 2.0  # of each actor
TRIALS_PER_ACTOR = 2
OVERHEAD = ("scoring", "waiting", "finishing", "between")  # everything except decoding and calibration


def measure_trials(folder: Path, *, trials: int = 1000) -> list[Figure]:
    """A real sweep of a very small model with many trials of one document: what each costs besides decoding."""
    policies = PolicyGrid().policies
    documents = -(-trials // len(policies))
    write_model_and_data(folder, documents=documents)
    flags = ["--tasks", "gsm8k", "--policies", ",".join(policies), "--limit", documents, "--shard-size", 1]
    flags += ["--max-new-tokens", 8, "--fewshot", 0, "--model", folder / "model", "--data", folder / "data"]
    flags += ["--actors", 2, "--cpus-per-actor", 0.5, "--out", folder / "out", "--name", "s"]
    flags += ["--no-dashboard", "--quiet"]
    spent = measure_command("orchestrator.sweep", [str(flag) for flag in flags])
    totals = timeline(Store(folder / "out" / "s").trials().values())
    assert totals is not None
    assert totals.trials == documents * len(policies), totals.trials
    milliseconds = {part: 1000 * seconds / totals.trials for part, seconds in totals.parts.items()}
    return [
        Figure(
            what=f"{totals.trials:,} trials of one document: overhead of each",
            value=sum(milliseconds[part] for part in OVERHEAD),
            unit="ms",
            bound=60,
        ),
        *(Figure(what=f"  of which {part}", value=milliseconds[part], unit="ms") for part in OVERHEAD),
        Figure(what="  calibration, not included", value=milliseconds["calibration"], unit="ms"),
        Figure(what="  the whole command", value=spent.wall_seconds, unit="s"),
    ]


def measure_planning(folder: Path, *, trials: int = 100_000) -> list[Figure]:
    """The time of `--dry-run` for a long plan."""
    documents = -(-trials // len(PolicyGrid().policies))
    write_model_and_data(folder, documents=documents)
    flags = ["--tasks", "gsm8k", "--shard-size", "1", "--dry-run", "--fewshot", "0", "--actors", "1"]
    flags += ["--model", str(folder / "model"), "--data", str(folder / "data"), "--out", str(folder / "out")]
    spent = measure_command("orchestrator.sweep", flags)
    return [
        Figure(what=f"{trials:,} trials planned and dry-run", value=spent.wall_seconds, unit="s", bound=10),
        Figure(what="  CPU time", value=spent.cpu_seconds, unit="s"),
        Figure(what="  memory", value=spent.memory_mb, unit="MB"),
    ]


def measure_status(folder: Path, *, rows: int = 1_000_000) -> list[Figure]:
    """The cost of `status` on many rows, and whether its memory grows with them."""
    large, small = folder / "large", folder / "small"
    count = write_finished_sweep(large, rows=rows)
    write_finished_sweep(small, rows=rows // 10)
    spent, tenth = (measure_command("orchestrator.status", [str(path), "--json"]) for path in (large, small))
    return [
        Figure(what=f"status of {count:,} rows", value=spent.wall_seconds, unit="s", bound=2),
        Figure(what="  CPU time", value=spent.cpu_seconds, unit="s"),
        Figure(what="  memory", value=spent.memory_mb, unit="MB"),
        Figure(what="  ratio to a tenth of the rows", value=spent.memory_mb / tenth.memory_mb, unit="times", bound=1.5),
    ]


def measure_actors(folder: Path, *, actors: int = 64) -> list[Figure]:
    """Whether the result actor and Tune keep up with many actors of known speed on a local Ray cluster."""
    environment.prepare(local=True)
    from orchestrator.running import cluster, driver  # after environment.prepare, which must precede Ray
    from tools.scale.simulated_worker import SimulatedWorker, SimulatedWorkerSettings

    plan = _plan(folder / "s", actors)
    placement = Placement(actors=actors, gpus_per_actor=0, cpus_per_actor=1, threads_per_actor=1)
    began = time.perf_counter()
    with cluster.start_local(placement, Machine.here(), dashboard=False), SweepView(quiet=True) as view:
        results = cluster.start_result_actor(plan, actors=actors, metrics=False)
        run = driver.SweepRun(
            plan=plan,
            results=results,
            settings=SimulatedWorkerSettings(seconds_per_document=1 / DOCUMENTS_PER_SECOND, actors=actors),
            placement=placement,
            view=view,
            stop=StopSignals(),
            worker=SimulatedWorker,
        )
        driver.run_trials(run, plan.trials)
        driver.close_results(results)
    return _throughput(Store(Path(plan.folder)), actors, time.perf_counter() - began)


def _plan(folder: Path, actors: int) -> RunPlan:
    documents_per_policy = -(-actors * TRIALS_PER_ACTOR // len(PolicyGrid().policies)) * SHARD_SIZE
    trials = write_planned_sweep(folder, documents=documents_per_policy, shard_size=SHARD_SIZE)
    documents = {trial.shard: _document_ids(trial) for trial in trials}
    return RunPlan(
        folder=str(folder),
        sweep=SWEEP_ID,
        trials=tuple(trials),
        wanted=WantedDocuments(by_shard={TASK: documents}),
    )


def _document_ids(trial: Trial) -> tuple[str, ...]:
    return tuple(f"{trial.task}/{trial.shard * SHARD_SIZE + index}" for index in range(SHARD_SIZE))


def _throughput(store: Store, actors: int, seconds: float) -> list[Figure]:
    """The rate while all actors work: from the first row of the last one to the last row of the first one."""
    rows = store.rows(columns=["actor", "started_at"])
    by_actor = rows.group_by("actor").aggregate([("started_at", "min"), ("started_at", "max")])
    first, last = pc.max(by_actor["started_at_min"]), pc.min(by_actor["started_at_max"])
    within = pc.sum(pc.and_(pc.greater_equal(rows["started_at"], first), pc.less_equal(rows["started_at"], last)))
    window = (last.as_py() - first.as_py()).total_seconds()
    return [
        Figure(
            what=f"{len(by_actor)} actors of {DOCUMENTS_PER_SECOND:g} documents/s: rows stored per second",
            value=within.as_py() / window,
            unit="documents",
            bound=0.95 * actors * DOCUMENTS_PER_SECOND,
            at_least=True,
        ),
        Figure(what="  measured over", value=window, unit="s"),
        Figure(what="  whole run, including the start of all actors", value=seconds, unit="s"),
    ]

"""Many simulated sweeps with known truth: how often intervals cover it, how often a verdict is wrong.

Sweeps come from the same model as those of `analysis_tables`, but straight as the arrays that statistics work on,
without a table in between: a thousand take seconds, not minutes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from analysis_tables import NINE, Truth, World

from orchestrator.analysis.accuracy import paired_difference
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.runs import ResolvedConfiguration, TaskRuns
from orchestrator.analysis.speedups import bootstrap_times, measure_baseline, speedup
from orchestrator.analysis.verdicts import CONFIRMED, REJECTED, Criteria, Verdict, judge, judge_task
from orchestrator.core.configuration import Configuration

SETTINGS = (0.95, 8, True)
CRITERIA = Criteria(margin=5.0, speedup=1.2)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One configuration of one simulated sweep."""

    policy: str
    points: Estimate
    speed: Estimate
    seconds: Estimate
    verdict: Verdict


def sweep(world: World, seed: Sequence[int], draws: int) -> tuple[list[Judged], Verdict]:
    """The steps of an analysis that lead to verdicts, and no others."""
    rng = np.random.default_rng(seed)
    return judged(arrays(world, rng), rng, draws)


def judged(rows: TaskRuns, rng: np.random.Generator, draws: int) -> tuple[list[Judged], Verdict]:
    bootstrap = bootstrap_times(rows, rng, draws)
    side = measure_baseline(bootstrap, rows.baseline_runs(SETTINGS))
    base = rows.mean(side.runs, "score")
    compared = [number for number, one in enumerate(rows.configurations) if not one.is_baseline]
    found = []
    for number in compared:
        runs, policy = rows.runs_of(number), rows.configurations[number].policy
        apart = paired_difference(
            base, rows.mean(runs, "score"), rows.strata, rng=rng, comparisons=len(compared), draws=draws
        )
        faster = speedup(bootstrap, side, runs, len(compared))
        assert faster is not None
        assert faster.tokens is not None
        verdict = judge(policy, apart, faster, side.noise_floor, CRITERIA)
        found.append(
            Judged(policy=policy, points=apart.points, speed=faster.tokens, seconds=faster.seconds, verdict=verdict)
        )
    return found, judge_task(rows.task, [(one.policy, one.verdict) for one in found], CRITERIA)


def arrays(world: World, rng: np.random.Generator) -> TaskRuns:
    n, policies = world.documents, list(world.policies)
    strata = np.arange(n) % world.subtasks
    factor = np.linspace(0.5, 1.5, world.subtasks)[strata] if world.subtasks > 1 else np.ones(n)
    right = rng.random(n) < world.right
    length = np.round(np.maximum(8, rng.lognormal(np.log(100), 0.5, n)))
    pace = rng.lognormal(np.log(0.02), 0.1, n)
    runs = [_run(world, name, world.policies[name], factor, right, length, pace, rng) for name in policies]
    columns = {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}
    shard = np.arange(n) // world.shard
    columns["trial_id"] = np.concatenate([shard + (shard.max() + 1) * i for i in range(len(policies))])
    columns["batch_id"] = np.tile(np.arange(n) % world.shard // world.batch, len(policies))
    columns["attempt"] = np.zeros(n * len(policies), dtype=int)
    columns["batch_size"] = np.full(n * len(policies), world.batch)
    columns["finish"] = np.zeros(n * len(policies), dtype=int)
    return TaskRuns(
        task=world.task,
        configurations=tuple(_configuration(name) for name in policies),
        owner=np.arange(len(policies)),
        repeat=np.zeros(len(policies), dtype=int),
        cell=np.arange(n * len(policies)).reshape(len(policies), n),
        doc_ids=np.arange(n).astype(object),
        strata=strata,
        subtasks=tuple(str(i) for i in range(world.subtasks)),
        columns=columns,
        names={"finish": ("stop",)},
        run=np.repeat(np.arange(len(policies)), n),
        row=np.arange(n * len(policies)),
    )


def _run(
    world: World,
    policy: str,
    truth: Truth,
    factor: np.ndarray,
    right: np.ndarray,
    length: np.ndarray,
    pace: np.ndarray,
    rng: np.random.Generator,
) -> dict[str, np.ndarray]:
    n, u = world.documents, rng.random(world.documents)
    lost = right & (u < truth.lost * factor / world.right)
    won = ~right & (u < truth.won * factor / (1 - world.right))
    tokens = length
    if not policy.startswith("k1"):
        own = rng.lognormal(-(world.length_noise**2) / 2, world.length_noise, n) * truth.length
        tokens = np.maximum(1, np.round(length * own))
    shard = np.arange(n) // world.shard
    noise = rng.lognormal(-(world.document_noise**2) / 2, world.document_noise, n)
    noise *= np.exp(rng.normal(0, world.trial_noise, shard.max() + 1))[shard]
    work = pace * tokens / truth.speedup * noise
    if world.batch > 1:  # a batch's time, shared out by tokens
        batch = shard * 10_000 + np.arange(n) % world.shard // world.batch
        _, code = np.unique(batch, return_inverse=True)
        work = np.bincount(code, weights=work)[code] * tokens / np.bincount(code, weights=tokens)[code]
    return {"score": ((right & ~lost) | won).astype(float), "tokens": tokens, "work": work, "wall": work}


def _configuration(policy: str) -> ResolvedConfiguration:
    return ResolvedConfiguration(
        configuration=Configuration(policy=policy, threshold=0.95, small_block=8, block_cache=True),
        k=int(policy[1]),
        subset=policy.partition("_")[2] or None,
        mode=None,
        layers=(),
        label=policy,
    )


def coverage(world: World, runs: int, draws: int) -> dict[str, float]:
    """Share of simulated sweeps in which the 95 % interval of a configuration holds the truth."""
    hits, count = dict.fromkeys(("points", "speed", "seconds"), 0), 0
    for run in range(runs):
        for one in sweep(world, (run,), draws)[0]:
            truth = world.policies[one.policy]
            hits["points"] += one.points.low <= world.difference[one.policy] <= one.points.high
            hits["speed"] += one.speed.low <= truth.speedup <= one.speed.high
            hits["seconds"] += one.seconds.low <= truth.speedup / truth.length <= one.seconds.high
            count += 1
    return {name: hit / count for name, hit in hits.items()}


def is_good(world: World, policy: str) -> bool:
    truth = world.policies[policy]
    return truth.speedup > CRITERIA.speedup and world.difference[policy] > -CRITERIA.margin


def errors(world: World, runs: int, draws: int) -> dict[str, float]:
    """Shares of sweeps with a wrong verdict on some configuration, and on the hypothesis; and of decided ones."""
    some, overall, decided = 0, 0, 0
    good = any(is_good(world, policy) for policy in world.policies if not policy.startswith("k1"))
    for run in range(runs):
        found, outcome = sweep(world, (run,), draws)
        wrong = {True: REJECTED, False: CONFIRMED}
        some += any(one.verdict.outcome == wrong[is_good(world, one.policy)] for one in found)
        overall += outcome.outcome == wrong[good]
        decided += outcome.outcome in (CONFIRMED, REJECTED)
    return {"any": some / runs, "hypothesis": overall / runs, "decided": decided / runs}


__all__ = ["CRITERIA", "NINE", "arrays", "coverage", "errors", "judged", "sweep"]

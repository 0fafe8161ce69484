"""Many simulated sweeps with known truth: how often intervals cover it, how often a verdict is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from analysis_tables import World, draw

from orchestrator.analysis.accuracy import difference
from orchestrator.analysis.pairs import TaskRows, split
from orchestrator.analysis.resample import Estimate
from orchestrator.analysis.speed import baseline, speeds, speedup
from orchestrator.analysis.verdict import CONFIRMED, REJECTED, Criteria, Verdict, hypothesis, judge

SETTINGS = (0.95, 8, True)
CRITERIA = Criteria(margin=5.0, speedup=1.2)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One configuration of one simulated sweep."""

    policy: str
    points: Estimate
    speed: Estimate
    seconds: Estimate
    points_simultaneous: Estimate
    speed_simultaneous: Estimate
    verdict: Verdict


def sweep(world: World, seed: Sequence[int], draws: int) -> tuple[list[Judged], Verdict]:
    """The steps of an analysis that lead to verdicts, and no others, so that a thousand sweeps take a minute."""
    rng = np.random.default_rng(seed)
    table = draw(world, rng, answers=False)
    [rows] = split(table, np.zeros(table.num_rows, dtype=np.uint64), {world.task: "exact_match"})
    bootstrap = speeds(rows, rng, draws)
    side = baseline(bootstrap, rows.baseline_runs(SETTINGS))
    base = rows.mean(side.runs, "score")
    compared = [number for number, one in enumerate(rows.configurations) if not one.is_baseline]
    found = []
    for number in compared:
        runs = rows.runs_of(number)
        apart = difference(base, rows.mean(runs, "score"), rows.strata, rng=rng, family=len(compared), draws=draws)
        faster = speedup(bootstrap, side, runs, len(compared))
        assert faster is not None
        assert faster.tokens is not None
        assert faster.tokens_simultaneous is not None
        found.append(
            Judged(
                policy=rows.configurations[number].policy,
                points=apart.points,
                speed=faster.tokens,
                seconds=faster.seconds,
                points_simultaneous=apart.simultaneous,
                speed_simultaneous=faster.tokens_simultaneous,
                verdict=judge(rows.configurations[number].label, apart, faster, side.floor, CRITERIA),
            )
        )
    return found, hypothesis(world.task, [(one.policy, one.verdict) for one in found], CRITERIA)


def coverage(world: World, runs: int, draws: int) -> dict[str, float]:
    """Share of simulated sweeps in which the 95 % interval of a configuration holds the truth."""
    hits = dict.fromkeys(("points", "speed", "seconds"), 0)
    count = 0
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
    good = [is_good(world, policy) for policy in world.policies if not policy.startswith("k1")]
    for run in range(runs):
        found, outcome = sweep(world, (run,), draws)
        wrong = [one.verdict.outcome == (REJECTED if is_good(world, one.policy) else CONFIRMED) for one in found]
        some += any(wrong)
        overall += outcome.outcome == (REJECTED if any(good) else CONFIRMED)
        decided += outcome.outcome in (CONFIRMED, REJECTED)
    return {"any": some / runs, "hypothesis": overall / runs, "decided": decided / runs}


__all__ = ["CRITERIA", "Judged", "TaskRows", "coverage", "errors", "is_good", "sweep"]

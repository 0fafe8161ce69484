"""Whole sweeps drawn from a world with known truth, analysed by the real code: how often is it right?

The world has what real sweeps have: documents of different lengths, policies that suit some documents better than
others, actors whose speed drifts while they work through interleaved trials, noisy calibrations, batches, shards of
unequal size, answers that change in length, and subjects. A sweep is drawn as the arrays that the statistics work on,
without a table in between, so that hundreds take seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.signal import lfilter

from orchestrator.analysis.accuracy import paired_difference
from orchestrator.analysis.intervals import Levels
from orchestrator.analysis.runs import ResolvedConfiguration, TaskRuns
from orchestrator.analysis.speedups import bootstrap_times, measure_baseline, speed_noise, speedup, throughput
from orchestrator.analysis.verdicts import (
    CONFIRMED,
    REJECTED,
    UNDECIDED,
    Compared,
    Criteria,
    Verdict,
    judge_all,
    judge_task,
)
from orchestrator.core.configuration import Configuration
from orchestrator.core.speed import TrialTimes, calibrate

SETTINGS = Configuration(policy="k1").settings
CRITERIA = Criteria(margin=5.0, speedup=1.2)
K1 = ("k1_first", "k1_middle", "k1_last")
SIX = tuple(f"k{k}_{subset}" for k in (2, 3) for subset in ("first", "middle", "last"))


@dataclass(frozen=True, kw_only=True)
class Policy:
    """True shares of documents lost and won against k=1, speed-up in tokens/s, and length against k=1."""

    lost: float = 0.0
    won: float = 0.0
    speedup: float = 1.0
    length: float = 1.0

    @property
    def points(self) -> float:
        return 100 * (self.won - self.lost)

    @property
    def is_good(self) -> bool:
        each = self.speedup / self.length if abs(self.length - 1) > 0.1 else self.speedup
        return min(self.speedup, each) > CRITERIA.speedup and self.points > -CRITERIA.margin


@dataclass(frozen=True, kw_only=True)
class SimulatedWorld:
    policies: Mapping[str, Policy]
    documents: int = 100
    shards: tuple[int, ...] = (10,)  # sizes; the last one repeats until all documents are assigned
    batch: int = 1
    subjects: int = 1
    right: float = 0.8  # accuracy of k=1
    replicates: int = 3
    tasks: int = 1
    preference: float = 0.05  # how much a policy's speed-up differs between documents
    length_noise: float = 0.25  # of a policy's lengths about those of k=1
    clock_noise: float = 0.03  # of a document's time
    trial_noise: float = 0.0  # of a whole trial, independent of all others
    drift: float = 0.0  # standard deviation of an actor's log speed
    drift_documents: float = 11.0  # after which its correlation has fallen to 1/e
    drift_shared: float = 0.69  # correlation between the actors of one machine
    calibration_noise: float = 0.1
    actors: int = 2

    @property
    def shard(self) -> np.ndarray:
        sizes = list(self.shards)
        while sum(sizes) < self.documents:
            sizes.append(sizes[-1])
        return np.repeat(np.arange(len(sizes)), sizes)[: self.documents]

    @property
    def names(self) -> tuple[str, ...]:
        return (*K1[: self.replicates], *self.policies)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What an analysis says about one task of a simulated sweep."""

    compared: Sequence[Compared]
    verdicts: Sequence[Verdict]
    task: Verdict
    rates: Mapping[str, tuple[float, float]]  # ends of the interval of tokens/s


def draw_task(world: SimulatedWorld, rng: np.random.Generator, name: str = "gsm8k") -> TaskRuns:
    n, names, shard = world.documents, world.names, world.shard
    strata = np.arange(n) % world.subjects
    factor = np.linspace(0.5, 1.5, world.subjects)[strata] if world.subjects > 1 else np.ones(n)
    right = rng.random(n) < world.right
    length, pace = np.maximum(8, np.round(rng.lognormal(np.log(100), 0.5, n))), rng.lognormal(np.log(0.02), 0.1, n)
    slowness, calibration, actor = _machine(world, shard, rng)
    tokens, score, wall = np.empty((len(names), n)), np.empty((len(names), n)), np.empty((len(names), n))
    for run, policy in enumerate(names):
        truth = world.policies.get(policy, Policy())
        u = rng.random(n)
        lost = right & (u < truth.lost * factor / world.right)
        won = ~right & (u < truth.won * factor / (1 - world.right))
        score[run] = (right & ~lost) | won
        tokens[run], suits = length, np.ones(n)
        if policy not in K1:
            scatter = rng.lognormal(-(world.length_noise**2) / 2, world.length_noise, n)
            tokens[run] = np.maximum(1, np.round(length * scatter * truth.length))
            suits = rng.lognormal(-(world.preference**2) / 2, world.preference, n)
        clock = rng.lognormal(-(world.clock_noise**2) / 2, world.clock_noise, n)
        wall[run] = pace * tokens[run] / truth.speedup * suits * clock * np.exp(slowness[run])
    trial = np.arange(len(names))[:, None] * (shard[-1] + 1) + shard
    place = np.concatenate([np.arange(size) for size in np.bincount(shard)])
    batch = place // world.batch
    for run in range(len(names)):
        _, code = np.unique(shard * 10_000 + batch, return_inverse=True)
        share = tokens[run] / np.bincount(code, weights=tokens[run])[code]
        wall[run] = np.bincount(code, weights=wall[run])[code] * share  # a batch's time, shared out by tokens
    flat_trial = trial.ravel()
    seconds = np.bincount(flat_trial, weights=wall.ravel())
    first = np.unique(flat_trial, return_index=True)[1]
    run_of = first // n
    times = TrialTimes(
        shard=np.tile(shard, len(names))[first],
        baseline=np.zeros(len(first), dtype=int),
        configuration=run_of,
        is_k1=run_of < world.replicates,
        actor=actor.ravel(),
        documents=np.bincount(flat_trial),
        tokens=np.bincount(flat_trial, weights=tokens.ravel()),
        seconds=seconds,
        calibration=calibration.ravel(),
    )
    speed = calibrate(times).work / seconds
    columns = {
        "score": score.ravel(),
        "tokens": tokens.ravel(),
        "wall": wall.ravel(),
        "work": (wall * speed[trial]).ravel(),
        "trial_id": flat_trial,
        "batch_id": np.tile(batch, len(names)),
        "attempt": np.zeros(wall.size, dtype=int),
        "batch_size": np.full(wall.size, world.batch),
        "truncated": np.zeros(wall.size, dtype=bool),
        **{name: np.ones(wall.size) for name in ("seconds", "passes", "steps", "layers_computed", "layer_positions")},
    }
    cell = np.arange(wall.size).reshape(wall.shape)
    return TaskRuns(
        task=name,
        configurations=tuple(_configuration(policy) for policy in names),
        owner=np.arange(len(names)),
        repeat=np.zeros(len(names), dtype=int),
        cell=cell,
        timed=cell,
        doc_ids=np.arange(n).astype(object),
        strata=strata,
        subtasks=tuple(str(i) for i in range(world.subjects)),
        columns=columns,
        names={},
        run=np.repeat(np.arange(len(names)), n),
        row=np.arange(wall.size),
    )


def _machine(
    world: SimulatedWorld, shard: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log slowness by run and document; calibration and actor by run and shard.

    Shard by shard, all configurations in random order, each on the actor whose turn it is. A document takes a unit of
    time, and the log speed of an actor is an autoregressive process: a part of its own and a part of the machine's.
    """
    runs, shards = len(world.names), int(shard[-1]) + 1
    sizes = np.bincount(shard)
    order = np.argsort(rng.random((shards, runs)), axis=1)
    turn = np.empty((shards, runs), dtype=int)
    np.put_along_axis(turn, order, np.tile(np.arange(runs), (shards, 1)), axis=1)
    turn += np.arange(shards)[:, None] * runs  # when a trial starts, counted in trials
    actor = turn % world.actors
    rounds = np.cumsum(np.repeat(sizes, -(-runs // world.actors)))  # generous: each round lasts as long as its shard
    starts = np.concatenate(([0], rounds))[np.minimum(turn // world.actors, len(rounds) - 1)]
    length = int(rounds[-1]) + int(sizes.max()) + 1
    decay = np.exp(-1 / world.drift_documents)
    steps = rng.normal(0, np.sqrt(1 - decay**2), (world.actors + 1, length))
    steps[:, 0] = rng.normal(0, 1, world.actors + 1)
    paths = lfilter([1.0], [1.0, -decay], steps, axis=1)
    shared = np.sqrt(world.drift_shared)
    speed = world.drift * (shared * paths[0] + np.sqrt(1 - world.drift_shared) * paths[1:])
    place = np.concatenate([np.arange(size) for size in sizes])
    slowness = np.stack([-speed[actor[shard, run], starts[shard, run] + place] for run in range(runs)])
    slowness += rng.normal(0, world.trial_noise, (runs, shards))[:, shard] if world.trial_noise else 0.0
    calibration = np.exp(speed[actor, starts] + rng.normal(0, world.calibration_noise, (shards, runs))) * 45
    return slowness, calibration.T, actor.T


def _configuration(policy: str) -> ResolvedConfiguration:
    return ResolvedConfiguration(
        configuration=Configuration(policy=policy, threshold=0.95, small_block=8, block_cache=True),
        k=int(policy[1]),
        subset=policy.partition("_")[2] or None,
        mode=None,
        layers=(),
        label=policy,
    )


def analyse_sweep(world: SimulatedWorld, seed: Sequence[int], draws: int) -> list[Found]:
    """The steps of an analysis that lead to intervals and verdicts, for all tasks of one sweep."""
    rng = np.random.default_rng(seed)
    tasks = [draw_task(world, rng, f"task{number}") for number in range(world.tasks)]
    noise = speed_noise(tasks)
    found = []
    for rows in tasks:
        bootstrap = bootstrap_times(rows, rng, draws)
        side = measure_baseline(bootstrap, rows.baseline_runs(SETTINGS))
        base = rows.mean(side.runs, "score")
        numbers = [number for number, one in enumerate(rows.configurations) if not one.is_baseline]
        levels = Levels(comparisons=len(numbers))
        compared = [
            Compared(
                label=rows.configurations[number].policy,
                difference=paired_difference(
                    base, rows.mean(rows.runs_of(number), "score"), rows.strata, rng=rng, levels=levels, draws=draws
                ),
                speedup=speedup(bootstrap, side, rows.runs_of(number), noise.work, levels),
            )
            for number in numbers
        ]
        verdicts = judge_all(compared, CRITERIA, levels)
        named = [(one.label, verdict) for one, verdict in zip(compared, verdicts, strict=True)]
        rates = {}
        for run in side.runs:
            rate = throughput(bootstrap, np.array([run]), noise.wall).tokens_per_second
            assert rate is not None
            rates[rows.run_label(int(run))] = (rate.low, rate.high)
        task = judge_task(rows.task, named, CRITERIA)
        found.append(Found(compared=compared, verdicts=verdicts, task=task, rates=rates))
    return found


@dataclass(kw_only=True)
class Measured:
    """Shares of simulated tasks (or of their configurations), with the number of sweeps behind them."""

    sweeps: int
    shares: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.shares[name]

    def error(self, name: str) -> float:
        """Monte-Carlo standard error, as if the configurations of a sweep were one observation."""
        share = min(max(self.shares[name], 0.01), 0.99)
        return float(np.sqrt(share * (1 - share) / self.sweeps))


def measure(
    world: SimulatedWorld, sweeps: int, draws: int, analyse: Callable[..., list[Found]] = analyse_sweep
) -> Measured:
    """Coverage of all intervals, wrong verdicts, decided tasks, and k=1 replicates whose tokens/s are disjoint."""
    covered: dict[str, list[float]] = {}
    events: dict[str, list[bool]] = {}
    good = any(policy.is_good for policy in world.policies.values())
    for sweep in range(sweeps):
        for found in analyse(world, (sweep, world.documents), draws):
            together = {"accuracy": True, "speed": True, "seconds": True}
            wrong = False
            for one, verdict in zip(found.compared, found.verdicts, strict=True):
                truth, speed = world.policies[one.label], one.speedup
                assert speed is not None
                assert speed.tokens is not None
                assert speed.tokens_simultaneous is not None
                for name, value, alone, simultaneous in (
                    ("accuracy", truth.points, one.difference.points, one.difference.simultaneous),
                    ("speed", truth.speedup, speed.tokens, speed.tokens_simultaneous),
                    ("seconds", truth.speedup / truth.length, speed.seconds, speed.seconds_simultaneous),
                ):
                    covered.setdefault(name, []).append(alone.low <= value <= alone.high)
                    together[name] &= simultaneous.low <= value <= simultaneous.high
                wrong |= verdict.outcome == (REJECTED if truth.is_good else CONFIRMED)
            for name, all_hold in together.items():
                events.setdefault(f"{name}, simultaneous", []).append(all_hold)
            lows, highs = zip(*found.rates.values(), strict=True)
            wrong_task = found.task.outcome == (REJECTED if good else CONFIRMED)
            events.setdefault("wrong", []).append(wrong or wrong_task)
            events.setdefault("wrong task", []).append(wrong_task)
            events.setdefault("decided", []).append(found.task.outcome != UNDECIDED)
            events.setdefault("disjoint replicates", []).append(max(lows) > min(highs))
    shares = {name: float(np.mean(values)) for name, values in (covered | events).items()}
    return Measured(sweeps=sweeps, shares=shares)

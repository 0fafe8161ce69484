"""The estimator of speed: calibration of trials, its fitted exponent, and speed-ups on shards that both sides have."""

from dataclasses import replace

import numpy as np
import pytest

from orchestrator.core.speed import PRIOR_EXPONENT, TrialTimes, calibrate, paired_speedups

K1, OTHER = 3, 2  # runs of k=1, and configurations compared with it


def sweep(shards: int, exponent: float, noise: float, seed: int = 0, *, actors: int = 1) -> TrialTimes:
    """Trials whose time follows their actor's calibration with an exponent; the second configuration takes half."""
    rng = np.random.default_rng(seed)
    runs = K1 + OTHER
    configuration = np.tile(np.maximum(np.arange(runs) - K1 + 1, 0), shards)
    count = runs * shards
    actor = rng.integers(0, actors, count)
    deviation = rng.normal(0, 0.3, count)
    level = np.log(50) + np.log(2) * actor
    size = np.repeat(rng.uniform(5, 20, shards), runs)
    speed = np.where(configuration == 2, 2.0, 1.0)
    seconds = size / speed * np.exp(-level - exponent * deviation + rng.normal(0, noise, count))
    return TrialTimes(
        shard=np.repeat(np.arange(shards), runs),
        baseline=np.zeros(count, dtype=int),
        configuration=configuration,
        is_k1=configuration == 0,
        actor=actor,
        documents=np.full(count, 10),
        tokens=np.full(count, 1000.0),
        seconds=seconds,
        calibration=np.exp(level + deviation),
    )


@pytest.mark.parametrize("exponent", [0.0, 0.4, 0.66, 1.0])
def test_the_exponent_is_fitted_to_the_replicates(exponent: float) -> None:
    assert calibrate(sweep(300, exponent, 0.05)).exponent == pytest.approx(exponent, abs=0.02)


def test_few_replicates_hardly_move_the_exponent() -> None:
    assert calibrate(sweep(1, 0.0, 0.05)).exponent > PRIOR_EXPONENT / 2
    alone = sweep(4, 1.0, 0.0)
    once = TrialTimes(**{name: getattr(alone, name)[::5] for name in alone.__slots__})
    assert calibrate(once).exponent == PRIOR_EXPONENT, "one k=1 run has no replicate"


def test_an_actors_typical_speed_counts_in_full() -> None:
    times = sweep(200, 0.0, 0.02, actors=3)
    assert paired_speedups(times, calibrate(times).work) == pytest.approx({0: 1.0, 1: 1.0, 2: 2.0}, rel=0.02)


def test_calibration_pays_only_as_far_as_it_predicts() -> None:
    """A calibration that says nothing is left out, one that says everything removes the actor's drift."""

    def spread(exponent: float) -> float:
        found = [sweep(40, exponent, 0.02, seed) for seed in range(30)]
        return float(np.std([paired_speedups(one, calibrate(one).work)[1] for one in found]))

    assert spread(0.0) < 0.015
    assert spread(1.0) < 0.015


def test_without_calibration_times_are_compared_as_they_are() -> None:
    times = sweep(50, 0.0, 0.0)
    blind = replace(times, calibration=np.full(250, np.nan))
    assert calibrate(blind).work == pytest.approx(times.seconds)
    assert paired_speedups(blind, blind.seconds)[2] == pytest.approx(2.0)

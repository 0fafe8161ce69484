"""Simulated sweeps with known truth: intervals cover it as often as they say, verdicts are seldom wrong.

Every run is seeded, so a test that passes keeps passing. The quick versions use few sweeps and wide bounds; the slow
ones are those that count.
"""

import numpy as np
import pytest
from analysis_simulate import coverage, errors
from analysis_tables import Truth, World, grid

from orchestrator.analysis.intervals import DRAWS, bonferroni_level, paired_bootstrap

K1 = dict.fromkeys(("k1_first", "k1_middle", "k1_last"), Truth())
DROPS = Truth(lost=0.06, won=0.02, speedup=1.25)
WORLDS = {
    "100 documents": World(documents=100, policies={**K1, "k2_middle": DROPS}),
    "six subjects": World(documents=300, subtasks=6, policies={**K1, "k2_middle": DROPS}),
    "noisy trials": World(documents=300, subtasks=6, trial_noise=0.02, policies={**K1, "k2_middle": DROPS}),
    "batches of eight": World(documents=400, batch=8, policies={**K1, "k2_middle": DROPS}),
    "a whole benchmark": World(documents=1319, trial_noise=0.01, policies={**K1, "k2_middle": DROPS}),
}
GRIDS = {  # every configuration at the edge of the criteria, where verdicts are hardest
    "too slow by nothing": Truth(lost=0.01, won=0.01, speedup=1.2),
    "too wrong by nothing": Truth(lost=0.06, won=0.01, speedup=1.4),
    "good by a hair": Truth(lost=0.0599, won=0.0101, speedup=1.2002),
}


def accuracy_coverage(documents: int, lost: float, won: float, subjects: int, level: float, runs: int) -> float:
    rng = np.random.default_rng([documents, subjects])
    strata = np.arange(documents) % subjects
    factor = np.linspace(0.5, 1.5, subjects)[strata] if subjects > 1 else np.ones(documents)
    truth, hits = float(np.mean((won - lost) * factor)), 0
    for _ in range(runs):
        u = rng.random(documents)
        apart = np.where(u < lost * factor, -1.0, np.where(u < (lost + won) * factor, 1.0, 0.0))
        found = paired_bootstrap(apart, strata, rng, (level,), draws=1000)[0]
        hits += found.low <= truth <= found.high
    return hits / runs


@pytest.mark.parametrize("subjects", [1, 7])
@pytest.mark.parametrize(("documents", "lost", "won"), [(100, 0.08, 0.03), (300, 0.06, 0.02), (1319, 0.09, 0.02)])
def test_accuracy_intervals_cover(documents: int, lost: float, won: float, subjects: int) -> None:
    assert 0.93 <= accuracy_coverage(documents, lost, won, subjects, 0.95, 1000) <= 0.97


@pytest.mark.parametrize(("documents", "lost", "won"), [(10, 0.1, 0.05), (30, 0.1, 0.03), (100, 0.01, 0.005)])
def test_where_few_documents_change_the_interval_errs_on_the_wide_side(documents: int, lost: float, won: float) -> None:
    assert accuracy_coverage(documents, lost, won, 1, 0.95, 300) >= 0.95


def test_simultaneous_intervals_cover() -> None:
    assert accuracy_coverage(300, 0.06, 0.02, 1, bonferroni_level(6), 500) >= 0.98


def test_a_few_sweeps_cover() -> None:
    for name in ("100 documents", "noisy trials"):
        for what, share in coverage(WORLDS[name], runs=40, draws=500).items():
            assert share >= 0.85, (name, what)


def test_a_few_grids_are_judged_right() -> None:
    for truth in GRIDS.values():
        assert errors(World(documents=120, policies=grid(truth)), runs=12, draws=1000)["any"] <= 2 / 12


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_intervals_cover_in_93_to_97_percent_of_a_thousand_sweeps(name: str) -> None:
    found = coverage(WORLDS[name], runs=1000, draws=DRAWS)
    assert all(0.93 <= share <= 0.97 for share in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("name", GRIDS)
def test_a_wrong_verdict_in_at_most_5_percent_of_a_thousand_sweeps(name: str, noise: float) -> None:
    world = World(documents=200, subtasks=4, trial_noise=noise, policies=grid(GRIDS[name]))
    found = errors(world, runs=1000, draws=2000)
    assert found["any"] <= 0.05, found
    assert found["hypothesis"] <= 0.05, found


@pytest.mark.slow
def test_a_clear_case_is_decided() -> None:
    """Caution alone would never be wrong: verdicts must also be reached."""
    good = World(documents=400, policies=grid(Truth(lost=0.015, won=0.01, speedup=1.35)))
    slow = World(documents=400, policies=grid(Truth(lost=0.015, won=0.01, speedup=1.1)))
    for world in (good, slow):
        found = errors(world, runs=200, draws=1000)
        assert found["decided"] >= 0.95, found
        assert found["hypothesis"] == 0

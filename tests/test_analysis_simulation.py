"""Simulated sweeps with known truth: intervals cover it as often as they say, verdicts are right and get decided.

Every sweep is seeded, so a test that passes keeps passing. The bounds of the quick tests allow for their few sweeps;
the slow ones are those that count.
"""

import pytest
from analysis_simulate import SIX, Measured, Policy, SimulatedWorld, measure

DROPS = dict.fromkeys(SIX, Policy(lost=0.06, won=0.02, speedup=1.25))
LONGER = dict.fromkeys(SIX, Policy(lost=0.06, won=0.02, speedup=1.5, length=1.3))
SLOW = dict.fromkeys(SIX, Policy(lost=0.02, won=0.01, speedup=1.05))
VM = 0.12  # drift of a virtual machine: gives the trial noise seen with 5, 10 and 50 documents per trial
WORLDS = {
    f"{n} documents, batch {batch}, drift {drift}": SimulatedWorld(
        policies=DROPS, documents=n, batch=batch, drift=drift
    )
    for n in (50, 100, 105, 300, 1319)
    for batch in (1, 8)
    for drift in (0.0, VM)
} | {
    "shards of 50 and 5": SimulatedWorld(policies=DROPS, documents=105, shards=(50,), trial_noise=0.05),
    "one shard of 50 and one of 5": SimulatedWorld(policies=DROPS, documents=55, shards=(50,), trial_noise=0.05),
    "long shards and drift": SimulatedWorld(policies=DROPS, documents=105, shards=(50,), drift=VM),
    "answers change in length": SimulatedWorld(policies=LONGER, documents=100, drift=VM),
    "six subjects": SimulatedWorld(policies=DROPS, documents=300, subjects=6, drift=0.05),
    "one k=1 run": SimulatedWorld(policies=DROPS, documents=100, replicates=1, shards=(5,), drift=VM),
}
EDGES = {  # every configuration at the edge of the criteria, where verdicts are hardest
    "too slow by nothing": Policy(lost=0.01, won=0.01, speedup=1.2),
    "too wrong by nothing": Policy(lost=0.06, won=0.01, speedup=1.4),
    "all lost, at the margin": Policy(lost=0.05, won=0.0, speedup=1.4),
    "good by a hair": Policy(lost=0.0599, won=0.0101, speedup=1.2002),
    "longer and good by a hair": Policy(lost=0.01, won=0.01, speedup=1.5602, length=1.3),
    "longer and too slow by nothing": Policy(lost=0.01, won=0.01, speedup=1.56, length=1.3),
}
INTERVALS = ("accuracy", "speed", "seconds")


def check_coverage(found: Measured, errors: float) -> None:
    """Within 93 to 97 %, and at least 94 % together, give or take so many Monte-Carlo errors.

    A score interval of few discordant pairs covers more than it must, since counts are whole numbers.
    """
    for name in INTERVALS:
        slack = errors * found.error(name) / 2  # six configurations of a sweep say more than one
        assert 0.93 - slack <= found[name] <= (0.985 if name == "accuracy" else 0.97 + slack), (name, found.shares)
        together = f"{name}, simultaneous"
        assert found[together] >= 0.94 - errors * found.error(together), (together, found.shares)


@pytest.mark.parametrize("name", ["100 documents, batch 1, drift 0.12", "shards of 50 and 5"])
def test_intervals_cover_in_a_few_sweeps(name: str) -> None:
    check_coverage(measure(WORLDS[name], sweeps=50, draws=500), errors=3)


@pytest.mark.parametrize("name", ["too slow by nothing", "good by a hair"])
def test_a_few_sweeps_at_the_edge_are_judged_right(name: str) -> None:
    world = SimulatedWorld(policies=dict.fromkeys(SIX, EDGES[name]), documents=100, drift=0.06)
    found = measure(world, sweeps=40, draws=500)
    assert found["wrong"] <= 0.05 + 3 * found.error("wrong")


def test_six_slow_policies_on_a_virtual_machine_are_rejected() -> None:
    found = measure(SimulatedWorld(policies=SLOW, shards=(5,), drift=VM), sweeps=40, draws=500)
    assert found["decided"] >= 0.9
    assert found["wrong"] == 0


def test_identical_replicates_seldom_differ_in_tokens_per_second() -> None:
    """With the noise of trials left out of its interval, every third run had disjoint intervals."""
    found = measure(SimulatedWorld(policies={"k2_last": Policy()}, drift=VM), sweeps=60, draws=300)
    assert found["disjoint replicates"] <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_intervals_cover_in_hundreds_of_sweeps(name: str) -> None:
    check_coverage(measure(WORLDS[name], sweeps=400, draws=2000), errors=2)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [50, 75, 100, 300])
@pytest.mark.parametrize("name", EDGES)
def test_a_wrong_verdict_in_at_most_5_percent_of_hundreds_of_sweeps(name: str, documents: int) -> None:
    world = SimulatedWorld(policies=dict.fromkeys(SIX, EDGES[name]), documents=documents, drift=0.06)
    found = measure(world, sweeps=400, draws=2000)
    assert found["wrong"] <= 0.05 + found.error("wrong"), found.shares
    assert found["wrong task"] <= 0.05 + found.error("wrong task"), found.shares


@pytest.mark.slow
def test_one_good_configuration_among_bad_ones_is_seldom_rejected() -> None:
    """The hardest case of the intersection-union test: all others fail for sure."""
    policies = dict.fromkeys(SIX, Policy(lost=0.2, speedup=0.9)) | {"k2_first": Policy(speedup=1.201)}
    found = measure(SimulatedWorld(policies=policies, documents=100, drift=0.06), sweeps=600, draws=2000)
    assert found["wrong task"] <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("shard", [5, 10])
@pytest.mark.parametrize("tasks", [1, 2])
def test_tasks_are_decided(shard: int, tasks: int) -> None:
    """Caution alone would never be wrong: verdicts must also be reached."""
    found = measure(SimulatedWorld(policies=SLOW, shards=(shard,), tasks=tasks, drift=VM), sweeps=200, draws=2000)
    assert found["decided"] >= 0.9, found.shares
    assert found["wrong"] == 0
    good = dict.fromkeys(SIX, Policy(lost=0.015, won=0.01, speedup=1.35))
    found = measure(SimulatedWorld(policies=good, documents=600, shards=(shard,), drift=0.06), sweeps=100, draws=2000)
    assert found["decided"] >= 0.95, found.shares
    assert found["wrong"] == 0

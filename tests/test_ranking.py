"""Policies and decode settings on one scale: families, who beats whom, the fastest within a margin."""

from dataclasses import replace
from typing import Any

import pytest
from analysis_tables import Truth, World, asked, described, draw

from orchestrator.analysis import analyse
from orchestrator.analysis.costs import (
    AXES,
    EXECUTIONS,
    FAMILIES,
    POSITIONS,
    SPEED,
    Ranking,
    beyond_fixed_grid,
    family_of,
    fastest_within_margin,
    with_beaten_by,
)
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.runs import ResolvedConfiguration
from orchestrator.core.configuration import Configuration
from orchestrator.report.scatter import FAMILY_MARKERS
from sampler import ReusePolicy

FIRST = Configuration(policy="k1", threshold=0.95, small_block=8, block_cache=True)


def configuration(policy: str, **settings: Any) -> ResolvedConfiguration:
    parsed = ReusePolicy.parse(policy)
    return ResolvedConfiguration(
        configuration=replace(FIRST, policy=policy, **settings),
        k=parsed.k,
        subset=parsed.layers,
        mode=None if parsed.layers is None else parsed.mode,
        layers=parsed.layer_indices(36),
        label=policy,
    )


@pytest.mark.parametrize(
    ("wanted", "one"),
    [
        ("k=1", configuration("k1_first")),
        ("threshold", configuration("k1", threshold=0.5)),
        ("small block", configuration("k1", small_block=32)),
        ("block cache", configuration("k1", block_cache=False)),
        ("several decode settings", configuration("k1", threshold=0.5, small_block=32)),
        ("fixed grid", configuration("k2_middle")),
        ("fixed grid", configuration("k2_middle", threshold=0.5)),
        ("output mode", configuration("k3_last.output")),
        ("adaptive", configuration("adaptive=0.2_middle.2")),
        ("trim", configuration("trim=0.25_4-9")),
        ("trim, random", configuration("trim=0.25_4-9.random")),
        ("mlp", configuration("mlp=2_middle")),
        ("attn", configuration("attn=2_middle")),
        ("skip", configuration("skip_middle")),
        ("stale", configuration("stale=2")),
    ],
)
def test_families(wanted: str, one: ResolvedConfiguration) -> None:
    assert family_of(one, FIRST) == wanted
    assert wanted in FAMILIES
    assert wanted in FAMILY_MARKERS, "every family has a plot marker"


def ranking(name: str, gain: float, low: float = -1.0, label: str = "", **changes: float) -> Ranking:
    at = Estimate(value=gain, low=gain, high=gain)
    points = Estimate(value=low + 1, low=low, high=low + 2)
    return replace(
        Ranking(name=label or name, family=name, points=points, speed=at, executions=gain, positions=gain), **changes
    )


def test_a_policy_is_beaten_by_a_lower_threshold_that_is_as_good() -> None:
    found = with_beaten_by(
        [0.90, 0.88, 0.89, 0.91, 0.80],
        [
            ranking("k=1", 1.0),
            ranking("fixed grid", 1.2),
            ranking("threshold", 1.3, label="k1 t0.8"),
            ranking("trim", 1.1, positions=1.4),
            ranking("mlp", 1.3),
        ],
    )
    beaten = [one.beaten_by for one in found if one is not None]
    assert AXES == (SPEED, EXECUTIONS, POSITIONS)
    assert [by[0] for by in beaten] == ["trim", "k1 t0.8", None, None, "k1 t0.8"]
    assert [by[2] for by in beaten] == ["trim", "k1 t0.8", "trim", None, "k1 t0.8"]
    assert [one.on_front(SPEED) for one in found if one is not None] == [False, False, True, True, False]
    assert with_beaten_by([0.5], [None]) == [None]


def test_equals_do_not_beat_each_other() -> None:
    found = with_beaten_by([0.9, 0.9], [ranking("trim", 1.2), ranking("mlp", 1.2)])
    assert [one.beaten_by[0] for one in found if one is not None] == [None, None]


def test_the_fastest_of_each_family_within_the_margin() -> None:
    found = [
        ranking("k=1", 1.0, low=-0.5),
        ranking("trim", 1.5, low=-6.0),
        ranking("trim", 1.3, low=-4.0),
        ranking("trim", 1.2, low=-1.0),
        ranking("skip", 1.6, low=-30.0),
        None,
    ]
    table = fastest_within_margin(found, margin=5.0)
    assert [(one.family, one.tried, one.index) for one in table] == [("k=1", 1, 0), ("trim", 3, 2), ("skip", 1, None)]


def test_the_grid_alone_is_not_worth_a_part_of_its_own() -> None:
    grid = [ranking("k=1", 1.0), ranking("fixed grid", 1.1), ranking("output mode", 1.2), None]
    assert not beyond_fixed_grid(grid)
    assert beyond_fixed_grid([*grid, ranking("threshold", 1.2)])


def test_gains_follow_the_counters() -> None:
    world = World(documents=80, policies={"k1": Truth(), "k2_middle": Truth(lost=0.1, speedup=1.25)})
    [task] = analyse(draw(world), described(world), asked(world), draws=500).tasks
    base, other = (result.ranking for result in task.configurations)
    assert base is not None
    assert other is not None
    assert (base.family, base.points.value, base.gain(SPEED)) == ("k=1", 0.0, 1.0)
    assert (base.executions, base.positions) == (pytest.approx(1), pytest.approx(1))
    compared = task.configurations[1].comparison
    assert compared is not None
    assert compared.explanation is not None
    assert other.points == compared.difference.points, "one interval of one difference in all tables"
    assert other.executions == pytest.approx(compared.explanation.from_executions)
    assert other.positions == pytest.approx(compared.explanation.from_positions)


def test_an_unknown_family_is_last() -> None:
    at = Estimate(value=1.1, low=1.0, high=1.2)
    found = [
        Ranking(name=name, family=name, points=Estimate(value=0, low=-1, high=1), speed=at, executions=1, positions=1)
        for name in ("settle", "skip", "fixed grid")
    ]
    assert [one.family for one in fastest_within_margin(found, margin=5)] == ["fixed grid", "skip", "settle"]
    assert all(one is not None and one.beaten_by[0] is None for one in with_beaten_by([0.5, 0.5, 0.5], found))

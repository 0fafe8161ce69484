"""Beyond the verdict on one task: all tasks together, the cost model, differences between subjects, AUP, extensions."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from analysis_tables import Truth, World, asked, described, draw, grid

from orchestrator.analysis import Analysis, analyse
from orchestrator.analysis.accuracy import heterogeneity
from orchestrator.analysis.results import area_under_parallelism
from orchestrator.planning.run_plan import _extension

GOOD = Truth(lost=0.01, won=0.01, speedup=1.4)


def two_tasks(**request: Any) -> Analysis:
    worlds = [
        World(documents=300, shard=20, task=task, policies=grid(GOOD, k3_last=Truth(lost=lost, speedup=1.4)))
        for task, lost in (("gsm8k", 0.02), ("minerva_math", 0.12))
    ]
    table = pa.concat_tables([draw(world, seed) for seed, world in enumerate(worlds)])
    documents = {name: one for world in worlds for name, one in described(world).items()}
    trials = [
        f"{task}-{trial}" for task, trial in zip(*(table[n].to_pylist() for n in ("task", "trial_id")), strict=True)
    ]
    place = table.schema.get_field_index("trial_id")
    table = table.set_column(place, table.schema.field(place), pa.array(trials))
    return analyse(table, documents, {**asked(*worlds), **request}, draws=500)


def test_tasks_are_pooled_with_equal_weights() -> None:
    found = two_tasks(pooled="equal weights")
    assert found.pooled is not None
    assert found.pooled.declared
    assert found.pooled.verdict.outcome == "confirmed"
    assert not found.pooled.verdict.exploratory
    for one in found.pooled.comparisons:
        parts = [
            result.comparison
            for task in found.tasks
            for result in task.configurations
            if result.label == one.label and result.comparison is not None
        ]
        points = [part.difference.points for part in parts]
        assert one.difference.points.value == pytest.approx(np.mean([part.value for part in points]))
        assert one.difference.points.high - one.difference.points.value == pytest.approx(
            math.hypot(*(part.high - part.value for part in points)) / 2
        )
        speeds = [part.speedup.tokens.value for part in parts if part.speedup and part.speedup.tokens]
        assert one.speedup is not None
        assert one.speedup.tokens is not None
        assert one.speedup.tokens.value == pytest.approx(math.sqrt(speeds[0] * speeds[1]))


def test_a_pool_that_was_not_declared_is_exploratory() -> None:
    found = two_tasks()
    assert found.pooled is not None
    assert found.pooled.verdict.exploratory
    assert not found.tasks[0].verdict.exploratory


def test_the_cost_model_predicts_from_counters_and_says_if_it_does_not_fit() -> None:
    """Times that follow the counters are predicted; a policy that is slower than its counters is a lack of fit."""
    world = World(documents=300, shard=10, policies=grid(GOOD), document_noise=0.02, length_noise=0.1)
    table = draw(world)
    place = table.schema.get_field_index("batch_seconds")
    work = table["layers_computed"].to_numpy() * 1e-4 + table["passes_full"].to_numpy() * 1e-3
    noise = np.exp(np.random.default_rng(0).normal(0, 0.02, len(work)))
    slow = np.where(np.array(table["policy"].to_pylist()) == "k3_last", 1.3, 1.0)
    for factor, fits in ((1.0, True), (slow, False)):
        seconds = pa.array(work * noise * factor * 45 / table["calibration"].to_numpy())
        timed = table.set_column(place, table.schema.field(place), seconds)
        [task] = analyse(timed, described(world), asked(world), draws=300).tasks
        comparison = next(r.comparison for r in task.configurations if r.label == "k2_last")
        assert comparison is not None
        assert comparison.modelled is not None
        assert comparison.modelled.lack_of_fit is not None
        assert (comparison.modelled.lack_of_fit > 1e-4) == fits
        if fits:
            assert comparison.speedup.tokens.value == pytest.approx(comparison.modelled.tokens.value, rel=0.03)


def test_equal_subjects_are_not_called_different_and_others_are() -> None:
    rng = np.random.default_rng(0)
    subject = np.repeat(np.arange(5), 80)
    p_values = [heterogeneity(rng.choice([-1.0, 0.0, 1.0], 400, p=[0.1, 0.85, 0.05]), subject) for _ in range(200)]
    assert 0.01 < np.mean([p < 0.05 for p in p_values if p is not None]) < 0.1
    lost_in_one = np.where((subject == 0) & (rng.random(400) < 0.3), -1.0, 0.0)
    assert (heterogeneity(lost_in_one, subject) or 1) < 1e-6
    assert heterogeneity(np.zeros(400), subject) is None


def test_the_area_under_accuracy() -> None:
    assert area_under_parallelism([(2.0, 80.0)]) == pytest.approx(160)
    assert area_under_parallelism([(3.0, 60.0), (2.0, 80.0)]) == pytest.approx(160 + 70)


def test_more_documents_for_a_task_are_recorded_as_an_extension() -> None:
    before = {"tasks": {"a": {"documents": 50}, "b": {"documents": 50}}}
    now = {"tasks": {"a": {"documents": 100}, "b": {"documents": 50}, "c": {"documents": 9}}}
    [extension] = _extension(before, now)
    assert extension["documents"] == {"a": [50, 100]}
    assert _extension(before, before) == []

"""Totals added batch by batch and from a whole table agree with each other and with sums done by hand."""

import json
import math
import random
from typing import Any

import pyarrow as pa
import pytest
from scipy.stats import binomtest
from synthetic_folder import rows_with_defaults

from orchestrator.core.configuration import Configuration
from orchestrator.core.totals import (
    COLUMNS,
    KEYS,
    RunningTotals,
    Sums,
    TaskConfiguration,
    Totals,
    totals_of,
    trial_sums,
    wilson_interval,
)
from orchestrator.core.trial import Trial


def configuration(task: str, policy: str, **settings: Any) -> TaskConfiguration:
    return task, Configuration(policy=policy, **settings)


def row(
    trial: str, policy: str, *, tokens: int = 10, seconds: float = 1.0, batch: int = 0, **fields: Any
) -> dict[str, Any]:
    k = int(policy[1]) if policy[0] == "k" else None
    return {
        "trial_id": trial, "task": "gsm8k", "policy": policy, "k": k, "tokens": tokens, "batch_id": batch,
        "batch_seconds": seconds, "layer_positions": 100, "correct": True, **fields,
    }  # fmt: skip


def numbers(totals: Totals) -> list[float]:
    return [math.nan if value is None else value for name, value in totals.as_json().items() if name not in KEYS]


def both(rows: list[dict[str, Any]]) -> dict[str, Totals]:
    """Totals by policy, after checking that adding decode batches one by one and all rows at once agree."""
    table = rows_with_defaults(rows)
    running = RunningTotals()
    batches: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for fields in rows:
        batches.setdefault((fields["trial_id"], fields.get("attempt", 0), fields["batch_id"]), []).append(fields)
    for batch in batches.values():
        running.add_rows(rows_with_defaults(batch))
    grown = {totals.key: totals for totals in running.totals()}
    whole = {totals.key: totals for totals in totals_of(table)}
    assert grown.keys() == whole.keys()
    for name in whole:
        assert numbers(grown[name]) == pytest.approx(numbers(whole[name]), rel=1e-12, nan_ok=True)
    return {totals.configuration.policy: totals for totals in totals_of(table)}


def test_a_batch_of_several_documents_is_timed_once() -> None:
    rows = [row("a", "k1", batch=batch, seconds=2.0 + batch, tokens=7) for batch in (0, 0, 0, 1)]
    rows += [row("a", "k1", batch=0, attempt=1, seconds=10.0)]  # the next attempt counts its batches from zero
    totals = both(rows)["k1"]
    assert (totals.documents, totals.tokens, totals.seconds) == (5, 38, 15.0)
    assert totals.tokens_per_s == pytest.approx(38 / 15)


def test_a_speed_up_divides_each_actors_time_by_its_calibration() -> None:
    rows = [
        row("a", "k1_first", seconds=1.0, calibration=10.0, actor="fast"),
        row("b", "k1_last", seconds=2.0, calibration=5.0, actor="slow"),
        row("c", "k2_middle", seconds=1.0, calibration=5.0, actor="slow"),
        row("d", "k2_middle", seconds=0.5, calibration=10.0, actor="fast", repeat=1),
    ]
    totals = both(rows)
    assert (totals["k1_first"].speedup, totals["k1_last"].speedup) == pytest.approx((1.0, 1.0))
    assert totals["k2_middle"].speedup == pytest.approx(2.0)
    assert totals["k2_middle"].calibration == pytest.approx((5 + 0.5 * 10) / 1.5), "weighed by time"


def test_only_shards_that_both_sides_completed_are_compared() -> None:
    rows = [
        row("a", "k1_first", seconds=1.0, shard=0),
        row("b", "k1_first", seconds=8.0, shard=1),
        row("c", "k2_middle", seconds=0.5, shard=0),
        row("d", "k2_middle", seconds=8.0, shard=2),  # k=1 has no such shard yet
        row("e", "k1_last", seconds=1.0, shard=3),
        row("e", "k1_last", seconds=1.0, shard=3, batch=1),
        row("f", "k2_middle", seconds=8.0, shard=3),  # one of its two documents
    ]
    assert both(rows)["k2_middle"].speedup == pytest.approx(2.0)


def test_the_baseline_is_all_k1_of_the_same_task_and_settings() -> None:
    rows = [
        row("a", "k1_first", seconds=1.0),
        row("b", "k1_last", seconds=3.0),
        row("c", "k1_last", seconds=50.0, threshold=0.5),
        row("d", "k1_last", seconds=50.0, task="other"),
        row("e", "k2_middle", seconds=1.0),
    ]
    table = rows_with_defaults(rows)
    totals = {(t.task, t.configuration.policy, t.configuration.threshold): t for t in totals_of(table)}
    assert totals["gsm8k", "k2_middle", 0.95].speedup == pytest.approx(2.0)  # 10 tokens/s against 20 in 4 s
    assert totals["gsm8k", "k1_last", 0.5].speedup == pytest.approx(1.0)
    both(rows)


def test_layer_positions_are_for_each_token() -> None:
    rows = [row("a", "k1", tokens=10, layer_positions=1000), row("b", "k3_last", tokens=20, layer_positions=1000)]
    assert both(rows)["k3_last"].layer_positions == pytest.approx(0.5)


def test_scored_options_have_no_speed() -> None:
    rows = [
        row("a", "k1", tokens=0, layer_positions=10),
        row("b", "k2_first", tokens=0, layer_positions=15),
        row("b", "k2_first", tokens=0, layer_positions=15, correct=False, batch=1),
    ]
    totals = both(rows)["k2_first"]
    assert (totals.tokens_per_s, totals.speedup, totals.accuracy) == (None, None, 0.5)
    assert totals.layer_positions == pytest.approx(1.5)


@pytest.mark.parametrize("calibration", [0.0, math.nan])
def test_a_trial_without_calibration_has_the_typical_speed_of_its_actor(calibration: float) -> None:
    rows = [row("a", "k1"), row("b", "k2_first"), row("c", "k2_first", repeat=1, calibration=calibration)]
    totals = {totals.configuration.policy: totals for totals in totals_of(rows_with_defaults(rows))}
    assert totals["k2_first"].speedup == pytest.approx(1.0)
    assert totals["k1"].speedup == pytest.approx(1.0)
    assert totals["k2_first"].tokens_per_s == pytest.approx(10.0)


def test_a_null_is_neither_right_nor_wrong() -> None:
    rows = [row("a", "k1", correct=value) for value in (True, None, False, None)]
    totals = both(rows)["k1"]
    assert (totals.documents, totals.scored, totals.correct, totals.accuracy) == (4, 2, 1, 0.5)
    assert both([row("a", "k1", correct=None)])["k1"].accuracy is None


def test_repeating_documents_does_not_narrow_the_interval() -> None:
    once = [row("a", "k1", batch=i, correct=i % 2 == 0) for i in range(10)]
    again = [{**fields, "trial_id": "b", "repeat": 1} for fields in once]
    one, two = both(once)["k1"], both(once + again)["k1"]
    assert two.documents == 20
    assert (two.accuracy_low, two.accuracy_high) == (one.accuracy_low, one.accuracy_high)


def test_a_policy_without_k_has_totals_but_is_no_baseline() -> None:
    totals = both([row("a", "adaptive=0.15_middle")])
    assert totals["adaptive=0.15_middle"].speedup is None
    assert totals["adaptive=0.15_middle"].documents == 1


def test_wanted_configurations_appear_before_their_rows() -> None:
    plan = {configuration("gsm8k", "k2_last"): 100, configuration("gsm8k", "k1"): 100}
    rows = [row("a", "k1"), row("b", "k9_all")]
    shown = [(t.configuration.policy, t.documents, t.wanted) for t in totals_of(rows_with_defaults(rows), plan)]
    assert shown == [("k2_last", 0, 100), ("k1", 1, 100), ("k9_all", 1, 1)]
    assert totals_of(rows_with_defaults([]), plan)[0].as_json()["accuracy"] is None


@pytest.mark.parametrize("calibration", [40.0, math.nan])
def test_sums_of_finished_trials_add_up_through_json(calibration: float) -> None:
    rows = [
        row("a", "k1"),
        row("b", "k2_first", correct=None),
        row("b", "k2_first", attempt=1, calibration=calibration),
    ]
    running = RunningTotals()
    for trial, policy in (("a", "k1"), ("b", "k2_first")):
        sums = trial_sums(rows_with_defaults([fields for fields in rows if fields["trial_id"] == trial]))
        stored = json.loads(json.dumps(sums.as_json(), allow_nan=False))
        task, chosen = configuration("gsm8k", policy)
        running.add_sums(
            Trial(trial_id=trial, task=task, configuration=chosen, repeat=0, shard=0), Sums.from_json(stored)
        )
    expected = {totals.key: totals for totals in totals_of(rows_with_defaults(rows))}
    for totals in running.totals():
        assert numbers(totals) == pytest.approx(numbers(expected[totals.key]), nan_ok=True)


@pytest.mark.parametrize(("correct", "count"), [(0, 1), (1, 1), (0, 20), (7, 20), (20, 20), (1054, 1319)])
def test_wilson_is_scipys(correct: int, count: int) -> None:
    theirs = binomtest(correct, count).proportion_ci(method="wilson")
    assert wilson_interval(correct, count) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def many(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for trial in range(count // 20):
        policy, settings = f"k{trial % 3 + 1}_middle", {"threshold": rng.choice([0.9, 0.95]), "task": rng.choice("ab")}
        for attempt in (0, 1):
            speed = rng.uniform(20, 60)
            for batch in range(10):
                fields = {
                    "tokens": rng.randrange(300),
                    "correct": rng.choice([True, False, None]),
                    "calibration": speed,
                }
                seconds = rng.random()
                rows += [row(str(trial), policy, batch=batch // 2, seconds=0, attempt=attempt, **settings, **fields)]
                rows[-1]["batch_seconds"] = seconds if batch % 2 == 0 else rows[-2]["batch_seconds"]
    return rows


def test_the_order_of_rows_does_not_matter() -> None:
    rows = many(600)
    both(rows)
    straight = {totals.key: numbers(totals) for totals in totals_of(rows_with_defaults(rows))}
    random.Random(1).shuffle(rows)
    both(rows)
    for totals in totals_of(rows_with_defaults(rows)):
        assert numbers(totals) == pytest.approx(straight[totals.key], rel=1e-12, nan_ok=True)


def test_names_may_come_as_dictionaries() -> None:
    table = rows_with_defaults(many(100))
    encoded = table
    for name in ("trial_id", "task", "policy"):
        encoded = encoded.set_column(encoded.schema.get_field_index(name), name, encoded[name].dictionary_encode())
    expected = {t.key: t.documents for t in totals_of(table)}
    assert {t.key: t.documents for t in totals_of(pa.concat_tables([encoded]))} == expected


def test_many_rows() -> None:
    part = rows_with_defaults(many(10_000)).select([name for name in COLUMNS if name != "trial_id"])
    trials = [pa.array([f"{i}-{j // 20}" for j in range(10_000)]) for i in range(10)]
    table = pa.concat_tables([part.append_column("trial_id", names) for names in trials])
    totals = totals_of(table)
    assert sum(t.documents for t in totals) == 100_000

"""The whole way from rows to verdicts, on tables whose truth is known."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from analysis_tables import NINE, Truth, World, asked, changed, described, draw, grid

from orchestrator.analysis import COLUMNS, Analysis, analyse, as_json
from orchestrator.analysis.costs import flops_per_token
from orchestrator.store.schema import ROWS
from sampler.errors import InputError

GOOD = Truth(lost=0.01, won=0.01, speedup=1.4)
WORLD = World(
    documents=400,
    policies=grid(
        GOOD, k3_first=Truth(lost=0.2, won=0.02, speedup=1.4), k3_middle=Truth(speedup=1.02), k3_last=Truth(speedup=1.2)
    ),
)


def run(world: World, table: pa.Table | None = None, **options: Any) -> Analysis:
    rows = draw(world) if table is None else table
    return analyse(rows, described(world), options.pop("request", asked(world)), draws=2000, **options)


@pytest.fixture(scope="module")
def found() -> Analysis:
    return run(WORLD)


def test_verdicts_follow_the_truth(found: Analysis) -> None:
    task = found.tasks[0]
    outcomes = {c.label: c.comparison.verdict.outcome for c in task.configurations if c.comparison}
    assert outcomes == {
        "k2_first": "confirmed",
        "k2_middle": "confirmed",
        "k2_last": "confirmed",
        "k3_first": "rejected",
        "k3_middle": "rejected",
        "k3_last": "undecided",
    }
    assert task.verdict.outcome == "confirmed"
    assert "k2_first, k2_middle and k2_last reached more than 1.20× the speed of k=1" in task.verdict.sentence
    assert task.comparisons == 6
    assert not found.failed


def test_the_baseline_is_all_of_k1(found: Analysis) -> None:
    [base] = found.tasks[0].baselines
    assert base.labels == ("k1_first", "k1_middle", "k1_last")
    assert base.noise_floor is not None
    assert 1 <= base.noise_floor.spread.value < base.noise_floor.spread.high < 1.03


def test_it_is_all_json_and_the_same_each_time(found: Analysis) -> None:
    text = json.dumps(as_json(found), allow_nan=False)
    assert text == json.dumps(as_json(run(WORLD)), allow_nan=False)
    assert json.loads(text)["tasks"][0]["verdict"]["outcome"] == "confirmed"


def test_text_need_not_be_loaded() -> None:
    table = draw(WORLD).select(list(COLUMNS))
    assert "text" not in table.column_names
    assert run(WORLD, table).tasks[0].verdict.outcome == "confirmed"


def test_the_order_of_rows_and_chunks_does_not_matter() -> None:
    world = World(documents=60, policies=grid(GOOD), subtasks=3)
    table = draw(world)
    mixed = table.take(pa.array(np.random.default_rng(0).permutation(table.num_rows)))
    mixed = pa.concat_tables([mixed.slice(0, 100), mixed.slice(100, 7), mixed.slice(107)])
    plain, other = (run(world, t).tasks[0] for t in (table, mixed))
    for one, two in zip(plain.configurations, other.configurations, strict=True):
        assert one.label == two.label
        assert one.accuracy == two.accuracy
        assert one.throughput.tokens == two.throughput.tokens
        if one.comparison and two.comparison:
            assert one.comparison.difference.lost == two.comparison.difference.lost
            assert one.comparison.speedup.tokens.value == pytest.approx(two.comparison.speedup.tokens.value)


def test_only_documents_of_both_sides_are_paired() -> None:
    world = World(documents=60, policies=grid(GOOD))
    table = draw(world)
    policy, doc = (np.array(table[name].to_pylist()) for name in ("policy", "doc_id"))
    gone = (policy == "k2_first") & np.isin(doc, [f"gsm8k/{i}" for i in range(15)])
    gone |= np.char.startswith(policy.astype(str), "k1") & np.isin(doc, [f"gsm8k/{i}" for i in range(55, 60)])
    analysis = run(world, table.filter(pa.array(~gone)))
    result = next(c for c in analysis.tasks[0].configurations if c.label == "k2_first")
    assert result.comparison is not None
    assert result.comparison.documents == 40
    assert result.documents == 45
    assert "k2_first has 45 of 60 documents." in analysis.tasks[0].missing
    assert {finding.gate for finding in analysis.failed} == {"every document once"}
    verdict = analysis.tasks[0].verdict
    assert (verdict.outcome, verdict.level) == ("undecided", None)
    assert "gsm8k has no verdict yet, because the sweep is not finished: k1_first has 55 of 60" in verdict.sentence
    assert verdict.basis == "none: the sweep is not finished"
    assert all(c.comparison.verdict.level is None for c in analysis.tasks[0].configurations if c.comparison)


def test_an_extension_after_a_look_divides_the_error() -> None:
    table, request = draw(WORLD), asked(WORLD)
    later = {**request, "extensions": [{"at": "2026-01-02T00:00:00Z", "documents": {WORLD.task: [100, 400]}}]}
    first, second = (analyse(table, described(WORLD), one, draws=500).tasks[0] for one in (request, later))
    assert (first.verdict.basis, second.verdict.basis) == (
        "speed and accuracy",
        "speed and accuracy; look 2, so the error of 5 % is divided by 2",
    )
    for one, two in zip(first.configurations, second.configurations, strict=True):
        if one.comparison and two.comparison:
            assert two.comparison.difference.bounds.low < one.comparison.difference.bounds.low
            assert two.comparison.difference.points == one.comparison.difference.points


def test_repeats_are_pooled() -> None:
    world = World(documents=60, policies={"k1": Truth(), "k2_last": GOOD}, repeats=3)
    [task] = run(world).tasks
    assert [c.repeats for c in task.configurations] == [3, 3]
    assert task.baselines[0].labels == ("k1", "k1.r1", "k1.r2")
    assert task.baselines[0].noise_floor is not None


def test_one_run_at_k1_in_one_trial_gives_no_speed_verdict() -> None:
    """Several trials show how much they vary, also without a replicate."""
    world = World(documents=50, policies={"k1": Truth(), "k2_last": GOOD})
    [task] = run(world).tasks
    assert task.baselines[0].noise_floor is None
    assert task.verdict.outcome == "undecided"
    assert "k=1 ran once, in one trial, so the noise" in task.configurations[1].comparison.verdict.sentence
    [task] = run(World(documents=600, shard=20, policies={"k1": Truth(), "k2_last": GOOD})).tasks
    assert task.verdict.outcome == "confirmed"


def test_a_slow_replicate_hides_any_speedup() -> None:
    """The seeds' anomaly: one of three identical configurations at half the speed. Nothing may be decided then."""
    table = draw(WORLD)
    slow = np.where(np.array(table["policy"].to_pylist()) == "k1_first", 2.2, 1.0)
    seconds = pa.array(table["batch_seconds"].to_numpy() * slow)
    place = table.schema.get_field_index("batch_seconds")
    found = run(WORLD, table.set_column(place, table.schema.field(place), seconds))
    [task] = found.tasks
    assert task.baselines[0].noise_floor.spread.value == pytest.approx(2.2, rel=0.02)
    assert task.verdict.outcome == "undecided"
    assert all(c.comparison.verdict.outcome == "undecided" for c in task.configurations if c.comparison)
    [failed] = [finding for finding in found.failed if finding.gate == "speed at k=1"]
    assert "k1_first ran 2.2" in failed.sentence


def test_loglikelihood_tasks_get_accuracy_and_time_never_a_speed_verdict() -> None:
    world = World(documents=300, kind="loglikelihood", task="mmlu", subtasks=6, policies=grid(Truth(speedup=0.5)))
    [task] = run(world).tasks
    assert task.kind == "loglikelihood"
    for result in task.configurations:
        assert result.throughput.tokens_per_second is None
        assert not result.on_front
        if result.comparison:
            assert result.comparison.verdict.basis == "accuracy only"
            assert "speed" not in result.comparison.verdict.sentence
            assert result.comparison.speedup.tokens is None
            assert result.comparison.speedup.seconds.value == pytest.approx(0.5, rel=0.1)
            assert len(result.comparison.breakdown.by_subject) == 6
    assert task.verdict.basis == "accuracy only"
    assert "speed" not in task.verdict.sentence


def test_other_criteria_are_exploratory(found: Analysis) -> None:
    assert not found.criteria.exploratory
    other = run(WORLD, margin=1.0)
    assert other.criteria.exploratory
    assert other.declared == found.criteria
    assert all(c.comparison.verdict.exploratory for c in other.tasks[0].configurations if c.comparison)
    assert not run(WORLD, margin=5.0, speedup=1.2).criteria.exploratory


def test_longer_answers_must_also_come_out_faster() -> None:
    """Tokens per second rewards repetition: 1.4× the tokens/s at 1.5× the tokens is no gain."""
    world = World(documents=400, policies=grid(GOOD, k2_first=Truth(speedup=1.4, length=1.5)))
    analysis = run(world)
    result = next(c for c in analysis.tasks[0].configurations if c.label == "k2_first")
    assert result.comparison.speedup.length_changed
    assert result.comparison.speedup.tokens.value == pytest.approx(1.4, rel=0.03)
    assert result.comparison.speedup.seconds.value == pytest.approx(1.4 / 1.5, rel=0.06)
    assert result.comparison.verdict.outcome == "rejected", "its documents surely take longer"
    assert "changed in length" in result.comparison.verdict.sentence


def test_a_failed_gate_withholds_the_verdict() -> None:
    table = draw(WORLD)
    hit = np.array(table["policy"].to_pylist()) == "k2_first"
    [task] = run(WORLD, changed(table, "replayed", hit, 0)).tasks
    verdicts = {c.label: c.comparison.verdict for c in task.configurations if c.comparison}
    assert verdicts["k2_first"].outcome == "undecided"
    assert "a validity gate failed (replay); without it the verdict would be confirmed" in verdicts["k2_first"].sentence
    assert verdicts["k2_middle"].outcome == "confirmed"


def test_what_breaks_is_listed(found: Analysis) -> None:
    rows = {(row["trial_id"], row["doc_id"]): row for row in draw(WORLD).to_pylist()}
    result = next(c for c in found.tasks[0].configurations if c.label == "k3_first")
    regressions = result.comparison.regressions
    assert len(regressions) == result.comparison.difference.lost
    for one in regressions:
        ours, base = (rows[trial, one.doc_id] for trial in (one.trial, one.baseline_trial))
        assert (ours["correct"], base["correct"]) == (False, True)
        assert (ours["policy"], base["k"]) == ("k3_first", 1)


def test_levels_and_subjects_add_up() -> None:
    world = World(documents=300, subtasks=4, policies=grid(Truth(lost=0.1, won=0.02, speedup=1.3)))
    for result in run(world).tasks[0].configurations:
        if result.comparison:
            for parts in (result.comparison.breakdown.by_subject, result.comparison.breakdown.by_level):
                assert sum(part.documents for part in parts) == 300
                assert sum(part.lost for part in parts) == result.comparison.difference.lost
                assert all(part.points.low <= part.points.value <= part.points.high for part in parts)
    assert [part.name for part in parts] == [f"level {i}" for i in range(1, 6)]


def test_the_explanation_multiplies_to_what_was_measured(found: Analysis) -> None:
    for result in found.tasks[0].configurations:
        if result.comparison:
            why = result.comparison.explanation
            assert why.passes * why.layers * why.unexplained == pytest.approx(why.measured)
            assert why.passes * why.layers == pytest.approx(why.from_executions)
            assert why.ideal == pytest.approx(1.2 if result.resolved.k == 2 else 9 / 7)


def test_operations_are_those_of_the_layers_and_not_of_the_embedding() -> None:
    stated = {"depth": 36, "parameters": 1_694_016, "layer_weights": [12_288, 30_720]}
    assert flops_per_token(100.0, stated) == 2 * 43_008 * 100
    assert flops_per_token(100.0, {"depth": 10, "parameters": 5_000}) == 2 * 500 * 100
    assert flops_per_token(100.0, {}) is None
    assert flops_per_token(None, stated) is None


def test_identical_answers_are_counted(found: Analysis) -> None:
    matrix = found.tasks[0].agreement
    assert all(matrix[i][i] == 1 for i in range(9))
    assert matrix[0][1] == matrix[0][2] == 1
    assert matrix[0][3] == 0


def test_distributions_hold_every_row(found: Analysis) -> None:
    for result in found.tasks[0].configurations:
        assert sum(result.lengths.counts) == sum(result.steps.counts) == 400
        assert result.lengths.edges == found.tasks[0].configurations[0].lengths.edges
        assert result.lengths.mean == pytest.approx(result.throughput.tokens_per_document)


def test_two_settings_have_two_baselines_and_one_axis() -> None:
    slow, fast = (World(documents=80, policies=grid(GOOD), threshold=t) for t in (0.95, 0.8))
    other = draw(fast, 1)
    trial = pa.array([f"x{name}" for name in other["trial_id"].to_pylist()])
    other = other.set_column(ROWS.get_field_index("trial_id"), ROWS.field("trial_id"), trial)
    analysis = run(slow, pa.concat_tables([draw(slow, 0), other]), request=asked(slow, fast))
    [task] = analysis.tasks
    assert len(task.baselines) == 2
    assert task.comparisons == 12
    assert {c.label for c in task.configurations} == {f"{p} threshold {t:g}" for p in NINE for t in (0.8, 0.95)}
    assert all(c.ranking is not None and c.ranking.speed is not None for c in task.configurations)


def test_several_tasks_are_kept_apart() -> None:
    worlds = (
        World(documents=60, policies=grid(GOOD)),
        World(documents=80, task="mmlu", kind="loglikelihood", subtasks=4),
    )
    table = pa.concat_tables([draw(world) for world in worlds])
    analysis = analyse(table, {**described(worlds[0]), **described(worlds[1])}, asked(*worlds), draws=500)
    assert [(task.task, task.documents, task.kind) for task in analysis.tasks] == [
        ("gsm8k", 60, "generate"),
        ("mmlu", 80, "loglikelihood"),
    ]


def refused(table: pa.Table, message: str, **options: Any) -> None:
    with pytest.raises(InputError, match=message):
        run(WORLD, table, **options)


def test_what_cannot_be_analysed_is_refused() -> None:
    table = draw(WORLD)
    policy = np.array(table["policy"].to_pylist())
    refused(table.slice(0, 0), "there are no rows")
    refused(table.drop_columns(["calibration"]), "lack the columns calibration")
    refused(table.filter(pa.array(policy == "k2_first")), "no rows at k=1, only k2_first")
    refused(table.filter(pa.array(policy == "k1_first")), "only rows of k1_first")
    nan = changed(table, "correct", np.arange(table.num_rows) == 7, None)
    nan = changed(nan, "metrics", np.arange(table.num_rows) == 7, '{"exact_match": NaN}')
    refused(nan, r"1 row with no finite score \(first: gsm8k/7\)")
    refused(table, "margin must be .*got -1", margin=-1.0)
    refused(table, "speed-up must be .*got nan", speedup=float("nan"))
    refused(table, "margin must be .*got 'five'", request={**asked(WORLD), "margin": "five"})


def test_a_metric_that_is_no_yes_or_no_is_read_from_its_json() -> None:
    table = draw(World(documents=60, policies=grid(GOOD)))
    numbers = [json.dumps({"exact_match": 0.25 + (i % 4) / 8, "else": 1}) for i in range(table.num_rows)]
    place = ROWS.get_field_index("correct")
    table = table.set_column(place, ROWS.field(place), pa.nulls(table.num_rows, pa.bool_()))
    table = table.set_column(ROWS.get_field_index("metrics"), ROWS.field("metrics"), pa.array(numbers))
    [task] = run(World(documents=60, policies=grid(GOOD)), table).tasks
    assert all(0.25 < c.accuracy.value < 0.625 for c in task.configurations)


@pytest.mark.parametrize("documents", [1, 2, 4])
def test_a_handful_of_documents_decides_nothing(documents: int) -> None:
    world = World(documents=documents, policies=grid(Truth(speedup=3.0)))
    [task] = run(world).tasks
    assert task.verdict.outcome == "undecided"
    json.dumps(as_json(task), allow_nan=False)

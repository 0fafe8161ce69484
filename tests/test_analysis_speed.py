"""Speed: sums over batches, calibration, the paired interval, and the noise that whole trials share."""

import numpy as np
import pyarrow as pa
import pytest
from analysis_tables import Truth, World, draw

from orchestrator.analysis.columns import apportioned_wall_time, condense, encode, fingerprints
from orchestrator.analysis.intervals import Estimate, bootstrap_weights, units_of
from orchestrator.analysis.runs import TaskRuns, split_by_task
from orchestrator.analysis.speedups import (
    TrialNoise,
    bootstrap_times,
    measure_baseline,
    noise_share,
    speed_noise,
    speedup,
    throughput,
)
from orchestrator.core.configuration import Configuration
from orchestrator.core.speed import group_codes

K1 = dict.fromkeys(("k1_first", "k1_middle", "k1_last"), Truth())
SETTINGS = Configuration(policy="k1").settings


def rows_of(table: pa.Table) -> TaskRuns:
    [rows] = split_by_task(table, np.zeros(table.num_rows, dtype=np.uint64), {})
    return rows


def test_the_parts_of_a_batch_add_up_to_its_time() -> None:
    trial, batch = np.array([0, 0, 0, 1, 1]), np.array([0, 0, 1, 0, 0])
    tokens, seconds = np.array([30, 10, 5, 0, 0]), np.array([4.0, 4.0, 2.0, 6.0, 6.0])
    assert apportioned_wall_time(trial, np.zeros(5, int), batch, seconds, tokens) == pytest.approx([3, 1, 2, 3, 3])


def test_throughput_is_tokens_by_the_wall_time_of_batches() -> None:
    world = World(documents=100, batch=8, policies={**K1, "k2_last": Truth(speedup=1.3)})
    table = draw(world)
    rows = rows_of(table)
    frame = table.filter(pa.array(np.array(table["policy"].to_pylist()) == "k2_last"))
    once = frame.group_by(["trial_id", "attempt", "batch_id"]).aggregate([("batch_seconds", "max")])
    expected = sum(frame["tokens"].to_pylist()) / sum(once["batch_seconds_max"].to_pylist())
    number = [c.policy for c in rows.configurations].index("k2_last")
    bootstrap = bootstrap_times(rows, np.random.default_rng(0), 500)
    found = throughput(bootstrap, rows.runs_of(number), speed_noise([rows]).wall)
    assert found.tokens_per_second.value == pytest.approx(expected)
    assert found.tokens_per_second.low < expected < found.tokens_per_second.high
    assert found.p50 <= found.p90 <= found.p99
    assert found.documents == 100


def test_documents_of_a_batch_are_resampled_together() -> None:
    world = World(documents=96, batch=8, shard=48, policies={**K1, "k2_last": Truth()})
    assert bootstrap_times(rows_of(draw(world)), np.random.default_rng(0), 10).units.count == 12


def faster(table: pa.Table, policy: str = "k2_last", draws: int = 2000, noise: TrialNoise | None = None) -> Estimate:
    rows = rows_of(table)
    bootstrap = bootstrap_times(rows, np.random.default_rng(0), draws)
    number = [c.policy for c in rows.configurations].index(policy)
    baseline = measure_baseline(bootstrap, rows.baseline_runs(SETTINGS))
    found = speedup(bootstrap, baseline, rows.runs_of(number), noise or speed_noise([rows]).work)
    assert found is not None
    assert found.tokens is not None
    return found.tokens


def test_a_slow_actor_is_calibrated_away() -> None:
    """A configuration that happened to run on a machine half as fast is as fast as it was."""
    world = World(documents=200, policies={**K1, "k2_last": Truth(speedup=1.3)})
    table = draw(world)
    slow = np.array(table["policy"].to_pylist()) == "k2_last"
    for column, factor in (("batch_seconds", 2.0), ("seconds", 2.0), ("calibration", 0.5)):
        place = table.schema.get_field_index(column)
        values = pa.array(table[column].to_numpy() * np.where(slow, factor, 1.0))
        table = table.set_column(place, table.schema.field(place), values)
    place = table.schema.get_field_index("actor")
    actors = [
        f"slow-{actor}" if is_slow else actor for actor, is_slow in zip(table["actor"].to_pylist(), slow, strict=True)
    ]
    table = table.set_column(place, table.schema.field(place), pa.array(actors).cast(table.schema.field(place).type))
    assert faster(table).value == pytest.approx(faster(draw(world)).value)
    assert faster(table).value == pytest.approx(1.3, rel=0.02)


def test_the_interval_is_that_of_resampled_documents() -> None:
    """Against the slow obvious version: draw documents, recompute both sums, the ratio of ratios, its percentiles."""
    world = World(documents=300, policies={"k1": Truth(), "k2_last": Truth(speedup=1.3, length=1.1)})
    table = draw(world, 4)
    side = {}
    for policy in ("k1", "k2_last"):
        part = table.filter(pa.array(np.array(table["policy"].to_pylist()) == policy))
        side[policy] = part["tokens"].to_numpy(), part["batch_seconds"].to_numpy() * part["calibration"].to_numpy()
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(4000):
        pick = rng.integers(0, 300, 300)
        (tokens, work), (base_tokens, base_work) = (
            [column[pick].sum() for column in side[p]] for p in ("k2_last", "k1")
        )
        ratios.append(tokens / work / (base_tokens / base_work))
    ours = faster(table, draws=4000, noise=TrialNoise(variance=0.0))
    assert (ours.low, ours.high) == pytest.approx(np.quantile(ratios, [0.025, 0.975]), rel=0.004)


def test_many_documents_are_joined_into_groups_with_the_same_interval() -> None:
    rng = np.random.default_rng(0)
    values, strata = rng.lognormal(0, 1, 9000), np.repeat([0, 1, 2], 3000)
    units = units_of(strata, np.arange(9000), rng)
    assert units.count == 999  # 333 in each stratum
    drawn = np.concatenate([part @ units.sums(values)[0] for part in bootstrap_weights(units, 4000, rng)]) / 9000
    spread = np.sqrt(sum(values[strata == s].var(ddof=1) * 3000 for s in range(3))) / 9000
    assert drawn.std() == pytest.approx(spread, rel=0.06)


def test_every_draw_counts_every_stratum_in_full() -> None:
    rng = np.random.default_rng(0)
    units = units_of(np.repeat([0, 1, 2], [5, 20, 75]), np.arange(100), rng)
    for part in bootstrap_weights(units, 50, rng):
        for stratum, size in enumerate(units.sizes):
            assert part[:, units.stratum == stratum].sum(axis=1) == pytest.approx(size)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("deviation", [0.0, 0.01, 0.05])
def test_the_noise_of_whole_trials_is_found(deviation: float, batch: int) -> None:
    """Documents of a batch share its errors, which must not be taken for those of the trial."""
    world = World(documents=1500, shard=48, batch=batch, trial_noise=deviation, policies=K1)
    found = [speed_noise([rows_of(draw(world, seed))]).work.deviation for seed in range(5)]
    assert np.sqrt(np.mean(np.square(found))) == pytest.approx(deviation, rel=0.25, abs=0.003)


def test_one_run_in_one_trial_says_nothing_about_noise_but_several_trials_do() -> None:
    single = {"k1": Truth(), "k2_last": Truth(), "k3_last": Truth()}
    rows = rows_of(draw(World(documents=50, policies=single)))
    assert speed_noise([rows]).work.variance is None
    many = World(documents=1000, shard=20, length_noise=0.02, trial_noise=0.05, policies=single)
    found = [speed_noise([rows_of(draw(many, seed))]).work.deviation for seed in range(3)]
    assert np.mean(found) == pytest.approx(0.05, rel=0.25)


def test_noise_is_pooled_over_the_tasks_of_a_sweep() -> None:
    world = World(documents=100, trial_noise=0.05, policies=K1)
    parts = [rows_of(draw(world, seed)) for seed in range(4)]
    alone, pooled = speed_noise(parts[:1]).work, speed_noise(parts).work
    assert (round(alone.freedom), round(pooled.freedom)) == (4, 15), "less the fitted exponent"
    assert pooled.deviation == pytest.approx(0.05, rel=0.5)


def test_trials_weigh_as_much_as_their_time() -> None:
    """50 + 50 + 5 documents are not three trials."""
    world = World(documents=105, shard=50, policies=K1, document_noise=0.0)
    rows = rows_of(draw(world))
    bootstrap = bootstrap_times(rows, np.random.default_rng(0), 10)
    share, trials = noise_share(bootstrap, np.array([0]), "work", np.ones(105, dtype=bool))
    work = rows.values([0], "work")[0]
    weights = np.bincount(rows.columns["trial_id"][rows.cell[0]], weights=work) / work.sum()
    assert 1 / trials == pytest.approx((weights**2).sum())
    assert trials < 2.5
    assert share == pytest.approx((weights**2).sum() - ((work / work.sum()) ** 2).sum())


def test_noise_widens_an_interval_on_both_sides() -> None:
    plain = Estimate(value=0.1, low=0.1 - 1.96 * 0.03, high=0.1 + 1.96 * 0.03)
    noise = TrialNoise(variance=0.04**2, total=0.04**2, freedom=1e9)
    wide = noise.added_to(plain, 1.0, 1e9)
    assert (wide.value, wide.level) == (0.1, 0.95)
    assert (wide.value - wide.low, wide.high - wide.value) == pytest.approx((1.96 * 0.05, 1.96 * 0.05), rel=1e-4)
    few = TrialNoise(variance=0.04**2, total=0.04**2, freedom=4)
    assert few.added_to(plain, 1.0, 1e9).high > wide.high
    assert TrialNoise(variance=0.0).added_to(plain, 1.0, 50) == plain
    assert noise.added_to(plain, 0.0, 50) == plain


def test_a_few_long_documents_leave_fewer_degrees_of_freedom() -> None:
    rows = rows_of(draw(World(documents=100, policies=K1)))
    bootstrap = bootstrap_times(rows, np.random.default_rng(0), 10)
    assert bootstrap.freedom(np.ones(100)) == pytest.approx(0.7 * 100 - 1)
    assert bootstrap.freedom(np.where(np.arange(100) < 10, 1.0, 0.01)) < 10


def test_equal_answers_have_equal_fingerprints_and_others_do_not() -> None:
    lists = [[1, 2, 3], [3, 2, 1], [1, 2, 3], [], [0], [0, 0], [1, 2], [151_665, 7], [7, 151_665]]
    table = pa.table(
        {"token_ids": pa.array(lists, pa.list_(pa.int32())), "scores": pa.array([[]] * 9, pa.list_(pa.float64()))}
    )
    marks = fingerprints(table)
    assert marks[0] == marks[2]
    assert len(set(marks.tolist())) == len({tuple(one) for one in lists})
    rng = np.random.default_rng(0)
    many = [rng.integers(0, 3, rng.integers(0, 9)).tolist() for _ in range(20_000)]
    table = pa.table(
        {"token_ids": pa.array(many, pa.list_(pa.int32())), "scores": pa.array([[]] * 20_000, pa.list_(pa.float64()))}
    )
    assert len(set(fingerprints(table).tolist())) == len({tuple(one) for one in many})


def test_a_slice_of_a_table_has_its_own_fingerprints() -> None:
    table = draw(World(documents=30, policies=K1))
    assert (fingerprints(table.slice(40, 20)) == fingerprints(table)[40:60]).all()


def test_condensed_rows_keep_their_fingerprints() -> None:
    table = draw(World(documents=30, policies=K1))
    small = condense(table)
    assert not {"token_ids", "scores", "text"} & set(small.column_names)
    assert (fingerprints(small) == fingerprints(table)).all()


def test_a_part_of_a_table_has_its_own_names() -> None:
    column = pa.chunked_array([pa.array(["b", "c", None, "a", "c"]).dictionary_encode()])
    code, names = encode(column.take(pa.array([1, 2, 4, 0])))
    assert (code.tolist(), names) == ([1, 2, 1, 0], ("b", "c", None))
    code, names = encode(column.slice(3))
    assert (code.tolist(), names) == ([0, 1], ("a", "c"))


def test_codes_of_groups_are_dense_and_ordered() -> None:
    rng = np.random.default_rng(0)
    one, other, third = rng.integers(0, 5, 200), rng.random(200).round(1), rng.integers(-3, 2**40, 200)
    for keys in ((one,), (one, other), (other, one, third)):
        code, count = group_codes(*keys)
        expected = sorted(set(zip(*(key.tolist() for key in keys), strict=True)))
        assert count == len(expected)
        assert [expected[c] for c in code] == list(zip(*(key.tolist() for key in keys), strict=True))

"""Smoothed calibration: samples before and after a row, of its own actor, in any row order."""

import numpy as np
import pyarrow as pa
import pytest

from orchestrator.analysis.columns import SAMPLES_PER_CALIBRATION, SMOOTHING_REACH, smoothed_calibration
from orchestrator.running.worker import CALIBRATION_PARTS


def table(calibrations: list[float], actor: str = "worker-1", sweep: str = "s") -> pa.Table:
    """Rows of one actor, a second apart."""
    count = len(calibrations)
    started = pa.array(np.arange(count) * 10**6, pa.timestamp("us", tz="UTC"))
    names = {"sweep": sweep, "actor": actor, "device": "cpu"}
    columns = {name: pa.array([value] * count) for name, value in names.items()}
    return pa.table({**columns, "calibration": pa.array(calibrations), "started_at": started})


def test_calibrations_before_and_after_count_alike() -> None:
    count = 60
    rising = [100.0 + place for place in range(count)]
    found = smoothed_calibration(table(rising))
    inside = np.arange(SMOOTHING_REACH, count - SMOOTHING_REACH - SAMPLES_PER_CALIBRATION)
    assert found[inside] == pytest.approx(np.array(rising)[inside] + SAMPLES_PER_CALIBRATION / 2), (
        "the middle of its neighbours"
    )
    assert len(smoothed_calibration(table(rising[:1]))) == 1
    repeated = smoothed_calibration(table([value for value in rising for _ in range(3)]))
    assert repeated == pytest.approx(np.repeat(found, 3)), "rows between two samples have the same speed"


def test_one_slow_sample_does_not_change_the_speed() -> None:
    rng = np.random.default_rng(0)
    sampled = np.exp(rng.normal(0, 0.05, 200)) / 100  # seconds for a token
    sampled[[50, 120]] *= 3
    rolling = [1 / sampled[max(0, place - CALIBRATION_PARTS) : place].mean() for place in range(1, 201)]
    assert max(abs(np.log(np.array(rolling) / 100))) > 0.3
    assert np.abs(np.log(smoothed_calibration(table(rolling)) / 100)).max() < 0.08


def test_actors_and_sweeps_are_apart_and_the_order_of_rows_does_not_matter() -> None:
    parts = [table([10.0, 20.0], "worker-1"), table([40.0, 50.0], "worker-2"), table([70.0, 80.0], "worker-1", "t")]
    rows = pa.concat_tables(parts)
    expected = np.concatenate([smoothed_calibration(part) for part in parts])
    assert smoothed_calibration(rows) == pytest.approx(expected)
    shuffled = np.random.default_rng(0).permutation(len(rows))
    assert smoothed_calibration(rows.take(pa.array(shuffled))) == pytest.approx(expected[shuffled])


def test_a_machine_that_changes_within_seconds_is_followed_from_both_sides() -> None:
    """A lagging mean sees a slow spell too late and for too long; the centred one has its middle where it was."""
    true = np.where((np.arange(60) >= 20) & (np.arange(60) < 40), 50.0, 100.0)
    lagging = [
        float(np.mean(true[max(0, place - CALIBRATION_PARTS) : place] if place else true[:1])) for place in range(60)
    ]
    lagging = [value + 1e-9 * place for place, value in enumerate(lagging)]  # no two samples are alike
    off = np.abs(np.log(smoothed_calibration(table(lagging)) / true))
    assert off.sum() < 0.8 * np.abs(np.log(np.array(lagging) / true)).sum()


def test_what_has_no_calibration_has_no_speed() -> None:
    assert np.isnan(smoothed_calibration(table([np.nan, np.nan]))).all()


def test_as_many_samples_as_the_worker_takes() -> None:
    assert SAMPLES_PER_CALIBRATION == CALIBRATION_PARTS

"""tools.scale, with small numbers."""

from pathlib import Path

import pytest

from orchestrator.progress.status import read_status
from sampler.errors import InputError
from tools.scale.figures import Figure, measure_command
from tools.scale.measurements import measure_actors, measure_planning, measure_trials
from tools.scale.synthetic_sweep import write_finished_sweep


def test_bounds_of_figures() -> None:
    most = Figure(what="a", value=3.0, unit="s", bound=2)
    least = Figure(what="a", value=3.0, unit="s", bound=2, at_least=True)
    assert (most.good, least.good, Figure(what="a", value=3.0, unit="s").good) == (False, True, None)
    assert "MISSED (bound: at most 2)" in most.line()
    assert "ok (bound: at least 2)" in least.line()


def test_a_failing_command_is_reported() -> None:
    with pytest.raises(InputError, match="exit code 2: error: the following arguments are required: DIR"):
        measure_command("orchestrator.status", [])


def test_synthetic_rows_are_a_finished_sweep(tmp_path: Path) -> None:
    assert write_finished_sweep(tmp_path / "s", rows=900) == 900
    overview = read_status(tmp_path / "s")
    assert (overview.state, overview.documents, overview.missing) == ("complete", 900, 0)


@pytest.mark.slow
def test_measurements_with_small_numbers(tmp_path: Path) -> None:
    overhead, *_ = measure_trials(tmp_path / "trials", trials=18)
    assert overhead.value > 0
    pace, *_ = measure_actors(tmp_path / "crowd", actors=2)
    assert 2 < pace.value <= 4.5
    planned, *_ = measure_planning(tmp_path / "plan", trials=900)
    assert planned.value > 0

"""Measurements of scale, on a small scale: that they measure what they say."""

from pathlib import Path

import pytest

from orchestrator.progress.status import read_status
from sampler.errors import InputError
from tools.scale.crowd import crowd
from tools.scale.figure import Figure, spent_by
from tools.scale.million import write_rows
from tools.scale.planning import many_planned
from tools.scale.trials import thousand_trials


def test_a_figure_knows_whether_it_is_good() -> None:
    most = Figure(what="a", value=3.0, unit="s", wanted=2)
    least = Figure(what="a", value=3.0, unit="s", wanted=2, at_least=True)
    assert (most.good, least.good, Figure(what="a", value=3.0, unit="s").good) == (False, True, None)
    assert "MISSED (wanted: at most 2)" in most.line()
    assert "ok (wanted: at least 2)" in least.line()


def test_a_command_that_fails_is_told() -> None:
    with pytest.raises(InputError, match="ended with 2: error: the following arguments are required: DIR"):
        spent_by("orchestrator.status", [])


def test_made_rows_are_a_finished_sweep(tmp_path: Path) -> None:
    assert write_rows(tmp_path / "s", rows=900) == 900
    overview = read_status(tmp_path / "s")
    assert (overview.state, overview.documents, overview.missing) == ("complete", 900, 0)


@pytest.mark.slow
def test_everything_is_measured_on_a_small_scale(tmp_path: Path) -> None:
    overhead, *_ = thousand_trials(tmp_path / "trials", trials=18)
    assert overhead.value > 0
    pace, *_ = crowd(tmp_path / "crowd", actors=2)
    assert 2 < pace.value <= 4.5
    planned, *_ = many_planned(tmp_path / "plan", trials=900)
    assert planned.value > 0

"""Figures with what is unusual in them: many long names, and a configuration far below the others."""

import warnings

from orchestrator.analysis.resample import Estimate
from orchestrator.report.drawing import finish, style
from orchestrator.report.figure_grids import Grid, tall
from orchestrator.report.figure_pareto import Stand, pareto


def at(value: float) -> Estimate:
    return Estimate(value=value, low=value - 1, high=value + 1)


def stand(label: str, family: str, points: float) -> Stand:
    return Stand(label=label, family=family, points=at(points), gain=at(1.1), on_front=False)


def test_one_far_below_does_not_press_the_others_together() -> None:
    with style():
        figure = pareto(
            [stand("k1", "k=1", 0), stand("k2_first", "fixed grid", -3), stand("skip_middle", "skip", -85)],
            axis="tokens/s",
            margin=5,
        )
    [axes] = figure.axes
    assert axes.get_ylim()[0] > -10
    assert "far below: skip_middle (−85 points, 1.10×)" in [text.get_text() for text in axes.texts]


def test_long_names_over_few_rows_have_room() -> None:
    """As where decode settings vary: matplotlib gives up on a layout without, and says so."""
    columns = tuple(f"adaptive=0.{i}_middle threshold 0.95 small block 8 block cache on" for i in range(24))
    grid = Grid(title="", rows=("Level 1",), columns=columns, values=[[1.0] * 24], texts=[["1"] * 24])
    with style(), warnings.catch_warnings():
        warnings.simplefilter("error")
        finish(tall(grid, note="points"), name="levels", title="levels", caption="")

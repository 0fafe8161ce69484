"""Figures with what is unusual in them: many long names, and a configuration far below the others."""

import warnings

from orchestrator.analysis.intervals import Estimate
from orchestrator.report.charts import Grid, tall
from orchestrator.report.drawing import finish, style
from orchestrator.report.scatter import Point, Stand, pareto, tradeoff


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


def test_a_rule_that_came_later_has_its_mark() -> None:
    with style():
        figure = pareto([stand("k1", "k=1", 0), stand("settle=3_middle", "settle", -3)], axis="tokens/s", margin=5)
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["k=1", "settle", "Pareto front"]


def test_the_front_leaves_out_k1_where_it_is_beaten() -> None:
    better = Point(label="k2_last", k=2, subset="last", drop=at(2), speedup=at(3), on_front=True)
    faster = Point(label="k3_last", k=3, subset="last", drop=at(-2), speedup=at(4), on_front=True)
    for points, wanted in (([better, faster], [3, 4]), ([faster], [1, 4])):
        with style():
            figure = tradeoff(points, margin=5, speedup=1.2, accuracy=None, noise=None)
        drawn = [list(line.get_xdata()) for line in figure.axes[0].lines if line.get_drawstyle() == "steps-pre"]
        assert drawn == [wanted]


def test_long_names_over_few_rows_have_room() -> None:
    """As where decode settings vary: matplotlib gives up on a layout without, and says so."""
    columns = tuple(f"adaptive=0.{i}_middle threshold 0.95 small block 8 block cache on" for i in range(24))
    grid = Grid(title="", rows=("Level 1",), columns=columns, values=[[1.0] * 24], texts=[["1"] * 24])
    with style(), warnings.catch_warnings():
        warnings.simplefilter("error")
        finish(tall(grid, note="points"), name="levels", title="levels", caption="")

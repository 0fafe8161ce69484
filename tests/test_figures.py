"""Unusual figures: many long names, and a configuration far below the others."""

import warnings

from orchestrator.analysis.intervals import Estimate
from orchestrator.report.charts import Heatmap, figure_style, plot_tall_heatmap, render
from orchestrator.report.scatter import FamilyPoint, Point, plot_pareto, plot_tradeoff


def at(value: float) -> Estimate:
    return Estimate(value=value, low=value - 1, high=value + 1)


def point(label: str, family: str, difference: float) -> FamilyPoint:
    return FamilyPoint(label=label, family=family, difference=at(difference), gain=at(1.1), on_front=False)


def test_a_configuration_far_below_does_not_compress_the_axis() -> None:
    with figure_style():
        figure = plot_pareto(
            [point("k1", "k=1", 0), point("k2_first", "fixed grid", -3), point("skip_middle", "skip", -85)],
            axis="tokens/s",
            margin=5,
        )
    [axes] = figure.axes
    assert axes.get_ylim()[0] > -10
    assert "far below: skip_middle (−85 points, 1.10×)" in [text.get_text() for text in axes.texts]


def test_an_unknown_family_has_a_marker() -> None:
    with figure_style():
        figure = plot_pareto([point("k1", "k=1", 0), point("settle=3_middle", "settle", -3)], axis="tokens/s", margin=5)
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["k=1", "settle", "Pareto front"]


def test_the_front_leaves_out_k1_if_it_is_beaten() -> None:
    better = Point(label="k2_last", k=2, subset="last", difference=at(2), speedup=at(3), on_front=True)
    faster = Point(label="k3_last", k=3, subset="last", difference=at(-2), speedup=at(4), on_front=True)
    for points, wanted in (([better, faster], [3, 4]), ([faster], [1, 4])):
        with figure_style():
            figure = plot_tradeoff(points, margin=5, speedup=1.2, accuracy=None, noise=None)
        drawn = [list(line.get_xdata()) for line in figure.axes[0].lines if line.get_drawstyle() == "steps-pre"]
        assert drawn == [wanted]


def test_long_names_over_few_rows_fit() -> None:
    """As with varying decode settings; matplotlib would warn if the layout failed."""
    columns = tuple(f"adaptive=0.{i}_middle threshold 0.95 small block 8 block cache on" for i in range(24))
    heatmap = Heatmap(rows=("Level 1",), columns=columns, values=[[1.0] * 24], texts=[["1"] * 24])
    with figure_style(), warnings.catch_warnings():
        warnings.simplefilter("error")
        render(plot_tall_heatmap(heatmap, note="points"), name="levels", title="levels", caption="")

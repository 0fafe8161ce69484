"""The report's tables, declared as lists of columns. The page and results.md render the same cells.

To show the mean of another row column, add its name to COUNTERS in orchestrator/analysis/columns.py, and here, for
instance to WORK_COLUMNS: Column("retries/document", lambda row: number_cell(row.per_document("retries"))).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from orchestrator.analysis.costs import AXES, SPEED, Ranking, fastest_within_margin
from orchestrator.analysis.results import ConfigurationResult, PooledResult, best, best_by_k, family_parallelism
from orchestrator.core.system import format_bytes
from orchestrator.report.examples import Examples
from orchestrator.report.section import ConfigurationView, Section, TaskView
from orchestrator.report.summaries import EarlierResult, EarlierTaskResults
from orchestrator.report.text import (
    MISSING,
    NONE,
    Cell,
    Table,
    TableRow,
    accuracy_bounds_cell,
    difference_cell,
    estimate_cell,
    flips_cell,
    hours,
    interval,
    layer_ranges,
    number,
    number_cell,
    p_value_cell,
    percent,
    plain_table,
    signed,
    speed_bounds_cell,
    speedup_cell,
    text_cell,
    whole,
    with_prefix,
)
from sampler.errors import counted


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table with one row per configuration."""

    title: str
    cell: Callable[[ConfigurationView], Cell]
    shown: Callable[[TaskView], bool] | None = None  # None: always


def configuration_table(
    name: str, columns: Sequence[Column], view: TaskView, configurations: Iterable[ConfigurationView]
) -> Table:
    """One row per configuration. Only the results table marks the Pareto front."""
    shown = [column for column in columns if column.shown is None or column.shown(view)]
    rows = [
        TableRow(
            cells=tuple(column.cell(row) for column in shown),
            baseline=row.result.resolved.is_baseline,
            on_front=row.result.on_front and columns is RESULT_COLUMNS,
        )
        for row in configurations
    ]
    return Table(name=f"{name}: {view.task.task}", titles=tuple(column.title for column in shown), rows=tuple(rows))


def _verdict_cell(row: ConfigurationView) -> Cell:
    comparison = row.result.comparison
    if comparison is not None:
        note = comparison.race.note if comparison.race is not None else ""
        return Cell(text=comparison.verdict.outcome, detail=note, badge=True)
    return text_cell("baseline" if row.result.resolved.is_baseline else "not compared")


def _documents_cell(row: ConfigurationView) -> Cell:
    result = row.result
    wanted = f" of {whole(result.wanted)}" if result.documents < result.wanted else ""
    repeats = f" × {result.repeats}" if result.repeats > 1 else ""
    return Cell(text=f"{whole(result.documents)}{wanted}{repeats}", sort=result.documents)


def _memory_cell(row: ConfigurationView) -> Cell:
    memory = row.peak_memory_bytes
    return Cell(text=format_bytes(memory), sort=memory) if memory else MISSING


def _replayed_cell(row: ConfigurationView) -> Cell:
    sums = row.counters.sums
    passes = (sums["passes_full"] or 0) + (sums["passes_small"] or 0)
    return number_cell((sums["replayed"] or 0) / passes if passes else None, 0, 100, " %")


def _documents_speedup_cell(row: ConfigurationView) -> Cell:
    return estimate_cell(None if row.result.speedup is None else row.result.speedup.seconds, 2, unit="×")


def _modelled_cell(row: ConfigurationView) -> Cell:
    return estimate_cell(None if row.modelled is None else row.modelled.tokens, 2, unit="×")


GENERATES = attrgetter("generates")
LENGTH_DRIFTS = attrgetter("length_drifts")
CONFIGURATION = Column("configuration", lambda row: text_cell(row.result.label))

RESULT_COLUMNS: tuple[Column, ...] = (
    CONFIGURATION,
    Column("verdict", _verdict_cell),
    Column("accuracy %", lambda row: estimate_cell(row.result.accuracy, 1, 100)),
    Column("difference, points", lambda row: difference_cell(row.result.difference)),
    Column("verdict bounds, points", lambda row: accuracy_bounds_cell(row.result.difference)),
    Column("flips", lambda row: flips_cell(row.result.difference)),
    Column("p (Holm)", lambda row: p_value_cell(None if (own := row.result.difference) is None else own.p_holm)),
    Column("tokens/s", lambda row: estimate_cell(row.result.throughput.tokens_per_second), shown=GENERATES),
    Column("speed-up", lambda row: speedup_cell(row.result.speedup), shown=GENERATES),
    Column("verdict bounds, speed-up", lambda row: speed_bounds_cell(row.result.speedup), shown=GENERATES),
    Column("speed-up, documents", _documents_speedup_cell, shown=LENGTH_DRIFTS),
)

COST_COLUMNS: tuple[Column, ...] = (
    CONFIGURATION,
    Column("documents", _documents_cell),
    Column(
        "hours",
        lambda row: Cell(text=hours(row.result.throughput.seconds), sort=row.result.throughput.seconds),
    ),
    Column(
        "s/document",
        lambda row: estimate_cell(row.seconds_per_document, row.seconds_places),
    ),
    Column("p50 s", lambda row: number_cell(row.result.throughput.p50, row.seconds_places)),
    Column("p90 s", lambda row: number_cell(row.result.throughput.p90, row.seconds_places)),
    Column("p99 s", lambda row: number_cell(row.result.throughput.p99, row.seconds_places)),
    Column("steps/document", lambda row: number_cell(row.result.throughput.steps_per_document)),
    Column(
        "tokens/document",
        lambda row: number_cell(row.result.throughput.tokens_per_document, 0),
        shown=GENERATES,
    ),
    Column("cut off", lambda row: number_cell(row.result.throughput.truncated, 1, 100, " %"), shown=GENERATES),
    Column("peak memory", _memory_cell),
)

WORK_COLUMNS: tuple[Column, ...] = (
    CONFIGURATION,
    Column("prefill passes", lambda row: number_cell(row.per_document("passes_prefill"))),
    Column("full passes", lambda row: number_cell(row.per_document("passes_full"))),
    Column("small passes", lambda row: number_cell(row.per_document("passes_small"))),
    Column("commit passes", lambda row: number_cell(row.per_document("passes_commit"))),
    Column("replayed", _replayed_cell),
    Column("tokens/pass", lambda row: number_cell(row.result.throughput.tokens_per_pass, 2), shown=GENERATES),
    Column("passes/token", lambda row: number_cell(row.result.throughput.passes_per_token, 2), shown=GENERATES),
    Column("layers/token", lambda row: number_cell(row.result.throughput.layers_per_token), shown=GENERATES),
    Column(
        "layer-positions/token",
        lambda row: number_cell(row.result.throughput.positions_per_token, 0),
        shown=GENERATES,
    ),
    Column(
        "FLOPs/token",
        lambda row: Cell(text=with_prefix(row.flops_per_token), sort=row.flops_per_token or ""),
        shown=GENERATES,
    ),
)

# In results.md the main table has the columns of the original experiment.
MARKDOWN_COLUMNS: tuple[Column, ...] = (
    Column("Config", lambda row: text_cell(row.result.label)),
    Column("Reuse K", lambda row: text_cell(str(row.result.resolved.k or NONE))),
    Column("Layer Subset", lambda row: text_cell(row.result.resolved.subset or NONE)),
    Column("Accuracy", lambda row: accuracy_cell(row.result)),
    Column("Throughput (tokens/s)", lambda row: estimate_cell(row.result.throughput.tokens_per_second, 2)),
    Column("Total Time (h)", lambda row: text_cell(hours(row.result.throughput.seconds))),
    Column("Accuracy Drop", lambda row: drop_cell(row.result)),
    Column("Flips", lambda row: flips_cell(row.result.difference)),
    Column("Speed-up", lambda row: speedup_cell(row.result.speedup)),
    Column(
        "Seconds per Document",
        lambda row: estimate_cell(row.seconds_per_document, row.seconds_places),
        shown=lambda view: view.length_drifts or not view.generates,
    ),
    Column("Speed-up, Documents", _documents_speedup_cell, shown=LENGTH_DRIFTS),
    Column("Notes", lambda row: _notes_cell(row.result)),
    Column("Verdict Bounds, Drop", lambda row: accuracy_bounds_cell(row.result.difference)),
    Column("Verdict Bounds, Speed-up", lambda row: speed_bounds_cell(row.result.speedup), shown=GENERATES),
)


def accuracy_cell(result: ConfigurationResult) -> Cell:
    return Cell(text=percent(result.accuracy.value, 2), detail=interval(result.accuracy, 1, 100))


def drop_cell(result: ConfigurationResult) -> Cell:
    if result.difference is None:
        return text_cell("baseline" if result.resolved.is_baseline else NONE)
    points = result.difference.points
    return Cell(text=f"{signed(points.value, 2)} pp", detail=interval(points, 1, sign=True))


def _notes_cell(result: ConfigurationResult) -> Cell:
    parts = [f"layers {layer_ranges(result.resolved.layers)}"]
    if result.comparison is not None:
        verdict = result.comparison.verdict
        parts.append(verdict.outcome + (" (exploratory)" if verdict.exploratory else ""))
        parts += [race.note] if (race := result.comparison.race) is not None and race.note else []
    if result.documents < result.wanted and not parts[-1].startswith("stopped"):
        parts.append(f"{result.documents:,} of {counted(result.wanted, 'document')}")
    return text_cell(", ".join(parts))


def _explained(row: ConfigurationView, attribute: str, unit: str = "") -> Cell:
    return number_cell(getattr(row.explanation, attribute), 2, 1, unit)


EXPLANATION_COLUMNS: tuple[Column, ...] = (
    CONFIGURATION,
    Column("layers", lambda row: text_cell(layer_ranges(row.result.resolved.layers))),
    Column("ideal", lambda row: _explained(row, "ideal", "×")),
    Column("measured", lambda row: _explained(row, "measured", "×")),
    Column("= passes", lambda row: _explained(row, "passes")),
    Column("× layers", lambda row: _explained(row, "layers")),
    Column("× unexplained", lambda row: _explained(row, "unexplained")),
    Column("from layer executions", lambda row: _explained(row, "from_executions", "×")),
    Column("from layer-positions", lambda row: _explained(row, "from_positions", "×")),
    Column("modelled", _modelled_cell),
    Column("lack of fit, p", lambda row: p_value_cell(None if row.modelled is None else row.modelled.lack_of_fit)),
)


def results_table(view: TaskView) -> Table:
    return configuration_table("Results", RESULT_COLUMNS, view, view.configurations)


def cost_table(view: TaskView) -> Table:
    return configuration_table("Time and memory", COST_COLUMNS, view, view.configurations)


def work_table(view: TaskView) -> Table:
    return configuration_table("Computation", WORK_COLUMNS, view, view.configurations)


def markdown_table(view: TaskView) -> Table:
    return configuration_table("Results", MARKDOWN_COLUMNS, view, view.configurations)


def explanation_table(view: TaskView) -> Table:
    return configuration_table("Speed-up explained", EXPLANATION_COLUMNS, view, view.explained)


def _gain_cell(ranking: Ranking, axis: str) -> Cell:
    return estimate_cell(ranking.speed, 2, unit="×") if axis == SPEED else number_cell(ranking.gain(axis), 2, 1, "×")


def fastest_table(view: TaskView, margin: float) -> Table:
    """The fastest configuration of each family within the margin."""
    rows = []
    rankings = [result.ranking for result in view.task.configurations]
    for one in fastest_within_margin(rankings, margin):
        cells = [text_cell(one.family), number_cell(one.tried, 0)]
        ranking = None if one.index is None else rankings[one.index]
        if ranking is None:
            cells += [text_cell("none"), *(number_cell(None) for _ in ("difference", *AXES))]
        else:
            cells += [text_cell(ranking.name), estimate_cell(ranking.points, 2, sign=True)]
            cells += [_gain_cell(ranking, axis) for axis in AXES]
        rows.append(cells)
    titles = ["family", "tried", "fastest within the margin", "difference, points", *(f"gain, {axis}" for axis in AXES)]
    return plain_table(f"Fastest within the margin: {view.task.task}", titles, rows)


def ranking_table(view: TaskView) -> Table:
    """Every configuration against k=1 with the first decode settings, and which other configuration beats it."""
    titles = ["configuration", "family", "accuracy %", "difference, points", "steps/document"]
    titles += [title for axis in AXES for title in (f"gain, {axis}", "beaten by")]
    rows = []
    for result in view.task.configurations:
        if result.ranking is not None:
            ranking = result.ranking
            cells = [text_cell(ranking.name), text_cell(ranking.family), number_cell(result.accuracy.value, 2, 100)]
            cells += [estimate_cell(ranking.points, 2, sign=True), number_cell(result.throughput.steps_per_document)]
            for axis, beaten_by in zip(AXES, ranking.beaten_by, strict=True):
                cells += [_gain_cell(ranking, axis), text_cell(beaten_by or "on the front")]
            rows.append(cells)
    return plain_table(f"Policies and decode settings: {view.task.task}", titles, rows)


def pooled_table(pooled: PooledResult) -> Table:
    """All tasks together, each with the same weight."""
    rows = [
        [
            text_cell(one.label),
            Cell(text=one.verdict.outcome, badge=True),
            difference_cell(one.difference),
            accuracy_bounds_cell(one.difference),
            flips_cell(one.difference),
            speedup_cell(one.speedup),
            speed_bounds_cell(one.speedup),
        ]
        for one in pooled.comparisons
    ]
    titles = ["configuration", "verdict", "difference, points", "verdict bounds, points", "flips", "speed-up"]
    return plain_table("All tasks", [*titles, "verdict bounds, speed-up"], rows)


def best_table(section: Section) -> Table:
    """The most accurate and the fastest configuration of each task, then of each k."""
    rows = []
    for view in section.tasks:
        task = view.task
        groups = [(task.task, best(task.configurations))]
        groups += [(f"{task.task} (k{k})" if k else f"{task.task} (other)", one) for k, one in best_by_k(task)]
        for name, one in groups:
            rate = one.fast.throughput.tokens_per_second if one.fast is not None else None
            fastest = NONE if rate is None or one.fast is None else f"{number(rate.value, 2)} ({one.fast.label})"
            accuracy = percent(one.accurate.accuracy.value, 2)
            cells = [text_cell(text) for text in (name, accuracy, fastest, one.accurate.label)]
            rows.append([*cells, drop_cell(one.accurate)])
    titles = ["Benchmark", "Best Accuracy", "Best Throughput (tokens/s)", "Most Accurate Configuration"]
    return plain_table("Best configurations", [*titles, "Accuracy Drop"], rows)


def tradeoff_table(view: TaskView) -> Table:
    """The most accurate configuration for each k."""
    rows = []
    for k, one in best_by_k(view.task):
        result = one.accurate
        rate = result.throughput.tokens_per_second
        only = result.resolved.is_baseline and len(view.task.baselines) == 1
        role = "baseline" if only else f"best k{k}" if k else "best other"
        accuracy, throughput = percent(result.accuracy.value, 2), NONE if rate is None else number(rate.value, 2)
        cells = [text_cell(f"{result.label} ({role})"), text_cell(accuracy), drop_cell(result)]
        rows.append([*cells, text_cell(throughput), speedup_cell(result.speedup)])
    titles = ["Configuration", "Accuracy", "Accuracy Drop", "Throughput (tokens/s)", "Speed-up"]
    return plain_table(f"Accuracy and speed: {view.task.task}", titles, rows)


def parallelism_table(view: TaskView) -> Table:
    """Tokens per forward pass and the area under accuracy over it, by policy family."""
    rows = [
        (
            text_cell(one.family),
            number_cell(one.configurations, 0),
            number_cell(one.tokens_per_pass, 2),
            number_cell(one.area, 1),
        )
        for one in family_parallelism(view.task)
    ]
    return plain_table(
        f"Parallel decoding: {view.task.task}", ("policy family", "configurations", "tokens/pass", "AUP"), rows
    )


def regressions_table(groups: Sequence[Examples]) -> Table:
    rows = [
        (text_cell(one.label), text_cell(one.task), *(number_cell(n, 0) for n in (one.lost, one.won, len(one.shown))))
        for one in groups
    ]
    return plain_table("Documents lost and won", ("configuration", "task", "lost", "won", "shown"), rows)


def earlier_table(earlier: EarlierTaskResults, section: Section) -> Table:
    """An earlier experiment's means for a task, unpaired, next to this sweep's results if it ran the task."""
    ours = next((view.task for view in section.tasks if view.task.task == earlier.task), None)
    by_policy: dict[str, ConfigurationResult] = {}
    for result in ours.configurations if ours is not None else ():
        by_policy.setdefault(result.configuration.policy, result)
    own = ["accuracy %", "difference, points", "tokens/s", "speed-up"]
    titles = ["configuration", *(f"earlier {title}" for title in own), *(own if ours is not None else [])]
    name = earlier.task + (f" (first {earlier.limit} of each subject)" if earlier.limit else "")
    rows = [_earlier_cells(row, by_policy.get(row.summary.config))[: len(titles)] for row in earlier.rows]
    return plain_table(name, titles, rows)


def _earlier_cells(old: EarlierResult, ours: ConfigurationResult | None) -> list[Cell]:
    stated = old.summary.reported_drop  # computed by the experiment from rounded accuracies
    drop = MISSING
    if old.drop is not None:
        detail = "" if stated is None else f"reported as {signed(stated, 1)}"
        drop = Cell(text=signed(old.drop, 2), detail=detail, sort=old.drop)
    return [
        text_cell(old.summary.config),
        number_cell(old.summary.accuracy, 2, 100),
        drop,
        number_cell(old.summary.tokens_per_second, 2),
        number_cell(old.speed_ratio, 2, 1, "×"),
        estimate_cell(None if ours is None else ours.accuracy, 1, 100),
        difference_cell(None if ours is None else ours.difference),
        estimate_cell(None if ours is None else ours.throughput.tokens_per_second, 1),
        speedup_cell(None if ours is None else ours.speedup),
    ]

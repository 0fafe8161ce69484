"""Which figures a report contains, and their titles and captions."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice

import numpy as np

from orchestrator.analysis import Analysis
from orchestrator.analysis.accuracy import Subgroup
from orchestrator.analysis.costs import EXECUTIONS, POSITIONS, REFERENCE, SPEED, beyond_fixed_grid
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.results import ConfigurationResult, TaskResult
from orchestrator.analysis.trial_facts import ActorStartup
from orchestrator.analysis.verdicts import Criteria
from orchestrator.report.charts import (
    ActorTimeline,
    EvidencePath,
    Heatmap,
    RenderedFigure,
    figure_style,
    plot_evidence,
    plot_heatmap_row,
    plot_histograms,
    plot_shard_ratios,
    plot_speed_over_time,
    plot_tall_heatmap,
    render,
)
from orchestrator.report.scatter import FamilyPoint, Point, plot_forest, plot_pareto, plot_tradeoff
from orchestrator.report.sweeps import Map, sequential_map
from orchestrator.report.text import number, p_value, signed, why_no_speedup
from sampler.records import GENERATE

MAX_CONFIGURATIONS = 24  # in figures with one row per configuration
MAX_SUBJECTS = 60
MAX_GRIDS = 3  # sets of decode settings with a figure of k × layers
FOREST = (
    "Thick: 95 % interval. Thin, with ends: the one-sided bounds that the verdict compares with the declared values "
    "(dashed). "
)
GRID = (
    "Rows: k. Columns: which layers are reused. Times and speeds are as measured; only speed-ups are corrected for "
    "changes in the speed of the machine."
)
WORK = " Layer-positions count every position computed in every layer: the amount of work, independent of time."


def start_drawing(
    analysis: Analysis, startups: Mapping[str, ActorStartup], prefix: str, parallel: Map = sequential_map
) -> Iterator[list[RenderedFigure]]:
    """Start drawing (`parallel` may be a process pool); pass the result to `collect_figures`.

    `prefix` distinguishes the figures of several sections.
    """
    jobs = [
        partial(draw, task, analysis.criteria, f"{prefix}{task.task}-")
        for task in analysis.tasks
        for draw in TASK_FIGURES
    ]
    return parallel(_draw, [*jobs, partial(_speed_over_time, list(_timelines(analysis, startups)), prefix)])


def collect_figures(
    analysis: Analysis, drawn: Iterator[list[RenderedFigure]]
) -> tuple[dict[str, tuple[RenderedFigure, ...]], RenderedFigure | None]:
    """Figures by task in reading order, and speed over time (None if nothing was generated)."""
    by_task = {task.task: tuple(chain(*islice(drawn, len(TASK_FIGURES)))) for task in analysis.tasks}
    return by_task, next(iter(next(drawn)), None)


def _draw(job: Callable[[], Iterator[RenderedFigure]]) -> list[RenderedFigure]:
    with figure_style():
        return list(job())


def _tradeoff(task: TaskResult, criteria: Criteria, prefix: str) -> Iterator[RenderedFigure]:
    points = [_point(result) for result in task.configurations if result.comparison is not None]
    if not points:
        return
    name = f"{prefix}tradeoff"
    if task.kind != GENERATE:
        yield render(
            plot_forest(points[:MAX_CONFIGURATIONS], margin=criteria.margin, speedup=None),
            name=name,
            title=f"{task.task}: accuracy compared with k=1",
            caption=f"{FOREST}{why_no_speedup(task.kind)}, so there is no speed-up.",
        )
        return
    baseline = task.baselines[0]
    yield render(
        plot_tradeoff(
            points,
            margin=criteria.margin,
            speedup=criteria.speedup,
            accuracy=100 * baseline.accuracy.value if len(task.baselines) == 1 else None,
            noise=None if baseline.noise_floor is None else baseline.noise_floor.spread,
        ),
        name=name,
        title=f"{task.task}: accuracy and speed-up",
        caption="Differences from the pooled k=1 runs on the same documents, with 95 % intervals. Hatched: less than "
        f"{criteria.margin:g} points lost at more than {criteria.speedup:g}× the speed"
        f"{' (not the values declared before the run)' if criteria.exploratory else ''}. The gray band shows how much "
        "the speeds of the k=1 runs differ.",
    )


def _point(result: ConfigurationResult) -> Point:
    assert result.comparison is not None
    speedup, difference = result.comparison.speedup, result.comparison.difference
    return Point(
        label=result.label,
        k=result.resolved.k,
        subset=result.resolved.subset,
        difference=difference.points,
        speedup=None if speedup is None else speedup.tokens,
        on_front=result.on_front,
        difference_bounds=difference.bounds,
        speedup_bounds=None if speedup is None else speedup.tokens_bounds,
        stopped_early=result.comparison.race is not None and result.comparison.race.stopped_early,
    )


def _race(task: TaskResult, criteria: Criteria, prefix: str) -> Iterator[RenderedFigure]:
    """How the evidence of each configuration in a race grew."""
    del criteria
    races = [(result, result.comparison.race) for result in task.configurations if result.comparison is not None]
    lines = [
        EvidencePath(label=result.label, k=result.resolved.k, path=race.path, rules=race.entry.rules)
        for result, race in races
        if race is not None and race.path
    ]
    if lines:
        yield render(
            plot_evidence(lines[:MAX_CONFIGURATIONS]),
            name=f"{prefix}race",
            title=f"{task.task}: evidence in the race",
            caption="One row per configuration, over the number of documents used so far. Left: evidence that the "
            "drop in accuracy is within the margin (solid) or beyond it (dashed), scaled so that 1 decides. Right: "
            "the speed-up with bounds that stay valid however often one looks, and the declared speed-up "
            "(dashed). In other figures, configurations that were stopped early have hollow markers.",
        )


def _forest(task: TaskResult, criteria: Criteria, prefix: str) -> Iterator[RenderedFigure]:
    """Forest plot, speed-ups of single shards over time, and how the outcomes of documents changed."""
    compared = [result for result in task.configurations if result.comparison is not None][:MAX_CONFIGURATIONS]
    if not compared:
        return
    floors = [baseline.noise_floor for baseline in task.baselines if baseline.noise_floor is not None]
    if task.kind == GENERATE:
        yield render(
            plot_forest(
                [_point(result) for result in compared],
                margin=criteria.margin,
                speedup=criteria.speedup,
                replicates=[speed for floor in floors[:1] for speed in floor.speeds],
            ),
            name=f"{prefix}forest",
            title=f"{task.task}: speed-ups and accuracy differences",
            caption=f"{FOREST}The k=1 replicates are the same computation; their spread is noise.",
        )
        yield from _shards_over_time(task, compared, criteria, prefix)
    yield _outcomes(task, compared, prefix)


def _shards_over_time(
    task: TaskResult, compared: Sequence[ConfigurationResult], criteria: Criteria, prefix: str
) -> Iterator[RenderedFigure]:
    shards = {r.label: r.comparison.shards for r in compared if r.comparison is not None and r.comparison.shards}
    if not shards:
        return
    start = min(one.started_at for ratios in shards.values() for one in ratios)
    k_by_label = {result.label: result.resolved.k for result in compared}
    lines = [
        (label, k_by_label[label], [(one.started_at - start, one.ratio) for one in ratios])
        for label, ratios in shards.items()
    ]
    yield render(
        plot_shard_ratios(lines, speedup=criteria.speedup),
        name=f"{prefix}shards",
        title=f"{task.task}: speed-up of each shard over time",
        caption="Each marker is the speed-up on one shard, compared with all k=1 runs on the same documents. "
        "A trend or a jump suggests that the speed of the machine changed. Dashed: the declared speed-up.",
    )


def _outcomes(task: TaskResult, compared: Sequence[ConfigurationResult], prefix: str) -> RenderedFigure:
    differences = [own for result in compared if (own := result.difference) is not None]
    counts = [[one.both_right, one.lost, one.won, one.both_wrong] for one in differences]
    heatmap = Heatmap(
        rows=[result.label for result in compared],
        columns=["both", "lost", "won", "neither"],
        values=[[100 * count / one.documents for count in row] for row, one in zip(counts, differences, strict=True)],
        texts=[[str(count) for count in row] for row in counts],
    )
    return render(
        plot_tall_heatmap(heatmap, note="documents; the color shows their share"),
        name=f"{prefix}outcomes",
        title=f"{task.task}: correct answers of k=1 and of the policy",
        caption="Documents answered correctly by both, by k=1 only (lost), by the policy only (won) or by neither. "
        "Flips are lost plus won; the accuracy difference shows only won minus lost.",
    )


def _paretos(task: TaskResult, criteria: Criteria, prefix: str) -> Iterator[RenderedFigure]:
    """Policies and decode settings together, one figure per measure of speed; none for the fixed grid alone."""
    if not beyond_fixed_grid([result.ranking for result in task.configurations]):
        return
    for axis, name in ((SPEED, "speed"), (EXECUTIONS, "executions"), (POSITIONS, "positions")):
        yield render(
            plot_pareto(list(_family_points(task, axis)), axis=axis, margin=criteria.margin),
            name=f"{prefix}pareto-{name}",
            title=f"{task.task}: policies and decode settings, {axis}",
            caption="Accuracy differences from k=1 with the first decode settings on the same documents, with 95 % "
            "intervals, over the gain per token. Hollow markers: k=1 with another threshold, small block or block "
            "cache, which a policy has to beat. The shaded band is the accuracy margin.",
        )


def _family_points(task: TaskResult, axis: str) -> Iterator[FamilyPoint]:
    """The reference is a single point, also if several k=1 runs are pooled in it."""
    seen = set()
    for result in task.configurations:
        one = result.ranking
        gain = None if one is None else one.gain(axis)
        if one is None or gain is None or (one.family == REFERENCE and REFERENCE in seen):
            continue
        seen.add(one.family)
        measured = one.speed if axis == SPEED else None
        yield FamilyPoint(
            label=REFERENCE if one.family == REFERENCE else one.name,
            family=one.family,
            difference=one.points,
            gain=measured or Estimate(value=gain, low=gain, high=gain),
            on_front=one.on_front(axis),
        )


def _grids(task: TaskResult, criteria: Criteria, prefix: str) -> Iterator[RenderedFigure]:
    """k × layers, for each mode and set of decode settings that has more than one k."""
    del criteria
    by_settings: dict[object, list[ConfigurationResult]] = {}
    for result in task.configurations:
        own = result.resolved
        if own.k is not None and own.subset is not None:
            by_settings.setdefault(own.settings, []).append(result)
    for index, results in enumerate(list(by_settings.values())[:MAX_GRIDS]):
        modes = list(dict.fromkeys(r.resolved.mode for r in results if r.resolved.k != 1)) or [None]
        for mode in modes:
            members = [r for r in results if r.resolved.mode == mode or r.resolved.k == 1]
            if len({r.resolved.k for r in members}) < 2:
                continue
            name, title = f"{prefix}grid", f"{task.task}: k × layers"
            if len(modes) > 1 and mode:
                name, title = f"{name}-{mode}", f"{title}, {mode} mode"
            if len(by_settings) > 1:
                title += f", {results[0].configuration.settings_label()}"
            yield render(
                plot_heatmap_row(
                    list(_grid_heatmaps(members, generates=task.kind == GENERATE)),
                    x_label="layers reused",
                    y_label="k",
                ),
                name=f"{name}-{index + 1}" if index else name,
                title=title,
                caption=GRID + (WORK if task.kind == GENERATE else ""),
            )


def _grid_heatmaps(results: Sequence[ConfigurationResult], *, generates: bool) -> Iterator[Heatmap]:
    subsets = list(dict.fromkeys(str(r.resolved.subset) for r in results))
    ks = sorted({r.resolved.k for r in results if r.resolved.k is not None})
    by_cell = {(r.resolved.k, str(r.resolved.subset)): r for r in results}

    def heatmap(title: str, value: Callable[[ConfigurationResult], float | None], places: int) -> Heatmap:
        values = {cell: value(result) for cell, result in by_cell.items()}
        table = [[_or_nan(values.get((k, subset))) for subset in subsets] for k in ks]
        texts = [[number(one, places) for one in row] for row in table]
        return Heatmap(title=title, rows=[str(k) for k in ks], columns=subsets, values=table, texts=texts)

    yield heatmap("accuracy (%)", lambda r: 100 * r.accuracy.value, 1)
    if generates:
        yield heatmap("tokens/s", lambda r: rate.value if (rate := r.throughput.tokens_per_second) else None, 1)
        yield heatmap("layer-positions/token", lambda r: r.throughput.positions_per_token, 0)
    else:
        yield heatmap("ms/document", lambda r: 1000 * r.throughput.seconds_per_document.value, 0)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _other_figures(task: TaskResult, criteria: Criteria, prefix: str) -> Iterator[RenderedFigure]:
    del criteria
    shown = task.configurations[:MAX_CONFIGURATIONS]
    if task.kind == GENERATE:
        steps = [(r.label, r.resolved.k, r.steps) for r in shown]
        lengths = [(r.label, r.resolved.k, r.lengths) for r in shown]
        yield render(
            plot_histograms([("denoising steps per document", steps), ("tokens per document", lengths)]),
            name=f"{prefix}spread",
            title=f"{task.task}: denoising steps and output lengths",
            caption="Filled: the configuration. Outline: the first k=1 run. Bar: median. Triangle: mean. Longer "
            "answers can raise tokens/s without making a configuration faster.",
        )
    yield _agreement(task, shown, prefix)
    compared = [result for result in task.configurations if result.comparison is not None][:MAX_CONFIGURATIONS]
    for attribute, word in (("by_subject", "subject"), ("by_level", "level")):
        columns = [getattr(r.comparison.breakdown, attribute) for r in compared if r.comparison is not None]
        if columns and columns[0]:
            yield render(
                plot_tall_heatmap(
                    _breakdown(compared, columns, task.task), note="accuracy at k=1 (%), then difference (points)"
                ),
                name=f"{prefix}{word}s",
                title=f"{task.task}: by {word}",
                caption=f"Accuracy of k=1 and the difference from it for each {word}, with the number of documents in "
                f"parentheses. The groups are small: these numbers are only hints, and no verdict uses them. "
                f"{_tests(compared, word)}",
            )


def _tests(compared: Sequence[ConfigurationResult], word: str) -> str:
    """P-values of the hypothesis that the difference is the same in all groups."""
    p_values = []
    for result in compared:
        parts = None if result.comparison is None else result.comparison.breakdown
        p = None if parts is None else parts.subject_p if word == "subject" else parts.level_p
        if p is not None:
            p_values.append(f"{result.label} {p_value(p)}")
    return f"Tests of equal differences in all {word}s, p-values: {', '.join(p_values)}." if p_values else ""


def _agreement(task: TaskResult, shown: Sequence[ConfigurationResult], prefix: str) -> RenderedFigure:
    labels = [result.label for result in shown]
    rows = task.agreement[: len(shown)]
    values = [[math.nan if share is None else 100 * share for share in row[: len(shown)]] for row in rows]
    texts = [[number(value, 0) for value in row] for row in values]
    heatmap = Heatmap(rows=labels, columns=labels, values=values, texts=texts)
    return render(
        plot_tall_heatmap(heatmap, note="identical answers (%)"),
        name=f"{prefix}agreement",
        title=f"{task.task}: identical answers",
        caption="Percentage of documents for which two configurations gave the same answer, token by token. It must "
        "be 100 between k=1 runs on the same type of device.",
    )


def _breakdown(compared: Sequence[ConfigurationResult], columns: Sequence[Sequence[Subgroup]], task: str) -> Heatmap:
    by_name = [{part.name: part for part in column} for column in columns]
    names = list(dict.fromkeys(part.name for column in columns for part in column))[:MAX_SUBJECTS]
    baselines = [next(column[name] for column in by_name if name in column) for name in names]
    differences = [[column[name].points.value if name in column else None for column in by_name] for name in names]
    return Heatmap(
        rows=[f"{one.name.removeprefix(f'{task}_').replace('_', ' ')} ({one.documents})" for one in baselines],
        columns=["k=1", *(result.label for result in compared)],
        values=[[math.nan, *map(_or_nan, row)] for row in differences],
        texts=[
            [number(100 * one.baseline.value, 1), *("" if value is None else signed(value) for value in row)]
            for one, row in zip(baselines, differences, strict=True)
        ],
    )


def _speed_over_time(timelines: Sequence[ActorTimeline], prefix: str) -> Iterator[RenderedFigure]:
    if timelines:
        yield render(
            plot_speed_over_time(timelines),
            name=f"{prefix}time",
            title="Tokens/s over time, by actor",
            caption="Each marker is one trial at its start time. Markers of the same kind should stay level; if the "
            "first ones are far below the others, it was a cold start. Gray line: the calibration before each trial "
            "(fixed documents at k=1), which measures the machine rather than the policy.",
        )


def _timelines(analysis: Analysis, startups: Mapping[str, ActorStartup]) -> Iterator[ActorTimeline]:
    line = analysis.timeline
    timed = (line.tokens > 0) & (line.wall > 0)
    if not timed.any():
        return
    start = min([float(line.started_at[timed].min()), *(startup.began for startup in startups.values())])
    k = np.array([math.nan if run.resolved.k is None else run.resolved.k for run in line.runs])
    for actor in sorted(set(line.actor[timed]), key=lambda name: (len(name), name)):
        startup, own = startups.get(actor), np.flatnonzero(timed & (line.actor == actor))
        yield ActorTimeline(
            actor=actor,
            start=line.started_at[own] - start,
            k=k[line.run[own]],
            speed=line.tokens[own] / line.wall[own],
            calibration=line.calibration[own],
            loading=None if startup is None else (startup.began - start, startup.loaded - start),
            warm_up=None if startup is None else (startup.loaded - start, startup.warm - start),
        )


TASK_FIGURES = (_tradeoff, _forest, _race, _paretos, _grids, _other_figures)  # in reading order

"""Chooses which figures a sweep gets and hands them their values. Draws nothing itself, computes no statistics."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

from orchestrator.analysis import Analysis
from orchestrator.analysis.details import Subgroup
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.ranking import EXECUTIONS, POSITIONS, REFERENCE, SPEED, beyond_fixed_grid
from orchestrator.analysis.results import ConfigurationResult, TaskResult
from orchestrator.analysis.runs import TrialAttempt
from orchestrator.analysis.trial_facts import ActorStartup
from orchestrator.analysis.verdicts import Criteria
from orchestrator.report.charts import Dot, Grid, Lane, Spread, over_time, panels, spreads, tall
from orchestrator.report.drawing import Picture, finish, style
from orchestrator.report.scatter import Point, Stand, forest, pareto, tradeoff
from orchestrator.report.sweeps import Mapped, one_by_one
from orchestrator.report.text import number, signed

GENERATE = "generate"
MOST_CONFIGURATIONS = 24  # in a figure whose size grows with them
MOST_SUBJECTS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Gallery:
    """All figures of a sweep, in reading order."""

    tasks: Mapping[str, tuple[Picture, ...]] = field(default_factory=dict)
    time: Picture | None = None  # none where nothing was generated, so there is no speed


def draw(
    analysis: Analysis, startups: Mapping[str, ActorStartup], prefix: str, mapped: Mapped = one_by_one
) -> Iterator[list[Picture]]:
    """What `arrange` makes a gallery of; where processes draw, they begin now. `prefix` tells sweeps apart."""
    jobs = [
        partial(kind, task, analysis.criteria, f"{prefix}{task.task}-") for task in analysis.tasks for kind in KINDS
    ]
    return mapped(_styled, [*jobs, partial(_time, list(_lanes(analysis, startups)), prefix)])


def arrange(analysis: Analysis, drawn: Iterator[list[Picture]]) -> Gallery:
    tasks = {task.task: tuple(chain(*islice(drawn, len(KINDS)))) for task in analysis.tasks}
    return Gallery(tasks=tasks, time=next(iter(next(drawn)), None))


def _styled(draw: Callable[[], Iterator[Picture]]) -> list[Picture]:
    with style():
        return list(draw())


def _time(lanes: Sequence[Lane], prefix: str) -> Iterator[Picture]:
    if lanes:
        yield finish(
            over_time(lanes),
            name=f"{prefix}time",
            title="Tokens/s over time, by actor",
            caption="Each mark is one trial at the time it began; marks of one kind should lie on a level. The grey "
            "line is the calibration as a trial began: fixed documents at k=1, which show the machine and not the "
            "policy. A cold start would be a first mark far below its like.",
        )


def _tradeoff(task: TaskResult, criteria: Criteria, prefix: str) -> Iterator[Picture]:
    points = [_point(result) for result in task.configurations if result.comparison is not None]
    if not points:
        return
    if task.kind != GENERATE:
        yield finish(
            forest(points[:MOST_CONFIGURATIONS], margin=criteria.margin),
            name=f"{prefix}tradeoff",
            title=f"{task.task}: accuracy against k=1",
            caption="Paired difference in accuracy with its 95 % interval. Nothing is generated here, so there is no "
            "speed to trade it for.",
        )
        return
    base = task.baselines[0]
    yield finish(
        tradeoff(
            points,
            margin=criteria.margin,
            speedup=criteria.speedup,
            accuracy=100 * base.accuracy.value if len(task.baselines) == 1 else None,
            noise=None if base.noise_floor is None else base.noise_floor.spread,
        ),
        name=f"{prefix}tradeoff",
        title=f"{task.task}: accuracy against speed-up",
        caption=f"Paired differences to the pooled k=1 with 95 % intervals. Hatched: a drop of less than "
        f"{criteria.margin:g} points at more than {criteria.speedup:g}×"
        f"{', values that were not declared before the run' if criteria.exploratory else ''}. The grey band is how far "
        "runs at k=1 lie from each other.",
    )


def _paretos(task: TaskResult, criteria: Criteria, prefix: str) -> Iterator[Picture]:
    """Decode settings and policies together, over each axis; nothing where there is only the fixed grid."""
    if not beyond_fixed_grid([result.ranking for result in task.configurations]):
        return
    for axis, name in ((SPEED, "speed"), (EXECUTIONS, "executions"), (POSITIONS, "positions")):
        yield finish(
            pareto(list(_stands(task, axis)), axis=axis, margin=criteria.margin),
            name=f"{prefix}pareto-{name}",
            title=f"{task.task}: policies and decode settings over {axis}",
            caption="Paired differences in accuracy to k=1 at the first decode settings, with 95 % intervals, "
            "over what is gained per token. Hollow: k=1 with another threshold, small block or block cache, the "
            "control that a policy has to beat. The band is the margin.",
        )


def _stands(task: TaskResult, axis: str) -> Iterator[Stand]:
    """The reference is one point, however many runs at k=1 it is pooled from."""
    seen = set()
    for result in task.configurations:
        one = result.ranking
        gain = None if one is None else one.gain(axis)
        if one is None or gain is None or (one.family == REFERENCE and REFERENCE in seen):
            continue
        seen.add(one.family)
        timed = one.speed if axis == SPEED else None
        yield Stand(
            label=REFERENCE if one.family == REFERENCE else one.name,
            family=one.family,
            points=one.points,
            gain=timed or Estimate(value=gain, low=gain, high=gain),
            on_front=one.on_front(axis),
        )


def _point(result: ConfigurationResult) -> Point:
    assert result.comparison is not None
    faster = result.comparison.speedup
    return Point(
        label=result.label,
        k=result.resolved.k,
        subset=result.resolved.subset,
        drop=result.comparison.difference.points,
        speedup=None if faster is None else faster.tokens,
        on_front=result.on_front,
    )


def _grids(task: TaskResult, criteria: Criteria, prefix: str) -> Iterator[Picture]:
    """k × subset, for the first mode and settings that have more than one of both."""
    del criteria
    families: dict[object, list[ConfigurationResult]] = {}
    for result in task.configurations:
        own = result.resolved
        if own.k is not None and own.subset is not None:
            families.setdefault(own.settings, []).append(result)
    for place, (settings, results) in enumerate(families.items()):
        modes = dict.fromkeys(r.resolved.mode for r in results if r.resolved.k != 1)
        for mode in modes or {None: None}:
            members = [r for r in results if r.resolved.mode == mode or r.resolved.k == 1]
            if len({r.resolved.k for r in members}) > 1 and place < 3:
                said = f", {mode} mode" if mode and len(modes) > 1 else ""
                suffix = f"{f'-{mode}' if said else ''}{f'-{place + 1}' if place else ''}"
                varies = f", {_settings_text(settings)}" if len(families) > 1 else ""
                yield finish(
                    panels(list(_maps(members, generates=task.kind == GENERATE))),
                    name=f"{prefix}grid{suffix}",
                    title=f"{task.task}: k × layers{said}{varies}",
                    caption="Rows are k, columns which layers are reused. Speed is as the clock had it: the machine's "
                    "changes are taken out of speed-ups only. Layer-positions count layers × positions that really "
                    "ran: the work, whatever the clock said.",
                )


def _settings_text(settings: object) -> str:
    assert isinstance(settings, tuple)
    threshold, small_block, block_cache = settings
    return f"threshold {threshold:g}, small block {small_block}, block cache {'on' if block_cache else 'off'}"


def _maps(results: Sequence[ConfigurationResult], *, generates: bool) -> Iterator[Grid]:
    names = list(dict.fromkeys(str(r.resolved.subset) for r in results))
    periods = sorted({r.resolved.k for r in results if r.resolved.k is not None})
    by = {(r.resolved.k, str(r.resolved.subset)): r for r in results}

    def grid(title: str, values: Mapping[tuple[int | None, str], float], places: int) -> Grid:
        table = [[values.get((k, name), math.nan) for name in names] for k in periods]
        texts = [[number(value, places) for value in row] for row in table]
        return Grid(title=title, rows=[str(k) for k in periods], columns=names, values=table, texts=texts)

    yield grid("accuracy (%)", {key: 100 * r.accuracy.value for key, r in by.items()}, 1)
    if generates:
        rates = {key: r.throughput.tokens_per_second for key, r in by.items()}
        yield grid("tokens/s", {key: rate.value for key, rate in rates.items() if rate is not None}, 1)
        work = {key: r.throughput.positions_per_token for key, r in by.items()}
        yield grid("layer-positions/token", {key: value for key, value in work.items() if value is not None}, 0)
    else:
        yield grid("ms/document", {key: 1000 * r.throughput.seconds_per_document.value for key, r in by.items()}, 0)


def _rest(task: TaskResult, criteria: Criteria, prefix: str) -> Iterator[Picture]:
    del criteria
    shown = task.configurations[:MOST_CONFIGURATIONS]
    if task.kind == GENERATE:
        steps = [Spread(label=r.label, k=r.resolved.k, histogram=r.steps) for r in shown]
        lengths = [Spread(label=r.label, k=r.resolved.k, histogram=r.lengths) for r in shown]
        yield finish(
            spreads([("denoising steps per document", steps), ("tokens per document", lengths)]),
            name=f"{prefix}spread",
            title=f"{task.task}: steps and output lengths",
            caption="Filled: the configuration. Line: the first k=1 on top of it. The bar is the median, the triangle "
            "the mean. A configuration that writes more is not faster for it.",
        )
    names = [r.label for r in shown]
    agreement = [[math.nan if share is None else 100 * share for share in row[: len(shown)]] for row in task.agreement]
    yield finish(
        tall(
            Grid(
                title="",
                rows=names,
                columns=names,
                values=agreement[: len(shown)],
                texts=[[number(value, 0) for value in row] for row in agreement[: len(shown)]],
            ),
            note="identical answers (%)",
        ),
        name=f"{prefix}agreement",
        title=f"{task.task}: identical answers",
        caption="Share of documents to which two configurations gave the same answer, token for token. Between k=1 it "
        "has to be 100 on one type of device.",
    )
    yield from _breakdowns(task, prefix)


def _breakdowns(task: TaskResult, prefix: str) -> Iterator[Picture]:
    compared = [r for r in task.configurations if r.comparison is not None][:MOST_CONFIGURATIONS]
    for name, word in (("by_subject", "subject"), ("by_level", "level")):
        parts = [getattr(r.comparison.breakdown, name) for r in compared if r.comparison is not None]
        if parts and parts[0]:
            yield finish(
                tall(_breakdown(compared, parts, task.task), note="accuracy at k=1 (%), then difference (points)"),
                name=f"{prefix}{word}s",
                title=f"{task.task}: by {word}",
                caption=f"Accuracy of k=1 and the difference to it, {word} by {word}, with the number of documents. "
                "Parts are small: these are for looking, and no verdict is drawn from them.",
            )


def _breakdown(compared: Sequence[ConfigurationResult], parts: Sequence[Sequence[Subgroup]], task: str) -> Grid:
    by = [{part.name: part for part in column} for column in parts]
    names = list(dict.fromkeys(part.name for column in parts for part in column))[:MOST_SUBJECTS]
    firsts = [next(column[name] for column in by if name in column) for name in names]
    values = [[math.nan, *(c[name].points.value if name in c else math.nan for c in by)] for name in names]
    texts = [
        [
            number(100 * first.baseline.value, 1),
            *(signed(c[first.name].points.value) if first.name in c else "" for c in by),
        ]
        for first in firsts
    ]
    return Grid(
        title="",
        rows=[f"{first.name.removeprefix(f'{task}_').replace('_', ' ')} ({first.documents})" for first in firsts],
        columns=["k=1", *(r.label for r in compared)],
        values=values,
        texts=texts,
        around_zero=True,
    )


def _lanes(analysis: Analysis, startups: Mapping[str, ActorStartup]) -> Iterator[Lane]:
    periods = {c.label: c.resolved.k for task in analysis.tasks for c in task.configurations}
    by_actor: dict[str, list[TrialAttempt]] = {}
    for trial in analysis.timeline:
        if trial.tokens_per_second is not None:
            by_actor.setdefault(trial.actor, []).append(trial)
    if not by_actor:
        return
    start = min(min(t.started_at for t in trials) for trials in by_actor.values())
    start = min([start, *(startup.began for startup in startups.values())])
    for actor in sorted(by_actor, key=lambda name: (len(name), name)):
        own = startups.get(actor)
        yield Lane(
            actor=actor,
            dots=[
                Dot(
                    at=trial.started_at - start,
                    k=periods.get(trial.label.partition(".r")[0]),
                    speed=trial.tokens_per_second or 0.0,
                    calibration=trial.calibration,
                )
                for trial in by_actor[actor]
            ],
            loading=None if own is None else (own.began - start, own.loaded - start),
            warming=None if own is None else (own.loaded - start, own.warm - start),
        )


KINDS = (_tradeoff, _paretos, _grids, _rest)  # of a task, in reading order

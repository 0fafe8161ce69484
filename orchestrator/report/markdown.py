"""results.md: the experiment's tables, generated. The same values as in the page; computes nothing."""

from collections.abc import Iterator, Sequence

from orchestrator.analysis.earlier_results import EarlierResult
from orchestrator.analysis.ranking import AXES, SPEED, FastestOfFamily, Ranking
from orchestrator.analysis.results import ConfigurationResult, TaskResult, best, best_by_k
from orchestrator.report.section import Section, TaskView
from orchestrator.report.text import NONE, between, hours, layers, number, percent, signed

GENERATE = "generate"


def results_markdown(sections: Sequence[Section]) -> str:
    lines = ["# Results", ""]
    for section in sections:
        lines += [f"## {section.model}", ""] if len(sections) > 1 else []
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> Iterator[str]:
    for notice in section.notices:
        yield f"> {_plain(notice)}"
        yield ">"
    criteria = section.criteria
    said = "Exploratory" if criteria.exploratory else "Declared before the run"
    yield f"{said}: more than {criteria.speedup:g}× the speed of k=1 at a drop of less than {criteria.margin:g} points."
    yield "Intervals are 95 %, paired with the pooled k=1 on the same documents."
    yield ""
    yield "## Verdict"
    yield ""
    for verdict in section.verdicts:
        yield f"- {_plain(verdict)}"
    yield ""
    yield "## Complete results"
    yield ""
    for view in section.tasks:
        yield from _complete(view)
    yield from _best(section)
    yield from _tradeoffs(section)
    yield from _beside_settings(section)
    yield from _notes(section)
    yield from _earlier(section)


def _complete(view: TaskView) -> Iterator[str]:
    task = view.task
    yield f"### {task.task} ({task.documents} documents, {task.primary or 'accuracy'})"
    yield ""
    names = [
        "Config",
        "Reuse K",
        "Layer Subset",
        "Accuracy",
        "Throughput (tokens/s)",
        "Total Time (h)",
        "Accuracy Drop",
        "Speed-up",
    ]
    if view.drifts or task.kind != GENERATE:
        names += ["Seconds per Document"]
    if view.drifts:
        names += ["Speed-up, Documents"]
    yield from _table([*names, "Notes"], [_row(view, result) for result in task.configurations])
    if view.drifts:
        yield "Output length changed, so the speed-up in documents stands beside the one in tokens."
        yield ""


def _row(view: TaskView, result: ConfigurationResult) -> list[str]:
    task, own, rate = view.task, result.resolved, result.throughput.tokens_per_second
    cells = [
        result.label,
        NONE if own.k is None else str(own.k),
        own.subset or NONE,
        f"{percent(result.accuracy.value, 2)} ({between(result.accuracy, 1, 100)})",
        NONE if rate is None else f"{number(rate.value, 2)} ({between(rate, 1)})",
        hours(result.throughput.seconds),
        _drop(result),
        _speedup(task, result),
    ]
    if view.drifts or task.kind != GENERATE:
        each = result.throughput.seconds_per_document
        cells.append(f"{number(each.value, view.places)} ({between(each, view.places)})")
    if view.drifts:
        faster = result.comparison.speedup if result.comparison is not None else None
        cells.append(NONE if faster is None else f"{number(faster.seconds.value, 2)}× ({between(faster.seconds, 2)})")
    return [*cells, _note(result)]


def _drop(result: ConfigurationResult) -> str:
    if result.comparison is None:
        return "baseline" if result.resolved.is_baseline else NONE
    points = result.comparison.difference.points
    return f"{signed(points.value, 2)} pp ({between(points, 1, sign=True)})"


def _speedup(task: TaskResult, result: ConfigurationResult) -> str:
    faster = result.comparison.speedup if result.comparison is not None else None
    if task.kind != GENERATE or faster is None or faster.tokens is None:
        return NONE
    return f"{number(faster.tokens.value, 2)}× ({between(faster.tokens, 2)})"


def _note(result: ConfigurationResult) -> str:
    parts = [f"layers {layers(result.resolved.layers)}"]
    if result.comparison is not None:
        verdict = result.comparison.verdict
        parts.append(verdict.outcome + (" (exploratory)" if verdict.exploratory else ""))
    if result.documents < result.wanted:
        parts.append(f"{result.documents} of {result.wanted} documents")
    return ", ".join(parts)


def _best(section: Section) -> Iterator[str]:
    yield "## Best configuration per benchmark"
    yield ""
    rows = []
    for view in section.tasks:
        task = view.task
        kinds = [(task.task, best(task.configurations))]
        kinds += [(f"{task.task} (k{k})" if k else f"{task.task} (other)", one) for k, one in best_by_k(task)]
        for name, one in kinds:
            rate = one.fast.throughput.tokens_per_second if one.fast is not None else None
            fastest = NONE if rate is None or one.fast is None else f"{number(rate.value, 2)} ({one.fast.label})"
            rows.append(
                [name, percent(one.accurate.accuracy.value, 2), fastest, one.accurate.label, _drop(one.accurate)]
            )
    yield from _table(["Benchmark", "Best Accuracy", "Best Throughput (tokens/s)", "Configuration", "Notes"], rows)


def _tradeoffs(section: Section) -> Iterator[str]:
    yield "## Accuracy against speed"
    yield ""
    for view in section.tasks:
        task = view.task
        if task.kind != GENERATE:
            continue
        yield f"### {task.task}"
        yield ""
        yield "The most accurate configuration of each k; of equally accurate ones the fastest."
        yield ""
        rows = []
        for k, one in best_by_k(task):
            result = one.accurate
            rate = result.throughput.tokens_per_second
            only = k == 1 and len(task.baselines) == 1
            rows.append(
                [
                    f"{result.label} ({'baseline' if only else f'best k{k}' if k else 'best other'})",
                    percent(result.accuracy.value, 2),
                    _drop(result),
                    NONE if rate is None else number(rate.value, 2),
                    _speedup(task, result),
                ]
            )
        names = ["Configuration", "Accuracy", "Degradation", "Throughput (tokens/s)", "Speed-up vs k1 (pooled)"]
        yield from _table(names, rows)


def _beside_settings(section: Section) -> Iterator[str]:
    """Policies beside decode settings: the fastest of each family, and who beats whom."""
    for view in section.tasks:
        if not view.beside_settings:
            continue
        margin = section.criteria.margin
        yield f"## Policies beside decode settings: {view.task.task}"
        yield ""
        yield (
            f"The fastest configuration of each family whose accuracy lies within {margin:g} points of k=1 at the "
            "first settings, by the low end of its paired 95 % interval. Gains are ratios per token against that k=1."
        )
        yield ""
        names = ["Family", "Tried", "Fastest within the margin", "Accuracy difference", *(f"Gain, {a}" for a in AXES)]
        yield from _table(names, [_fastest(iso, result) for iso, result in view.fastest(margin)])
        yield "On the front: no other configuration, decode settings of k=1 included, is as accurate and as good."
        yield ""
        columns = [f"{what}, {axis}" for axis in AXES for what in ("Gain", "beaten by")]
        names = ["Config", "Family", "Accuracy", "Accuracy difference", "Steps/document", *columns]
        yield from _table(names, [_standing(r, r.ranking) for r in view.task.configurations if r.ranking])


def _fastest(iso: FastestOfFamily, result: ConfigurationResult | None) -> list[str]:
    one = None if result is None else result.ranking
    if one is None:
        return [iso.family, str(iso.tried), "none", *[NONE] * 4]
    return [iso.family, str(iso.tried), one.name, _points(one), *(_gain(one, axis) for axis in AXES)]


def _standing(result: ConfigurationResult, one: Ranking) -> list[str]:
    pairs = zip(AXES, one.beaten_by, strict=True)
    sides = [cell for axis, by in pairs for cell in (_gain(one, axis), by or "on the front")]
    steps = number(result.throughput.steps_per_document, 1)
    return [one.name, one.family, percent(result.accuracy.value, 2), _points(one), steps, *sides]


def _points(one: Ranking) -> str:
    return f"{signed(one.points.value, 2)} pp ({between(one.points, 1, sign=True)})"


def _gain(one: Ranking, axis: str) -> str:
    ends = f" ({between(one.speed, 2)})" if axis == SPEED else ""
    return f"{number(one.gain(axis), 2)}×{ends}"


def _notes(section: Section) -> Iterator[str]:
    yield "## Notes"
    yield ""
    for gate in section.gates:
        for sentence in gate.sentences:
            yield f"- {gate.name} ({gate.state}): {_plain(sentence)}"
    for view in section.tasks:
        for base in view.task.baselines:
            if base.noise_floor is not None:
                apart = f"{number(base.noise_floor.spread.value, 3)}× ({between(base.noise_floor.spread, 3)})"
                yield f"- {view.task.task}{view.settings_of(base)}: runs at k=1 lie {apart} apart, the noise floor."
    for labels in section.by_construction:
        yield f"- identical by construction: {', '.join(labels)}; in output mode a replaying pass runs no layer."
    for sentence in section.missing:
        yield f"- missing: {_plain(sentence)}"
    yield ""


def _earlier(section: Section) -> Iterator[str]:
    if section.earlier is None:
        return
    yield "## An earlier experiment beside ours"
    yield ""
    yield f"{section.earlier.folder} holds means of an earlier run: {'; '.join(section.earlier.caveats)}."
    yield ""
    for task in section.earlier.tasks:
        yield f"### {task.name}"
        yield ""
        for sentence in task.anomalies:
            yield f"- {sentence}"
        yield ""
        rows = []
        for row in task.rows:
            was, ours = row.old, row.ours
            rows.append(
                [
                    was.summary.config,
                    percent(was.summary.accuracy, 2),
                    _old_drop(was),
                    number(was.summary.tokens_per_second, 2),
                    NONE if ours is None else percent(ours.accuracy.value, 2),
                    NONE if ours is None else _drop(ours),
                ]
            )
        names = ["Config", "Accuracy, then", "Drop, then", "Tokens/s, then", "Accuracy, ours", "Drop, ours"]
        yield from _table(names, rows)


def _old_drop(was: EarlierResult) -> str:
    """As its accuracies give it, and as its own tables state it (from rounded accuracies)."""
    stated = was.summary.reported_drop
    beside = "" if stated is None else f" (stated {signed(stated, 1)})"
    return NONE if was.drop is None else f"{signed(was.drop, 2)} pp{beside}"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    for row in rows:
        yield "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in row) + " |"
    yield ""


def _plain(text: str) -> str:
    """On one line; nothing in it is taken for HTML."""
    return " ".join(text.split()).replace("<", "&lt;")

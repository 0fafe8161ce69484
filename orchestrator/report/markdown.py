"""results.md: the tables of the report in Markdown."""

from collections.abc import Iterator, Sequence

from orchestrator.analysis.results import best, best_by_k
from orchestrator.report.earlier import caveats
from orchestrator.report.section import Section, TaskView
from orchestrator.report.tables import (
    Table,
    drop_cell,
    earlier_table,
    fastest_table,
    markdown_table,
    ranking_table,
    speedup_cell,
)
from orchestrator.report.text import NONE, interval, number, percent


def results_markdown(sections: Sequence[Section]) -> str:
    lines = ["# Results", ""]
    for section in sections:
        lines += [f"## {section.model}", ""] if len(sections) > 1 else []
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> Iterator[str]:
    for notice in section.notices():
        yield f"> {_escape(notice)}"
        yield ">"
    criteria = section.criteria
    source = "Exploratory" if criteria.exploratory else "Declared before the run"
    yield (
        f"{source}: a configuration succeeds if it is more than {criteria.speedup:g}× as fast as k=1 and loses less "
        f"than {criteria.margin:g} points of accuracy."
    )
    yield "Differences and speed-ups are paired with the pooled k=1 runs on the same documents; intervals are 95 %."
    yield ""
    yield "## Verdict"
    yield ""
    for verdict in section.verdicts:
        yield f"- {_escape(verdict)}"
    yield ""
    yield "## Complete results"
    yield ""
    for view in section.tasks:
        yield from _complete(view)
    yield from _best(section)
    yield from _tradeoffs(section)
    yield from _policies_and_settings(section)
    yield from _notes(section)
    yield from _earlier(section)


def _complete(view: TaskView) -> Iterator[str]:
    task = view.task
    yield f"### {task.task} ({task.documents} documents, {task.primary or 'accuracy'})"
    yield ""
    yield from _table(markdown_table(view))
    if view.length_drifts:
        yield "Answers changed in length, so the speed-up per document is shown next to the speed-up in tokens/s."
        yield ""


def _best(section: Section) -> Iterator[str]:
    yield "## Best configuration per benchmark"
    yield ""
    rows = []
    for view in section.tasks:
        task = view.task
        groups = [(task.task, best(task.configurations))]
        groups += [(f"{task.task} (k{k})" if k else f"{task.task} (other)", one) for k, one in best_by_k(task)]
        for name, one in groups:
            rate = one.fast.throughput.tokens_per_second if one.fast is not None else None
            fastest = NONE if rate is None or one.fast is None else f"{number(rate.value, 2)} ({one.fast.label})"
            accuracy, drop = percent(one.accurate.accuracy.value, 2), drop_cell(one.accurate).markdown
            rows.append([name, accuracy, fastest, one.accurate.label, drop])
    titles = [
        "Benchmark",
        "Best Accuracy",
        "Best Throughput (tokens/s)",
        "Most Accurate Configuration",
        "Accuracy Drop",
    ]
    yield from _lines(titles, rows)


def _tradeoffs(section: Section) -> Iterator[str]:
    yield "## Accuracy and speed"
    yield ""
    for view in section.tasks:
        task = view.task
        if not view.generates:
            continue
        yield f"### {task.task}"
        yield ""
        yield "The most accurate configuration for each k; among equally accurate ones, the fastest."
        yield ""
        rows = []
        for k, one in best_by_k(task):
            result = one.accurate
            rate = result.throughput.tokens_per_second
            role = "baseline" if k == 1 and len(task.baselines) == 1 else f"best k{k}" if k else "best other"
            rows.append(
                [
                    f"{result.label} ({role})",
                    percent(result.accuracy.value, 2),
                    drop_cell(result).markdown,
                    NONE if rate is None else number(rate.value, 2),
                    speedup_cell(result).markdown,
                ]
            )
        yield from _lines(["Configuration", "Accuracy", "Accuracy Drop", "Throughput (tokens/s)", "Speed-up"], rows)


def _policies_and_settings(section: Section) -> Iterator[str]:
    for view in section.tasks:
        if not view.compares_settings:
            continue
        margin = section.criteria.margin
        yield f"## Policies and decode settings: {view.task.task}"
        yield ""
        yield (
            f"For each family, the fastest configuration whose accuracy is within {margin:g} points of k=1 with the "
            "first decode settings (low end of the paired 95 % interval). Gains are ratios per token over that k=1."
        )
        yield ""
        yield from _table(fastest_table(view, margin))
        yield (
            "On the front: no other configuration, including k=1 with other decode settings, is at least as good in "
            "both accuracy and gain."
        )
        yield ""
        yield from _table(ranking_table(view))


def _notes(section: Section) -> Iterator[str]:
    yield "## Notes"
    yield ""
    for gate in section.gates:
        for sentence in gate.sentences:
            yield f"- {gate.name} ({gate.state}): {_escape(sentence)}"
    for view in section.tasks:
        for baseline in view.task.baselines:
            if baseline.noise_floor is not None:
                spread = f"{number(baseline.noise_floor.spread.value, 3)}× ({interval(baseline.noise_floor.spread, 3)})"
                settings = view.baseline_settings(baseline)
                yield f"- noise floor of {view.task.task}{settings}: k=1 runs differ in speed by {spread}."
    for labels in section.identical_by_construction:
        names = ", ".join(labels)
        yield f"- identical by construction: {names}; in output mode, a pass that replays runs no layer."
    for sentence in section.missing():
        yield f"- missing: {_escape(sentence)}"
    yield ""


def _earlier(section: Section) -> Iterator[str]:
    if not section.earlier:
        return
    yield "## Comparison with an earlier experiment"
    yield ""
    yield f"{section.earlier_name} contains the means of an earlier run: {'; '.join(caveats(section.earlier))}."
    yield ""
    for task in section.earlier:
        table = earlier_table(task, section)
        yield f"### {table.name}"
        yield ""
        for sentence in task.anomalies:
            yield f"- {sentence}"
        yield ""
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    return _lines(table.titles, [[cell.markdown for cell in row.cells] for row in table.rows])


def _lines(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(titles) + " |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        yield "| " + " | ".join(_escape(cell).replace("|", "\\|") for cell in row) + " |"
    yield ""


def _escape(text: str) -> str:
    """On one line, and without HTML tags."""
    return " ".join(text.split()).replace("<", "&lt;")

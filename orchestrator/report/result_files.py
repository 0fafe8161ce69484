"""The report's numbers as files: results.md, and one summary.json per configuration.

A summary.json has the keys of the original experiment, and more.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.analysis import as_json
from orchestrator.analysis.results import ConfigurationResult, TaskResult, best, best_by_k
from orchestrator.analysis.trial_facts import TrialProvenance
from orchestrator.core.configuration import DECODE_SETTINGS, varying_settings
from orchestrator.core.totals import TaskConfiguration
from orchestrator.report.earlier import caveats
from orchestrator.report.section import ConfigurationView, Section, TaskView
from orchestrator.report.tables import (
    Table,
    drop_cell,
    earlier_table,
    fastest_table,
    markdown_table,
    parallelism_table,
    pooled_table,
    ranking_table,
    speedup_cell,
)
from orchestrator.report.text import NONE, interval, number, percent

RENAMED_SETTINGS = {"block_cache": "use_block_cache"}  # as the original experiment wrote them


def results_markdown(sections: Sequence[Section]) -> str:
    lines = ["# Results", ""]
    for section in sections:
        lines += [f"## {section.model}", ""] if len(sections) > 1 else []
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _paragraphs(*texts: str) -> Iterator[str]:
    """Each with an empty line after it."""
    for text in texts:
        yield text
        yield ""


def _section(section: Section) -> Iterator[str]:
    for notice in section.notices():
        yield f"> {_escape(notice)}"
        yield ">"
    criteria = section.criteria
    yield (
        f"{section.criteria_origin}: a configuration succeeds if it is more than {criteria.speedup:g}× as fast as k=1 "
        f"and loses less than {criteria.margin:g} points of accuracy."
    )
    yield from _paragraphs(
        "Differences and speed-ups are paired with the pooled k=1 runs on the same documents. Intervals in parentheses "
        "are 95 %; verdicts use the verdict bounds. Flips are documents lost plus documents won."
    )
    yield from _paragraphs("## Verdict")
    for verdict in section.verdicts:
        yield f"- {_escape(verdict)}"
    yield ""
    yield from _paragraphs("## Complete results")
    for view in section.tasks:
        yield from _complete(view)
    yield from _pooled(section)
    yield from _best(section)
    yield from _tradeoffs(section)
    yield from _policies_and_settings(section)
    yield from _notes(section)
    yield from _earlier(section)


def _complete(view: TaskView) -> Iterator[str]:
    task = view.task
    yield from _paragraphs(f"### {task.task} ({task.documents} documents, {task.primary or 'accuracy'})")
    yield from _table(markdown_table(view))
    if view.bounds_note:
        yield from _paragraphs(view.bounds_note)
    if view.generates:
        yield from _paragraphs(
            "AUP is the area under accuracy over tokens per forward pass, each family together with k=1."
        )
        yield from _table(parallelism_table(view))
    if view.length_drifts:
        yield from _paragraphs(
            "Answers changed in length, so the speed-up per document is shown next to the speed-up in tokens/s."
        )


def _pooled(section: Section) -> Iterator[str]:
    pooled = section.analysis.pooled
    if pooled is None:
        return
    sentence = _escape(pooled.verdict.sentence)
    yield from _paragraphs(
        "### All tasks together",
        f"{', '.join(pooled.tasks)}, each with the same weight. {sentence[0].upper()}{sentence[1:]}",
    )
    yield from _table(pooled_table(pooled))


def _best(section: Section) -> Iterator[str]:
    yield from _paragraphs("## Best configuration per benchmark")
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
    yield from _paragraphs("## Accuracy and speed")
    for view in section.tasks:
        task = view.task
        if not view.generates:
            continue
        yield from _paragraphs(
            f"### {task.task}", "The most accurate configuration for each k; among equally accurate ones, the fastest."
        )
        rows = []
        for k, one in best_by_k(task):
            result = one.accurate
            rate = result.throughput.tokens_per_second
            only = result.resolved.is_baseline and len(task.baselines) == 1
            role = "baseline" if only else f"best k{k}" if k else "best other"
            rows.append(
                [
                    f"{result.label} ({role})",
                    percent(result.accuracy.value, 2),
                    drop_cell(result).markdown,
                    NONE if rate is None else number(rate.value, 2),
                    speedup_cell(result.speedup).markdown,
                ]
            )
        yield from _lines(["Configuration", "Accuracy", "Accuracy Drop", "Throughput (tokens/s)", "Speed-up"], rows)


def _policies_and_settings(section: Section) -> Iterator[str]:
    for view in section.tasks:
        if not view.compares_settings:
            continue
        margin = section.criteria.margin
        yield from _paragraphs(f"## Policies and decode settings: {view.task.task}")
        yield from _paragraphs(
            f"For each family, the fastest configuration whose accuracy is within {margin:g} points of k=1 with the "
            "first decode settings (low end of the paired 95 % interval). Gains are ratios per token over that k=1."
        )
        yield from _table(fastest_table(view, margin))
        yield from _paragraphs(
            "On the front: no other configuration, including k=1 with other decode settings, is at least as good in "
            "both accuracy and gain."
        )
        yield from _table(ranking_table(view))


def _notes(section: Section) -> Iterator[str]:
    yield from _paragraphs("## Notes")
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
    yield from _paragraphs(
        "## Comparison with an earlier experiment",
        f"{section.earlier_name} contains the means of an earlier run: {'; '.join(caveats(section.earlier))}.",
    )
    for task in section.earlier:
        table = earlier_table(task, section)
        yield from _paragraphs(f"### {table.name}")
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


def configuration_summaries(section: Section) -> Iterator[tuple[str, dict[str, Any]]]:
    """Directory name (task[_limit_N]/configuration) and content."""
    limit = section.request.get("settings", {}).get("limit")
    nothing = TrialProvenance(devices=(), packages=(), codes=())
    for task_view in section.tasks:
        task = task_view.task
        folder = task.task + (f"_limit_{limit}" if limit else "")
        varying = varying_settings(result.configuration for result in task.configurations)
        for view in task_view.configurations:
            configuration = view.result.configuration
            found = section.provenance_by_configuration.get((task.task, configuration), nothing)
            yield f"{folder}/{configuration.slug(varying)}", _summary(section, task, view, found)


def _summary(section: Section, task: TaskResult, view: ConfigurationView, found: TrialProvenance) -> dict[str, Any]:
    result = view.result
    own, speed = result.resolved, result.throughput
    identity = section.request["identity"]
    rate = speed.tokens_per_second
    return {
        "task": task.task,
        "config": own.policy,
        "timestamp": view.counters.ended.isoformat(),
        "accuracy": result.accuracy.value,
        "throughput": {
            "tokens_generated": speed.tokens,
            "total_time_s": speed.seconds,
            "tokens_per_s": None if rate is None else rate.value,
        },
        "gpu_info": [{"name": device.name, **dict(device.facts)} for device in found.devices],
        "git": {"versions": list(found.codes)},
        "environment": {
            name: versions[0] if len(versions) == 1 else list(versions) for name, versions in found.packages
        },
        "model_args": {
            "model": identity.get("model"),
            "revision": identity.get("model_revision"),
            "dtype": identity.get("dtype"),
            "reuse_k": own.k,
            "layer_subset": own.subset,
            "mode": own.mode,
            **{RENAMED_SETTINGS.get(name, name): getattr(own.configuration, name) for name in DECODE_SETTINGS},
        },
        "eval_params": {
            "limit": section.request.get("settings", {}).get("limit"),
            "num_fewshot": section.request["tasks"].get(task.task, {}).get("fewshot"),
            "batch_size": identity.get("batch_size"),
            "max_new_tokens": identity.get("max_new_tokens"),
            "chat_template": identity.get("chat_template"),
            "primary_metric": task.primary,
            "documents": result.documents,
            "documents_wanted": result.wanted,
            "repeats": result.repeats,
        },
        "layers": list(own.layers),
        "intervals": _intervals(result),
        "verdict": as_json(result.comparison.verdict) if result.comparison else None,
        "counters": {"rows": view.counters.rows, **view.counters.sums},
        "flops_per_token": view.flops_per_token,
        "peak_memory_bytes": view.peak_memory_bytes,
        "gates": _gates(section, (task.task, own.configuration)),
    }


def _intervals(result: ConfigurationResult) -> dict[str, Any]:
    found: dict[str, Any] = {
        "accuracy": result.accuracy,
        "tokens_per_s": result.throughput.tokens_per_second,
        "seconds_per_document": result.throughput.seconds_per_document,
    }
    comparison = result.comparison
    if comparison is not None:
        own, speed = comparison.difference, comparison.speedup
        found |= {
            "accuracy_difference_points": own.points,
            "accuracy_difference_simultaneous": own.simultaneous,
            "accuracy_difference_bounds": own.bounds,
            "lost": own.lost,
            "won": own.won,
            "p_mcnemar": own.p_value,
            "p_holm": own.p_holm,
            "speedup": None if speed is None else speed.tokens,
            "speedup_bounds": None if speed is None else speed.tokens_bounds,
            "speedup_documents": None if speed is None else speed.seconds,
            "speedup_documents_bounds": None if speed is None else speed.seconds_bounds,
            "speedup_modelled": comparison.modelled,
        }
    return {name: as_json(value) for name, value in found.items()}


def _gates(section: Section, own: TaskConfiguration) -> list[dict[str, Any]]:
    """Gates that passed, and those that failed for this configuration's trials."""
    return [
        {"gate": finding.gate, "ok": finding.ok, "sentence": finding.sentence}
        for finding in section.analysis.gates
        if finding.ok or not finding.trials or own in section.configurations_of(finding)
    ]

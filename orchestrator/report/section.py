"""A section of a report: one sweep (or several that can be compared), analyzed and ready to be rendered."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis import Analysis, analyse
from orchestrator.analysis.accuracy import documents_for_margin
from orchestrator.analysis.costs import Explanation, ModelledSpeedup, beyond_fixed_grid, flops_per_token
from orchestrator.analysis.gates import IMPORTED, Finding
from orchestrator.analysis.intervals import Estimate
from orchestrator.analysis.results import Baseline, ConfigurationResult, TaskResult, sort_configurations
from orchestrator.analysis.trial_facts import (
    CounterSums,
    TrialProvenance,
    actor_startups,
    counter_sums,
    describe_code,
    distinct,
    peak_memory,
    provenance_by_configuration,
    task_configuration,
    unfinished_trials,
)
from orchestrator.analysis.verdicts import Criteria
from orchestrator.core.race import RaceEntry
from orchestrator.core.system import format_bytes
from orchestrator.core.totals import KEYS, TaskConfiguration
from orchestrator.report.charts import RenderedFigure
from orchestrator.report.examples import Examples, find_examples
from orchestrator.report.figures import MAX_CONFIGURATIONS, collect_figures, start_drawing
from orchestrator.report.sweeps import Map, SweepData, sequential_map
from orchestrator.report.text import (
    FAILED,
    GateSummary,
    duration,
    in_words,
    layer_ranges,
    summarize_gates,
    whole,
    why_no_speedup,
)
from sampler.config import BUNDLED_MODEL
from sampler.errors import counted
from sampler.records import GENERATE

MAX_FAILED_TRIALS = 20  # listed in a report


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigurationView:
    """A configuration's result, with the sums of its rows' counters, FLOPs and memory."""

    result: ConfigurationResult
    counters: CounterSums
    flops_per_token: float | None
    peak_memory_bytes: int | None
    seconds_places: int  # decimals for seconds per document

    @property
    def explanation(self) -> Explanation | None:
        return None if self.result.comparison is None else self.result.comparison.explanation

    @property
    def seconds_per_document(self) -> Estimate | None:
        """None if times are unknown."""
        return self.result.throughput.seconds_per_document if self.result.throughput.seconds else None

    @property
    def modelled(self) -> ModelledSpeedup | None:
        return None if self.result.comparison is None else self.result.comparison.modelled

    def per_document(self, column: str) -> float | None:
        """The mean of one of COUNTERS; None for rows that are older than the column."""
        total = self.counters.sums[column]
        return None if total is None else float(total / self.counters.rows)


@dataclass(frozen=True, kw_only=True)
class TaskView:
    task: TaskResult
    figures: tuple[RenderedFigure, ...]
    configurations: tuple[ConfigurationView, ...]
    margin: float

    @property
    def generates(self) -> bool:
        return self.task.kind == GENERATE

    @property
    def why_no_speedup(self) -> str:
        return why_no_speedup(self.task.kind)

    @property
    def length_drifts(self) -> bool:
        """Whether answers changed in length, so that speed-ups per document are shown too."""
        compared = [r.comparison for r in self.task.configurations if r.comparison is not None]
        return any(c.speedup is not None and c.speedup.length_changed for c in compared)

    @property
    def bounds_note(self) -> str:
        """A note on the one-sided bounds that verdicts use and their levels; empty if nothing is compared."""
        compared = (r.comparison.difference.bounds for r in self.task.configurations if r.comparison is not None)
        bounds = next(compared, None)
        if bounds is None:
            return ""
        if self.task.race:
            return (
                "Intervals and bounds stay valid however often the race looked at the results. Estimates of "
                "configurations that were stopped early are biased, because their results decided when they stopped."
            )
        levels = (bounds.low_level, bounds.high_level, bounds.joint_level)
        low, high, joint = (f"{100 * level:.4g} %" for level in levels)
        return (
            f"Verdict bounds are one-sided: the low end, which can confirm a configuration, has a confidence level of "
            f"{low}; the high end, which can reject one, has {high}. To reject all configurations of a task together, "
            f"{joint} is enough, because each of them must fail."
        )

    @property
    def documents_for_margin(self) -> int | None:
        return documents_for_margin(self.margin, self.task.comparisons)

    @property
    def reason(self) -> str:
        """The verdict's sentence without task and outcome."""
        verdict = self.task.verdict
        reason = verdict.sentence.removeprefix(f"{self.task.task} is {verdict.outcome}: ")
        reason = reason.removeprefix(f"{self.task.task} has no verdict yet, because ")
        return reason[:1].upper() + reason[1:]

    @property
    def explained(self) -> list[ConfigurationView]:
        return [view for view in self.configurations if view.explanation is not None]

    @property
    def compares_settings(self) -> bool:
        """Whether there is more than the fixed grid, so that policies are compared with decode settings."""
        return beyond_fixed_grid([result.ranking for result in self.task.configurations])

    def baseline_settings(self, baseline: Baseline) -> str:
        """The decode settings of a baseline, to be written after its name; empty if there is only one baseline."""
        return f", {baseline.configuration.settings_label()}" if len(self.task.baselines) > 1 else ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """`build_section` creates it; the page, results.md and the summaries are rendered from it."""

    prefix: str  # of HTML ids and figure names; empty if the report has one section
    request: Mapping[str, Any]
    analysis: Analysis
    tasks: tuple[TaskView, ...]
    speed_over_time: RenderedFigure | None
    examples: tuple[Examples, ...]
    attempts: pa.Table  # store.schema.ATTEMPTS
    data_notices: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        return str(self.request["identity"].get("model"))

    @property
    def criteria(self) -> Criteria:
        return self.analysis.criteria

    @property
    def criteria_origin(self) -> str:
        if self.criteria.exploratory:
            return "Exploratory"
        return "Declared at the first import" if self.imported else "Declared before the run"

    @property
    def imported(self) -> bool:
        """Whether other programs produced the results."""
        return IMPORTED in self.request

    @property
    def race(self) -> list[RaceEntry]:
        """All configurations of a race; empty if the sweep was none."""
        return [entry for view in self.tasks for entry in view.task.race]

    @property
    def figures(self) -> list[RenderedFigure]:
        over_time = [self.speed_over_time] if self.speed_over_time else []
        return [*(figure for view in self.tasks for figure in view.figures), *over_time]

    @property
    def figures_note(self) -> str:
        """A sentence if figures leave out configurations; empty otherwise."""
        if not self.figures or all(len(view.configurations) <= MAX_CONFIGURATIONS for view in self.tasks):
            return ""
        return f"Figures with one row per configuration show at most {MAX_CONFIGURATIONS} of them; the tables show all."

    @property
    def verdicts(self) -> list[str]:
        """A sentence per task, and one on all tasks together."""
        prefix = "Exploratory: " if self.criteria.exploratory else ""
        sentences = [f"{prefix}{view.task.verdict.sentence}" for view in self.tasks]
        pooled = self.analysis.pooled
        if pooled is not None:
            sentences.append(f"{'' if pooled.declared and not prefix else 'Exploratory: '}{pooled.verdict.sentence}")
        return sentences

    @cached_property
    def gates(self) -> list[GateSummary]:
        return list(summarize_gates(self.analysis.gates))

    @cached_property
    def provenance_by_configuration(self) -> Mapping[TaskConfiguration | None, TrialProvenance]:
        return provenance_by_configuration(self.attempts)

    def configurations_of(self, finding: Finding) -> set[TaskConfiguration]:
        """The configurations whose trials a finding names."""
        named = pc.is_in(self.attempts["trial_id"], pa.array(finding.trials, pa.string()))
        return {task_configuration(row) for row in distinct(self.attempts.filter(named), *KEYS)}

    @property
    def identical_by_construction(self) -> list[list[str]]:
        """Labels of configurations in output mode that differ only in the layers they name."""
        groups: dict[object, list[str]] = {}
        for view in self.tasks:
            for result in view.task.configurations:
                own = result.resolved
                if own.mode == "output" and own.k not in (1, None):
                    rule = own.policy.partition("_")[0], own.policy.partition(".")[2], own.settings
                    labels = groups.setdefault(rule, [])
                    labels += [own.label] if own.label not in labels else []
        return [labels for labels in groups.values() if len(labels) > 1]

    def notices(self) -> Iterator[str]:
        """What a reader must know before the results."""
        identity, tasks = self.request["identity"], self.request["tasks"]
        source = str(self.request.get("model", {}).get("source", identity.get("model")))
        if BUNDLED_MODEL in (source, identity.get("model")):
            yield (
                "The model is the small one bundled with this project, trained on arithmetic. Its results show that "
                "the measurement works; they say nothing about other models."
            )
        bundled = [name for name, entry in tasks.items() if entry.get("source") == "bundled"]
        if bundled:
            names = ", ".join(bundled)
            yield f"The documents of {names} are bundled with this project; they are not the public benchmark."
        if self.imported:
            baseline, *others = self.request["settings"]["policies"]
            yield (
                f"Imported from lm-eval files: other programs produced these results. The baseline is {baseline}, "
                f"which this report calls k=1. Compared with it on the same documents: {', '.join(others)}."
            )
        if self.criteria.exploratory:
            yield "The margin or speed-up differs from the value declared before the run: all verdicts are exploratory."
        failed = [gate.name for gate in self.gates if gate.state == FAILED]
        if failed:
            yield f"Validity checks failed ({', '.join(failed)}): there is no verdict on the affected rows."
        if any(self.missing()):
            yield (
                "The sweep is not finished: see the missing results. Until it is, the intervals of differences and "
                "speed-ups are wider, so that they stay valid however often you look at the results."
            )
        if self.race:
            yield (
                "This sweep was a race (--race): each configuration was stopped when its verdict was certain. The "
                "verdicts are valid, but the estimates of configurations that were stopped early are biased. "
                f"Saved: {describe_saved(self.race)}."
            )
        limit = self.request.get("settings", {}).get("limit")
        if limit:
            yield (
                f"Only the first {counted(limit, 'document')} of each task were requested, or of each subject if a "
                f"task has several (--limit {limit})."
            )
        yield from self.data_notices

    def facts(self) -> Iterator[tuple[str, str]]:
        request, identity = self.request, self.request["identity"]
        parameters = request.get("model", {}).get("parameters")
        counters = [view.counters for task in self.tasks for view in task.configurations]
        yield "Model", f"{identity.get('model')}{f', {in_words(parameters)} parameters' if parameters else ''}"
        yield "Depth", f"{identity.get('depth')} layers, subsets of {identity.get('subset_size')}"
        yield "Precision", f"{identity.get('dtype')}, batch size {identity.get('batch_size')}"
        yield "Tasks", ", ".join(view.task.task for view in self.tasks)
        yield "Configurations", str(max(len(view.configurations) for view in self.tasks))
        yield "Rows", whole(self.analysis.rows)
        if self.race:
            yield "Saved by the race", describe_saved(self.race)
        yield "Decoding time", duration(sum(one.sums["seconds"] for one in counters))
        began, ended = min(one.began for one in counters), max(one.ended for one in counters)
        yield "Run", f"{began:%Y-%m-%d %H:%M} to {ended:%Y-%m-%d %H:%M} UTC"

    def provenance(self) -> Iterator[tuple[str, str]]:
        request, identity = self.request, self.request["identity"]
        provenance = self.provenance_by_configuration[None]
        yield "sweep", ", ".join(self.analysis.sweeps)
        yield "model", f"{identity.get('model')}, revision {identity.get('model_revision') or 'unknown'}"
        for task, datasets in identity.get("datasets", {}).items():
            entry = request["tasks"].get(task, {})
            revisions = ", ".join(f"{name} at {revision}" for name, revision in datasets.items())
            yield f"documents of {task}", f"{entry.get('source')}: {revisions}; {entry.get('fewshot', 0)}-shot"
        yield "prompts", f"chat template {'on' if identity.get('chat_template') else 'off'}"
        for view in self.tasks[:1]:
            for result in view.task.configurations:
                yield f"layers of {result.label}", layer_ranges(result.resolved.layers)
        for device in provenance.devices:
            facts = ", ".join(
                f"{name} {format_bytes(float(value)) if name == 'memory' else value}" for name, value in device.facts
            )
            yield "device", f"{device.name} ({facts}); {', '.join(device.actors)}"
        yield "code", "; ".join(provenance.codes) or "unknown"
        for name, versions in provenance.packages:
            yield name, ", ".join(versions)
        for command in request.get("commands", ()):
            arguments = " ".join(str(word) for word in command.get("argv", ()))
            code = f", {describe_code(command['code'])}" if isinstance(command.get("code"), Mapping) else ""
            yield "command", f"{arguments} ({command.get('at', '')}{code})"
        trials = pc.count_distinct(self.attempts["trial_id"]).as_py()
        yield "attempts", f"{whole(pc.count(self.attempts['attempt']).as_py())} for {counted(trials, 'trial')}"

    def missing(self) -> Iterator[str]:
        present = [view.task.task for view in self.tasks]
        for task in self.request["tasks"]:
            if task not in present:
                yield f"{task}: no rows yet."
        for view in self.tasks:
            for sentence in view.task.missing:
                yield f"{view.task.task}: {sentence}"
        unfinished = unfinished_trials(self.attempts)
        yield from unfinished[:MAX_FAILED_TRIALS]
        if len(unfinished) > MAX_FAILED_TRIALS:
            yield f"{counted(len(unfinished) - MAX_FAILED_TRIALS, 'more trial')} did not finish."


def describe_saved(race: Sequence[RaceEntry]) -> str:
    """Documents and time saved, compared with the full grid at the measured speed of each configuration."""
    documents, planned = sum(one.documents_saved for one in race), sum(one.planned for one in race)
    seconds = sum(one.seconds_saved_at_end for one in race)
    saved = f"{whole(documents)} of {counted(planned, 'document')} of the full grid ({100 * documents / planned:.0f} %)"
    return f"{saved}, {duration(seconds)} of decoding"


def build_section(
    data: SweepData,
    *,
    prefix: str = "",
    margin: float | None = None,
    speedup: float | None = None,
    figures: bool = True,
    parallel: Map = sequential_map,
) -> Section:
    """Analyze the rows and draw the figures. InputError if the rows cannot be compared."""
    analysis = analyse(data.rows, data.documents, data.request, margin=margin, speedup=speedup, attempts=data.attempts)
    order = [*data.request["tasks"], *(task.task for task in analysis.tasks)]
    tasks = sorted(map(sort_configurations, analysis.tasks), key=lambda task: order.index(task.task))
    analysis = replace(analysis, tasks=tuple(tasks))
    drawing = start_drawing(analysis, actor_startups(data.attempts), prefix, parallel) if figures else None
    examples = tuple(find_examples(data, analysis))  # while other processes draw
    by_task, over_time = ({}, None) if drawing is None else collect_figures(analysis, drawing)
    counters, memory, model = counter_sums(data.rows), peak_memory(data.attempts), data.request.get("model", {})

    views = []
    for task in analysis.tasks:
        slow = bool(task.baselines) and task.baselines[0].throughput.seconds_per_document.value > 1
        configurations = tuple(
            ConfigurationView(
                result=result,
                counters=counters[task.task, result.configuration],
                flops_per_token=flops_per_token(result.throughput.positions_per_token, model),
                peak_memory_bytes=memory.get((task.task, result.configuration)),
                seconds_places=2 if slow else 3,
            )
            for result in task.configurations
        )
        views.append(
            TaskView(
                task=task,
                figures=by_task.get(task.task, ()),
                configurations=configurations,
                margin=analysis.criteria.margin,
            )
        )
    return Section(
        prefix=prefix,
        request=data.request,
        analysis=analysis,
        tasks=tuple(views),
        speed_over_time=over_time,
        examples=examples,
        attempts=data.attempts,
        data_notices=(*data.reading_notices, *data.notices),
    )

"""One sweep (or several of one identity) as a report tells it: analysis, figures, texts, provenance, in reading order.

Holds values only; how they look in HTML or Markdown is not known here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.analysis import Analysis, analyse
from orchestrator.analysis.earlier_results import EarlierResult, EarlierTaskResults, caveats, read_summaries
from orchestrator.analysis.explain import Explanation, flops_per_token
from orchestrator.analysis.ranking import FastestOfFamily, beyond_fixed_grid, fastest_within_margin
from orchestrator.analysis.results import Baseline, ConfigurationResult, TaskResult, sort_configurations
from orchestrator.analysis.trial_facts import (
    CounterSums,
    TaskConfiguration,
    actor_startups,
    counter_sums,
    describe_code,
    peak_memory,
    trial_provenance,
)
from orchestrator.analysis.verdicts import Criteria
from orchestrator.report.drawing import Picture
from orchestrator.report.examples import Examples, examples
from orchestrator.report.figures import Gallery, arrange, draw
from orchestrator.report.sweeps import Mapped, Material, one_by_one
from orchestrator.report.text import GateText, counted, duration, gate_texts, large, layers, size, whole
from sampler.tiny import BUNDLED_MODEL


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    old: EarlierResult
    ours: ConfigurationResult | None  # None where we have no such configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierTask:
    name: str
    in_ours: bool
    rows: tuple[Beside, ...]
    anomalies: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """What stands beside one section, and what must be known about it."""

    folder: str
    caveats: tuple[str, ...]
    tasks: tuple[EarlierTask, ...]


def read_earlier(folder: Path) -> tuple[EarlierTaskResults, ...]:
    """InputError where there is nothing to compare with."""
    return read_summaries(folder)


def beside(old: Sequence[EarlierTaskResults], ours: Sequence[TaskResult], folder: Path) -> Earlier:
    results = {task.task: task for task in ours}
    tasks = tuple(_task(one, results.get(one.task)) for one in old)
    return Earlier(folder=folder.resolve().name, caveats=caveats(old), tasks=tasks)


def _task(old: EarlierTaskResults, ours: TaskResult | None) -> EarlierTask:
    found: dict[str, ConfigurationResult] = {}
    for result in ours.configurations if ours is not None else ():
        found.setdefault(result.configuration.policy, result)
    return EarlierTask(
        name=old.task + (f" (first {old.limit} of each subject)" if old.limit else ""),
        in_ours=ours is not None,
        rows=tuple(Beside(old=row, ours=found.get(row.summary.config)) for row in old.rows),
        anomalies=old.anomalies,
    )


PASSES = {
    "prefill": "passes_prefill",
    "full": "passes_full",
    "small": "passes_small",
    "commit": "passes_commit",
    "replayed": "replayed",  # of the full and small ones
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a configuration took beside time; passes are those of an average document."""

    result: ConfigurationResult
    passes: Mapping[str, float]
    flops: float | None  # per token
    memory: int | None  # bytes at most


@dataclass(frozen=True, kw_only=True)
class TaskView:
    """One task with its figures and what stands beside its table."""

    task: TaskResult
    pictures: tuple[Picture, ...]
    costs: tuple[Cost, ...]
    explained: tuple[tuple[ConfigurationResult, Explanation], ...]

    @property
    def drifts(self) -> bool:
        """Output length drifts somewhere, so that documents per second must stand beside tokens/s."""
        compared = [r.comparison for r in self.task.configurations if r.comparison is not None]
        return any(c.speedup is not None and c.speedup.length_changed for c in compared)

    @property
    def why(self) -> str:
        """The verdict's sentence without what stands above it."""
        verdict = self.task.verdict
        said = verdict.sentence.removeprefix(f"{self.task.task} is {verdict.outcome}: ")
        return said[:1].upper() + said[1:]

    @property
    def outside(self) -> float | None:
        return next((e.overhead_share for _, e in self.explained), None)

    @property
    def beside_settings(self) -> bool:
        """There is more than the fixed grid, so that decode settings and policies are told side by side."""
        return beyond_fixed_grid([result.ranking for result in self.task.configurations])

    def fastest(self, margin: float) -> list[tuple[FastestOfFamily, ConfigurationResult | None]]:
        """Of each family the fastest configuration within the margin."""
        found = self.task.configurations
        table = fastest_within_margin([result.ranking for result in found], margin)
        return [(one, None if one.index is None else found[one.index]) for one in table]

    @property
    def places(self) -> int:
        """Decimals that seconds per document need."""
        return 2 if self.task.baselines and self.task.baselines[0].throughput.seconds_per_document.value > 1 else 3

    def settings_of(self, base: Baseline) -> str:
        if len(self.task.baselines) < 2:
            return ""
        return f", {base.configuration.settings_label()}"


@dataclass(frozen=True, kw_only=True)
class Section:
    prefix: str  # of ids and of figures' names; empty where a report has one section
    request: Mapping[str, Any]
    analysis: Analysis
    tasks: tuple[TaskView, ...]
    time: Picture | None
    examples: tuple[Examples, ...]
    totals: Mapping[TaskConfiguration, CounterSums]
    memory: Mapping[TaskConfiguration, int]
    trials: Mapping[str, Mapping[str, Any]]
    more_notices: tuple[str, ...] = ()
    earlier: Earlier | None = None

    @property
    def model(self) -> str:
        return str(self.request["identity"].get("model"))

    @property
    def criteria(self) -> Criteria:
        return self.analysis.criteria

    @property
    def declared(self) -> Criteria:
        return self.analysis.declared

    @property
    def pictures(self) -> list[Picture]:
        return [*(p for view in self.tasks for p in view.pictures), *([self.time] if self.time else [])]

    @property
    def verdicts(self) -> list[str]:
        """A sentence for each task."""
        said = "Exploratory: " if self.criteria.exploratory else ""
        return [f"{said}{view.task.verdict.sentence}" for view in self.tasks]

    @cached_property
    def gates(self) -> list[GateText]:
        return list(gate_texts(self.analysis.gates))

    @property
    def missing(self) -> list[str]:
        return list(_missing(self))

    @property
    def notices(self) -> list[str]:
        return [*_notices(self), *self.more_notices]

    @property
    def facts(self) -> list[tuple[str, str]]:
        return list(_facts(self))

    @property
    def provenance(self) -> list[tuple[str, str]]:
        return list(_provenance(self))

    @property
    def by_construction(self) -> list[list[str]]:
        """Labels of configurations in output mode that differ in nothing but the layers they name."""
        groups: dict[object, list[str]] = {}
        for view in self.tasks:
            for result in view.task.configurations:
                own = result.resolved
                if own.mode == "output" and own.k not in (1, None):
                    rule = own.policy.partition("_")[0], own.policy.partition(".")[2], own.settings
                    labels = groups.setdefault(rule, [])
                    labels += [own.label] if own.label not in labels else []
        return [labels for labels in groups.values() if len(labels) > 1]


def section(
    material: Material,
    *,
    prefix: str = "",
    margin: float | None = None,
    speedup: float | None = None,
    figures: bool = True,
    mapped: Mapped = one_by_one,
) -> Section:
    """Analyses and draws. Raises InputError where no comparison can be made."""
    found = analyse(
        material.rows, material.documents, material.request, margin=margin, speedup=speedup, trials=material.trials
    )
    asked = [*material.request["tasks"], *(task.task for task in found.tasks)]
    found = replace(
        found, tasks=tuple(sorted(map(sort_configurations, found.tasks), key=lambda task: asked.index(task.task)))
    )
    memory, counted = peak_memory(material.trials), counter_sums(material.rows)
    model = material.request.get("model", {})
    drawn = draw(found, actor_startups(material.trials), prefix, mapped) if figures else None
    shown = tuple(examples(material, found))  # read while others draw
    pictures = Gallery() if drawn is None else arrange(found, drawn)
    views = [
        TaskView(
            task=task,
            pictures=pictures.tasks.get(task.task, ()),
            costs=tuple(_costs(task, counted, memory, model)),
            explained=tuple(_explained(task)),
        )
        for task in found.tasks
    ]
    return Section(
        prefix=prefix,
        request=material.request,
        analysis=found,
        tasks=tuple(views),
        time=pictures.time,
        examples=shown,
        totals=counted,
        memory=memory,
        trials=material.trials,
        more_notices=(*material.damage, *material.notices),
    )


def _costs(
    task: TaskResult,
    counted: Mapping[TaskConfiguration, CounterSums],
    memory: Mapping[TaskConfiguration, int],
    model: Mapping[str, Any],
) -> Iterator[Cost]:
    for result in task.configurations:
        key = task.task, result.configuration
        own = counted[key]
        yield Cost(
            result=result,
            passes={kind: own.sums[name] / own.rows for kind, name in PASSES.items()},
            flops=flops_per_token(result.throughput.positions_per_token, model),
            memory=memory.get(key),
        )


def _explained(task: TaskResult) -> Iterator[tuple[ConfigurationResult, Explanation]]:
    for result in task.configurations:
        if result.comparison is not None and result.comparison.explanation is not None:
            yield result, result.comparison.explanation


def _notices(section: Section) -> Iterator[str]:
    identity, tasks = section.request["identity"], section.request["tasks"]
    source = str(section.request.get("model", {}).get("source", identity.get("model")))
    if BUNDLED_MODEL in (source, identity.get("model")):
        yield (
            "The model is the small one bundled with this project, trained on its own arithmetic. Its figures show "
            "that the measuring works; they say nothing about other models."
        )
    bundled = [name for name, entry in tasks.items() if entry.get("source") == "bundled"]
    if bundled:
        yield f"The documents of {', '.join(bundled)} are those bundled with this project, not the public benchmark."
    if section.criteria.exploratory:
        yield "Margin or speed-up are not those declared before the run: all verdicts are exploratory."
    failed = [gate.name for gate in section.gates if gate.state == "failed"]
    if failed:
        yield f"Validity gates failed ({', '.join(failed)}): verdicts on the rows concerned are withheld."
    if section.missing:
        yield "The sweep is unfinished; what is missing stands at the end."
    limit = section.request.get("settings", {}).get("limit")
    if limit:
        yield f"Only the first {counted(limit, 'document')} of each subject were asked for (--limit {limit})."


def _facts(section: Section) -> Iterator[tuple[str, str]]:
    request, identity = section.request, section.request["identity"]
    model = request.get("model", {})
    many = f", {large(model['parameters'])} parameters" if model.get("parameters") else ""
    yield "Model", f"{identity.get('model')}{many}"
    yield "Depth", f"{identity.get('depth')} layers, subsets of {identity.get('subset_size')}"
    yield "Precision", f"{identity.get('dtype')}, batch {identity.get('batch_size')}"
    yield "Tasks", ", ".join(view.task.task for view in section.tasks)
    yield "Configurations", str(max(len(view.task.configurations) for view in section.tasks))
    yield "Rows", whole(section.analysis.rows)
    yield "Decoding time", duration(sum(one.sums["seconds"] for one in section.totals.values()))
    began, ended = (min(o.began for o in section.totals.values()), max(o.ended for o in section.totals.values()))
    yield "Run", f"{began:%Y-%m-%d %H:%M} to {ended:%Y-%m-%d %H:%M} UTC"


def _provenance(section: Section) -> Iterator[tuple[str, str]]:
    request, identity = section.request, section.request["identity"]
    made = trial_provenance(section.trials)
    yield "sweep", ", ".join(section.analysis.sweeps)
    yield "model", f"{identity.get('model')}, revision {identity.get('model_revision') or 'unknown'}"
    for task, sets in identity.get("datasets", {}).items():
        entry = request["tasks"].get(task, {})
        named = ", ".join(f"{name} at {revision}" for name, revision in sets.items())
        yield f"documents of {task}", f"{entry.get('source')}: {named}; {entry.get('fewshot', 0)}-shot"
    yield "prompts", f"chat template {'on' if identity.get('chat_template') else 'off'}"
    for view in section.tasks[:1]:
        for result in view.task.configurations:
            yield f"layers of {result.label}", layers(result.resolved.layers)
    for device in made.devices:
        facts = ", ".join(f"{name} {size(float(value)) if name == 'memory' else value}" for name, value in device.facts)
        yield "device", f"{device.name} ({facts}); {', '.join(device.actors)}"
    yield "code", "; ".join(made.codes) or "unknown"
    for name, versions in made.packages:
        yield name, ", ".join(versions)
    for command in request.get("commands", ()):
        said = " ".join(str(word) for word in command.get("argv", ()))
        code = f", {describe_code(command['code'])}" if isinstance(command.get("code"), Mapping) else ""
        yield "command", f"{said} ({command.get('at', '')}{code})"
    yield "attempts", f"{whole(made.attempts)} at {whole(len(section.trials))} trials"


def _missing(section: Section) -> Iterator[str]:
    present = [view.task.task for view in section.tasks]
    for task in section.request["tasks"]:
        if task not in present:
            yield f"{task}: no rows yet."
    for view in section.tasks:
        for sentence in view.task.missing:
            yield f"{view.task.task}: {sentence}"
    failures = trial_provenance(section.trials).unfinished
    for failure in failures[:20]:
        reason = f": {failure.reason}" if failure.reason else ""
        yield f"Trial {failure.name} is {failure.status}, not finished{reason}."
    if len(failures) > 20:
        yield f"{len(failures) - 20} more trials are not finished."

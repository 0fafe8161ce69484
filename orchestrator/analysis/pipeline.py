"""From rows to verdicts: `analyse` is the entry point of this package."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from orchestrator.analysis.accuracy import (
    TYPICAL_DISAGREEMENT,
    answer_agreement,
    breakdown,
    detectable,
    document_levels,
    find_regressions,
    holm,
    paired_difference,
)
from orchestrator.analysis.columns import Array, check_columns, encode, fingerprints
from orchestrator.analysis.costs import (
    CostModel,
    explain,
    fit_cost_model,
    modelled_speedup,
    rank,
    shard_ratios,
    with_beaten_by,
)
from orchestrator.analysis.gates import Evidence, Finding, check_gates, metrics
from orchestrator.analysis.intervals import DRAWS, Estimate, Levels, accuracy_interval
from orchestrator.analysis.raced import RaceResult, anytime, is_race, race_verdict, replay_race
from orchestrator.analysis.results import (
    Analysis,
    Baseline,
    Comparison,
    ConfigurationResult,
    PooledResult,
    TaskResult,
    pool_tasks,
)
from orchestrator.analysis.runs import Settings, TaskRuns, histograms, split_by_task
from orchestrator.analysis.speedups import (
    BaselineRuns,
    SpeedNoise,
    TimeBootstrap,
    bootstrap_times,
    measure_baseline,
    speed_noise,
    speedup,
    throughput,
)
from orchestrator.analysis.trial_facts import timeline
from orchestrator.analysis.verdicts import (
    Compared,
    Criteria,
    Verdict,
    judge_all,
    judge_task,
    no_verdict_yet,
    withhold,
)
from orchestrator.core.configuration import BaselineRule, Configuration, first_settings, listed_configurations
from orchestrator.core.race import TaskRace
from sampler.errors import InputError, counted
from sampler.records import GENERATE

POOLED = "equal weights"  # how sweep.json declares that tasks are also judged together


def analyse(
    rows: pa.Table,
    documents: Mapping[str, pa.Table],
    request: Mapping[str, Any],
    *,
    margin: float | None = None,
    speedup: float | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    attempts: pa.Table | None = None,
) -> Analysis:
    """Analyses the rows of one sweep, or of several comparable ones.

    `documents` describes each task's documents (store.schema.DOCUMENTS), `request` is the content of sweep.json,
    `attempts` that of the trial.json files (store.schema.ATTEMPTS). A `margin` or `speedup` other than declared in the
    request makes every verdict exploratory. The same rows and seed give the same analysis.
    """
    check_columns(rows)
    declared = Criteria.declared_in(request)
    criteria = declared.overridden(margin, speedup)
    primary = {task: str(entry.get("primary", "")) for task, entry in request.get("tasks", {}).items()}
    tasks = split_by_task(rows, fingerprints(rows), primary, BaselineRule.by_task(request))
    evidence = Evidence(
        table=rows,
        tasks=tasks,
        timeline=timeline(tasks),
        documents=documents,
        request=request,
        attempts=attempts,
    )
    _check_comparable(tasks, evidence)
    unfinished = any(evidence.incomplete_runs(part) for part in tasks)
    race = replay_race(rows, documents, request, criteria) if unfinished or is_race(request) else None
    evidence = replace(evidence, race=race if is_race(request) else None)
    findings = check_gates(evidence)
    shared: Any = {"evidence": evidence, "criteria": criteria, "findings": findings, "noise": speed_noise(tasks)}
    sequential = {} if race is None else race.tasks
    results = [
        _TaskAnalysis(rows=part, sequential=sequential.get(part.task), seed=seed, draws=draws, **shared).result()
        for part in tasks
    ]
    return Analysis(
        sweeps=tuple(str(name) for name in encode(rows["sweep"])[1]),
        rows=rows.num_rows,
        criteria=criteria,
        declared=declared,
        tasks=tuple(results),
        gates=findings,
        timeline=evidence.timeline,
        pooled=None if is_race(request) else _pooled(results, criteria, request),  # estimates of a race are biased
    )


def _pooled(results: Sequence[TaskResult], criteria: Criteria, request: Mapping[str, Any]) -> PooledResult | None:
    declared = request.get("pooled") == POOLED
    by_task = {
        task.task: {result.label: result.comparison for result in task.configurations if result.comparison is not None}
        for task in results
    }
    return pool_tasks(
        by_task,
        replace(criteria, exploratory=criteria.exploratory or not declared),
        looks=max(_count_looks(request, task.task) for task in results),
        missing=[sentence for task in results for sentence in task.missing],
        declared=declared,
    )


def _count_looks(request: Mapping[str, Any], task: str) -> int:
    """How often a verdict could be drawn from results of the task: once, and once more after each extension."""
    return 1 + sum(task in extension.get("documents", {}) for extension in request.get("extensions", ()))


def _check_comparable(tasks: Sequence[TaskRuns], evidence: Evidence) -> None:
    """InputError if there is nothing to compare with k=1, or if a row has no finite score, time or calibration."""
    policies = ", ".join(sorted({configuration.policy for rows in tasks for configuration in rows.configurations}))
    with_baseline = [rows for rows in tasks if any(c.is_baseline for c in rows.configurations)]
    if not with_baseline:
        raise InputError(f"there are no rows at k=1, only {policies}; run policy k1 as the baseline")
    if not any(len({(c.is_baseline, c.settings) for c in rows.configurations}) > 1 for rows in with_baseline):
        raise InputError(f"there are only rows of {policies}; run k=1 and another policy on the same task")
    for finding in metrics(evidence):
        raise InputError(f"{finding.sentence.rstrip('.')}; run these trials again")


@dataclass(frozen=True, kw_only=True, eq=False)
class _TaskAnalysis:
    """Computes the result of one task.

    It decides which runs are compared with which baseline, and the order in which random numbers are drawn (another
    order would give other intervals).
    """

    rows: TaskRuns
    evidence: Evidence
    criteria: Criteria
    findings: Sequence[Finding]
    noise: SpeedNoise
    seed: int
    draws: int
    sequential: TaskRace | None  # evidence that is valid at any time; only of a race or an unfinished sweep

    @cached_property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng([self.seed, *self.rows.task.encode()])

    @cached_property
    def bootstrap(self) -> TimeBootstrap:
        return bootstrap_times(self.rows, self.rng, self.draws)

    @cached_property
    def baselines(self) -> Mapping[Settings, BaselineRuns]:
        all_settings = dict.fromkeys(one.compared_with for one in self.rows.configurations)
        runs = {settings: self.rows.baseline_runs(settings) for settings in all_settings}
        return {settings: measure_baseline(self.bootstrap, own) for settings, own in runs.items() if len(own)}

    def result(self) -> TaskResult:
        rows = self.rows
        comparisons = self._comparisons()
        results = self._configurations(comparisons)
        verdicts = [(r.label, r.comparison.verdict) for r in results if r.comparison is not None]
        gates = list(dict.fromkeys(gate for one in comparisons.values() for gate in one.gates))
        low, high = (100 * detectable(rows.documents, share) for share in TYPICAL_DISAGREEMENT)
        return TaskResult(
            task=rows.task,
            kind=self.kind,
            primary=str(self._entry.get("primary", "")),
            wanted=self.evidence.wanted_documents(rows),
            documents=rows.documents,
            comparisons=len(comparisons),
            detectable=(low, high),
            baselines=tuple(self._baseline(baseline) for baseline in self.baselines.values()),
            configurations=results,
            verdict=judge_task(rows.task, verdicts, self.criteria, gates),
            agreement=answer_agreement(rows),
            missing=tuple(self._missing()),
            race=() if self.race is None else tuple(self.race.entries()),
        )

    @property
    def _entry(self) -> Mapping[str, Any]:
        entry: Mapping[str, Any] = self.evidence.request.get("tasks", {}).get(self.rows.task, {})
        return entry

    @property
    def _model(self) -> Mapping[str, Any]:
        model: Mapping[str, Any] = self.evidence.request.get("model", {})
        return model

    @property
    def race(self) -> TaskRace | None:
        """None if the sweep is not a race."""
        return None if self.evidence.race is None else self.sequential

    @property
    def kind(self) -> str:
        return self.evidence.kind(self.rows)

    def _baseline_of(self, number: int) -> BaselineRuns:
        return self.baselines[self.rows.configurations[number].compared_with]

    def _shared_documents(self, number: int) -> Array:
        """Documents that both the configuration and its baseline have."""
        return self.rows.present(self.rows.runs_of(number)) & self.rows.present(self._baseline_of(number).runs)

    def _comparisons(self) -> dict[int, Comparison]:
        """By number of the configuration: all except k=1 that share documents with their baseline."""
        compared = [
            number
            for number, one in enumerate(self.rows.configurations)
            if not one.is_baseline and one.compared_with in self.baselines and self._shared_documents(number).any()
        ]
        task_levels = Levels(comparisons=len(compared), looks=_count_looks(self.evidence.request, self.rows.task))
        judged = [self._compare(number, task_levels) for number in compared]
        adjusted = holm([one.difference.p_value for one in judged])
        judged = [
            replace(one, difference=replace(one.difference, p_holm=p)) for one, p in zip(judged, adjusted, strict=True)
        ]
        gates = [self._failed_gates(number) for number in compared]
        resolved = [self.rows.configurations[number] for number in compared]
        missing, generates = list(self._missing()), self.kind == GENERATE
        if self.race is not None:
            verdicts = [race_verdict(self.race, one, self.criteria) for one in resolved]
        elif missing:
            verdicts = no_verdict_yet(judged, missing, self.criteria)
        else:
            verdicts = judge_all(judged, self.criteria, task_levels, generates=generates, valid=not any(gates))
        if self.sequential is not None and (missing or self.race is not None):
            judged = [anytime(self.sequential, *pair) for pair in zip(resolved, judged, strict=True)]
        model = fit_cost_model(self.rows) if self.kind == GENERATE else None
        levels = document_levels(self.rows, self.evidence.documents.get(self.rows.task))
        return {
            number: self._comparison(number, one, withhold(one.label, verdict, failed), failed, model, levels)
            for number, one, verdict, failed in zip(compared, judged, verdicts, gates, strict=True)
        }

    def _compare(self, number: int, levels: Levels) -> Compared:
        rows, both = self.rows, self._shared_documents(number)
        baseline, runs = self._baseline_of(number), rows.runs_of(number)
        base, ours = rows.mean(baseline.runs, "score")[both], rows.mean(runs, "score")[both]
        return Compared(
            label=rows.configurations[number].label,
            difference=paired_difference(base, ours, rows.strata[both], rng=self.rng, levels=levels, draws=self.draws),
            speedup=speedup(self.bootstrap, baseline, runs, self.noise.work, levels),
        )

    def _comparison(
        self,
        number: int,
        compared: Compared,
        verdict: Verdict,
        failed_gates: Sequence[str],
        model: CostModel | None,
        levels: tuple[Array, Sequence[str]],
    ) -> Comparison:
        rows = self.rows
        resolved, runs = rows.configurations[number], rows.runs_of(number)
        baseline = self._baseline_of(number)
        explanation, speed = None, compared.speedup
        if self.kind == GENERATE and speed is not None and speed.tokens is not None:
            measured = speed.tokens.value
            explanation = explain(rows, runs, baseline.runs, resolved, measured, self._model)
        return Comparison(
            documents=compared.difference.documents,
            difference=compared.difference,
            speedup=speed,
            verdict=verdict,
            gates=tuple(failed_gates),
            explanation=explanation,
            modelled=None if model is None else modelled_speedup(model, rows, runs, baseline.runs),
            shards=shard_ratios(rows, runs, baseline.runs),
            regressions=find_regressions(rows, runs, baseline.runs),
            breakdown=breakdown(rows, runs, baseline.runs, *levels),
            race=None if self.race is None else RaceResult.of(self.race, resolved.configuration),
        )

    def _failed_gates(self, number: int) -> list[str]:
        """Names of the gates that withhold the verdict on this configuration."""
        runs = np.concatenate((self.rows.runs_of(number), self._baseline_of(number).runs))
        concerned = set(self.rows.trials_of(self.rows.rows_of(runs)))
        failed = [f for f in self.findings if not f.ok and f.withholds_verdict]
        return list(dict.fromkeys(f.gate for f in failed if not f.trials or concerned & set(f.trials)))

    def _configurations(self, comparisons: Mapping[int, Comparison]) -> tuple[ConfigurationResult, ...]:
        rows, reference = self.rows, self._reference()
        steps, lengths = histograms(rows, "steps"), histograms(rows, "tokens")
        results = []
        for number, resolved in enumerate(rows.configurations):
            runs = rows.runs_of(number)
            results.append(
                ConfigurationResult(
                    resolved=resolved,
                    repeats=len(runs),
                    trials=len(rows.trials_of(rows.rows_of(runs))),
                    documents=int(rows.present(runs).sum()),
                    wanted=self.evidence.wanted_documents(rows),
                    accuracy=self._accuracy(runs),
                    throughput=throughput(self.bootstrap, runs, self.noise.wall),
                    steps=steps[number],
                    lengths=lengths[number],
                    comparison=comparisons.get(number),
                )
            )
        return tuple(results if reference is None else self._with_rankings(results, reference))

    def _accuracy(self, runs: Array) -> Estimate:
        scores = self.rows.mean(runs, "score")
        return accuracy_interval(scores[~np.isnan(scores)])

    def _with_rankings(
        self, results: Sequence[ConfigurationResult], reference: Configuration
    ) -> Iterator[ConfigurationResult]:
        rng = np.random.default_rng([self.seed, 1, *self.rows.task.encode()])
        rankings = [
            rank(self.rows, number, reference, self._relative_speed(number, result, reference), self._model, rng)
            for number, result in enumerate(results)
        ]
        rankings = with_beaten_by([result.accuracy.value for result in results], rankings)
        return (replace(result, ranking=one) for result, one in zip(results, rankings, strict=True))

    def _reference(self) -> Configuration | None:
        """k=1 at the settings requested first, or first in the rows; None if nothing is generated or k=1 is missing."""
        if not self.baselines or self.kind != GENERATE:
            return None
        requested = first_settings(self.evidence.request.get("settings", {})).settings
        chosen = requested if requested in self.baselines else next(iter(self.baselines))
        return self._configuration_of(self.baselines[chosen])

    def _configuration_of(self, baseline: BaselineRuns) -> Configuration:
        return self.rows.configuration_of(baseline.runs[0]).configuration

    def _relative_speed(self, number: int, result: ConfigurationResult, reference: Configuration) -> Estimate | None:
        """Speed-up in tokens/s over k=1 at the settings of `reference`; None if they cannot be compared."""
        if result.resolved.compared_with != reference.settings:
            base, runs = self.baselines[reference.settings], self.rows.runs_of(number)
            speed = speedup(self.bootstrap, base, runs, self.noise.work)
        elif result.resolved.is_baseline:
            return Estimate(value=1.0, low=1.0, high=1.0)
        else:
            speed = result.speedup
        return None if speed is None else speed.tokens

    def _baseline(self, baseline: BaselineRuns) -> Baseline:
        rows = self.rows
        return Baseline(
            configuration=self._configuration_of(baseline),
            labels=tuple(rows.run_label(int(run)) for run in baseline.runs),
            documents=int(rows.present(baseline.runs).sum()),
            accuracy=self._accuracy(baseline.runs),
            throughput=throughput(self.bootstrap, baseline.runs, self.noise.wall),
            noise_floor=baseline.noise_floor,
        )

    def _missing(self) -> Iterator[str]:
        """A sentence for each thing that has not run yet."""
        rows = self.rows
        for configuration in rows.configurations:
            if not configuration.is_baseline and configuration.compared_with not in self.baselines:
                yield f"{configuration.label} has no run at k=1 with the same settings to compare with."
        for one in self.evidence.incomplete_runs(rows):
            yield f"{rows.run_label(one.run)} has {one.present:,} of {counted(one.needed, 'document')}."
        requested = self.evidence.request.get("settings", {})
        policies = {*requested.get("policies", ()), *(one.policy for one in listed_configurations(requested))}
        absent = sorted(policies - {configuration.policy for configuration in rows.configurations})
        if absent:
            yield f"No rows yet of {', '.join(absent)}."

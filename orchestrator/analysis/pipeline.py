"""From rows to verdicts: the one way in. Reads tables and the request, nothing from disk."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from orchestrator.analysis import gates
from orchestrator.analysis.accuracy import USUAL_DISAGREEMENT, Difference, detectable, difference, holm
from orchestrator.analysis.columns import ANSWER, COLUMNS, Array, codes, fingerprints
from orchestrator.analysis.details import agreement, breakdown, breaks, histograms, levels_of
from orchestrator.analysis.explain import depth_of, explain, outside_layers
from orchestrator.analysis.gates import Evidence, Finding, metrics, trials_of, wanted_documents
from orchestrator.analysis.intervals import DRAWS, Estimate, mean_interval
from orchestrator.analysis.ranking import Standings, front, with_fronts
from orchestrator.analysis.results import Analysis, Baseline, Comparison, ConfigurationResult, TaskResult
from orchestrator.analysis.runs import Settings, TaskRows, split, timeline
from orchestrator.analysis.speedups import Against, Speeds, baseline, speeds, speedup, throughput
from orchestrator.analysis.verdicts import Criteria, hypothesis, judge, withheld
from sampler.errors import InputError

MARGIN, SPEEDUP = 5.0, 1.2  # where a request declares none


def analyse(
    rows: pa.Table,
    documents: Mapping[str, pa.Table],
    request: Mapping[str, Any],
    *,
    margin: float | None = None,
    speedup: float | None = None,
    seed: int = 0,
    draws: int = DRAWS,
    trials: Mapping[str, Mapping[str, Any]] | None = None,
) -> Analysis:
    """Analyses rows of one or several sweeps of one identity; `request` is sweep.json, `trials` the trial.json files.

    `margin` and `speedup` other than those declared in the request make every verdict exploratory. The same rows and
    seed give the same analysis.
    """
    _check_columns(rows)
    declared = Criteria(margin=_declared(request, "margin", MARGIN), speedup=_declared(request, "speedup", SPEEDUP))
    criteria = _criteria(declared, margin, speedup)
    primary = {task: str(entry.get("primary", "")) for task, entry in request.get("tasks", {}).items()}
    tasks = split(rows, fingerprints(rows), primary)
    evidence = Evidence(
        table=rows,
        tasks=tasks,
        timeline=timeline(tasks, rows),
        documents=documents,
        request=request,
        trials=trials or {},
    )
    _check_comparable(tasks, evidence)
    findings = gates.check(evidence)
    results = [
        TaskAnalysis(
            rows=part, evidence=evidence, criteria=criteria, findings=findings, seed=seed, draws=draws
        ).result()
        for part in tasks
    ]
    return Analysis(
        sweeps=tuple(str(name) for name in codes(rows["sweep"])[1]),
        rows=rows.num_rows,
        criteria=criteria,
        declared=declared,
        tasks=tuple(results),
        gates=findings,
        timeline=tuple(evidence.timeline),
    )


def _check_columns(rows: pa.Table) -> None:
    given = {*rows.column_names, *(("token_ids", "scores") if ANSWER in rows.column_names else ())}
    absent = [name for name in COLUMNS if name not in given]
    if absent:
        raise InputError(
            f"the rows lack the columns {', '.join(absent)}; the rows must come from this version of the program"
        )
    if not rows.num_rows:
        raise InputError("there are no rows to analyse yet; let a sweep finish some documents first")


def _check_comparable(tasks: Sequence[TaskRows], evidence: Evidence) -> None:
    """What no report can be made of, in one sentence each."""
    policies = sorted({configuration.policy for rows in tasks for configuration in rows.configurations})
    with_baseline = [rows for rows in tasks if any(c.is_baseline for c in rows.configurations)]
    if not with_baseline:
        raise InputError(
            f"no rows at k=1 among {', '.join(policies)}; a comparison needs the baseline, so run policy k1"
        )
    if not any(len({(c.is_baseline, c.settings) for c in rows.configurations}) > 1 for rows in with_baseline):
        raise InputError(
            f"the rows hold only {', '.join(policies)}; a comparison needs k=1 and another policy in one task"
        )
    for finding in metrics(evidence):
        raise InputError(f"{finding.sentence.rstrip('.')}: no statistic can be made of them; run these trials again")


def _declared(request: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = request.get(name, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"sweep.json: {name} {value!r} is no positive number; a number above 0 is allowed")
    return float(value)


def _criteria(declared: Criteria, margin: float | None, speedup: float | None) -> Criteria:
    for name, value in (("margin", margin), ("speed-up", speedup)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} {value}: a number above 0 is allowed")
    chosen = replace(
        declared,
        margin=declared.margin if margin is None else margin,
        speedup=declared.speedup if speedup is None else speedup,
    )
    return replace(chosen, exploratory=chosen != declared)


GENERATE, LOGLIKELIHOOD = "generate", "loglikelihood"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TaskAnalysis:
    """One task on its way from rows to a result."""

    rows: TaskRows
    evidence: Evidence
    criteria: Criteria
    findings: Sequence[Finding]
    seed: int
    draws: int

    def result(self) -> TaskResult:
        rows, rng = self.rows, np.random.default_rng([self.seed, *self.rows.task.encode()])
        bootstrap = speeds(rows, rng, self.draws)
        against = {
            settings: baseline(bootstrap, rows.baseline_runs(settings))
            for settings in dict.fromkeys(c.settings for c in rows.configurations)
            if len(rows.baseline_runs(settings))
        }
        compared = [
            number
            for number, configuration in enumerate(rows.configurations)
            if not configuration.is_baseline
            and configuration.settings in against
            and self._paired(number, against[configuration.settings]).any()
        ]
        differences = self._differences(compared, against, rng)
        comparisons = dict(self._comparisons(compared, against, differences, bootstrap))
        results = self._configurations(bootstrap, comparisons, against)
        verdicts = [(r.label, r.comparison.verdict) for r in results if r.comparison is not None]
        low, high = (100 * detectable(rows.documents, share) for share in USUAL_DISAGREEMENT)
        return TaskResult(
            task=rows.task,
            kind=self.kind,
            primary=str(self._entry.get("primary", "")),
            wanted=self._wanted,
            documents=rows.documents,
            family=len(compared),
            detectable=(low, high),
            baselines=tuple(self._baseline(bootstrap, settings, side) for settings, side in against.items()),
            configurations=results,
            hypothesis=hypothesis(rows.task, verdicts, self.criteria),
            agreement=agreement(rows),
            missing=tuple(self._missing(against)),
        )

    @property
    def _entry(self) -> Mapping[str, Any]:
        entry: Mapping[str, Any] = self.evidence.request.get("tasks", {}).get(self.rows.task, {})
        return entry

    @property
    def kind(self) -> str:
        stated = self._entry.get("kind")
        return str(stated) if stated else (GENERATE if self.rows.columns["tokens"].any() else LOGLIKELIHOOD)

    @property
    def _wanted(self) -> int:
        return wanted_documents(self.rows, self.evidence.documents.get(self.rows.task), self.evidence.request)

    def _paired(self, number: int, against: Against) -> Array:
        return self.rows.present(self.rows.runs_of(number)) & self.rows.present(against.runs)

    def _differences(
        self, compared: Sequence[int], against: Mapping[Settings, Against], rng: np.random.Generator
    ) -> list[Difference]:
        rows, found = self.rows, []
        for number in compared:
            side = against[rows.configurations[number].settings]
            both = self._paired(number, side)
            base, ours = rows.mean(side.runs, "score")[both], rows.mean(rows.runs_of(number), "score")[both]
            found.append(difference(base, ours, rows.strata[both], rng=rng, family=len(compared), draws=self.draws))
        adjusted = holm([one.p_value for one in found])
        return [replace(one, p_holm=p) for one, p in zip(found, adjusted, strict=True)]

    def _comparisons(
        self,
        compared: Sequence[int],
        against: Mapping[Settings, Against],
        differences: Sequence[Difference],
        bootstrap: Speeds,
    ) -> Iterator[tuple[int, Comparison]]:
        rows, model = self.rows, self.evidence.request.get("model", {})
        outside = outside_layers(rows, depth_of(model))
        level, levels = levels_of(rows, self.evidence.documents.get(rows.task))
        for number, found in zip(compared, differences, strict=True):
            configuration, runs = rows.configurations[number], rows.runs_of(number)
            side = against[configuration.settings]
            faster = speedup(bootstrap, side, runs, len(compared))
            judged = faster if self.kind == GENERATE else None
            verdict = judge(
                configuration.label, found, judged, side.floor, self.criteria, generates=self.kind == GENERATE
            )
            measured = judged.tokens.value if judged is not None and judged.tokens is not None else None
            yield (
                number,
                Comparison(
                    documents=found.documents,
                    unpaired=int((rows.present(runs) ^ rows.present(side.runs)).sum()),
                    difference=found,
                    speedup=faster,
                    verdict=withheld(verdict, self._failed_gates(np.concatenate((runs, side.runs)))),
                    explanation=None
                    if measured is None
                    else explain(rows, runs, side.runs, number, measured, model, outside),
                    breaks=breaks(rows, runs, side.runs),
                    breakdown=breakdown(rows, runs, side.runs, level, levels),
                ),
            )

    def _failed_gates(self, runs: Array) -> list[str]:
        """Gates that take a verdict on these runs away."""
        concerned = set(trials_of(self.rows, self.rows.rows_of(runs)))
        failed = [f for f in self.findings if not f.ok and f.withholds and (not f.trials or concerned & set(f.trials))]
        return list(dict.fromkeys(finding.gate for finding in failed))

    def _configurations(
        self, bootstrap: Speeds, comparisons: Mapping[int, Comparison], against: Mapping[Settings, Against]
    ) -> tuple[ConfigurationResult, ...]:
        rows = self.rows
        steps, lengths = histograms(rows, "steps"), histograms(rows, "tokens")
        found = []
        for number, configuration in enumerate(rows.configurations):
            runs = rows.runs_of(number)
            scores = rows.mean(runs, "score")
            found.append(
                ConfigurationResult(
                    configuration=configuration,
                    repeats=len(runs),
                    trials=len(trials_of(rows, rows.rows_of(runs))),
                    documents=int(rows.present(runs).sum()),
                    wanted=self._wanted,
                    accuracy=mean_interval(scores[~np.isnan(scores)]),
                    throughput=throughput(bootstrap, runs),
                    steps=steps[number],
                    lengths=lengths[number],
                    comparison=comparisons.get(number),
                    relative_speed=self._relative_speed(number, bootstrap, against),
                    pareto=False,
                )
            )
        return self._with_standings(_with_front(found), against)

    def _with_standings(
        self, found: Sequence[ConfigurationResult], against: Mapping[Settings, Against]
    ) -> tuple[ConfigurationResult, ...]:
        if not against or self.kind != GENERATE:
            return tuple(found)
        standings = Standings(
            rows=self.rows,
            reference=self._first_settings(against),
            model=self.evidence.request.get("model", {}),
            rng=np.random.default_rng([self.seed, 1, *self.rows.task.encode()]),
        )
        placed = with_fronts(
            [result.accuracy.value for result in found],
            [standings.of(number, result.relative_speed) for number, result in enumerate(found)],
        )
        return tuple(replace(result, standing=one) for result, one in zip(found, placed, strict=True))

    def _first_settings(self, against: Mapping[Settings, Against]) -> Settings:
        """Those asked for first, so that k=1 at other settings stands on the same axis."""
        asked = self.evidence.request.get("settings", {})
        first = tuple((asked.get(axis) or (None,))[0] for axis in ("threshold", "small_block", "block_cache"))
        return next((settings for settings in against if settings == first), next(iter(against)))

    def _relative_speed(self, number: int, bootstrap: Speeds, against: Mapping[Settings, Against]) -> Estimate | None:
        """Against k=1 at the first settings."""
        if not against or self.kind != GENERATE:
            return None
        chosen = self._first_settings(against)
        configuration = self.rows.configurations[number]
        if configuration.is_baseline and configuration.settings == chosen:
            return Estimate(value=1.0, low=1.0, high=1.0)
        faster = speedup(bootstrap, against[chosen], self.rows.runs_of(number))
        return None if faster is None else faster.tokens

    def _baseline(self, bootstrap: Speeds, settings: Settings, side: Against) -> Baseline:
        rows = self.rows
        scores = rows.mean(side.runs, "score")
        threshold, small_block, block_cache = settings
        return Baseline(
            threshold=threshold,
            small_block=small_block,
            block_cache=block_cache,
            labels=tuple(rows.run_label(int(run)) for run in side.runs),
            documents=int(rows.present(side.runs).sum()),
            accuracy=mean_interval(scores[~np.isnan(scores)]),
            throughput=throughput(bootstrap, side.runs),
            floor=side.floor,
        )

    def _missing(self, against: Mapping[Settings, Against]) -> Iterator[str]:
        rows = self.rows
        for configuration in rows.configurations:
            if not configuration.is_baseline and configuration.settings not in against:
                yield f"{configuration.label} has no run at k=1 with the same settings, so it is compared with nothing."
        for run in rows.all_runs:
            have = int((rows.cell[run] >= 0).sum())
            if have < self._wanted:
                yield f"{rows.run_label(run)} has {have} of {self._wanted} documents."
        asked = self.evidence.request.get("settings", {}).get("policies", ())
        absent = sorted(set(asked) - {configuration.policy for configuration in rows.configurations})
        if absent:
            yield f"No rows yet of {', '.join(absent)}."


def _with_front(results: Sequence[ConfigurationResult]) -> tuple[ConfigurationResult, ...]:
    """Marks the front over accuracy and relative speed. Where nothing is generated there is none."""
    placed = [result for result in results if result.relative_speed is not None]
    points = [(r.accuracy.value, r.relative_speed.value) for r in placed if r.relative_speed is not None]
    standing = {id(result) for result, on_front in zip(placed, front(points), strict=True) if on_front}
    return tuple(replace(result, pareto=id(result) in standing) for result in results)

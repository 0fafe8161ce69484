"""From rows to verdicts: the one way in. Reads tables and the request, nothing from disk."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from orchestrator.analysis import gates
from orchestrator.analysis.columns import ANSWER, COLUMNS, codes, fingerprints
from orchestrator.analysis.errors import refuse
from orchestrator.analysis.findings import Evidence
from orchestrator.analysis.gates_rows import metrics
from orchestrator.analysis.pairs import TaskRows, split
from orchestrator.analysis.resample import DRAWS
from orchestrator.analysis.results import Analysis
from orchestrator.analysis.shapes import timeline
from orchestrator.analysis.task import TaskAnalysis
from orchestrator.analysis.verdict import Criteria

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
        refuse(f"the rows lack the columns {', '.join(absent)}; rows of this version of the program are needed")
    if not rows.num_rows:
        refuse("there are no rows to analyse yet; let a sweep finish some documents first")


def _check_comparable(tasks: Sequence[TaskRows], evidence: Evidence) -> None:
    """What no report can be made of, in one sentence each."""
    policies = sorted({configuration.policy for rows in tasks for configuration in rows.configurations})
    with_baseline = [rows for rows in tasks if any(c.is_baseline for c in rows.configurations)]
    if not with_baseline:
        refuse(f"no rows at k=1 among {', '.join(policies)}; a comparison needs the baseline: run policy k1 too")
    if not any(len({(c.is_baseline, c.settings) for c in rows.configurations}) > 1 for rows in with_baseline):
        refuse(f"only {', '.join(policies)} here; a comparison needs another policy beside k=1 in the same task")
    for finding in metrics(evidence):
        refuse(f"{finding.sentence.rstrip('.')}: no statistic can be made of them; run these trials again")


def _declared(request: Mapping[str, Any], name: str, otherwise: float) -> float:
    value = request.get(name, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        refuse(f"sweep.json: {name} {value!r} is no positive number; a number above 0 is allowed")
    return float(value)


def _criteria(declared: Criteria, margin: float | None, speedup: float | None) -> Criteria:
    for name, value in (("margin", margin), ("speed-up", speedup)):
        if value is not None and not (math.isfinite(value) and value > 0):
            refuse(f"{name} {value}: a number above 0 is allowed")
    chosen = replace(
        declared,
        margin=declared.margin if margin is None else margin,
        speedup=declared.speedup if speedup is None else speedup,
    )
    return replace(chosen, exploratory=chosen != declared)

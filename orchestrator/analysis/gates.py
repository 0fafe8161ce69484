"""Validity gates: what must hold before the numbers of a sweep may be compared.

A gate is a function that yields a finding for each violation. A violation that `withholds_verdict` leaves the verdicts
on the trials concerned undecided; the others are warnings.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy import special

from orchestrator.analysis.accuracy import differing_answers
from orchestrator.analysis.columns import Array, has_nonfinite_metric, to_numpy, varies_within
from orchestrator.analysis.runs import IncompleteRun, TaskRuns
from orchestrator.analysis.speedups import MAX_EXTRA_TRUNCATED
from orchestrator.analysis.trial_facts import (
    AttemptTimeline,
    describe_code,
    first_attempt_slowness,
    overlapping_attempts,
    trials_by_code,
)
from orchestrator.core.configuration import DECODE_SETTINGS, Configuration, listed_configurations
from orchestrator.core.race import Race
from orchestrator.core.speed import MAX_LENGTH_CHANGE, group_codes
from sampler.errors import counted
from sampler.records import GENERATE, LOGLIKELIHOOD

UNTIMED = "untimed"  # kind of an imported task that generates text, but has no times to compare
IMPORTED = "imported"  # key of sweep.json: another program produced the results, and how it ran is unknown
COLD_START_RATIO = 1.5  # tolerated ratio of the cost of an actor's first trial to that of its peers
REPLICATE_P = 1e-3  # of the F test between runs at k=1, which are identical by definition
REPLICATE_RATIO = 1.05  # smaller ratios between their times do not withhold a verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a gate found: a violation, or (`ok`) that there is none."""

    sentence: str
    gate: str = ""  # its name in GATES; filled in by check_gates
    ok: bool = False
    trials: tuple[str, ...] = ()  # ids of the trials concerned; empty: all trials
    withholds_verdict: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """The input of all gates. `request` is sweep.json, `attempts` the trial.json files (store.schema.ATTEMPTS)."""

    table: pa.Table
    tasks: Sequence[TaskRuns]
    timeline: AttemptTimeline
    documents: Mapping[str, pa.Table]
    request: Mapping[str, Any]
    race: Race | None = None  # None: the sweep is not a race
    attempts: pa.Table | None = None

    def kind(self, rows: TaskRuns) -> str:
        """The task's kind in sweep.json; if that is missing, inferred from whether the rows have tokens."""
        recorded = self.request.get("tasks", {}).get(rows.task, {}).get("kind")
        return str(recorded) if recorded else (GENERATE if rows.columns["tokens"].any() else LOGLIKELIHOOD)

    def incomplete_runs(self, rows: TaskRuns) -> list[IncompleteRun]:
        """Runs that lack documents; they need all wanted ones, or fewer if a race has stopped the configuration."""
        wanted = self.wanted_documents(rows)
        by_race = {} if self.race is None else self.race.needed_documents()
        result = []
        for run, cells in enumerate(rows.cell):
            present, key = int((cells >= 0).sum()), (rows.task, rows.configuration_of(run).configuration)
            needed = min(wanted, by_race.get(key, wanted))
            if present < needed:
                result.append(IncompleteRun(run=run, present=present, needed=needed))
        return result

    def wanted_documents(self, rows: TaskRuns) -> int:
        """Number of documents requested; if unknown, of those that the sweep describes, or that any run has."""
        requested = self.request.get("tasks", {}).get(rows.task, {}).get("documents")
        if isinstance(requested, int):
            return requested
        described = self.documents.get(rows.task)
        return rows.documents if described is None else described.num_rows


def check_gates(evidence: Evidence) -> tuple[Finding, ...]:
    """Findings of all gates, in the order of GATES; for a gate without violations, a single finding that is ok."""
    result: list[Finding] = []
    for name, (gate, passed) in GATES.items():
        if IMPORTED in evidence.request and name not in GATES_OF_IMPORTED:
            continue
        findings = list(gate(evidence)) or [Finding(sentence=passed, ok=True)]
        result += [replace(finding, gate=name) for finding in findings]
    return tuple(result)


def _failed(rows: TaskRuns, indices: Array, text: str, *, withholds_verdict: bool = False) -> Finding:
    sentence = f"{rows.task}: {text}."
    return Finding(sentence=sentence, trials=rows.trials_of(indices), withholds_verdict=withholds_verdict)


def replay(evidence: Evidence) -> Iterator[Finding]:
    """Layers were replayed in every eligible pass, and never at k=1."""
    for rows in evidence.tasks:
        columns = rows.columns
        k = columns["k"].astype(float)
        missed = np.flatnonzero((k != 1) & (columns["replayed"] < columns["eligible"]))
        if len(missed):
            passes = int((columns["eligible"] - columns["replayed"])[missed].sum())
            text = f"{passes} passes should have replayed layers and did not"
            yield _failed(rows, missed, text, withholds_verdict=True)
        wrong = np.flatnonzero((k == 1) & ((columns["replayed"] > 0) | (columns["layers_reused"] > 0)))
        if len(wrong):
            yield _failed(rows, wrong, "layers were replayed at k=1", withholds_verdict=True)
        for number, configuration in enumerate(rows.configurations):
            indices = rows.rows_of(rows.runs_of(number))
            if configuration.k != 1 and not columns["eligible"][indices].any():
                text = f"{configuration.label} had no pass that could replay, so it is identical to k=1"
                yield _failed(rows, indices, text, withholds_verdict=True)


def baseline_agreement(evidence: Evidence) -> Iterator[Finding]:
    """Runs at k=1 give the same tokens (or choose the same option) on the same type of device and batch size."""
    for rows in evidence.tasks:
        indices = np.flatnonzero(rows.columns["k"].astype(float) == 1)
        differing, documents = differing_answers(rows, indices)
        if len(differing):
            number = counted(documents, "document")
            text = f"runs at k=1 gave different answers to {number}, with the same device and batch size"
            yield _failed(rows, differing, text)


def output_mode(evidence: Evidence) -> Iterator[Finding]:
    """In output mode, policies that differ only in their layers give the same answers by construction."""
    for rows in evidence.tasks:
        columns, modes = rows.columns, rows.names["mode"]
        if "output" not in modes:
            continue
        rule = np.array([_without_layers(str(name)) for name in rows.names["policy"]])[columns["policy"]]
        indices = np.flatnonzero((columns["mode"] == modes.index("output")) & (columns["k"].astype(float) != 1))
        differing, documents = differing_answers(rows, indices, rule)
        if len(differing):
            number = counted(documents, "document")
            text = f"output mode gave different answers to {number} for different subsets of layers"
            yield _failed(rows, differing, text)


def _without_layers(policy: str) -> str:
    """The policy's name without its subset of layers: k3_last.output → k3.output."""
    rule, _, options = policy.partition(".")
    return rule.partition("_")[0] + "." + options


def one_version(evidence: Evidence) -> Iterator[Finding]:
    """One version of the code and one revision of the model produced all rows."""
    revisions = {str(evidence.request.get("identity", {}).get("model_revision"))}
    by_code: dict[str, list[str]] = {}
    if evidence.attempts is not None:
        used = evidence.attempts.filter(pc.field("attempt").is_valid())
        revisions |= set(used["model_revision"].drop_null().unique().to_pylist())
        by_code = trials_by_code(used)
    commands = evidence.request.get("commands", ())
    versions = sorted(set(by_code) or {describe_code(command.get("code")) for command in commands})
    if len(versions) > 1:
        yield Finding(
            sentence=f"{len(versions)} versions of the code produced the rows: {', '.join(versions)}.",
            trials=tuple(sorted({trial for version in versions[1:] for trial in by_code.get(version, ())})),
            withholds_verdict=True,
        )
    if len(revisions) > 1:
        text = f"{len(revisions)} revisions of the model produced the rows: {', '.join(sorted(revisions))}."
        yield Finding(sentence=text, withholds_verdict=True)
    if len(versions) == 1 and "uncommitted" in versions[0]:
        text = f"The code differed from its commit ({versions[0]}), so this version cannot be checked out again."
        yield Finding(sentence=text)


def settings(evidence: Evidence) -> Iterator[Finding]:
    """Effective settings are recorded, constant where they must be, and as requested."""
    requested, identity = evidence.request.get("settings", {}), evidence.request.get("identity", {})
    listed = listed_configurations(requested)
    for rows in evidence.tasks:
        columns = rows.columns
        for name in DECODE_SETTINGS if evidence.kind(rows) == GENERATE else ():  # scoring uses none of them
            if requested.get(name):
                yield from _requested_setting(rows, name, requested[name], listed)
        yield from _one_value(rows, "batch_size", [int(v) for v in np.unique(columns["batch_size"])], identity)
        yield from _one_value(rows, "dtype", [rows.names["dtype"][c] for c in np.unique(columns["dtype"])], identity)
        blank = np.concatenate([_blank(rows, name) for name in ("dtype", "device", "actor")])
        if len(blank):
            yield _failed(rows, blank, "rows do not record their dtype, device or actor")
        changed = _changed_within_trials(rows)
        if len(changed):
            yield _failed(rows, changed, "settings changed within a trial", withholds_verdict=True)


def _requested_setting(rows: TaskRuns, name: str, requested: Any, listed: Sequence[Configuration]) -> Iterator[Finding]:
    values = [*(requested if isinstance(requested, list | tuple) else [requested])]
    values += [getattr(configuration, name) for configuration in listed]
    used = [resolved.configuration for resolved in rows.configurations]
    other = [i for i, one in enumerate(used) if one.uses(name) and getattr(one, name) not in values]
    if other:
        text = f"rows ran with {used[other[0]].settings_label([name])}, not as requested"
        indices = np.flatnonzero(np.isin(rows.owner[rows.run], other))
        yield _failed(rows, indices, text, withholds_verdict=True)


def _one_value(rows: TaskRuns, column: str, seen: Sequence[Any], identity: Mapping[str, Any]) -> Iterator[Finding]:
    every, name = np.arange(len(rows.row)), column.replace("_", " ")
    if len(seen) > 1:
        text = f"rows ran with more than one {name}: {', '.join(str(value) for value in seen)}"
        yield _failed(rows, every, text, withholds_verdict=True)
    elif identity.get(column) not in (None, "auto", seen[0]):
        text = f"rows ran with {name} {seen[0]}, but {identity[column]} was requested"
        yield _failed(rows, every, text, withholds_verdict=True)


def _blank(rows: TaskRuns, name: str) -> Array:
    """Rows that do not record this column."""
    empty = [code for code, value in enumerate(rows.names[name]) if value in (None, "", "auto")]
    return np.flatnonzero(np.isin(rows.columns[name], empty))


def _changed_within_trials(rows: TaskRuns) -> Array:
    """Rows of trials in which a setting changes, or in which the device changes within an attempt."""
    columns = rows.columns
    result: list[Array] = []
    for keys, constant in (
        (("trial_id",), (*DECODE_SETTINGS, "policy", "batch_size", "dtype", "repeat")),
        (("trial_id", "attempt", "actor"), ("device",)),
    ):
        group, count = group_codes(*(columns[key] for key in keys))
        result += [np.flatnonzero(varies_within(columns[name], group, count)[group]) for name in constant]
    return np.unique(np.concatenate(result))


def output_length(evidence: Evidence) -> Iterator[Finding]:
    """Answers are as long as at k=1: tokens per second rewards repetition."""
    for rows in evidence.tasks:
        truncated = rows.columns["truncated"]
        for number, configuration in enumerate(rows.configurations):
            baseline, runs = rows.baseline_runs(configuration.compared_with), rows.runs_of(number)
            if configuration.is_baseline or not len(baseline):
                continue
            both = rows.present(runs) & rows.present(baseline)
            ours, base = rows.mean(runs, "tokens")[both].sum(), rows.mean(baseline, "tokens")[both].sum()
            if not base:
                continue
            indices, change = rows.rows_of(runs), ours / base - 1
            if abs(change) > MAX_LENGTH_CHANGE:
                text = f"answers of {configuration.label} are {abs(change):.0%} {'longer' if change > 0 else 'shorter'}"
                text += " than those of k=1, so compare seconds per document as well as tokens per second"
                yield _failed(rows, indices, text)
            more = truncated[indices].mean() - truncated[rows.rows_of(baseline)].mean()
            if more > MAX_EXTRA_TRUNCATED:
                text = f"{configuration.label} hit the length limit {100 * more:.1f} points more often than k=1"
                yield _failed(rows, indices, text)


def every_document(evidence: Evidence) -> Iterator[Finding]:
    """Every run has every wanted document exactly once, and it is the document that the sweep describes."""
    for rows in evidence.tasks:
        group, count = group_codes(rows.run, rows.columns["doc_id"])
        duplicates = np.flatnonzero((np.bincount(group, minlength=count) > 1)[group])
        if len(duplicates):
            number = counted(len(np.unique(group[duplicates])), "document")
            text = f"{number} more than once in a run; the first row is used"
            yield _failed(rows, duplicates, text)
        incomplete = evidence.incomplete_runs(rows)
        if incomplete:
            present, needed = min((one.present, one.needed) for one in incomplete)
            text = (
                f"{len(incomplete)} of {len(rows.owner)} runs lack documents (the shortest has {present} of {needed})"
            )
            yield _failed(rows, rows.rows_of([one.run for one in incomplete]), text)
        yield from _described_documents(rows, evidence)


def _described_documents(rows: TaskRuns, evidence: Evidence) -> Iterator[Finding]:
    documents = evidence.documents.get(rows.task)
    if documents is None:
        return
    expected = rows.described(documents, "doc_hash")
    stated = evidence.table["doc_hash"].cast(pa.string())
    stated = stated.take(pa.array(rows.row)) if len(evidence.tasks) > 1 else stated
    same = pc.equal(stated, expected.take(pa.array(rows.columns["doc_id"])))
    other = np.flatnonzero(~to_numpy(same.fill_null(False)).astype(bool))
    if len(other):
        text = f"{counted(len(other), 'row')} for documents that differ from those the sweep describes"
        yield _failed(rows, other, text)


def cold_start(evidence: Evidence) -> Iterator[Finding]:
    """An actor's first trial is as fast as its calibrated peers."""
    line = evidence.timeline
    for first, ratio in first_attempt_slowness(line):
        if ratio > COLD_START_RATIO or ratio < 1 / COLD_START_RATIO:
            change, cause = (
                (f"{ratio:.1f} times slower", "it may have started cold")
                if ratio > 1
                else (f"{1 / ratio:.1f} times faster", "its calibration may have been cold")
            )
            run, actor = line.runs[line.run[first]], line.actor[first]
            text = f"the first trial of {actor} ran {change} per pass than its peers; {cause}"
            sentence = f"{run.task} {run.label}: {text}."
            yield Finding(sentence=sentence, trials=(str(line.trial_id[first]),))


def baseline_speed(evidence: Evidence) -> Iterator[Finding]:
    """Runs at k=1 differ in speed no more than their trials vary: what slowed one run may have slowed any other."""
    for rows in evidence.tasks:
        for settings in dict.fromkeys(one.compared_with for one in rows.configurations):
            runs = rows.baseline_runs(settings)
            effects = None if len(runs) < 2 else _trial_effects(rows, runs)
            if effects is None or effects.shape[1] < 2:
                continue
            means = effects.mean(axis=1)
            count, trials = effects.shape
            within = ((effects - means[:, None]) ** 2).sum() / ((count - 1) * (trials - 1))
            ratio = trials * (means**2).sum() / (count - 1) / max(within, 1e-12)
            spread = float(np.exp(means.max() - means.min()))
            if special.fdtrc(count - 1, (count - 1) * (trials - 1), ratio) < REPLICATE_P and spread > REPLICATE_RATIO:
                slowest = rows.run_label(int(runs[means.argmax()]))
                text = f"{slowest} ran {spread:.2f} times slower than another run at k=1, in all of its trials"
                yield _failed(rows, rows.rows_of(runs), text, withholds_verdict=True)


def _trial_effects(rows: TaskRuns, runs: Array) -> Array | None:
    """Runs × shards: log calibrated time relative to the mean over runs, for shards that all runs completed."""
    indices = rows.timed[runs][:, rows.timed_in_all(runs)]
    if not indices.size:
        return None
    group = np.unique(rows.columns["trial_id"][indices], axis=1, return_inverse=True)[1].reshape(-1)
    work = np.stack([np.bincount(group, weights=rows.columns["work"][row]) for row in indices])
    if not (work > 0).all():
        return None
    result: Array = np.log(work) - np.log(work).mean(axis=0)
    return result


def own_device(evidence: Evidence) -> Iterator[Finding]:
    """No two actors share a GPU: no fraction of one was requested, and no trials on one GPU overlap in time."""
    share = evidence.request.get("settings", {}).get("gpus_per_actor")
    if isinstance(share, int | float) and 0 < share < 1:
        text = f"Each actor had {share:g} of a GPU and shared the device with others: speeds are not comparable."
        yield Finding(sentence=text, withholds_verdict=True)
        return
    line, shared = evidence.timeline, overlapping_attempts(evidence.timeline, evidence.attempts)
    if shared:
        first, second = (line.actor[attempt] for attempt in shared[0])
        text = f"{first} and {second} decoded on the same GPU at the same time: speeds are not comparable."
        trials = tuple(sorted({str(line.trial_id[attempt]) for pair in shared for attempt in pair}))
        yield Finding(sentence=text, trials=trials, withholds_verdict=True)


def metrics(evidence: Evidence) -> Iterator[Finding]:
    """Every row has a finite score, time and calibration."""
    nonfinite = has_nonfinite_metric(evidence.table)
    for rows in evidence.tasks:
        columns = rows.columns
        checks = {
            "score": ("finite score", nonfinite[rows.row]),
            "batch_seconds": ("time above 0", columns["batch_seconds"] <= 0),
            "calibration": ("calibration above 0", columns["calibration"] <= 0),
        }
        if IMPORTED in evidence.request and evidence.kind(rows) != GENERATE:
            checks = {"score": checks["score"]}
        for column, (name, wrong) in checks.items():
            indices = np.flatnonzero(wrong | ~np.isfinite(columns[column]))
            if len(indices):
                first = rows.doc_ids[columns["doc_id"][indices[0]]]
                text = f"{counted(len(indices), 'row')} with no {name} (first: {first})"
                yield _failed(rows, indices, text, withholds_verdict=True)


GATES: dict[str, tuple[Callable[[Evidence], Iterator[Finding]], str]] = {
    "replay": (replay, "Layers were replayed in every eligible pass, and never at k=1."),
    "agreement at k=1": (
        baseline_agreement,
        "All runs at k=1 gave the same answers on the same type of device and at the same batch size.",
    ),
    "output mode": (output_mode, "Output mode gave the same answers for every subset of layers, or was not used."),
    "one version": (one_version, "One version of the code and one revision of the model produced all rows."),
    "settings": (settings, "Effective threshold, dtype, batch size and device are recorded and as requested."),
    "output length": (output_length, "Answers are as long as those of k=1."),
    "every document once": (every_document, "Every run has every document exactly once."),
    "cold start": (cold_start, "Every actor's first trial was as fast as its calibrated peers."),
    "speed at k=1": (baseline_speed, "Runs at k=1 differ in speed no more than their trials vary."),
    "own device": (own_device, "No two actors shared a GPU."),
    "metrics": (metrics, "Every row has a finite score, time and calibration."),
}
GATES_OF_IMPORTED = ("output length", "every document once", "metrics")

"""What a validity gate looks at and what it says. A finding that failed and `withholds` takes verdicts away."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis.columns import Array, grouped, has_nan, numbers
from orchestrator.analysis.runs import TaskRows, Trial
from orchestrator.analysis.speedups import DRIFT, MORE_CUT, cut


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    gate: str
    ok: bool
    sentence: str
    trials: tuple[str, ...] = ()  # none of them named: all are concerned
    withholds: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """All that gates look at. `trials` are the trial.json files, where the caller has them."""

    table: pa.Table
    tasks: Sequence[TaskRows]
    timeline: Sequence[Trial]
    documents: Mapping[str, pa.Table]
    request: Mapping[str, Any]
    trials: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def trials_of(rows: TaskRows, places: Array) -> tuple[str, ...]:
    names = rows.names["trial_id"]
    return tuple(sorted(str(names[code]) for code in np.unique(rows.columns["trial_id"][places])))


def failed(gate: str, rows: TaskRows, places: Array, said: str, *, withholds: bool = False) -> Finding:
    return Finding(
        gate=gate, ok=False, sentence=f"{rows.task}: {said}.", trials=trials_of(rows, places), withholds=withholds
    )


def wanted_documents(rows: TaskRows, documents: pa.Table | None, request: Mapping[str, Any]) -> int:
    """As many as the request says, else as the folder describes, else as any run has."""
    said = request.get("tasks", {}).get(rows.task, {}).get("documents")
    if isinstance(said, int):
        return said
    return rows.documents if documents is None else documents.num_rows


SAME_SETTINGS = ("threshold", "small_block", "block_cache", "device", "doc_id")


def replay(evidence: Evidence) -> Iterator[Finding]:
    """Layers were replayed wherever passes were eligible, and never at k=1."""
    for rows in evidence.tasks:
        columns = rows.columns
        k = columns["k"].astype(float)
        missed = np.flatnonzero((k != 1) & (columns["replayed"] < columns["eligible"]))
        if len(missed):
            passes = int((columns["eligible"] - columns["replayed"])[missed].sum())
            yield failed("replay", rows, missed, f"{passes} passes were to replay layers and did not", withholds=True)
        wrong = np.flatnonzero((k == 1) & ((columns["replayed"] > 0) | (columns["layers_reused"] > 0)))
        if len(wrong):
            yield failed("replay", rows, wrong, "layers were replayed at k=1, where none may be", withholds=True)
        for number, configuration in enumerate(rows.configurations):
            places = rows.rows_of(rows.runs_of(number))
            if not configuration.is_baseline and not columns["eligible"][places].any():
                said = f"{configuration.label} never came to a pass that could replay, so it is k=1 by another name"
                yield failed("replay", rows, places, said, withholds=True)


def baseline_agreement(evidence: Evidence) -> Iterator[Finding]:
    """Runs at k=1 give the same tokens (or choose the same option) on the same type of device."""
    for rows in evidence.tasks:
        columns = rows.columns
        places = np.flatnonzero(columns["k"].astype(float) == 1)
        apart, documents = _disagreeing(columns["mark"], [columns[axis] for axis in SAME_SETTINGS], places)
        if len(apart):
            said = f"runs at k=1 gave different answers to {documents} documents on the same type of device"
            yield failed("agreement at k=1", rows, apart, said)


def output_mode(evidence: Evidence) -> Iterator[Finding]:
    """In output mode the subset of layers cannot matter: answers are identical by construction."""
    for rows in evidence.tasks:
        columns, modes = rows.columns, rows.names["mode"]
        if "output" not in modes:
            continue
        rule = np.array([_without_layers(str(name)) for name in rows.names["policy"]])[columns["policy"]]
        places = np.flatnonzero((columns["mode"] == modes.index("output")) & (columns["k"].astype(float) != 1))
        apart, documents = _disagreeing(columns["mark"], [rule, *(columns[axis] for axis in SAME_SETTINGS)], places)
        if len(apart):
            said = f"output mode gave different answers to {documents} documents for different subsets of layers"
            yield failed("output mode", rows, apart, said)


def _without_layers(policy: str) -> str:
    """k3_last.output → k3.output: the same rule whatever its layers."""
    rule, _, options = policy.partition(".")
    return rule.partition("_")[0] + "." + options


def _disagreeing(marks: Array, keys: Sequence[Array], places: Array) -> tuple[Array, int]:
    """Of rows that share the keys, those in a group with more than one fingerprint; and how many groups these are."""
    if not len(places):
        return places, 0
    group, count = grouped(*(key[places] for key in keys))
    lowest, highest = np.full(count, np.iinfo(np.uint64).max, np.uint64), np.zeros(count, np.uint64)
    np.minimum.at(lowest, group, marks[places])
    np.maximum.at(highest, group, marks[places])
    differs = lowest != highest
    return places[differs[group]], int(differs.sum())


def length(evidence: Evidence) -> Iterator[Finding]:
    """Output lengths are those of k=1: tokens per second rewards who repeats himself."""
    for rows in evidence.tasks:
        for number, configuration in enumerate(rows.configurations):
            against = rows.baseline_runs(configuration.settings)
            runs = rows.runs_of(number)
            if configuration.is_baseline or not len(against):
                continue
            both = rows.present(runs) & rows.present(against)
            ours, base = rows.mean(runs, "tokens")[both].sum(), rows.mean(against, "tokens")[both].sum()
            if not base:
                continue
            places = rows.rows_of(runs)
            off = ours / base - 1
            if abs(off) > DRIFT:
                said = f"answers of {configuration.label} are {abs(off):.0%} {'longer' if off > 0 else 'shorter'} than"
                said += " those of k=1, so seconds per document must stand beside tokens per second"
                yield failed("output length", rows, places, said)
            ended = cut(rows)
            more = ended[places].mean() - ended[rows.rows_of(against)].mean()
            if more > MORE_CUT:
                said = (
                    f"{configuration.label} hit the longest length allowed {100 * more:.1f} points more often than k=1"
                )
                yield failed("output length", rows, places, said)


SLOWER = 1.5  # a first trial this much off its peers is a cold start
PEERS = 2
AXES = ("threshold", "small_block", "block_cache")


def one_version(evidence: Evidence) -> Iterator[Finding]:
    """One state of the code and one revision of the model made all rows."""
    codes = [command.get("code") for command in evidence.request.get("commands", ())]
    revisions = {str(evidence.request.get("identity", {}).get("model_revision"))}
    by_code: dict[str, list[str]] = {}
    for trial_id, trial in evidence.trials.items():
        for attempt in trial.get("attempts", ()):
            by_code.setdefault(_version(attempt.get("code")), []).append(trial_id)
            revisions |= {str(attempt["model_revision"])} if "model_revision" in attempt else set()
    versions = sorted(set(by_code) or {_version(code) for code in codes})
    trials = tuple(sorted({trial for version in versions[1:] for trial in by_code.get(version, ())}))
    if len(versions) > 1:
        said = f"rows were made by {len(versions)} versions of the code: {', '.join(versions)}"
        yield Finding(gate="one version", ok=False, sentence=f"{said}.", trials=trials, withholds=True)
    if len(revisions) > 1:
        said = f"rows were made with {len(revisions)} revisions of the model: {', '.join(sorted(revisions))}"
        yield Finding(gate="one version", ok=False, sentence=f"{said}.", withholds=True)
    if any("changed files" in version for version in versions) and len(versions) == 1:
        said = f"the code had changed files beside its commit ({versions[0]}), so it cannot be had again from it"
        yield Finding(gate="one version", ok=False, sentence=f"{said}.")


def _version(code: object) -> str:
    if not isinstance(code, Mapping) or not code.get("commit"):
        return "unknown"
    return str(code["commit"])[:12] + (" with changed files" if code.get("dirty") else "")


def settings(evidence: Evidence) -> Iterator[Finding]:
    """Effective settings are recorded, constant where they must be, and those that were asked for."""
    asked, identity = evidence.request.get("settings", {}), evidence.request.get("identity", {})
    for rows in evidence.tasks:
        columns = rows.columns
        for axis in (axis for axis in AXES if asked.get(axis)):
            wanted = np.array(asked[axis] if isinstance(asked[axis], list | tuple) else [asked[axis]], dtype=float)
            strange = np.flatnonzero(~np.isin(columns[axis].astype(float), wanted))
            if len(strange):
                said = f"rows ran with {axis.replace('_', ' ')} {columns[axis][strange[0]]:g}, which was not asked for"
                yield failed("settings", rows, strange, said, withholds=True)
        yield from _constant(rows, "batch_size", [int(v) for v in np.unique(columns["batch_size"])], identity)
        yield from _constant(rows, "dtype", [rows.names["dtype"][c] for c in np.unique(columns["dtype"])], identity)
        blank = [i for name in ("dtype", "device", "actor") for i in _blank(rows, name)]
        if blank:
            yield failed("settings", rows, np.array(blank), "rows do not say their dtype, device or actor")
        changed = _changing(rows)
        if len(changed):
            yield failed("settings", rows, changed, "settings changed within a trial", withholds=True)


def _constant(rows: TaskRows, column: str, seen: Sequence[Any], identity: Mapping[str, Any]) -> Iterator[Finding]:
    every, name = np.arange(len(rows.row)), column.replace("_", " ")
    if len(seen) > 1:
        said = f"rows ran with more than one {name}: {', '.join(str(value) for value in seen)}"
        yield failed("settings", rows, every, said, withholds=True)
    elif identity.get(column) not in (None, "auto", seen[0]):
        said = f"rows ran with {name} {seen[0]}, the sweep was asked for {identity[column]}"
        yield failed("settings", rows, every, said, withholds=True)


def _blank(rows: TaskRows, name: str) -> list[int]:
    empty = [code for code, value in enumerate(rows.names[name]) if value in (None, "", "auto")]
    return [int(i) for i in np.flatnonzero(np.isin(rows.columns[name], empty))] if empty else []


def _changing(rows: TaskRows) -> Array:
    """Rows of trials in which a setting, or within one attempt the device, is not the same throughout."""
    columns = rows.columns
    result: list[Array] = []
    for keys, axes in (
        (("trial_id",), (*AXES, "policy", "batch_size", "dtype", "repeat")),
        (("trial_id", "attempt", "actor"), ("device",)),
    ):
        group, count = grouped(*(columns[key] for key in keys))
        for axis in axes:
            low, high = np.full(count, np.inf), np.full(count, -np.inf)
            np.minimum.at(low, group, columns[axis].astype(float))
            np.maximum.at(high, group, columns[axis].astype(float))
            result.append(np.flatnonzero((low != high)[group]))
    return np.unique(np.concatenate(result))


def every_document(evidence: Evidence) -> Iterator[Finding]:
    """Every wanted document is there exactly once in every run, and is the document that the folder describes."""
    for rows in evidence.tasks:
        columns = rows.columns
        group, count = grouped(rows.run, columns["doc_id"])
        twice = np.flatnonzero((np.bincount(group, minlength=count) > 1)[group])
        if len(twice):
            said = (
                f"{len(np.unique(group[twice]))} documents are there more than once in a run; the first row was taken"
            )
            yield failed("every document once", rows, twice, said)
        wanted = wanted_documents(rows, evidence.documents.get(rows.task), evidence.request)
        short = [run for run in rows.all_runs if (rows.cell[run] >= 0).sum() < wanted]
        if short:
            worst = min(int((rows.cell[run] >= 0).sum()) for run in short)
            said = f"{len(short)} of {len(rows.owner)} runs lack documents (the shortest has {worst} of {wanted})"
            yield failed("every document once", rows, rows.rows_of(short), said)
        yield from _described(rows, evidence)


def _described(rows: TaskRows, evidence: Evidence) -> Iterator[Finding]:
    documents = evidence.documents.get(rows.task)
    if documents is None:
        return
    found = pc.index_in(pa.array(rows.doc_ids, pa.string()), value_set=documents["doc_id"].combine_chunks())
    expected = documents["doc_hash"].combine_chunks().take(found)
    stated = evidence.table["doc_hash"].cast(pa.string())
    stated = stated.take(pa.array(rows.row)) if len(evidence.tasks) > 1 else stated
    same = pc.equal(stated, expected.take(pa.array(rows.columns["doc_id"])))
    strange = np.flatnonzero(~numbers(same.fill_null(False)).astype(bool))
    if len(strange):
        said = f"{len(strange)} rows answer documents that are not, or no longer, those the folder describes"
        yield failed("every document once", rows, strange, said)


def cold_start(evidence: Evidence) -> Iterator[Finding]:
    """The first trial of an actor is as fast as its calibrated peers.

    Peers of other policies leave out other layers, and in output mode most of a pass: what is off must be off both by
    the pass and by the layer that ran.
    """
    by_settings: dict[object, list[Trial]] = {}
    by_rule: dict[object, list[Trial]] = {}
    for trial in (trial for trial in evidence.timeline if trial.work_per_pass > 0):
        by_settings.setdefault((trial.task, trial.settings), []).append(trial)
        by_rule.setdefault((trial.task, trial.settings, _rule(trial.label)), []).append(trial)
    for trial in (trial for trial in evidence.timeline if trial.first_of_actor and trial.work_per_pass > 0):
        same = by_rule[trial.task, trial.settings, _rule(trial.label)]
        peers = same if len(same) > PEERS else by_settings[trial.task, trial.settings]
        if len(peers) > PEERS:
            others = [peer for peer in peers if peer is not trial]
            ratios = (
                trial.work_per_pass / float(np.median([peer.work_per_pass for peer in others])),
                trial.work_per_layer / float(np.median([peer.work_per_layer for peer in others])),
            )
            ratio = min(ratios) if min(ratios) > 1 else min(1.0, max(ratios))
            if ratio > SLOWER or ratio < 1 / SLOWER:
                yield Finding(gate="cold start", ok=False, sentence=_cold(trial, ratio), trials=(trial.trial_id,))


def _rule(label: str) -> str:
    """All of k=1 is one rule; any other policy is its own peer only."""
    return "k1" if label.split("_")[0].split(".")[0].split(" ")[0] == "k1" else label


def _cold(trial: Trial, ratio: float) -> str:
    if ratio > 1:
        said = f"ran {ratio:.1f} times slower per pass than its peers, as if it had started cold"
    else:
        said = f"ran {1 / ratio:.1f} times faster per pass than its peers, as if it had been calibrated cold"
    return f"{trial.task} {trial.label}: the first trial of {trial.actor} {said}."


def own_device(evidence: Evidence) -> Iterator[Finding]:
    """No two actors share a GPU: neither by a fractional request, nor by what the trials recorded."""
    share = evidence.request.get("settings", {}).get("gpus_per_actor")
    if isinstance(share, int | float) and 0 < share < 1:
        said = f"each actor had {share:g} of a GPU, and neighbours share the device: speeds are not comparable."
        yield Finding(gate="own device", ok=False, sentence=said, withholds=True)
        return
    shared = _on_one_device(evidence)
    if shared:
        (first, second), *_ = shared
        said = f"{first.actor} and {second.actor} decoded on the same GPU at the same time: speeds are not comparable."
        trials = tuple(sorted({trial.trial_id for pair in shared for trial in pair}))
        yield Finding(gate="own device", ok=False, sentence=said, trials=trials, withholds=True)


def _on_one_device(evidence: Evidence) -> list[tuple[Trial, Trial]]:
    """Attempts of different actors on one GPU, of which the second began before the first had ended."""
    attempts = [attempt for trial in evidence.trials.values() for attempt in trial.get("attempts", ())]
    devices = {
        str(attempt.get("actor")): [(str(attempt.get("node_id")), str(gpu)) for gpu in attempt.get("gpus") or ()]
        for attempt in attempts
    }
    by_device: dict[tuple[str, str], list[Trial]] = {}
    for trial in sorted(evidence.timeline, key=lambda trial: trial.started_at):
        for device in devices.get(trial.actor, ()):
            by_device.setdefault(device, []).append(trial)
    return [
        (first, second)
        for trials in by_device.values()
        for first, second in pairwise(trials)
        if first.actor != second.actor and second.started_at < first.started_at + first.seconds
    ]


def metrics(evidence: Evidence) -> Iterator[Finding]:
    """Every row has a finite score, time and calibration."""
    nan = has_nan(evidence.table)
    for rows in evidence.tasks:
        columns = rows.columns
        lacking = {
            "score": ("finite score", nan[rows.row]),
            "batch_seconds": ("time above 0", columns["batch_seconds"] <= 0),
            "calibration": ("calibration above 0", columns["calibration"] <= 0),
        }
        for column, (name, wrong) in lacking.items():
            places = np.flatnonzero(wrong | ~np.isfinite(columns[column]))
            if len(places):
                first = rows.doc_ids[columns["doc_id"][places[0]]]
                said = f"{len(places)} rows have no {name} (the first is of {first})"
                yield failed("metrics", rows, places, said, withholds=True)


Gate = Callable[[Evidence], Iterator[Finding]]
GATES: dict[str, tuple[Gate, str]] = {
    "replay": (replay, "Layers were replayed in every pass that was to replay, and never at k=1."),
    "agreement at k=1": (baseline_agreement, "All runs at k=1 gave the same answers on the same type of device."),
    "output mode": (output_mode, "Output mode gave the same answers for every subset of layers, or was not used."),
    "one version": (one_version, "One version of the code and one revision of the model made all rows."),
    "settings": (settings, "Effective threshold, dtype, batch size and device are recorded and as asked for."),
    "output length": (length, "Output lengths are those of k=1."),
    "every document once": (every_document, "Every run has every document exactly once."),
    "cold start": (cold_start, "No actor's first trial was off its calibrated peers."),
    "own device": (own_device, "No two actors shared a GPU."),
    "metrics": (metrics, "Every row has a finite score, time and calibration."),
}


def check(evidence: Evidence) -> tuple[Finding, ...]:
    """All gates; one that finds nothing says what held."""
    result: list[Finding] = []
    for name, (gate, held) in GATES.items():
        result.extend(list(gate(evidence)) or [Finding(gate=name, ok=True, sentence=held)])
    return tuple(result)

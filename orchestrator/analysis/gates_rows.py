"""Gates about how rows came to be: versions, settings, documents, cold starts, numbers that are none."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis.columns import Array, grouped, has_nan, numbers
from orchestrator.analysis.findings import Evidence, Finding, failed, wanted_documents
from orchestrator.analysis.pairs import TaskRows
from orchestrator.analysis.shapes import Trial

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

"""Gates about what was computed and answered: replays, agreement where it must be, lengths. Knows no clock."""

from collections.abc import Iterator, Sequence

import numpy as np

from orchestrator.analysis.columns import Array, grouped
from orchestrator.analysis.findings import Evidence, Finding, failed
from orchestrator.analysis.speed import DRIFT, MORE_CUT, cut

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

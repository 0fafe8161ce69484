"""Each gate fires on a table made to break it, and on no clean one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from analysis_tables import NINE, Truth, World, asked, changed, described, draw, grid

from orchestrator.analysis.columns import fingerprints
from orchestrator.analysis.gates import GATES, Evidence, Finding, check_gates, cold_start, own_device
from orchestrator.analysis.runs import ResolvedConfiguration, split_by_task
from orchestrator.analysis.trial_facts import AttemptTimeline, RunOfTask, timeline
from orchestrator.core.configuration import Configuration
from orchestrator.store.schema import attempts_of

OUTPUT = {f"k{k}_{subset}.output": Truth(speedup=1.3) for k in (2, 3) for subset in ("first", "last")}
WORLD = World(
    policies={**dict.fromkeys(NINE, Truth()), **OUTPUT}, documents=60, shard=20, length_noise=0.02, document_noise=0.02
)

NO_LAYERS: dict[str, Any] = {"subset": None, "mode": None, "layers": ()}


def evidence(table: pa.Table, **changes: Any) -> Evidence:
    tasks = split_by_task(table, fingerprints(table), {"gsm8k": "exact_match"})
    request = {**asked(WORLD), **changes.pop("request", {})}
    given = {"documents": described(WORLD), **changes}
    return Evidence(table=table, tasks=tasks, timeline=timeline(tasks), request=request, **given)


@pytest.fixture(scope="module")
def clean() -> pa.Table:
    return draw(WORLD, 1)


def line(labels: list[str], **columns: Any) -> AttemptTimeline:
    """One attempt per label, in this order; a column may be one value for all."""
    runs = [
        RunOfTask(
            task="gsm8k",
            label=label,
            resolved=ResolvedConfiguration(
                configuration=Configuration(policy=label),
                k=int(label[1]),
                subset=None,
                mode=None,
                layers=(),
                label=label,
            ),
        )
        for label in labels
    ]
    defaults = dict.fromkeys(("tokens", "wall", "calibration", "work", "passes", "layers_computed"), 1.0)
    names = [f"t{number}" for number in range(len(labels))]
    values = {"started_at": np.arange(len(labels)), "trial_id": names, **defaults, **columns}
    arrays = {name: np.broadcast_to(np.asarray(value), len(labels)) for name, value in values.items()}
    return AttemptTimeline(runs=tuple(runs), run=np.arange(len(labels)), **arrays)


def recorded(attempts: dict[str, dict[str, Any]]) -> pa.Table:
    """By trial: the only attempt at it."""
    trial = {"task": "gsm8k", "policy": "k1", "repeat": 0, "shard": 0}
    records = {name: {"trial": trial, "attempts": [{"attempt": 0, **facts}]} for name, facts in attempts.items()}
    return attempts_of(records.items())


def failures(found: tuple[Finding, ...]) -> set[str]:
    return {finding.gate for finding in found if not finding.ok}


def where(table: pa.Table, policy: str, documents: int = 60) -> np.ndarray:
    """The first documents of a policy."""
    rows = np.array(table["policy"].to_pylist()) == policy
    return rows & (np.cumsum(rows) <= documents)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["generate", "loglikelihood"])
def test_no_gate_fires_on_a_clean_table(seed: int, kind: str) -> None:
    world = World(documents=60, shard=20, subtasks=3, length_noise=0.02, kind=kind, policies=grid(Truth(lost=0.1)))
    table = draw(world, seed)
    tasks = split_by_task(table, fingerprints(table), {})
    found = check_gates(
        Evidence(
            table=table,
            tasks=tasks,
            timeline=timeline(tasks),
            documents=described(world),
            request=asked(world),
        )
    )
    assert [finding.sentence for finding in found if not finding.ok] == []
    assert [finding.gate for finding in found] == list(GATES)


@pytest.mark.parametrize(("kind", "expected"), [("generate", {"settings"}), ("loglikelihood", set())])
def test_scored_tasks_have_no_decode_settings(kind: str, expected: set[str]) -> None:
    world = World(documents=60, shard=20, kind=kind, policies=grid(Truth()))
    request = {**asked(world), "settings": {"threshold": [0.85], "small_block": [4]}}
    assert failures(check_gates(evidence(draw(world, 0), request=request))) == expected


def test_no_gate_fires_with_output_mode(clean: pa.Table) -> None:
    assert failures(check_gates(evidence(clean))) == set()


def _cold(table: pa.Table) -> pa.Table:
    """The trial that began first on its actor takes twice as long."""
    trial = table["trial_id"][int(np.argmin(table["started_at"].to_numpy()))].as_py()
    slow = np.array(table["trial_id"].to_pylist()) == trial
    seconds = np.where(slow, 2.2, 1.0) * table["batch_seconds"].to_numpy()
    return table.set_column(
        table.schema.get_field_index("batch_seconds"), table.schema.field("batch_seconds"), pa.array(seconds)
    )


def _longer(table: pa.Table, policy: str, factor: float) -> pa.Table:
    tokens = np.where(where(table, policy), factor, 1.0) * table["tokens"].to_numpy()
    kind = table.schema.field("tokens")
    return table.set_column(table.schema.get_field_index("tokens"), kind, pa.array(tokens.astype(np.int32)))


BROKEN: dict[str, tuple[str, str, Callable[[pa.Table], pa.Table]]] = {
    "a pass that did not replay": (
        "replay",
        "should have replayed layers",
        lambda t: changed(t, "replayed", where(t, "k2_first", 3), 0),
    ),
    "a replay at k=1": ("replay", "at k=1", lambda t: changed(t, "replayed", where(t, "k1_last", 1), 2)),
    "reused layers at k=1": ("replay", "at k=1", lambda t: changed(t, "layers_reused", where(t, "k1_last", 1), 12)),
    "a policy that never acts": (
        "replay",
        "identical to k=1",
        lambda t: changed(changed(t, "eligible", where(t, "k3_last"), 0), "replayed", where(t, "k3_last"), 0),
    ),
    "another answer at k=1": (
        "agreement at k=1",
        "different answers to 1 document,",
        lambda t: changed(t, "token_ids", where(t, "k1_middle", 1), [1, 2, 3]),
    ),
    "a subset that matters in output mode": (
        "output mode",
        "different answers to 2 documents",
        lambda t: changed(t, "token_ids", where(t, "k3_last.output", 2), [1, 2, 3]),
    ),
    "another threshold": ("settings", "threshold 0.9", lambda t: changed(t, "threshold", where(t, "k2_last"), 0.9)),
    "two dtypes": ("settings", "more than one dtype", lambda t: changed(t, "dtype", where(t, "k2_last"), "bfloat16")),
    "two batch sizes": ("settings", "batch size", lambda t: changed(t, "batch_size", where(t, "k2_last"), 4)),
    "a device that is not named": (
        "settings",
        "do not record",
        lambda t: changed(t, "device", where(t, "k2_last", 5), ""),
    ),
    "a device that changes in a trial": (
        "settings",
        "changed within a trial",
        lambda t: changed(t, "device", where(t, "k2_last", 5), "gpu"),
    ),
    "longer answers": ("output length", "% longer than", lambda t: _longer(t, "k3_first", 1.2)),
    "shorter answers": ("output length", "shorter", lambda t: _longer(t, "k3_first", 0.8)),
    "answers that are cut": (
        "output length",
        "hit the length limit",
        lambda t: changed(t, "finish", where(t, "k3_first", 3), "length"),
    ),
    "a document twice": (
        "every document once",
        "1 document more than once",
        lambda t: pa.concat_tables([t, t.slice(5, 1)]),
    ),
    "a missing document": (
        "every document once",
        "1 of 13 runs lack documents (the shortest has 59 of 60)",
        lambda t: t.slice(1),
    ),
    "another document under the same name": (
        "every document once",
        "1 row for documents that differ",
        lambda t: changed(t, "doc_hash", where(t, "k2_first", 1), "other"),
    ),
    "a cold start": ("cold start", "2.2 times slower per pass", _cold),
    "a score that is NaN": (
        "metrics",
        "no finite score",
        lambda t: changed(
            changed(t, "correct", where(t, "k2_first", 1), None),
            "metrics",
            where(t, "k2_first", 1),
            '{"exact_match": NaN}',
        ),
    ),
    "a metric that is NaN next to a right answer": (
        "metrics",
        "no finite score",
        lambda t: changed(t, "metrics", where(t, "k2_first", 1), '{"exact_match": 1.0, "other": NaN}'),
    ),
    "no calibration": ("metrics", "no calibration", lambda t: changed(t, "calibration", where(t, "k2_first", 1), 0.0)),
    "no time": ("metrics", "no time", lambda t: changed(t, "batch_seconds", where(t, "k2_first", 1), float("nan"))),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_gate_fires_on_a_table_made_to_break_it(fault: str, clean: pa.Table) -> None:
    gate, text, break_it = BROKEN[fault]
    found = [finding for finding in check_gates(evidence(break_it(clean))) if not finding.ok]
    assert gate in {finding.gate for finding in found}
    matching = [finding for finding in found if finding.gate == gate and text in finding.sentence]
    assert matching, [finding.sentence for finding in found]
    assert matching[0].trials
    assert set(matching[0].trials) <= set(clean["trial_id"].to_pylist())


@pytest.mark.parametrize(
    ("first", "work", "text"),
    [
        (0.5, 1.0, None),  # output mode: half of the layers, so half of a pass's work and no start that was odd
        (0.34, 1.6, None),  # and with much that is no layer: dear by the layer, cheap by the pass
        (0.9, 2.2, "2.0 times slower per pass"),
        (0.9, 0.4, "2.5 times faster per pass"),
    ],
)
def test_a_policy_alone_is_measured_by_passes_and_by_layers(first: float, work: float, text: str | None) -> None:
    """An actor's first trial whose policy has no other: its peers leave out other layers."""

    labels = ["k2_last.output", *(f"k1_{i}" for i in range(4))]
    work, layers = np.array([work, 1.0, 1.0, 1.0, 1.0]), np.array([first, 1.0, 1.0, 1.0, 1.0])
    attempts = line(labels, actor="worker-1", work=layers * work * 1000, passes=1000.0, layers_computed=layers * 1000)
    found = list(cold_start(Evidence(table=None, tasks=(), timeline=attempts, documents={}, request={})))
    assert [text in finding.sentence for finding in found if text] == ([] if text is None else [True])
    assert bool(found) == (text is not None)


def test_only_the_broken_gate_fires(clean: pa.Table) -> None:
    """Faults that touch one thing are reported by one gate."""
    for fault in ("a pass that did not replay", "another answer at k=1", "a cold start", "a missing document"):
        gate, _, break_it = BROKEN[fault]
        assert failures(check_gates(evidence(break_it(clean)))) == {gate}, fault


def test_disagreement_between_devices_is_none(clean: pa.Table) -> None:
    """k=1 agrees token for token within a type of device; between types rounding may differ."""
    table = changed(clean, "device", where(clean, "k1_middle"), "gpu")
    table = changed(table, "token_ids", where(table, "k1_middle", 9), [1, 2, 3])
    assert "agreement at k=1" not in failures(check_gates(evidence(table)))


def test_disagreement_between_batch_sizes_is_none(clean: pa.Table) -> None:
    """Another batch size may round differently; that a sweep has two is reported by another gate."""
    table = changed(clean, "batch_size", where(clean, "k1_middle"), 32)
    table = changed(table, "token_ids", where(table, "k1_middle", 9), [1, 2, 3])
    assert "agreement at k=1" not in failures(check_gates(evidence(table)))


def test_disagreement_within_one_of_two_devices_is_reported(clean: pa.Table) -> None:
    """A cluster with two types of GPU: runs on the second must agree with each other."""
    table = changed(clean, "device", where(clean, "k1_middle") | where(clean, "k1_last"), "gpu")
    assert "agreement at k=1" not in failures(check_gates(evidence(table)))
    table = changed(table, "token_ids", where(table, "k1_middle", 9), [1, 2, 3])
    assert "agreement at k=1" in failures(check_gates(evidence(table)))


def test_options_are_compared_by_the_one_that_scored_highest() -> None:
    world = World(documents=40, kind="loglikelihood", policies=grid(Truth()))
    table = draw(world, 0)
    closer = changed(table, "scores", where(table, "k1_last", 4), [-0.5, -0.6, -2.0, -3.0])
    other = changed(table, "scores", where(table, "k1_last", 4), [-0.5, -0.4, -2.0, -3.0])
    for rows, agrees in ((closer, True), (other, False)):
        found = check_gates(evidence(rows, documents=described(world), request=asked(world)))
        assert ("agreement at k=1" not in failures(found)) == agrees


def test_two_versions_of_the_code(clean: pa.Table) -> None:
    commands = [{"code": {"commit": commit, "dirty": False}} for commit in ("a" * 40, "b" * 40)]
    found = check_gates(evidence(clean, request={"commands": commands}))
    assert [f.sentence for f in found if not f.ok] == [
        "2 versions of the code produced the rows: commit aaaaaaaaaaaa, commit bbbbbbbbbbbb."
    ]
    dirty = [{"code": {"commit": "a" * 40, "dirty": True}}]
    assert failures(check_gates(evidence(clean, request={"commands": dirty}))) == {"one version"}


def test_versions_of_trials_count_before_those_of_commands(clean: pa.Table) -> None:
    attempts = recorded(
        {
            "k2_first-0-000": {"code": {"commit": "a" * 40, "dirty": False}},
            "k2_first-0-001": {"code": {"commit": "b" * 40, "dirty": False}, "model_revision": "other"},
        }
    )
    found = [finding for finding in check_gates(evidence(clean, attempts=attempts)) if not finding.ok]
    assert [finding.gate for finding in found] == ["one version", "one version"]
    assert found[0].trials == ("k2_first-0-001",)
    assert "2 revisions of the model produced the rows: abc, other" in found[1].sentence


@pytest.mark.parametrize(("share", "holds"), [(None, True), (0, True), (1.0, True), (0.5, False), (0.01, False)])
def test_a_fraction_of_a_gpu_takes_the_verdicts_away(clean: pa.Table, share: float | None, holds: bool) -> None:
    found = check_gates(evidence(clean, request={"settings": {"gpus_per_actor": share}}))
    assert failures(found) == (set() if holds else {"own device"})
    if not holds:
        (finding,) = (finding for finding in found if not finding.ok)
        assert finding.withholds_verdict
        assert f"{share:g} of a GPU" in finding.sentence


@pytest.mark.parametrize(
    ("second", "holds"),
    [
        ({}, False),
        ({"started_at": 10.0}, True),  # the first had ended, and its actor was replaced
        ({"actor": "worker-1"}, True),
        ({"gpus": ["1"]}, True),
        ({"node_id": "other"}, True),
        ({"gpus": []}, True),
    ],
)
def test_actors_on_one_gpu_at_a_time(second: dict[str, Any], holds: bool) -> None:
    """The first decodes from 0 to 10 seconds on GPU 0 of its node, the second from 5 on."""
    attempts = [
        {"actor": "worker-1", "node_id": "a", "gpus": ["0"], "started_at": 0.0},
        {"actor": "worker-2", "node_id": "a", "gpus": ["0"], "started_at": 5.0, **second},
    ]
    columns = {name: np.array([attempt[name] for attempt in attempts]) for name in ("actor", "started_at")}
    decoded = line(["k1", "k1"], wall=10.0, **columns)
    stored = recorded({f"t{number}": {**attempt, "started_at": ""} for number, attempt in enumerate(attempts)})
    given = Evidence(table=None, tasks=(), timeline=decoded, documents={}, request={}, attempts=stored)
    found = list(own_device(given))
    assert [finding.trials for finding in found] == ([] if holds else [("t0", "t1")])

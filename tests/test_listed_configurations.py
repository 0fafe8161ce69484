"""--configurations, policies with their own decode settings, and --reference, the k=1 that they are compared with."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from analysis_tables import Truth, World, asked, described, draw
from synthetic_folder import rows_with_defaults
from test_race_method import GOAL, SHARDS, trial
from test_totals import row

from orchestrator.analysis.pipeline import analyse
from orchestrator.analysis.results import ConfigurationResult
from orchestrator.analysis.verdicts import CONFIRMED, REJECTED
from orchestrator.cli.sweep import parse_sweep
from orchestrator.core.configuration import (
    FIRST,
    OWN,
    BaselineRule,
    Configuration,
    first_settings,
    grid,
    listed_configurations,
)
from orchestrator.core.race import TaskRace
from orchestrator.core.totals import RunningTotals
from orchestrator.planning.sweep_record import combine, describe_extension
from orchestrator.report.sweeps import _comparable
from orchestrator.store.record_checks import sweep_record_problem
from sampler.errors import InputError, InputErrors

BASE = Configuration(policy="k1")
LISTED = ("k1:threshold=0.5", "k2_middle:small-block=16", "k3_last:block-cache=off:reveal=topk=2")
SETTINGS: dict[str, Any] = {"policies": ["k1_first", "k2_middle"], "threshold": [0.9], "configurations": LISTED}


@pytest.mark.parametrize("text", [*LISTED, "k2_middle", "trim=0.25_all.random:threshold=0.8:small-block=4"])
def test_a_configuration_is_read_and_written(text: str) -> None:
    parsed = Configuration.parse(text)
    assert parsed.to_text(BASE) == text
    assert Configuration.parse(parsed.to_text(BASE)) == parsed


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("k2_middle:thresold=0.9", "did you mean threshold?"),
        ("k2_middle:colour=red", "known: threshold, small-block, block-cache, reveal"),
        ("k2_middle:threshold=high", "threshold must be a number (got 'high')"),
        ("k2_middle:threshold=7", "threshold must be above 0 and at most 1 (got 7)"),
        ("k2_middle:block-cache=maybe", "block-cache must be on or off (got 'maybe')"),
        ("k2_middle:threshold=0.9:threshold=0.8", "threshold is given twice"),
        ("k2_middle:small-block=0", "k2_middle:small-block=0: small block must be a divisor"),
        ("k2_midle:threshold=0.9", "did you mean middle?"),
    ],
)
def test_a_wrong_configuration_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputErrors) as error:
        parse_sweep(["--tasks", "gsm8k", "--configurations", text])
    assert "--configurations" in str(error.value)
    assert sentence in str(error.value)


def test_listed_configurations_follow_the_grid_and_take_over_its_first_settings() -> None:
    found = grid(SETTINGS)
    assert [one.label() for one in found] == [
        "k1_first threshold 0.9",
        "k2_middle threshold 0.9",
        "k1 threshold 0.5",
        "k2_middle threshold 0.9 small block 16",
        "k3_last block cache off reveal topk=2",
    ]
    assert listed_configurations(SETTINGS) == found[2:]
    scored = grid(SETTINGS, decoded=False)
    assert [one.label() for one in scored] == ["k1_first", "k2_middle", "k1", "k3_last"]


def test_a_sweep_is_extended_by_configurations_but_not_by_another_reference() -> None:
    def record(*flags: str) -> dict[str, Any]:
        settings = parse_sweep(["--tasks", "gsm8k", "--policies", "k1,k2_middle", *flags]).settings
        identity = dict.fromkeys(
            ("model", "model_revision", "depth", "dtype", "subset_size", "data", "sample", "seed", "fewshot")
        )
        identity |= dict.fromkeys(("chat_template", "max_new_tokens", "batch_size", "shard_size"))
        tasks = {"gsm8k": {"documents": 5}}
        return {
            "schema": 1,
            "identity": {**identity, "datasets": {}},
            "settings": settings.as_dict(),
            "tasks": tasks,
            "model": {"source": "tiny"},
            "margin": settings.margin,
            "speedup": settings.speedup,
        }

    old, more = record(), record("--configurations", "k2_middle:threshold=0.8")
    together = combine(old, more)
    assert list(together["settings"]["configurations"]) == ["k2_middle:threshold=0.8"]
    assert describe_extension(old, together) == ["configurations k2_middle:threshold=0.8"]
    assert list(combine(together, old)["settings"]["configurations"]) == ["k2_middle:threshold=0.8"]
    del old["settings"]["reference"], old["settings"]["configurations"]  # of an older version
    assert combine(old, record())["settings"]["reference"] == OWN
    with pytest.raises(InputError, match="--reference own \\(now first\\)"):
        combine(old, record("--reference", FIRST))
    assert _comparable(old, more)
    assert not _comparable(old, record("--reference", FIRST))


@pytest.mark.parametrize(
    "settings", [{"configurations": [5]}, {"configurations": "k1"}, {"reference": "second"}, {"reference": 1}]
)
def test_an_edited_sweep_is_refused(settings: dict[str, Any]) -> None:
    assert sweep_record_problem({"settings": settings}) is not None
    assert sweep_record_problem({"settings": {"configurations": list(LISTED), "reference": FIRST}}) is None


# With --reference first, k=1 at other settings is compared like any other configuration


def test_speedups_are_relative_to_the_first_settings() -> None:
    rows = [
        row("a", "k1_first", seconds=1.0, layer_positions=1000),
        row("b", "k1_last", seconds=0.5, threshold=0.5, layer_positions=500),
        row("c", "k2_middle", seconds=0.25, threshold=0.5, layer_positions=250),
    ]
    record = {
        "settings": {"threshold": [0.95], "reference": FIRST},
        "tasks": {"gsm8k": {"kind": "generate"}, "mmlu": {"kind": "loglikelihood"}},
    }
    rules = BaselineRule.by_task(record)
    assert rules["mmlu"] == BaselineRule(), "options are scored without decode settings"
    running = RunningTotals(baselines=rules)
    running.add_rows(rows_with_defaults(rows))
    totals = {one.configuration.policy: one for one in running.totals()}
    assert {name: one.speedup for name, one in totals.items()} == pytest.approx(
        {"k1_first": 1.0, "k1_last": 2.0, "k2_middle": 4.0}
    )
    assert [one.layer_positions for one in totals.values()] == pytest.approx([1.0, 0.5, 0.25])
    own = RunningTotals()
    own.add_rows(rows_with_defaults(rows))
    assert {one.configuration.policy: one.speedup for one in own.totals()} == pytest.approx(
        {"k1_first": 1.0, "k1_last": 1.0, "k2_middle": 2.0}
    )


@pytest.fixture(scope="module")
def results() -> dict[str, ConfigurationResult]:
    """k1 twice at threshold 0.95; at 0.8 k1 is 1.6 times as fast and k2_middle loses a third of the answers."""
    usual = World(policies={"k1_first": Truth(), "k1_last": Truth(), "k2_first": Truth(speedup=1.1)}, documents=400)
    changed = World(
        policies={"k1_middle": Truth(speedup=1.6), "k2_middle": Truth(lost=0.3, speedup=1.7)},
        documents=400,
        threshold=0.8,
    )
    request = asked(usual, changed)
    request["settings"] |= {
        "policies": list(usual.policies),
        "threshold": [0.95],
        "configurations": [f"{policy}:threshold=0.8" for policy in changed.policies],
        "reference": FIRST,
    }
    rows = pa.concat_tables([draw(usual), draw(changed)])
    analysis = analyse(rows, described(usual), request, draws=200)
    assert not [gate.sentence for gate in analysis.gates if gate.withholds_verdict and not gate.ok]
    (task,) = analysis.tasks
    assert task.missing == ()
    assert [one.configuration for one in task.baselines] == [
        replace(first_settings(request["settings"]), policy="k1_first")
    ]
    return {one.resolved.policy: one for one in task.configurations}


def test_k1_at_other_settings_gets_a_verdict(results: dict[str, ConfigurationResult]) -> None:
    assert results["k1_first"].comparison is None
    faster, lossy = results["k1_middle"].comparison, results["k2_middle"].comparison
    assert faster is not None
    assert lossy is not None
    assert faster.speedup is not None
    assert faster.speedup.tokens is not None
    assert faster.speedup.tokens.value == pytest.approx(1.6, rel=0.1)
    assert (faster.verdict.outcome, lossy.verdict.outcome) == (CONFIRMED, REJECTED)


def test_a_race_against_the_first_settings() -> None:
    k1, other = Configuration(policy="k1"), Configuration(policy="k1", threshold=0.8)
    fast, slow = (Configuration(policy=f"k2_{subset}", threshold=0.8) for subset in ("first", "last"))
    rules = {"alpha": 0.05, "margin": 30.0, "speedup": GOAL}
    race = TaskRace(
        "toy",
        shards=SHARDS,
        configurations=[k1, other, fast, slow],
        rules=rules,
        generates=True,
        baseline=BaselineRule(k1.settings),
    )
    assert race.compared == [other, fast, slow]
    for shard in SHARDS:
        wobble = 0.01 * (shard % 2)
        for one, log_time in ((k1, 0.0), (other, -0.9 + wobble), (fast, -0.8 + wobble), (slow, wobble)):
            race.add(one, shard, trial(shard, [0.0] * 5, log_time))
            race.look(k1.settings)
    decided = {one: race.lanes[one].decision for one in race.compared}
    assert {one.label(): found.outcome for one, found in decided.items() if found is not None} == {
        "k1 threshold 0.8": CONFIRMED,
        "k2_first threshold 0.8": CONFIRMED,
        "k2_last threshold 0.8": REJECTED,
    }
    assert race.needed_shards(k1) == max(race.needed_shards(one) for one in race.compared)

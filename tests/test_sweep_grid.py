"""Trial ids, shards and the order of trials. An id depends on exactly the settings that affect its rows."""

import json
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st

from orchestrator.core.configuration import Configuration
from orchestrator.core.trial import Trial
from orchestrator.planning.run_plan import assign_shards, extend_cuts, plan_trials
from orchestrator.planning.settings import SweepSettings
from orchestrator.planning.sweep_record import Cut, SweepIdentity, stored_cuts
from sampler.errors import InputError
from tasks.documents import Document
from tools.scale.synthetic_sweep import synthetic_identity

IDENTITY = synthetic_identity(
    model="owner/name",
    model_revision="c" * 40,
    depth=36,
    subset_size=12,
    data="hub",
    datasets={"gsm8k": {"openai/gsm8k": "a" * 40}, "mmlu": {"cais/mmlu": "b" * 40}},
)
SETTINGS = SweepSettings(tasks=("gsm8k", "mmlu"))
SHARDS = {"gsm8k": [0, 1, 2], "mmlu": [0, 1, 2, 3, 4]}


def plan(identity: SweepIdentity = IDENTITY, shards: Any = SHARDS, **changes: Any) -> list[Trial]:
    return plan_trials(identity, replace(SETTINGS, **changes), shards)


def ids(trials: list[Trial]) -> set[str]:
    assert len({trial.trial_id for trial in trials}) == len(trials), "no two trials share an id"
    return {trial.trial_id for trial in trials}


def documents(sizes: dict[str, int], limit: int | None = None) -> list[Document]:
    return [
        Document(doc_id=f"{name}/{index}", subtask=name, index=index, doc_hash="")
        for name, size in sizes.items()
        for index in range(min(size, limit or size))
    ]


def test_ids_do_not_change_between_versions() -> None:
    """Frozen: another id would orphan every sweep there is."""
    trial = next(t for t in plan() if (t.task, t.policy, t.shard) == ("gsm8k", "k2_middle", 0))
    assert trial.trial_id == "ee4193e869fc55e3"
    assert Trial.from_dict(json.loads(json.dumps(trial.as_dict()))) == trial
    assert SweepIdentity.from_dict(json.loads(json.dumps(IDENTITY.as_dict()))) == IDENTITY


@run(deadline=None)
@given(
    limit=st.none() | st.integers(1, 10_000),
    seed=st.integers(0, 99),
    policies=st.permutations(SETTINGS.policies),
    tasks=st.permutations(SETTINGS.tasks),
    machine=st.fixed_dictionaries(
        {
            "actors": st.none() | st.integers(1, 9),
            "gpus_per_actor": st.sampled_from([None, 0.0, 0.5, 1.0]),
            "threads_per_actor": st.integers(1, 8),
            "address": st.none() | st.just("auto"),
            "dashboard": st.booleans(),
            "out": st.sampled_from(["results", "elsewhere"]),
            "name": st.none() | st.just("x"),
            "quiet": st.booleans(),
            "margin": st.floats(1, 9),
            "speedup": st.floats(1.1, 9),
            "allow_code_execution": st.booleans(),
            "skip_unavailable": st.booleans(),
        }
    ),
)
def test_ids_know_no_limit_no_order_no_machine(
    limit: int | None, seed: int, policies: list[str], tasks: list[str], machine: dict[str, Any]
) -> None:
    other = plan(
        replace(IDENTITY, seed=seed), limit=limit, seed=seed, policies=tuple(policies), tasks=tuple(tasks), **machine
    )
    assert ids(other) == ids(plan())


@pytest.mark.parametrize(
    "change",
    [
        {"model": "owner/other"},
        {"model_revision": "d" * 40},
        {"model_revision": None},
        {"dtype": "bfloat16"},
        {"subset_size": 6},
        {"data": "folder"},
        {"datasets": {task: dict.fromkeys(found, "e" * 40) for task, found in IDENTITY.datasets.items()}},
        {"datasets": {task: {**found, "x/y": "f"} for task, found in IDENTITY.datasets.items()}},
        {"sample": 100},
        {"sample": 100, "seed": 1},
        {"fewshot": 0},
        {"fewshot": 5},
        {"chat_template": False},
        {"max_new_tokens": 64},
        {"batch_size": 4},
        {"shard_size": 25},
    ],
)
def test_an_id_differs_for_whatever_makes_other_rows(change: dict[str, Any]) -> None:
    assert not ids(plan(replace(IDENTITY, **change))) & ids(plan())
    assert not ids(plan(replace(IDENTITY, **{**change, "sample": 7}))) & ids(plan(replace(IDENTITY, sample=8)))


def test_the_seed_of_a_sample_matters_and_another_does_not() -> None:
    sampled = replace(IDENTITY, sample=100)
    assert not ids(plan(sampled)) & ids(plan(replace(sampled, seed=1)))
    assert ids(plan(replace(IDENTITY, seed=1))) == ids(plan())


def test_another_task_changes_nothing_for_the_first() -> None:
    alone = replace(IDENTITY, datasets={"gsm8k": IDENTITY.datasets["gsm8k"]})
    assert ids(plan(alone, tasks=("gsm8k",))) == ids([trial for trial in plan() if trial.task == "gsm8k"])


@pytest.mark.parametrize(
    "more",
    [
        {"policies": (*SETTINGS.policies, "k4_all")},
        {"threshold": (0.95, 0.9)},
        {"small_block": (8, 4)},
        {"block_cache": (True, False)},
        {"repeats": 2},
    ],
)
def test_more_of_anything_keeps_the_trials_there_are(more: dict[str, Any]) -> None:
    assert ids(plan()) < ids(plan(**more))


def test_scored_tasks_have_no_decode_settings() -> None:
    lists = {"threshold": (0.9, 1.0), "small_block": (4, 8), "block_cache": (True, False)}
    trials = plan_trials(IDENTITY, replace(SETTINGS, **lists), SHARDS, scored=["mmlu"])  # type: ignore[arg-type]
    count = Counter(trial.task for trial in trials)
    assert (count["gsm8k"], count["mmlu"]) == (3 * 9 * 8, 5 * 9)
    scored = {trial for trial in trials if trial.task == "mmlu"}
    assert all(not t.configuration.changed_from() for t in scored)
    assert scored <= set(plan()), "the same trials as with the default settings"


@run(deadline=None)
@given(
    shards=st.fixed_dictionaries({"gsm8k": st.sets(st.integers(0, 9)), "mmlu": st.sets(st.integers(0, 20))}),
    repeats=st.integers(1, 3),
    seed=st.integers(0, 9),
    threshold=st.sampled_from([(0.95,), (0.9, 1.0)]),
)
def test_every_configuration_grows_at_the_same_pace(
    shards: dict[str, set[int]], repeats: int, seed: int, threshold: tuple[float, ...]
) -> None:
    sorted_shards = {task: sorted(numbers) for task, numbers in shards.items()}
    trials = plan(shards=sorted_shards, repeats=repeats, seed=seed, threshold=threshold)
    each = 9 * len(threshold)
    assert len(trials) == repeats * each * sum(map(len, shards.values()))
    ids(trials)
    for start in range(0, len(trials), each):
        block = trials[start : start + each]
        assert len({(trial.repeat, trial.shard, trial.task) for trial in block}) == 1, "one shard of one task at a time"
        assert len({trial.configuration for trial in block}) == each
    places = [(trial.repeat, trial.shard, SETTINGS.tasks.index(trial.task)) for trial in trials]
    assert places == sorted(places)


def test_the_order_within_a_shard_is_random_and_repeatable() -> None:
    many = {"gsm8k": range(200), "mmlu": range(200)}
    trials = plan(shards=many)
    assert trials == plan(shards=many)
    assert trials != plan(shards=many, seed=1)
    first = Counter(trial.policy for trial in trials[::9])
    assert len(first) == 9
    assert max(first.values()) < 2 * 400 / 9, "no configuration is always first"


def test_labels() -> None:
    trial = Trial(trial_id="x", task="gsm8k", configuration=Configuration(policy="k2_middle"), repeat=0, shard=3)
    assert trial.label == "gsm8k/k2_middle/3"
    changed = Configuration(policy="k2_middle", threshold=1.0, small_block=4, block_cache=False)
    assert replace(trial, configuration=changed, repeat=2).label == "gsm8k/k2_middle_t1_b4_nocache/3.r2"


def test_shards_take_subjects_in_turns() -> None:
    shards = assign_shards(documents({"a": 20, "b": 9, "c": 1}), [(None, 3)])
    assert list(shards) == [
        *(f"a/{i}" for i in range(8)),
        *(f"b/{i}" for i in range(8)),
        "c/0",
        *(f"a/{i}" for i in range(8, 16)),
        "b/8",
        *(f"a/{i}" for i in range(16, 20)),
    ]
    assert list(shards.values()) == [position // 10 for position in range(30)]


def test_shards_have_equal_sizes() -> None:
    many = documents({"a": 105})
    cuts = extend_cuts((), many, limit=None, shard_size=50)
    assert cuts == ((None, 3),)
    assert Counter(assign_shards(many, cuts).values()) == {0: 35, 1: 35, 2: 35}
    assert extend_cuts((), many, limit=55, shard_size=50) == ((55, 2),)
    assert sorted(Counter(assign_shards(many, [(55, 2)]).values()).values()) == [27, 28]
    assert extend_cuts((), many, limit=105, shard_size=50) == cuts, "a limit that covers all documents is none"


def test_sweeps_of_older_versions_keep_their_shards() -> None:
    """Their last shard may be short, and a larger limit adds documents to it."""
    shards = assign_shards(documents({"a": 20, "b": 9, "c": 1}), None, shard_size=10)
    assert list(shards.values()) == [position // 10 for position in range(30)]
    assert Counter(assign_shards(documents({"a": 105}), None, shard_size=50).values()) == {0: 50, 1: 50, 2: 5}


@run(deadline=None)
@given(
    sizes=st.dictionaries(st.sampled_from("abcdefg"), st.integers(1, 60), min_size=1),
    shard_size=st.integers(1, 70),
    limits=st.lists(st.one_of(st.none(), st.integers(1, 70)), min_size=1, max_size=4),
)
def test_a_larger_limit_changes_no_earlier_trial(
    sizes: dict[str, int], shard_size: int, limits: list[int | None]
) -> None:
    cuts: tuple[Cut, ...] = ()
    before: dict[str, int] = {}
    known: set[str] = set()
    for limit in limits:
        cuts = extend_cuts(cuts, documents(sizes), limit=limit, shard_size=shard_size)
        shards = assign_shards(documents(sizes), cuts)
        assert {d.doc_id for d in documents(sizes, limit)} <= shards.keys()
        assert before.items() <= shards.items()
        counts = Counter(shard for doc_id, shard in shards.items() if doc_id not in before)
        assert max(counts.values(), default=0) <= shard_size
        assert max(counts.values(), default=0) - min(counts.values(), default=0) <= 1
        assert set(shards.values()) == set(range(len(set(shards.values()))))
        assert not counts.keys() & set(before.values())
        identity = replace(IDENTITY, cuts={"gsm8k": cuts, "mmlu": cuts})
        now = ids(plan(identity, {"gsm8k": sorted(set(shards.values())), "mmlu": [0]}, tasks=("gsm8k",)))
        assert known <= now
        before, known = shards, now


def test_ids_tell_how_documents_were_cut() -> None:
    """Shard 0 of 2 and shard 0 of 3 have other documents; the size that was asked for does not matter."""
    two, three, later = ({"gsm8k": cuts, "mmlu": cuts} for cuts in (((9, 2),), ((9, 3),), ((9, 2), (None, 5))))
    shards = {"gsm8k": [0, 1], "mmlu": [0, 1]}
    old = ids(plan(replace(IDENTITY, cuts=two), shards))
    assert not old & ids(plan(replace(IDENTITY, cuts=three), shards))
    assert old == ids(plan(replace(IDENTITY, cuts=later), shards))
    assert old == ids(plan(replace(IDENTITY, cuts=two, shard_size=9), shards))
    assert not old & ids(plan(IDENTITY, shards))
    stored = json.loads(json.dumps(replace(IDENTITY, cuts=later).as_dict()))
    assert SweepIdentity.from_dict(stored) == replace(IDENTITY, cuts=later)
    assert "cuts" not in IDENTITY.as_dict()


@pytest.mark.parametrize("cuts", [[], {"a": 3}, {"a": [[3]]}, {"a": [[None, 1], [5, 2]]}, {"a": [[5, 2], [6, 2]]}])
def test_cuts_that_no_sweep_can_have_are_refused(cuts: Any) -> None:
    with pytest.raises(InputError, match=r"sweep\.json is corrupted: 'cuts' must have increasing limits"):
        stored_cuts({"cuts": cuts})


def test_a_hundred_thousand_trials_are_planned_quickly() -> None:
    began = time.process_time()
    trials = plan(shards={"gsm8k": range(5_600), "mmlu": range(5_600)})
    assert len(trials) == 100_800
    ids(trials)
    assert time.process_time() - began < 80

"""What may be asked of a sweep: the grid of policies, and a sentence for each value that is not allowed."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st

from orchestrator.planning.settings import ALL_SETTINGS, PolicyGrid, SweepSettings
from sampler import InputError, ReusePolicy
from sampler.errors import InputErrors

NINE = ("k1_first", "k1_middle", "k1_last", "k2_first", "k2_middle", "k2_last", "k3_first", "k3_middle", "k3_last")


def settings(**changes: Any) -> SweepSettings:
    return SweepSettings(**{"tasks": ("gsm8k",), **changes})


def test_defaults_give_the_nine_configurations() -> None:
    assert settings().policies == NINE


def test_k1_is_made_once_for_each_subset_whatever_the_modes() -> None:
    both = PolicyGrid(k=(1, 2), subsets=("first", "last"), reuse=("residual", "output")).policies
    assert both == ("k1_first", "k1_last", "k2_first", "k2_first.output", "k2_last", "k2_last.output")
    assert PolicyGrid(k=(1, 2), subsets=("first",), reuse=("output",)).policies == ("k1_first", "k2_first.output")
    assert len(PolicyGrid(reuse=("residual", "output")).policies) == 15


@run(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, unique=True),
    st.lists(st.sampled_from(["first", "middle", "last", "all", "4-9+20", "0"]), min_size=1, unique=True),
    st.lists(st.sampled_from(["residual", "output"]), min_size=1, unique=True),
)
def test_a_grid_names_each_policy_once_and_canonically(
    periods: list[int], subsets: list[str], modes: list[str]
) -> None:
    names = PolicyGrid(k=tuple(periods), subsets=tuple(subsets), reuse=tuple(modes)).policies
    assert len(set(names)) == len(names) == len(subsets) * sum(1 if k == 1 else len(modes) for k in periods)
    assert [str(ReusePolicy.parse(name)) for name in names] == list(names)
    assert settings(policies=names).policies == names


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"k": (0,)}, "--k must be at least 1 (got 0)"),
        ({"k": (2, 2)}, "--k must not contain 2 twice"),
        ({"subsets": ("first", "first")}, "--subsets must not contain first twice"),
        ({"subsets": ("4+5", "4-5")}, "--subsets must not contain 4-5 twice"),
        ({"subsets": ("early",)}, "--subsets: unknown layers 'early'"),
        ({"subsets": ("first.output",)}, "unknown layers 'first.output'"),
        ({"reuse": ("state",)}, "--reuse must be residual or output (got state)"),
        ({"reuse": ("output", "output")}, "--reuse must not contain output twice"),
        ({"k": ()}, "--k must not be empty"),
        ({"subsets": ()}, "--subsets must not be empty"),
        ({"reuse": ()}, "--reuse must not be empty"),
    ],
)
def test_invalid_grids_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        PolicyGrid(**arguments)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tasks": ()}, "--tasks must not be empty: give names such as gsm8k,minerva_math"),
        ({"tasks": ("gsm8k", "")}, "--tasks must not contain an empty name: give names such as"),
        ({"tasks": ("gsm8k", "gsm8k")}, "--tasks must not contain gsm8k twice"),
        ({"policies": ()}, "--policies must not be empty: give names such as k1,k2_middle"),
        ({"policies": ("k2_4+5", "k2_4-5")}, "--policies must not contain k2_4-5 twice"),
        ({"policies": ("k2",)}, "--policies: policy k2 needs layers, such as k2_middle"),
        ({"policies": ("q2_middle",)}, "--policies: unknown policy 'q2_middle': did you mean k2_middle?"),
        ({"threshold": ()}, "--threshold must not be empty"),
        ({"threshold": (0.9, 1.5)}, "--threshold must be above 0 and at most 1 (got 1.5)"),
        ({"threshold": (0.0,)}, "--threshold must be above 0 and at most 1 (got 0)"),
        ({"threshold": (float("nan"),)}, "--threshold must be above 0 and at most 1 (got nan)"),
        ({"threshold": (0.9, 0.90)}, "--threshold must not contain 0.9 twice"),
        ({"small_block": (0,)}, "--small-block must be at least 1 (got 0)"),
        ({"small_block": (8, 8)}, "--small-block must not contain 8 twice"),
        ({"block_cache": (True, True)}, "--block-cache must not contain on twice"),
        ({"limit": 0}, "--limit must be at least 1 (got"),
        ({"sample": -3}, "--sample must be at least 1 (got"),
        ({"limit": 5, "sample": 5}, "--limit and --sample must not be used together"),
        ({"fewshot": -1}, "--fewshot must be at least 0 (got"),
        ({"subset_size": 0}, "--subset-size must be at least 1 (got 0)"),
        ({"batch_size": 0}, "--batch-size must be at least 1 (got"),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1 (got"),
        ({"repeats": 0}, "--repeats must be at least 1 (got"),
        ({"seed": -1}, "--seed must be at least 0 (got"),
        ({"shard_size": 0}, "--shard-size must be at least 1 (got"),
        ({"actors": 0}, "--actors must be at least 1 (got"),
        ({"threads_per_actor": 0}, "--threads-per-actor must be at least 1 (got"),
        ({"gpus_per_actor": -1}, "--gpus-per-actor must be 0 or between 0.01 and 1 (got -1): an actor decodes on one"),
        ({"gpus_per_actor": 1.5}, "--gpus-per-actor must be 0 or between 0.01 and 1 (got 1.5): an actor decodes on"),
        ({"gpus_per_actor": 2}, "(got 2): an actor decodes on one device"),
        ({"gpus_per_actor": float("inf")}, "--gpus-per-actor must be 0 or between 0.01 and 1 (got inf)"),
        ({"gpus_per_actor": 0, "accelerator_type": "T4"}, "--accelerator-type T4 needs --gpus-per-actor above 0"),
        (
            {"address": "ray://head:10001"},
            "--address must be the address of the cluster's head, such as HOST:6379 (got ray://head:10001)",
        ),
        ({"cpus_per_actor": 0}, "--cpus-per-actor must be at least 0.01 (got 0)"),
        ({"cpus_per_actor": 1e-9}, "--cpus-per-actor must be at least 0.01 (got 1e-09)"),
        ({"gpus_per_actor": 1e-9}, "--gpus-per-actor must be 0 or between 0.01 and 1 (got 1e-09)"),
        ({"repeats": 10**9}, "--repeats must be at most 1000 (got 1,000,000,000)"),
        ({"seed": 2**32}, "--seed must be at most 4,294,967,295 (got 4,294,967,296)"),
        ({"batch_size": 10**400}, "--batch-size must be at most 10,000 (got 10,000,"),
        ({"threads_per_actor": 10**6}, "--threads-per-actor must be at most 1024 (got 1,000,000)"),
        ({"worker_timeout": 1e300}, "--worker-timeout must be between 1 and 604,800 seconds (got 1e+300)"),
        ({"margin": 0}, "--margin must be between 0 and 100 (got 0)"),
        ({"margin": 100}, "--margin must be between 0 and 100 (got 100)"),
        ({"speedup": 1.0}, "--speedup must be above 1 (got 1)"),
        ({"speedup": float("nan")}, "--speedup must be above 1 (got nan)"),
        ({"dtype": "int8"}, "--dtype must be auto, float32, bfloat16 or float16 (got int8)"),
        ({"model": ""}, "--model must not be empty"),
        ({"data": ""}, "--data must not be empty"),
        ({"out": ""}, "--out must not be empty"),
        ({"address": ""}, "--address must not be empty"),
    ],
)
def test_a_value_that_is_not_allowed(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)) as error:
        settings(**changes)
    assert len(error.value.sentences) == 1


@pytest.mark.parametrize("name", [".", "..", "a/b", "../x", "-x", ".hidden", "a b", "a\nb", "ü", "x" * 101, "a\0"])
def test_a_name_that_is_no_folder(name: str) -> None:
    with pytest.raises(InputError, match="must be a valid directory name of up to 100 letters, digits"):
        settings(name=name)
    assert settings(name="k2-vs_k1.v3+x").name == "k2-vs_k1.v3+x"


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(InputErrors) as error:
        settings(limit=0, policies=("k0", "nonsense"), margin=-1, dtype="x")
    assert len(error.value.sentences) == 5
    assert "; " in str(error.value)


def test_policies_are_kept_by_their_canonical_names() -> None:
    assert settings(policies=("k2_5+4+9",)).policies == ("k2_4-5+9",)


def test_settings_survive_json() -> None:
    made = settings(threshold=(1, 0.9), block_cache=(True, False), limit=7, name="x")
    assert SweepSettings.from_dict(json.loads(json.dumps(made.as_dict()))) == made
    assert made.threshold == (1.0, 0.9)
    newer = {**made.as_dict(), "colour": 1}
    assert SweepSettings.from_dict(newer) == made
    assert SweepSettings.from_dict({"tasks": ["gsm8k"]}) == settings(), "older sweeps lack newer settings"


def test_every_list_is_checked() -> None:
    may_be_empty = {name for name, declared in ALL_SETTINGS.items() if declared.repeatable}
    assert may_be_empty == {"configurations", "resources", "callback", "track"}


def test_settings_of_an_older_version_with_more_than_one_gpu_stay_readable() -> None:
    stored = {**SweepSettings(tasks=("gsm8k",)).as_dict(), "gpus_per_actor": 2.0}
    assert SweepSettings.from_dict(stored).gpus_per_actor == 1

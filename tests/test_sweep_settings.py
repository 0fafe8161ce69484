"""What may be asked of a sweep: the grid of policies, and a sentence for each value that is not allowed."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st

from orchestrator.core.errors import InputErrors
from orchestrator.planning.settings import LISTS, SweepSettings, policies_of
from sampler import InputError, ReusePolicy

NINE = ("k1_first", "k1_middle", "k1_last", "k2_first", "k2_middle", "k2_last", "k3_first", "k3_middle", "k3_last")


def settings(**changes: Any) -> SweepSettings:
    return SweepSettings(**{"tasks": ("gsm8k",), **changes})


def test_defaults_give_the_nine_configurations() -> None:
    assert settings().policies == NINE


def test_k1_is_made_once_for_each_subset_whatever_the_modes() -> None:
    both = policies_of((1, 2), ("first", "last"), ("residual", "output"))
    assert both == ("k1_first", "k1_last", "k2_first", "k2_first.output", "k2_last", "k2_last.output")
    assert policies_of((1, 2), ("first",), ("output",)) == ("k1_first", "k2_first.output")
    assert len(policies_of(modes=("residual", "output"))) == 15


@run(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, unique=True),
    st.lists(st.sampled_from(["first", "middle", "last", "all", "4-9+20", "0"]), min_size=1, unique=True),
    st.lists(st.sampled_from(["residual", "output"]), min_size=1, unique=True),
)
def test_a_grid_names_each_policy_once_and_canonically(
    periods: list[int], subsets: list[str], modes: list[str]
) -> None:
    names = policies_of(periods, subsets, modes)
    assert len(set(names)) == len(names) == len(subsets) * sum(1 if k == 1 else len(modes) for k in periods)
    assert [str(ReusePolicy.parse(name)) for name in names] == list(names)
    assert settings(policies=names).policies == names


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (((0,),), "policy k0: k must be at least 1"),
        (((2, 2),), "--k names 2 twice: each value once is allowed"),
        (((2,), ("first", "first")), "--subsets names first twice"),
        (((2,), ("4+5", "4-5")), "--subsets names 4-5 twice"),
        (((2,), ("early",)), "unknown layers 'early': first, middle, last, all or indices such as 4-9+20 are allowed"),
        (((2,), ("first.output",)), "unknown layers 'first.output'"),
        (((2,), ("first",), ("state",)), "--reuse state: residual or output is allowed, or both"),
        (((2,), ("first",), ("output", "output")), "--reuse names output twice"),
        (((),), "--k is empty: whole numbers such as 1,2,3 are allowed"),
        (((2,), ()), "--subsets is empty: first, middle, last"),
        (((2,), ("first",), ()), "--reuse is empty: residual or output is allowed"),
    ],
)
def test_a_grid_that_cannot_be(arguments: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        policies_of(*arguments)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tasks": ()}, "--tasks is empty: name tasks such as gsm8k,minerva_math"),
        ({"tasks": ("gsm8k", "")}, "--tasks holds an empty name: name tasks such as"),
        ({"tasks": ("gsm8k", "gsm8k")}, "--tasks names gsm8k twice: each value once is allowed"),
        ({"policies": ()}, "--policies is empty: name policies such as k1,k2_middle"),
        ({"policies": ("k2_4+5", "k2_4-5")}, "--policies names k2_4-5 twice"),
        ({"policies": ("k2",)}, "--policies: policy k2 needs layers, such as k2_middle"),
        ({"policies": ("q2_middle",)}, "--policies: unknown policy 'q2_middle': a policy is rule_layers[.option]"),
        ({"threshold": ()}, "--threshold is empty: numbers above 0 and at most 1 are allowed"),
        ({"threshold": (0.9, 1.5)}, "--threshold 1.5: a number above 0 and at most 1 is allowed"),
        ({"threshold": (0.0,)}, "--threshold 0.0: a number above 0 and at most 1 is allowed"),
        ({"threshold": (float("nan"),)}, "--threshold nan: a number above 0"),
        ({"threshold": (0.9, 0.90)}, "--threshold names 0.9 twice"),
        ({"small_block": (0,)}, "--small-block 0: a divisor of the model's block, such as 8, is allowed"),
        ({"small_block": (8, 8)}, "--small-block names 8 twice"),
        ({"block_cache": (True, True)}, "--block-cache names on twice"),
        ({"limit": 0}, "--limit 0: a whole number of at least 1 is allowed"),
        ({"sample": -3}, "--sample -3: a whole number of at least 1 is allowed"),
        ({"limit": 5, "sample": 5}, "--limit and --sample exclude each other"),
        ({"fewshot": -1}, "--fewshot -1: a whole number of at least 0 is allowed"),
        ({"subset_size": 0}, "--subset-size 0: a whole number of at least 1 is allowed"),
        ({"batch_size": 0}, "--batch-size 0: a whole number of at least 1 is allowed"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0: a whole number of at least 1 is allowed"),
        ({"repeats": 0}, "--repeats 0: a whole number of at least 1 is allowed"),
        ({"seed": -1}, "--seed -1: a whole number of at least 0 is allowed"),
        ({"shard_size": 0}, "--shard-size 0: a whole number of at least 1 is allowed"),
        ({"actors": 0}, "--actors 0: a whole number of at least 1 is allowed"),
        ({"threads_per_actor": 0}, "--threads-per-actor 0: a whole number of at least 1 is allowed"),
        ({"gpus_per_actor": -1}, "--gpus-per-actor must be 0 or between 0.01 and 1 (got -1): an actor decodes on one"),
        ({"gpus_per_actor": 1.5}, "--gpus-per-actor must be 0 or between 0.01 and 1 (got 1.5): an actor decodes on"),
        ({"gpus_per_actor": 2}, "(got 2): an actor decodes on one device, and several actors use several"),
        ({"gpus_per_actor": float("inf")}, "--gpus-per-actor must be 0 or between 0.01 and 1 (got inf)"),
        ({"gpus_per_actor": 0, "accelerator_type": "T4"}, "--accelerator-type T4 needs --gpus-per-actor above 0"),
        (
            {"address": "ray://head:10001"},
            "--address ray://head:10001: Ray Client is not supported; run the sweep on the cluster with "
            "`ray job submit`, or give the address of its head, such as HOST:6379",
        ),
        ({"cpus_per_actor": 0}, "--cpus-per-actor 0: a number of at least 0.01 is allowed"),
        ({"cpus_per_actor": 1e-9}, "--cpus-per-actor 1e-09: a number of at least 0.01 is allowed"),
        ({"gpus_per_actor": 1e-9}, "--gpus-per-actor must be 0 or between 0.01 and 1 (got 1e-09)"),
        ({"repeats": 10**9}, "--repeats 1000000000: a whole number up to 1,000 is allowed"),
        ({"seed": 2**32}, "--seed 4294967296: a whole number up to 4,294,967,295 is allowed"),
        ({"batch_size": 10**400}, "0000...: a whole number up to 10,000 is allowed"),
        ({"threads_per_actor": 10**6}, "--threads-per-actor 1000000: a whole number up to 1,024 is allowed"),
        ({"worker_timeout": 1e300}, "--worker-timeout 1e+300: seconds, from 1 to a week's 604800, are allowed"),
        ({"margin": 0}, "--margin 0: percentage points above 0 and below 100 are allowed"),
        ({"margin": 100}, "--margin 100: percentage points above 0"),
        ({"speedup": 1.0}, "--speedup 1.0: a factor above 1, such as 1.2, is allowed"),
        ({"speedup": float("nan")}, "--speedup nan: a factor above 1"),
        ({"dtype": "int8"}, "--dtype int8: auto, float32, bfloat16, float16 are allowed"),
        ({"model": ""}, "--model is empty: leave it out or give a value"),
        ({"data": ""}, "--data is empty"),
        ({"out": ""}, "--out is empty"),
        ({"address": ""}, "--address is empty"),
    ],
)
def test_a_value_that_is_not_allowed(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)) as error:
        settings(**changes)
    assert len(error.value.sentences) == 1


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "-x", ".hidden", "a b", "a\nb", "ü", "x" * 101, "a\0"])
def test_a_name_that_is_no_folder(name: str) -> None:
    with pytest.raises(InputError, match="is no name of a folder: up to 100 letters, digits"):
        settings(name=name)
    assert settings(name="k2-vs_k1.v3+x").name == "k2-vs_k1.v3+x"


def test_all_problems_are_told_at_once() -> None:
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
    assert SweepSettings.from_dict({**made.as_dict(), "colour": 1}) == made, "a newer version's setting"


def test_every_list_is_checked() -> None:
    plural = {name for name, value in settings().as_dict().items() if isinstance(value, list)}
    assert plural == {*LISTS, "resources", "callback"}, "these two may be empty"


def test_settings_of_an_older_version_with_more_than_one_gpu_stay_readable() -> None:
    stored = {**SweepSettings(tasks=("gsm8k",)).as_dict(), "gpus_per_actor": 2.0}
    assert SweepSettings.from_dict(stored).gpus_per_actor == 1

"""Policy names: parsing and printing are inverse, subsets come from the model, mistakes are explained."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sampler import InputError, ReusePolicy
from sampler.plan import COMPUTE, REPLAY, PassKind, StepContext
from sampler.policies import RULES
from sampler.policies.periodic import PeriodicRule

indices = st.sets(st.integers(0, 99), min_size=1, max_size=12).map(lambda s: "+".join(map(str, sorted(s))))
layers = st.one_of(st.sampled_from(["first", "middle", "last", "all"]), indices)


def context(step: int, kind: PassKind = PassKind.FULL) -> StepContext:
    return StepContext(step=step, kind=kind, window=range(32), revealed_at=(None,) * 32)


@given(k=st.integers(1, 40), layers=layers, output=st.booleans(), small=st.booleans())
def test_parsing_and_printing_are_inverse(k: int, layers: str, output: bool, small: bool) -> None:
    policy = ReusePolicy.parse(f"k{k}_{layers}{'.output' * output}{'.small' * small}")
    assert ReusePolicy.parse(str(policy)) == policy
    assert (policy.k, policy.mode) == (k, "output" if output else "residual")
    assert ("small" in policy.rule.options) == small


@pytest.mark.parametrize("name", ["k1", "k1_first", "k2_middle", "k3_last.output", "k2_4-9+20", "k2_all.output.small"])
def test_names_round_trip(name: str) -> None:
    assert str(ReusePolicy.parse(name)) == name


def test_indices_are_printed_in_order_as_ranges() -> None:
    assert str(ReusePolicy.parse("k2_20+4+5+6-9.small.output")) == "k2_4-9+20.output.small"


@pytest.mark.parametrize(
    ("depth", "first", "middle", "last"),
    [
        (36, range(1, 13), range(12, 24), range(24, 36)),
        (28, range(1, 13), range(8, 20), range(16, 28)),
        (12, range(1, 5), range(4, 8), range(8, 12)),
        (3, range(1, 2), range(1, 2), range(2, 3)),
    ],
)
def test_subsets_come_from_the_model_and_have_one_size(depth: int, first: range, middle: range, last: range) -> None:
    for name, want in (("first", first), ("middle", middle), ("last", last), ("all", range(depth))):
        assert ReusePolicy.parse(f"k2_{name}").layer_indices(depth) == tuple(want)


def test_subset_size_can_be_chosen() -> None:
    assert ReusePolicy.parse("k2_last").layer_indices(36, 4) == (32, 33, 34, 35)
    for size in (0, -1, 36, 40):
        with pytest.raises(InputError, match=f"--subset-size must be between 1 and 35 .*got {size}"):
            ReusePolicy.parse("k2_last").bind(36, size)


def test_a_periodic_policy_computes_every_kth_step() -> None:
    policy = ReusePolicy.parse("k3_2-3").bind(6)
    plans = [policy.plan(context(step)) for step in range(7)]
    assert [plan.replays for plan in plans] == [False, True, True, False, True, True, False]
    assert plans[1].steps == (COMPUTE, COMPUTE, REPLAY, REPLAY, COMPUTE, COMPUTE)


def test_small_replays_in_small_passes_only() -> None:
    policy = ReusePolicy.parse("k2_first.small").bind(36)
    assert not policy.plan(context(1, PassKind.FULL)).replays
    assert policy.plan(context(1, PassKind.SMALL)).replays


def test_output_mode_runs_no_layer() -> None:
    plan = ReusePolicy.parse("k2_first.output").bind(36).plan(context(1))
    assert plan.stale
    assert ReusePolicy.parse("k2_first.output").bind(36) == ReusePolicy.parse("k2_last.output").bind(36)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nonsense", "unknown policy 'nonsense': a policy is rule_layers"),
        ("", "unknown policy ''"),
        ("K2_first", "unknown policy"),
        ("k02_first", "unknown policy"),
        ("k-1_first", "unknown policy"),
        ("k2_", "unknown policy"),
        ("k2_first.", "unknown option .;"),
        ("k2_first.fast", "unknown option .fast;"),
        ("k2_first.small.small", "unknown policy"),
        ("k0", "k must be at least 1"),
        ("k0_first", "k must be at least 1"),
        ("k2", "k2 needs layers"),
        ("k2_outer", "unknown layers 'outer'"),
        ("k2_9-4", "write 4-9"),
        ("k2_4-9+5", "repeated"),
        ("k2_1++2", "unknown layers"),
        ("adaptive_middle", "T in adaptive=T must be a number"),
        ("adaptive=x_middle", "T in adaptive=T must be a number such as 0.2 (got 'x')"),
        ("adaptive=-1_middle", "'-1'"),
        ("adaptive=nan_middle", "'nan'"),
        ("adaptive=0.2", "policy adaptive=0.2 needs layers, such as adaptive=0.2_middle"),
        ("adaptive=0.2_middle.x", "(got 'x')"),
        ("adaptive=0.2_middle.2.3", "one option"),
        ("trim=1.5_middle", "between 0 and 1 (got 1.5)"),
        ("trim=inf_middle", "between 0 and 1 (got inf)"),
        ("trim=0.2_middle.small", "unknown option .small; trim takes .random"),
        ("mlp=0_middle", "K must be at least 1"),
        ("mlp=2", "needs layers"),
        ("attn=1.5_middle", "K in attn=K must be a whole number"),
        ("mlp=2_middle.output", "unknown option .output"),
        ("skip", "policy skip needs layers"),
        ("skip=2_middle", "skip takes no number"),
        ("stale=2_middle", "stale=2 takes no layers"),
        ("stale", "K in stale=K must be a whole number"),
        ("k=2_middle", "unknown policy 'k=2_middle': did you mean k2_middle?"),
        ("fox=2", "unknown policy 'fox=2': a policy is"),
        ("delayed=0.5_all", "N in delayed=N must be a whole number or inf (got 0.5)"),
        ("delayed=1_all.2", "unknown option .2"),
        ("dllm=1.5_all", "R in dllm=R must be between 0 and 1 (got 1.5)"),
        ("dllm=0.5_all.0", "must be at least 1 (got 0)"),
        ("dllm=0.5_all.1.2", "dllm takes one option"),
        ("es=0.5_all.0", "the number of checkpoints must be at least 1 (got 0)"),
        ("focus=0.5", "needs layers"),
        ("skip_all.some", "skip takes .every"),
        ("skip_all.every.every", "an option is repeated"),
        ("trim=0.2_middle.random.fast", "unknown option .fast; trim takes .random"),
    ],
)
def test_invalid_names_are_explained(name: str, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        ReusePolicy.parse(name)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_layer_outside_the_model_is_named() -> None:
    with pytest.raises(InputError, match=r"layer 36 .* 0 to 35"):
        ReusePolicy.parse("k2_30-36").bind(36)


@pytest.mark.parametrize("module", ["policy", "records", "errors", "config", "hub"])
def test_modules_for_reading_results_do_not_import_torch(module: str) -> None:
    code = f"import sys, sampler.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_is_nearly_right_gets_a_suggestion() -> None:
    for wrong, meant in {
        "K2_Middle": "k2_middle",
        "k2middle": "k2_middle",
        "adaptiv=0.2_middle": "adaptive=0.2_middle",
        "Trim=0.25_ALL": "trim=0.25_all",
        "k2_midle": "middle",
    }.items():
        with pytest.raises(InputError, match=f"did you mean {meant}\\?"):
            ReusePolicy.parse(wrong)


def test_an_option_that_a_users_rule_ignores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "every", lambda value, _: PeriodicRule(k=int(value)))
    assert ReusePolicy.parse("every=2_middle").rule == PeriodicRule(k=2)
    with pytest.raises(InputError, match=r"unknown policy 'every=2_middle.fast': every takes no options \(got .fast\)"):
        ReusePolicy.parse("every=2_middle.fast")
    with pytest.raises(InputError, match="unknown policy 'every=x_middle': invalid literal"):
        ReusePolicy.parse("every=x_middle")
    assert ReusePolicy.parse("adaptive=0.2_middle.3"), "an option that is the default is still an option"

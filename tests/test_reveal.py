"""Reveal rules: names, choices, the oracle, batches, limits, and the settings of a sweep."""

import random
from typing import Any

import pytest
import torch
from oracle.decoder import reference_generate
from small_models import shallow, shallow_oracle

from orchestrator.planning.settings import SweepSettings
from orchestrator.planning.sweep_record import _values
from sampler import DecodeSettings, Generated, InputError, Prompt, ReusePolicy, decode_prompts
from sampler.reveal import REVEAL_RULES, Prediction, parse_reveal

torch.set_num_threads(1)

TIE = 1e-4  # decisions closer than this may fall either way
LENGTHS = (7, 32, 40)
MORE_LENGTHS = (*LENGTHS, 1, 12, 31, 33, 50)  # for a batch of eight
RULES = [
    *("margin=0.05", "margin=0.3", "entropy=0", "entropy=6", "klass=0.02+2", "klass=0.05", "credit=0.1", "credit=0.6"),
    *("topk=1", "topk=3", "factor=2.5", "factor=6"),
]


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Prompt]:
    generator = random.Random(3)
    return [Prompt(ids=tuple(generator.randrange(157) for _ in range(length)), seed=length) for length in lengths]


def decode(
    settings: DecodeSettings, policy: str = "k1", batch_size: int = 1, lengths: tuple[int, ...] = LENGTHS
) -> list[Generated]:
    options: dict[str, Any] = {"policy": ReusePolicy.parse(policy), "settings": settings, "batch_size": batch_size}
    found = dict(decode_prompts(shallow(), prompts(lengths), **options))
    return [found[index] for index in range(len(found))]


def settings(reveal: str, **more: Any) -> DecodeSettings:
    return DecodeSettings(reveal=reveal, max_new_tokens=36, **more)


# Names


@pytest.mark.parametrize("name", [*RULES, "threshold=0.95", "klass=0.9", "entropy=inf", "klass=1+0.001"])
def test_names_round_trip(name: str) -> None:
    assert str(parse_reveal(name)) == name
    assert parse_reveal(str(parse_reveal(name))) == parse_reveal(name)


def test_names_have_one_spelling() -> None:
    assert str(parse_reveal("klass=0.90+0.010")) == "klass=0.9"
    assert DecodeSettings(reveal="margin=0.50").reveal == "margin=0.5"
    assert DecodeSettings(reveal="threshold=0.9") == DecodeSettings(threshold=0.9)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("best=2", "unknown reveal rule 'best=2': a reveal rule is threshold=0.95, margin=0.5"),
        ("margin", "unknown reveal rule 'margin'"),
        ("margin=x", "must be a number such as 0.2 (got 'x')"),
        ("margin=1.5", "margin must be above 0 and at most 1 (got 1.5)"),
        ("threshold=0", "threshold must be above 0 and at most 1 (got 0)"),
        ("topk=0", "N in topk=N must be at least 1 (got 0)"),
        ("topk=1.5", "N in topk=N must be a whole number"),
        ("factor=0", "factor must be above 0 (got 0)"),
        ("klass=0.9+", "the divergence in klass=X+D must be a number"),
        ("entropy=-1", "(got '-1')"),
    ],
)
def test_invalid_names_are_explained(name: str, complaint: str) -> None:
    for make in (lambda: parse_reveal(name), lambda: DecodeSettings(reveal=name)):
        with pytest.raises(InputError) as caught:
            make()
        assert complaint in str(caught.value)
        assert "\n" not in str(caught.value)


# What each chooses


def choose(rule: str, *traces: tuple[tuple[int, float, float], ...]) -> list[int]:
    return parse_reveal(rule).choose([[Prediction(*step) for step in trace] for trace in traces])


def at(*probabilities: float, signals: tuple[float, ...] = ()) -> list[tuple[tuple[int, float, float], ...]]:
    return [((9, p, s),) for p, s in zip(probabilities, signals or (0.0,) * len(probabilities), strict=True)]


def test_threshold_takes_all_above_it_and_always_the_best() -> None:
    assert choose("threshold=0.95", *at(0.2, 0.96, 0.97)) == [1, 2]
    assert choose("threshold=0.95", *at(0.2, 0.4, 0.3)) == [1]
    assert choose("threshold=0.95", *at(0.4, 0.4)) == [0]
    assert choose("threshold=0.95", *at(0.95, 0.5)) == [0]
    assert choose("threshold=1", *at(1.0, 1.0)) == [0]


def test_margin_looks_at_the_distance_and_not_at_the_probability() -> None:
    assert choose("margin=0.3", *at(0.9, 0.5, 0.6, signals=(0.3, 0.4, 0.35))) == [1, 2]
    assert choose("margin=0.5", *at(0.9, 0.5, signals=(0.3, 0.4))) == [1]


def test_entropy_bounds_the_sum_of_all_but_the_last() -> None:
    traces = at(*(0.5,) * 4, signals=(0.4, 0.1, 0.3, 0.2))
    assert choose("entropy=0", *traces) == [1]
    assert choose("entropy=0.1", *traces) == [1, 3]
    assert choose("entropy=0.59", *traces) == [1, 2, 3]
    assert choose("entropy=0.61", *traces) == [0, 1, 2, 3]


def test_klass_needs_a_step_before_a_high_probability_and_a_small_change() -> None:
    moved, still = ((1, 0.9, 0.0), (1, 0.95, 0.5)), ((1, 0.9, 0.0), (1, 0.95, 0.001))
    unsure = ((1, 0.5, 0.0), (1, 0.5, 0.001))
    assert choose("klass=0.9", moved, still, unsure, *at(0.96)) == [1, 3]
    assert choose("klass=0.9+0.6", moved, still, unsure) == [0, 1]


def test_credit_grows_while_the_same_token_is_predicted() -> None:
    def credited(probability: float, credit: float) -> float:
        return probability * (1 + credit) / (probability * (1 + credit) + 1 - probability)

    same, other = ((7, 0.6, 0.0), (7, 0.5, 0.0), (7, 0.5, 0.0)), ((7, 0.6, 0.0), (7, 0.5, 0.0), (8, 0.5, 0.0))
    value = credited(0.5, 0.6 * 0.7 + 0.5)
    assert choose(f"credit={value - 0.001:.4f}", same, other, *at(0.9)) == [0, 2]
    assert choose(f"credit={value + 0.001:.4f}", same, other, *at(0.9)) == [2]
    assert choose("credit=0.4", *at(0.5, 0.3)) == [0]


def test_topk_and_factor_count() -> None:
    assert choose("topk=2", *at(0.1, 0.3, 0.3, 0.3)) == [1, 2]
    assert choose("topk=9", *at(0.1, 0.3)) == [0, 1]
    assert choose("factor=1", *at(0.6, 0.9, 0.7, 0.8)) == [1, 3]  # 2 · 0.1, 3 · 0.2, 4 · 0.3
    assert choose("factor=1.3", *at(0.6, 0.9, 0.7, 0.8)) == [1, 2, 3]
    assert choose("factor=0.1", *at(0.6, 0.9)) == [1]


# The oracle, batches and limits


@pytest.mark.parametrize(
    "rule", [pytest.param(r, marks=pytest.mark.slow if n % 2 else ()) for n, r in enumerate(RULES)]
)
def test_a_rule_equals_the_oracle_in_any_batch(rule: str) -> None:
    for policy in ("k1", "k2_middle"):
        got = decode(settings(rule), policy)
        assert [g.counters for g in decode(settings(rule), policy, batch_size=3)] == [g.counters for g in got]
        for one, prompt in zip(got, prompts(), strict=True):
            bound = ReusePolicy.parse(policy)
            want = reference_generate(shallow_oracle(), prompt.ids, policy=bound, settings=settings(rule))
            if want.margin < TIE and one.ids != want.ids:
                continue
            assert (one.ids, one.finish) == (want.ids, want.finish)
            assert one.counters.as_json()["passes"] == want.passes


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_a_batch_of_eight_equals_single_prompts(rule: str) -> None:
    for policy in ("k1", "k2_middle"):
        alone = decode(settings(rule), policy, lengths=MORE_LENGTHS)
        together = decode(settings(rule), policy, batch_size=8, lengths=MORE_LENGTHS)
        assert [(one.ids, one.counters) for one in together] == [(one.ids, one.counters) for one in alone]


def test_sampled_tokens_are_revealed_by_rules_as_by_the_oracle() -> None:
    compared = 0
    for rule in ("margin=0.05", "entropy=6", "klass=0.02+2", "credit=0.1"):
        sampled = settings(rule, temperature=0.7, top_p=0.9)
        for one, together, prompt in zip(decode(sampled), decode(sampled, batch_size=3), prompts(), strict=True):
            policy = ReusePolicy.parse("k1")
            want = reference_generate(shallow_oracle(), prompt.ids, policy=policy, settings=sampled, seed=prompt.seed)
            if want.margin > TIE:
                assert one.ids == together.ids == want.ids
                compared += 1
    assert compared >= 6


def test_one_token_at_a_time_is_threshold_1() -> None:
    def tokens_and_work(settings: DecodeSettings) -> list[object]:
        return [(one.ids, one.counters) for one in decode(settings, "k2_middle", 3)]

    want = tokens_and_work(DecodeSettings(threshold=1, max_new_tokens=36))
    for rule in ("topk=1", "klass=1", "factor=0.000001", "threshold=1"):
        assert tokens_and_work(settings(rule)) == want
    assert tokens_and_work(settings("topk=2")) != want


def test_every_rule_is_covered() -> None:
    assert {parse_reveal(rule).word for rule in RULES} | {"threshold"} == set(REVEAL_RULES)


# Settings


def sweep(**settings: Any) -> SweepSettings:
    return SweepSettings(tasks=("gsm8k",), **settings)


def test_a_threshold_is_short_for_its_reveal_rule() -> None:
    assert sweep(reveal=("threshold=0.9", "margin=0.5")) == sweep(threshold=(0.9,), reveal=("threshold", "margin=0.5"))
    assert sweep(threshold=(0.9,), reveal=("margin=0.5",)).reveal == ("threshold", "margin=0.5")
    assert sweep(reveal=("threshold=0.9",)) == sweep(threshold=(0.9,))
    only = sweep(reveal=("margin=0.50",))
    assert (only.threshold, only.reveal) == (None, ("margin=0.5",))
    for one in (only, sweep(), sweep(threshold=(0.9,), reveal=("topk=2",))):
        assert SweepSettings.from_dict(one.as_dict()) == one
    assert _values(only.as_dict(), "threshold") == []


@pytest.mark.parametrize(
    ("reveal", "complaint"),
    [
        (("best=2",), "--reveal: unknown reveal rule 'best=2'"),
        (("topk=2", "topk=2"), "twice"),
        ((), "must not be empty"),
    ],
)
def test_wrong_rules_of_a_sweep_are_explained(reveal: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        sweep(reveal=reveal)
    assert complaint in str(caught.value)


def test_a_command_takes_a_threshold_or_a_rule() -> None:
    assert shallow().config.decode_settings({"reveal": "topk=2"}).reveal == "topk=2"
    with pytest.raises(InputError, match=r"threshold 0\.9 and reveal topk=2 must not be used together"):
        shallow().config.decode_settings({"threshold": 0.9, "reveal": "topk=2"})

"""Policies beyond the grid: what each one plans, and the limits at which it equals another policy."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from golden_cases import batch_rows, single_rows
from small_models import golden_model

from sampler import DecodeSettings, LoadedModel, Prompt, ReusePolicy, decode_prompts
from sampler.loading import random_model
from sampler.measure import TINY
from sampler.plan import (
    COMPUTE,
    PARTIAL,
    REPLAY,
    REPLAY_ATTENTION,
    REPLAY_MLP,
    SKIP,
    WATCHED_INPUT,
    CacheSpec,
    LayerPlan,
    LayerStep,
    PassKind,
    PastPass,
    StepContext,
    Unit,
    compute_all,
    computed_at,
    input_changes,
)
from sampler.policies import adaptive, delayed, dllm, elastic, es, focus, periodic

torch.set_num_threads(1)

SMALL = replace(TINY, num_layers=9)
DEPTH = 6
ALL = compute_all(DEPTH)
BLOCK = range(8)


def past(plan: LayerPlan = ALL, window: range = BLOCK, **changes: float) -> PastPass:
    """A pass whose input changed by these shares at positions p0, p1, …, and nowhere else."""
    return PastPass(
        window=window, plan=plan, measured={WATCHED_INPUT: [(changes.get(f"p{p}", 0.0) * 10, 10.0) for p in window]}
    )


def context(*passes: PastPass, revealed: Sequence[int | None], window: range = BLOCK) -> StepContext:
    kind = PassKind.FULL if window == BLOCK else PassKind.SMALL
    return StepContext(step=len(passes), kind=kind, window=window, revealed_at=tuple(revealed), past=passes)


def plan(policy: str, facts: StepContext) -> LayerPlan:
    return ReusePolicy.parse(policy).bind(DEPTH).plan(facts)


def steps(step: LayerStep, *layers: int) -> tuple[LayerStep, ...]:
    return tuple(step if layer in layers else COMPUTE for layer in range(DEPTH))


OPENING = PastPass(window=BLOCK, plan=ALL)
GIVEN = [-1, -1, *[None] * 6]


# Names


@pytest.mark.parametrize(
    "name",
    [
        *("adaptive=0.2_middle", "adaptive=0_first", "adaptive=inf_all.2", "adaptive=0.125_4-9+20.0"),
        *(
            "trim=0.25_middle",
            "trim=1_last",
            "trim=0.1_2+5.random",
            "mlp=2_middle",
            "attn=3_4-9",
            "skip_last",
            "stale=2",
        ),
    ],
)
def test_names_round_trip(name: str) -> None:
    policy = ReusePolicy.parse(name)
    assert str(policy) == name
    assert ReusePolicy.parse(str(policy)) == policy
    assert policy.k is None


def test_names_have_one_spelling() -> None:
    for written, printed in (
        ("adaptive=0.20_middle.3", "adaptive=0.2_middle"),
        ("trim=1.0_5+2+3.random", "trim=1_2-3+5.random"),
    ):
        assert str(ReusePolicy.parse(written)) == printed


# What each plans


def test_halves_compute_every_kth_pass() -> None:
    for name, step, unit in (("mlp=3_2-3", REPLAY_MLP, Unit.MLP), ("attn=3_2-3", REPLAY_ATTENTION, Unit.ATTENTION)):
        bound = ReusePolicy.parse(name).bind(DEPTH)
        plans = [bound.plan(replace(context(revealed=GIVEN), step=t)) for t in range(7)]
        assert [p.replays for p in plans] == [False, True, True, False, True, True, False]
        assert plans[1].steps == steps(step, 2, 3)
        assert bound.cache_spec == CacheSpec((2, 3), unit)


def test_skip_caches_nothing() -> None:
    assert plan("skip_4-5", context(OPENING, revealed=GIVEN)).steps == steps(SKIP, 4, 5)
    assert ReusePolicy.parse("skip_4-5").bind(DEPTH).cache_spec == CacheSpec()


def test_stale_is_output_mode() -> None:
    for k in (1, 2, 3):
        assert ReusePolicy.parse(f"stale={k}").bind(DEPTH) == ReusePolicy.parse(f"k{k}_first.output").bind(DEPTH)


def test_adaptive_sums_measured_change_and_revealed_positions() -> None:
    replay = LayerPlan(steps(REPLAY, 2, 3))
    one_new = [-1, -1, 0, *[None] * 5]  # an eighth of the positions
    assert plan("adaptive=0.2_2-3", context(OPENING, revealed=one_new)) == replay
    assert plan("adaptive=0.12_2-3", context(OPENING, revealed=one_new)) == ALL
    moved = past(replay, p0=0.4, p2=0.4)  # 0.1 of the whole
    later = [-1, -1, 0, 1, *[None] * 4]
    assert plan("adaptive=0.23_2-3", context(OPENING, moved, revealed=later)) == replay
    assert plan("adaptive=0.22_2-3", context(OPENING, moved, revealed=later)) == ALL
    twice = context(OPENING, moved, moved, revealed=[-1, -1, 0, 1, 2, None, None, None])
    assert plan("adaptive=0.33_2-3", twice) == replay
    assert plan("adaptive=0.32_2-3", twice) == ALL


def test_adaptive_restarts_after_a_computed_pass() -> None:
    replay = LayerPlan(steps(REPLAY, 2, 3))
    facts = context(OPENING, past(replay, p0=9.0), past(ALL, p0=9.0), revealed=[-1, -1, 0, 1, 2, None, None, None])
    assert plan("adaptive=0.2_2-3", facts) == replay


def test_adaptive_limits_consecutive_replays() -> None:
    replay = LayerPlan(steps(REPLAY, 2, 3))
    for most in (0, 1, 2, 4):
        bound, done = ReusePolicy.parse(f"adaptive=inf_2-3.{most}").bind(DEPTH), [OPENING]
        for _ in range(10):
            done.append(past(bound.plan(context(*done, revealed=GIVEN))))
        assert [p.plan == replay for p in done] == [t % (most + 1) > 0 for t in range(11)]
    assert plan("adaptive=inf_2-3", context(OPENING, *[past(replay)] * 3, revealed=GIVEN)) == ALL


def test_trim_refreshes_revealed_neighbouring_and_most_changed_positions() -> None:
    facts = context(OPENING, past(p7=0.3, p0=0.2), revealed=[-1, -1, None, 1, None, None, None, None])
    assert plan("trim=0_2-3", facts) == LayerPlan(steps(PARTIAL, 2, 3), selected=(2, 3, 4))
    assert plan("trim=0.1_2-3", facts).selected == (2, 3, 4, 7)
    assert plan("trim=0.25_2-3", facts).selected == (0, 2, 3, 4, 7)
    assert plan("trim=1_2-3", facts) == ALL


def test_trim_remembers_revealed_positions_that_were_not_refreshed_yet() -> None:
    """Position 1 was revealed by the opening pass; the next pass forwarded other positions only."""
    partial = LayerPlan(steps(PARTIAL, 2, 3), selected=(4,))
    facts = context(OPENING, past(partial, range(4, 8)), revealed=[-1, 0, None, None, 1, None, None, None])
    assert plan("trim=0_2-3", facts).selected == (0, 1, 2, 3, 4, 5)
    refreshed = past(replace(partial, selected=(0, 1, 2, 3, 4, 5)))
    assert plan("trim=0_2-3", replace(facts, step=3, past=(*facts.past, refreshed))) == LayerPlan(steps(REPLAY, 2, 3))


def test_trim_selects_positions_of_the_pass_only() -> None:
    facts = context(OPENING, past(p0=5.0), revealed=[-1, -1, -1, -1, 1, None, None, None], window=range(4, 8))
    assert plan("trim=0.25_2-3", facts).selected == (4, 5)


def test_the_random_control_selects_as_many_positions() -> None:
    facts = [
        context(OPENING, past(p7=0.3), revealed=[-1] * given + [1] + [None] * (7 - given)) for given in range(1, 6)
    ]
    drawn = [plan("trim=0.25_2-3.random", one).selected for one in facts]
    chosen = [plan("trim=0.25_2-3", one).selected for one in facts]
    assert [len(s) for s in drawn] == [len(s) for s in chosen]
    assert drawn != chosen
    assert drawn == [plan("trim=0.25_2-3.random", one).selected for one in facts]
    assert plan("trim=1_2-3.random", facts[0]) == ALL


def test_input_changes_and_computed_at() -> None:
    partial = LayerPlan(steps(PARTIAL, 2), selected=(5,))
    passes = [OPENING, past(p1=0.5), past(partial, range(4, 8), p4=0.25)]
    assert OPENING.input_change == 0
    assert passes[1].input_change == pytest.approx(0.5 / 8)
    assert input_changes(passes) == {0: 0, 1: 0.5, 2: 0, 3: 0, 4: 0.25, 5: 0, 6: 0, 7: 0}
    assert computed_at(passes) == {**dict.fromkeys(BLOCK, 1), 5: 2}


# The limits at which a policy is another one

SAME = [
    *(
        (f"{rule}_{layers}", "k1")
        for rule in ("adaptive=0", "trim=1", "mlp=1", "attn=1")
        for layers in ("middle", "0-3")
    ),
    ("trim=1_all.random", "k1"),
    ("adaptive=inf_middle.0", "k1"),
    ("stale=1", "k1"),
    *((f"adaptive=inf_{layers}.{k - 1}", f"k{k}_{layers}") for k in (2, 3, 4) for layers in ("first", "last")),
    *((f"stale={k}", f"k{k}_middle.output") for k in (2, 3)),
]


@cache
def models() -> dict[str, LoadedModel]:
    return {"m28": golden_model("m28"), "m36": golden_model("m36"), "random": random_model(SMALL)}


@cache
def prompts(model: str) -> tuple[Prompt, ...]:
    """Golden prompts with their own limits; for the random model, lengths that make batches ragged."""
    if model != "random":
        rows = [row for row in (*single_rows(), *batch_rows()) if row.model == model]
        limits = {row.prompt: row.settings.max_new_tokens for row in rows if row.settings.max_new_tokens <= 64}
        chosen = list(limits)[:: max(1, len(limits) // 5)][:5]
        return tuple(Prompt(ids=ids, max_new_tokens=limits[ids]) for ids in chosen)
    generator = random.Random(5)
    return tuple(
        Prompt(ids=tuple(generator.randrange(157) for _ in range(length)), max_new_tokens=generator.randrange(20, 60))
        for length in (1, 31, 32, 40, 64, 70)
    )


@cache
def decoded(policy: str, model: str, batch_size: int) -> list[object]:
    found = dict(
        decode_prompts(
            models()[model],
            prompts(model),
            policy=ReusePolicy.parse(policy),
            settings=DecodeSettings(threshold=0.6),
            batch_size=batch_size,
        )
    )
    return [(found[i].ids, found[i].finish, found[i].counters) for i in range(len(prompts(model)))]


@pytest.mark.parametrize(
    ("model", "batch_size"),
    [
        ("random", 1),
        ("m28", 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("random", 4), ("m28", 1), ("m36", 1), ("m36", 4))),
    ],
)
@pytest.mark.parametrize(("policy", "other"), SAME)
def test_a_policy_at_its_limit_equals_another(policy: str, other: str, model: str, batch_size: int) -> None:
    """Token for token, and layer for layer."""
    assert len(prompts(model)) >= 4
    assert decoded(policy, model, batch_size) == decoded(other, model, batch_size)


@pytest.mark.parametrize(
    "policy", ["adaptive=0.3_middle", "trim=0.1_middle", "mlp=2_middle", "attn=2_middle", "skip_0-3"]
)
def test_a_policy_away_from_its_limit_differs(policy: str) -> None:
    assert decoded(policy, "random", 1) != decoded("k1", "random", 1)


def test_trim_runs_fewer_positions_the_less_it_refreshes() -> None:
    def positions(policy: str) -> float:
        found = decoded(policy, "random", 1)
        passes = sum(c.prefill_tokens + 32 * (c.full + c.commit) + 8 * c.small for _, _, c in found)  # type: ignore[misc]
        return sum(c.layer_positions for _, _, c in found) / (SMALL.num_layers * passes)  # type: ignore[misc]

    assert positions("k1") == 1
    assert positions("trim=0.1_all") < positions("trim=0.5_all") < positions("trim=0.9_all") <= 1


@pytest.mark.parametrize("module", [adaptive, periodic, delayed, dllm, elastic, es, focus])
def test_a_policy_file_is_short_and_cites_its_source(module: ModuleType) -> None:
    assert "Source:" in str(module.__doc__)
    assert len(Path(str(module.__file__)).read_text(encoding="utf-8").splitlines()) < 200

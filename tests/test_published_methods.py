"""Published methods and checkpoints: names, plans, limits, the oracle, batches and padded passes."""

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import with_execution
from oracle.decoder import ReferenceGenerated, reference_generate
from small_models import DEPTH, shallow, shallow_oracle
from test_policies import context, plan

from sampler import DecodeSettings, Generated, InputError, LoadedModel, Prompt, ReusePolicy, decode_prompts
from sampler.attention import Backend
from sampler.decode import Step
from sampler.plan import (
    COMPUTE,
    PARTIAL,
    REPLAY,
    SKIP,
    Checkpoint,
    CheckpointSignal,
    LayerPlan,
    PastPass,
    compute_all,
    resolve,
)
from sampler.policies import RULES

torch.set_num_threads(1)

TIE = 1e-4  # decisions closer than this may fall either way
METHODS = [
    *("delayed=1_all", "dllm=0.25_middle.3", "elastic=0.3_all", "es=0.5_2-7", "focus=0.5_1-7", "skip_middle.every"),
    *("delayed=0_middle", "delayed=2_2-5", "dllm=0.5_all", "es=0.25_middle", "es=0.5_1-7.3", "focus=0.25_2+5"),
    *("skip_0.every", "elastic=0.5_2-6.1"),
]
QUICK = METHODS[:6]
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS]
SAME = [  # at these limits two policies are equal, token for token and layer for layer
    *((f"{name}=1_middle", "k1") for name in ("dllm", "es", "focus")),
    *(("delayed=inf_all", "k1"), ("dllm=0.5_middle.1", "k1"), ("dllm=0_middle.3", "k3_middle")),
    *((f"{name}=0_middle", "k999_middle") for name in ("es", "focus")),
    *(("elastic=0_all", "k1"), ("elastic=inf_middle.2", "k3_middle")),
]
PROMPTS = tuple(
    Prompt(ids=tuple(random.Random(length).randrange(157) for _ in range(length)), max_new_tokens=24 + length % 9)
    for length in (7, 32, 40, 70)
)
SETTINGS = DecodeSettings(threshold=0.5)


def decode(policy: str, *, model: LoadedModel | None = None, batch_size: int = 1, **more: Any) -> list[Generated]:
    options: dict[str, Any] = {"policy": ReusePolicy.parse(policy), "settings": SETTINGS, "batch_size": batch_size}
    found = dict(decode_prompts(model or shallow(), PROMPTS, **options, **more))
    return [found[index] for index in range(len(PROMPTS))]


@cache
def oracle(policy: str, number: int) -> ReferenceGenerated:
    one = PROMPTS[number]
    settings = DecodeSettings(threshold=0.5, max_new_tokens=one.max_new_tokens or 1)
    return reference_generate(shallow_oracle(), one.ids, policy=ReusePolicy.parse(policy), settings=settings)


def check_against_oracle(policy: str, generated: list[Generated]) -> None:
    compared = 0
    for number, got in enumerate(generated):
        want = oracle(policy, number)
        if want.margin < TIE and got.ids != want.ids:
            continue
        assert (got.ids, got.finish) == (want.ids, want.finish)
        printed = got.counters.as_json()
        assert (printed["passes"], printed["layers"]) == (want.passes, want.layers)
        compared += 1
    assert compared >= 3


# Names


@pytest.mark.parametrize("name", [*METHODS, "delayed=inf_all", "dllm=0.1_last", "es=1_0.2", "focus=0_first"])
def test_names_round_trip(name: str) -> None:
    assert str(ReusePolicy.parse(name)) == name


@pytest.mark.parametrize("name", ["delayed=1_all", "dllm=0.5_all", "elastic=1_all", "es=0.5_all", "focus=0.5_all"])
def test_methods_that_cannot_score_say_why(name: str) -> None:
    with pytest.raises(InputError, match=r"cannot score log-likelihoods: it .* scored state"):
        ReusePolicy.parse(name).check_scoring()


# Plans


OPENING = PastPass(window=range(8), plan=compute_all(6), confidence={2: 0.4, 3: 0.9})
GIVEN: list[int | None] = [-1, -1, None, 0, None, -1, -1, -1]


def test_delayed_computes_masked_positions_their_predecessors_and_those_just_revealed() -> None:
    assert plan("delayed=0_all", context(OPENING, revealed=GIVEN)).selected == (1, 2, 3, 4)
    settled: list[int | None] = [*GIVEN[:4], 0, *GIVEN[5:]]
    assert plan("delayed=0_all", context(OPENING, revealed=settled)).selected == (1, 2)
    assert plan("delayed=1_all", context(OPENING, revealed=settled)).selected == (1, 2, 3, 4)
    small = PastPass(window=range(4), plan=LayerPlan((PARTIAL,) * 6, selected=(1, 2, 3)))
    later = context(OPENING, small, revealed=settled)
    assert plan("delayed=1_all", later).selected == (1, 2, 4), "position 4 was not forwarded since it was revealed"


def test_a_narrowing_rule_declares_its_checkpoints() -> None:
    facts = context(OPENING, revealed=GIVEN)
    dllm = plan("dllm=0.25_2-4", facts)
    assert dllm.steps == (COMPUTE, COMPUTE, PARTIAL, PARTIAL, PARTIAL, COMPUTE)
    [checkpoint] = dllm.checkpoints
    assert (checkpoint.layer, checkpoint.keep, checkpoint.signal) == (2, 2, CheckpointSignal.VALUE_CHANGE)
    assert checkpoint.priors == (0, 0, 0, float("inf"), 0, 0, 0, 0)
    from_start = plan("dllm=0.25_0-2", facts)
    assert (from_start.steps[:4], from_start.checkpoints[0].layer) == ((COMPUTE, PARTIAL, PARTIAL, COMPUTE), 1)
    assert plan("dllm=0.25_0", facts) == compute_all(6)
    early = plan("es=0.5_1-4.2", facts)
    assert [(c.layer, c.keep, c.weight) for c in early.checkpoints] == [(1, 4, 0.5), (3, 2, 0.5)]
    assert early.checkpoints[0].priors == (0, 0.2, 0.2, 0, 0, 0, 0, 0), "position 3 is revealed, 1 may predict 2"
    [focus] = plan("focus=0.5_2-3", facts).checkpoints
    assert [p for p, prior in enumerate(focus.priors) if prior == 0] == [1, 2, 3, 4]
    assert plan("es=0_1-4", facts).steps == (COMPUTE, *(REPLAY,) * 4, COMPUTE)
    assert plan("dllm=0.25_2-4.1", facts) == plan("focus=1_2", facts) == compute_all(6)


def test_elastic_computes_from_the_first_layer_that_drifted() -> None:
    def done(plan: LayerPlan, **drift: float) -> PastPass:
        measured = {layer: [(drift.get(f"l{layer}", 0.0), 1.0, 9.0)] * 8 for layer in range(1, 5)}
        computed = {layer: norms for layer, norms in measured.items() if plan.steps[layer] is COMPUTE}
        return PastPass(window=range(8), plan=plan, measured=computed)

    def replayed(*past: PastPass) -> list[int]:
        steps = plan("elastic=0.1_1-4.2", context(OPENING, *past, revealed=GIVEN)).steps
        return [layer for layer, step in enumerate(steps) if step is REPLAY]

    every = compute_all(6)
    assert replayed() == [], "nothing was measured yet"
    assert replayed(done(every, l3=0.2, l4=0.3)) == [1, 2]
    assert replayed(done(every, l1=0.2)) == []
    assert replayed(done(every)) == [1, 2, 3, 4]
    two = LayerPlan((COMPUTE, REPLAY, REPLAY, COMPUTE, COMPUTE, COMPUTE))
    assert replayed(done(every), done(two), done(two, l4=0.2)) == [], "layer 1 was replayed twice"
    assert replayed(done(every), done(two, l4=0.2)) == [1, 2, 3]


def test_only_skipped_layers_may_be_left_out_of_the_first_pass() -> None:
    first = context(revealed=[None] * 8)
    skip = plan("skip_2-3.every", first)
    assert skip.steps.count(SKIP) == 2
    assert resolve(skip, first, 6) == skip
    assert plan("skip_2-3", first) == compute_all(6)
    assert resolve(LayerPlan((REPLAY,) * 6), first, 6) == compute_all(6)


def test_plans_with_other_priors_share_a_batch() -> None:
    def narrowed(keep: int, *priors: float) -> object:
        one = Checkpoint(layer=1, keep=keep, signal=CheckpointSignal.ATTENTION, weight=1.0, priors=priors)
        return LayerPlan((COMPUTE, PARTIAL), checkpoints=(one,)).batch_key

    assert narrowed(1, 0.0, 1.0) == narrowed(1, 2.0, 0.0)
    assert len({narrowed(1, 0.0, 1.0), narrowed(1, 0.0, 1.0, 2.0), narrowed(2, 0.0, 1.0, 2.0)}) == 3


# Limits


@pytest.mark.parametrize(("policy", "other"), SAME)
def test_a_method_at_its_limit_equals_another(policy: str, other: str) -> None:
    got, want = (decode(name, batch_size=3) for name in (policy, other))
    assert [(g.ids, g.counters) for g in got] == [(g.ids, g.counters) for g in want]


def test_skipping_no_layer_is_k1() -> None:
    class SkipNothing:
        def bind(self, depth: int, subset_size: int | None = None) -> Any:
            del subset_size
            return ReusePolicy.parse("skip_0.every").rule.bind((), depth)

    want = decode("k1")
    got = dict(decode_prompts(shallow(), PROMPTS, policy=SkipNothing(), settings=SETTINGS))
    assert [(got[i].ids, got[i].counters) for i in range(len(PROMPTS))] == [(g.ids, g.counters) for g in want]


# The oracle


@pytest.mark.parametrize("policy", CASES)
def test_a_method_equals_the_oracle(policy: str) -> None:
    got = decode(policy)
    check_against_oracle(policy, got)
    assert [g.ids for g in got] != [g.ids for g in decode("k1")]
    assert any(g.counters.replayed for g in got)


@pytest.mark.parametrize("policy", CASES)
def test_a_method_equals_the_oracle_in_batches(policy: str) -> None:
    for batch_size in (3, 8) if policy not in QUICK else (3,):
        check_against_oracle(policy, decode(policy, batch_size=batch_size))


@pytest.mark.parametrize("backend", [Backend.REFERENCE, pytest.param(Backend.DENSE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["dllm=0.25_middle.3", "es=0.5_1-7.3", "focus=0.5_1-7"])
def test_padded_passes_equal_the_oracle(policy: str, backend: Backend) -> None:
    check_against_oracle(policy, decode(policy, model=with_execution(shallow(), backend), batch_size=3))


def test_layers_after_a_checkpoint_run_for_the_positions_it_kept() -> None:
    steps: list[Step] = []
    got = decode("es=0.5_2-7.2", on_step=steps.append)
    expected = sum(
        sum(step.executed.positions(layer, len(step.context.window)) for layer in range(DEPTH)) for step in steps
    )
    others = DEPTH * sum(g.counters.prefill_tokens + 32 * g.counters.commit for g in got)
    assert sum(g.counters.layer_positions for g in got) == expected + others
    assert any(step.executed.checkpoints for step in steps)


def test_a_rule_with_a_checkpoint_is_added_as_documented() -> None:
    """The example in docs/policies.md defines a new rule, which differs from all existing ones."""
    page = (Path(__file__).parent.parent / "docs" / "policies.md").read_text(encoding="utf-8")
    [block] = re.findall(
        r"```python\n(.*?)```", page.partition("## Decisions within a pass")[2].partition("\n## ")[0], re.S
    )
    try:
        exec(block, {"RULES": RULES, "__name__": "moved"})
        check_against_oracle("moved=0.5_2-6", decode("moved=0.5_2-6", batch_size=3))
    finally:
        RULES.pop("moved", None)

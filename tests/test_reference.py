"""The oracle against the reference implementation's answers, and the properties that define layer reuse."""

from copy import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from golden_cases import (
    GoldenRow,
    Step,
    batch_rows,
    logits_probes,
    loglikelihood_cases,
    model_folder,
    single_rows,
)
from oracle.decoder import ReferenceGenerated, ReferenceModel, guess, reference_generate, reference_score
from oracle.model import BlockState, forward

from sampler.plan import COMPUTE, PARTIAL, REPLAY, REPLAY_ATTENTION, REPLAY_MLP, LayerPlan, LayerStep, compute_all
from sampler.policy import ReusePolicy
from sampler.records import DecodeSettings

torch.set_num_threads(1)

K1 = ReusePolicy.parse("k1")
PROMPT = tuple(range(20, 59))  # a block and seven tokens
QUICK = DecodeSettings(threshold=0.9, max_new_tokens=27)  # the block's other 25 and two of the next
DEPTH, REUSED = 8, 2
SUBSETS = ("first", "middle", "last")


@cache
def model(name: str) -> ReferenceModel:
    return ReferenceModel.load(model_folder(name))


@cache
def shallow() -> ReferenceModel:
    """Eight layers; first, middle and last name two each: enough for what does not depend on depth."""
    cut = ReferenceModel.load(model_folder("m28"))
    cut.depth = DEPTH
    return cut


@cache
def generate(policy: str, *, settings: DecodeSettings = QUICK, **options: Any) -> ReferenceGenerated:
    return reference_generate(shallow(), PROMPT, policy=ReusePolicy.parse(policy), settings=settings, **options)


def by_default(rows: tuple[GoldenRow, ...], shortest: int) -> list[Any]:
    """The traced rows and the `shortest` of the others run by default; the rest is slow."""
    untraced = sorted((row for row in rows if row.trace is None), key=lambda row: sum(row.passes.values()))
    slow = {row.id for row in untraced[shortest:]}
    return [pytest.param(row, id=row.id, marks=pytest.mark.slow if row.id in slow else ()) for row in rows]


def steps(generated: ReferenceGenerated) -> tuple[Step, ...]:
    return tuple(
        Step(block=step.block, small=step.small, kind=step.kind, tokens=step.tokens) for step in generated.trace
    )


# The reference implementation's answers


@pytest.mark.parametrize("row", by_default(single_rows(), shortest=8))
def test_single_prompts_are_continued_as_the_reference_does(row: GoldenRow) -> None:
    got = reference_generate(model(row.model), row.prompt, policy=K1, settings=row.settings, whole_blocks=True)
    assert got.ids == row.ids
    assert got.passes == row.passes
    assert got.finish == ("stop" if row.stopped else "length")
    assert min(step.margin for step in got.trace) == pytest.approx(row.margin, abs=1e-4)
    assert row.trace is None or steps(got) == row.trace
    if row.stopped:  # ours does not finish the block in which the stop stands
        exact = reference_generate(model(row.model), row.prompt, policy=K1, settings=row.settings)
        assert exact.ids == row.ids
        assert steps(exact) == steps(got)[: len(exact.trace)]


@pytest.mark.parametrize("row", by_default(batch_rows(), shortest=2))
def test_rows_of_uncoupled_batches_are_continued_as_the_reference_does(row: GoldenRow) -> None:
    got = reference_generate(model(row.model), row.prompt, policy=K1, settings=row.settings, whole_blocks=True)
    assert got.ids == row.ids
    assert row.trace is None or steps(got) == row.trace


@pytest.mark.parametrize("case", loglikelihood_cases(), ids=lambda case: case["id"])
def test_reference_scoring_gives_the_golden_scores(case: dict[str, Any]) -> None:
    got = reference_score(model(case["model"]), case["prefix"], case["target"], policy=K1, method="reference")
    assert got.score == pytest.approx(case["score"], abs=5e-3)


@pytest.mark.parametrize("probe", logits_probes(), ids=lambda probe: probe["model"])
def test_raw_logits_are_the_golden_ones(probe: dict[str, Any]) -> None:
    oracle = model(probe["model"])
    state = BlockState()
    for window in (range(32), range(32, 64)):
        forward(oracle, probe["input_ids"], window, compute_all(oracle.depth), state)
    got = torch.stack([oracle.logits(state.final[position]) for position in probe["positions"]])
    torch.testing.assert_close(got, torch.tensor(probe["logits"]), atol=2e-3, rtol=1e-4)


# What reuse does to decoding


def test_k1_is_the_same_under_every_name() -> None:
    assert generate("k1_first") == generate("k1_last.output") == generate("k1")


@pytest.mark.parametrize("k", [2, 3])
def test_output_mode_is_the_same_for_every_subset_and_runs_no_layer(k: int) -> None:
    first, middle, last = (generate(f"k{k}_{subset}.output") for subset in SUBSETS)
    assert first == middle == last
    assert first != generate("k1")
    steps_in_block = [[step.block for step in first.trace].count(block) for block in (1, 2)]
    computing = sum(-(-count // k) for count in steps_in_block) + first.passes["prefill"] + first.passes["commit"]
    assert first.layers["computed"] == DEPTH * computing


@pytest.mark.parametrize(("k", "subset"), [(2, "first"), (2, "middle"), (2, "last"), (3, "middle")])
def test_output_small_equals_returning_every_cached_output(k: int, subset: str) -> None:
    stale = generate(f"k{k}_{subset}.output.small")
    literal = generate(f"k{k}_{subset}.output.small", literal=True)
    assert stale.ids == literal.ids
    assert stale.trace == literal.trace  # margins too: the logits are the same bit for bit
    assert stale.layers["reused"] > literal.layers["reused"] > 0


@pytest.mark.parametrize("option", ["", ".small"])
def test_residual_subsets_differ(option: str) -> None:
    traces = [steps(generate(f"k2_{subset}{option}")) for subset in SUBSETS]
    assert len(set(traces)) == len(SUBSETS)


@pytest.mark.parametrize("policy", ["k1", "k2_first", "k3_last", "k2_middle.output", "k2_2-3+6.small", "k2_all"])
@pytest.mark.parametrize("block_cache", [True, False])
def test_every_layer_of_every_pass_is_computed_or_reused(policy: str, block_cache: bool) -> None:
    got = generate(policy, settings=replace(QUICK, block_cache=block_cache))
    assert got.layers["computed"] + got.layers["reused"] == DEPTH * sum(got.passes.values())
    assert (got.layers["reused"] == 0) == (policy == "k1" or (policy.endswith(".small") and not block_cache))
    assert (got.passes["small"] > 0) == block_cache


# What a plan does in a forward: any plan on unchanged inputs gives what computing gives

BLOCK = [1 + position % 150 if position < 45 else 159 for position in range(64)]


@pytest.mark.parametrize("step", [REPLAY, REPLAY_ATTENTION, REPLAY_MLP, PARTIAL])
@pytest.mark.parametrize("window", [range(32, 64), range(40, 48)], ids=["full", "small"])
def test_replaying_with_unchanged_inputs_equals_computing(step: LayerStep, window: range) -> None:
    oracle = shallow()
    state = BlockState()
    forward(oracle, BLOCK, range(32, 64), compute_all(DEPTH), state)
    computed = dict(state.final)
    plan = LayerPlan((COMPUTE,) * 2 + (step,) * 4 + (COMPUTE,) * 2, selected=(9, 12) if step is PARTIAL else ())
    ran = forward(oracle, BLOCK, window, plan, state)
    attention, mlp = (share * len(window) for share in oracle.shares)
    assert attention + mlp == len(window)
    assert ran[2:6] == [{PARTIAL: 2, REPLAY: 0, REPLAY_ATTENTION: mlp, REPLAY_MLP: attention}[step]] * 4
    for position in window:
        torch.testing.assert_close(state.final[position], computed[position], atol=1e-4, rtol=1e-4)


def test_replayed_layers_and_positions_keep_what_they_last_left() -> None:
    oracle = shallow()
    state = BlockState()
    forward(oracle, BLOCK, range(32, 64), compute_all(DEPTH), state)
    before = BlockState(**{name: copy(getattr(state, name)) for name in BlockState.__slots__})
    changed = [*BLOCK[:45], 77, *BLOCK[46:]]
    plan = LayerPlan((COMPUTE, REPLAY, REPLAY_ATTENTION, REPLAY_MLP) + (PARTIAL,) * 4, selected=(13,))
    forward(oracle, changed, range(40, 48), plan, state)
    for name, fresh_layers in {"keys": (0, 3), "attention": (0, 3), "mlp": (0, 2)}.items():
        now, then = getattr(state, name), getattr(before, name)
        fresh = {place for place in now if now[place] is not then[place]}
        whole = {(layer, position) for layer in fresh_layers for position in range(40, 48)}
        assert fresh == whole | {(layer, 45) for layer in range(4, DEPTH)}


# Scoring


@pytest.mark.parametrize("policy", ["k1", "k2_middle", "k3_last.output"])
def test_chain_and_reference_scoring_agree_on_one_token(policy: str) -> None:
    chain, reference = (
        reference_score(shallow(), PROMPT, [7], policy=ReusePolicy.parse(policy), method=method)
        for method in ("chain", "reference")
    )
    assert chain == reference


@pytest.mark.parametrize(
    ("policy", "rewound", "full"),
    [("k1", 0, 1), ("k2_middle", 2, 2), ("k3_last", 4, 2), ("k9_first", 7, 2), ("k2_last.small", 0, 1)],
)
def test_reuse_is_scored_by_rewinding(policy: str, rewound: int, full: int) -> None:
    got = reference_score(shallow(), PROMPT, [7], policy=ReusePolicy.parse(policy))
    exact = reference_score(shallow(), PROMPT, [7], policy=K1)
    assert got.rewound == rewound
    assert got.passes == {"prefill": 1, "full": full, "small": 0, "commit": 0}
    assert (got.score == exact.score) == (rewound == 0)
    assert got.layers["reused"] == (REUSED if rewound else 0)


def test_the_scored_states_written_out() -> None:
    """K = 3, target at 39 and 40: four positions and EOS masked again, then t = 2 (replay) and t = 3."""
    masks, eos, oracle = [159] * 32, 158, shallow()
    rewound = [*PROMPT[:35], *masks][:64]
    first = [*PROMPT, 159, 159, eos, *masks][:64]
    second = [*PROMPT, 7, 159, eos, *masks][:64]
    replay = LayerPlan((COMPUTE,) * 3 + (REPLAY,) * REUSED + (COMPUTE,) * 3)
    state, expected = BlockState(), 0.0
    forward(oracle, rewound, range(32, 64), compute_all(DEPTH), state)
    forward(oracle, first, range(32, 64), replay, state)
    expected += float(oracle.logits(state.final[38]).log_softmax(-1)[7])
    forward(oracle, second, range(32, 64), compute_all(DEPTH), state)
    expected += float(oracle.logits(state.final[39]).log_softmax(-1)[8])
    got = reference_score(oracle, PROMPT, [7, 8], policy=ReusePolicy.parse("k3_middle"))
    assert got.score == pytest.approx(expected, abs=1e-6)
    assert got.passes["full"] == 3


def test_output_mode_reads_the_rewound_state() -> None:
    scores = {
        subset: reference_score(shallow(), PROMPT, [7, 8], policy=ReusePolicy.parse(f"k2_{subset}.output"))
        for subset in SUBSETS
    }
    assert scores["first"] == scores["middle"] == scores["last"]
    assert scores["first"].passes["full"] == 3  # the rewound state, nothing, and all layers again at t = 2
    assert scores["first"].layers["reused"] == DEPTH


def test_a_target_at_a_blocks_start_is_read_from_the_clean_block_before() -> None:
    k1, k3 = (
        reference_score(shallow(), PROMPT[:32], [7], policy=ReusePolicy.parse(policy)) for policy in ("k1", "k3_middle")
    )
    assert k1 == k3
    assert k1.rewound == 0
    assert k1.passes == {"prefill": 1, "full": 0, "small": 0, "commit": 0}


def test_a_target_across_a_block_border_commits_and_restarts_the_count() -> None:
    got = reference_score(shallow(), PROMPT[:30], [5, 6, 7, 8, 9], policy=ReusePolicy.parse("k2_middle"))
    assert got.rewound == 2
    # Block 0: rewound, then two tokens. Block 1: one token from the commit, two at t = 0 and 1.
    assert got.passes == {"prefill": 0, "full": 5, "small": 0, "commit": 1}
    assert got.layers["reused"] == 2 * REUSED


def test_greedy_says_whether_every_token_is_what_would_be_read() -> None:
    read = reference_generate(shallow(), PROMPT[:32], policy=K1, settings=replace(QUICK, max_new_tokens=1)).ids[0]
    assert reference_score(shallow(), PROMPT[:32], [read], policy=K1).greedy
    assert not reference_score(shallow(), PROMPT[:32], [read - 1], policy=K1).greedy
    assert not reference_score(shallow(), PROMPT[:32], [read - 1, read], policy=K1).greedy


# Sampling


def test_sampling_reads_by_cumulative_probability_inside_the_nucleus() -> None:
    logits = torch.tensor([0.2, 0.3, 0.1, 0.4]).log()  # token 3 is the mask: never read, yet in the softmax
    settings = DecodeSettings(temperature=1.0, top_p=0.4)
    assert guess(logits, 3, settings, 0.59).token == 1
    assert guess(logits, 3, settings, 0.61).token == 0
    assert guess(logits, 3, settings, 0.61).confidence == pytest.approx(0.4)
    assert guess(logits, 3, replace(settings, top_p=0.25), 0.99).confidence == 1
    assert guess(logits, 3, replace(settings, top_p=1.0), 0.99).token == 2
    greedy = guess(logits, 3, DecodeSettings(), 0.99)
    assert (greedy.token, greedy.confidence) == (1, pytest.approx(0.3))


def test_sampling_follows_its_seed_and_narrows_down_to_greedy() -> None:
    def sample(seed: int, **settings: float) -> tuple[int, ...]:
        wanted = replace(QUICK, max_new_tokens=9, **settings)
        policy = ReusePolicy.parse("k2_middle")
        return reference_generate(shallow(), PROMPT, policy=policy, settings=wanted, seed=seed).ids

    assert sample(1, temperature=1.5) == sample(1, temperature=1.5) != sample(2, temperature=1.5)
    # A nucleus of one token has confidence 1: all are revealed at once, as at a tiny threshold.
    assert sample(1, temperature=1.5, top_p=1e-9) == sample(1, threshold=1e-9)


def test_limits_are_exact() -> None:
    long = generate("k1")
    for length in (1, 8, 9):
        short = generate("k1", settings=replace(QUICK, max_new_tokens=length))
        assert short.ids == long.ids[:length]
        assert steps(short) == steps(long)[: len(short.trace)]
        assert short.passes["commit"] == 0

"""Log-likelihoods against the golden scores and the oracle; sharing and batching change only the work."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from golden_cases import loglikelihood_cases
from oracle.decoder import ReferenceScored, reference_score
from small_models import golden_model, shallow, shallow_oracle

from sampler import InputError, Pair, ReusePolicy, Scored, score_pairs

torch.set_num_threads(1)

GRID = ["k1", "k2_first", "k2_middle", "k3_last", "k3_middle.output", "k2_middle.small", "k4_all"]
POLICIES = [*GRID, "mlp=1_middle", "mlp=2_middle", "attn=3_all", "skip_middle", "stale=2"]


def tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(157) for _ in range(count))


def score(policy: str, pairs: Sequence[Pair], **options: Any) -> list[Scored]:
    found = dict(score_pairs(shallow(), pairs, policy=ReusePolicy.parse(policy), **options))
    return [found[index] for index in range(len(pairs))]


@cache
def oracle(policy: str, pair: Pair, method: str = "chain") -> ReferenceScored:
    return reference_score(shallow_oracle(), pair.prefix, pair.target, policy=ReusePolicy.parse(policy), method=method)


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in loglikelihood_cases()])
def test_reference_scoring_gives_the_golden_scores(case: dict[str, Any]) -> None:
    pair = Pair(prefix=tuple(case["prefix"]), target=tuple(case["target"]))
    model = golden_model(case["model"])
    [(_, got)] = score_pairs(model, [pair], policy=ReusePolicy.parse("k1"), method="reference")
    assert got.score == pytest.approx(case["score"], abs=5e-3)


@pytest.mark.parametrize("method", ["chain", "reference"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_equals_the_oracle(policy: str, method: str) -> None:
    for length, target in ((1, 1), (5, 3), (31, 1), (31, 3), (32, 1), (32, 4), (33, 2), (50, 40), (60, 5), (64, 33)):
        pair = Pair(prefix=tokens(length, length), target=tokens(target, length + 1))
        [got], want = score(policy, [pair], method=method), oracle(policy, pair, method)
        assert got.score == pytest.approx(want.score, abs=1e-3)
        assert (got.greedy, got.rewound) == (want.greedy, want.rewound)
        printed = got.counters.as_json()
        assert (printed["passes"], printed["layers"]) == (want.passes, want.layers)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_sharing_and_batches_do_not_change_a_score(policy: str, batch_size: int) -> None:
    shared = tokens(70, 1)
    pairs = []
    for question, length in enumerate((3, 26, 27, 40, 57, 58, 90)):
        prefix = (*shared, *tokens(length, question))
        first, second = tokens(2, 100 + question)
        pairs += [Pair(prefix=prefix, target=target) for target in ((first,), (second,), (first, 4), (first, 5))]
        pairs += [Pair(prefix=prefix, target=(first, second, last)) for last in (6, 7, 8)]
        pairs += [Pair(prefix=prefix, target=(second, *tokens(length % 9, 7))), Pair(prefix=prefix, target=(first,))]
    together = score(policy, pairs, batch_size=batch_size)
    for pair, got in zip(pairs, together, strict=True):
        want = oracle(policy, pair)
        assert got.score == pytest.approx(want.score, abs=1e-3)
        assert (got.greedy, got.rewound) == (want.greedy, want.rewound)


def test_options_with_one_state_share_a_forward() -> None:
    prefix = tokens(45, 3)
    scored = score("k1", [Pair(prefix=prefix, target=(option,)) for option in range(4)])
    assert [s.counters.full for s in scored] == [1, 0, 0, 0]
    assert scored[0].counters.prefill_tokens == 32
    scored = score("k3_middle", [Pair(prefix=prefix, target=(option,)) for option in range(4)])
    assert [s.counters.full for s in scored] == [2, 0, 0, 0]
    assert scored[0].counters.layers_reused == 2
    forked = score("k2_middle", [Pair(prefix=prefix, target=(9, option, 4)) for option in range(4)])
    assert forked[0].counters.full == 1 + 1 + 1 + 4


@pytest.mark.parametrize("batch_size", [1, 4])
def test_shared_prompt_blocks_are_prefilled_once(batch_size: int) -> None:
    shared = tokens(100, 4)
    pairs = [Pair(prefix=(*shared, *tokens(20, n)), target=(1,)) for n in range(8)]
    scored = score("k1", pairs, batch_size=batch_size)
    assert sum(s.counters.prefill_tokens for s in scored) == 96
    assert all(s.score == pytest.approx(oracle("k1", p).score, abs=1e-3) for s, p in zip(scored, pairs, strict=True))


def test_a_target_at_a_block_start_is_read_from_the_prefill() -> None:
    scored = score("k3_middle", [Pair(prefix=tokens(64, 5), target=(option,)) for option in (3, 4)])
    assert [(s.rewound, s.counters.prefill, s.counters.full) for s in scored] == [(0, 1, 0), (0, 0, 0)]


def test_a_longer_period_rewinds_more_and_scores_differently() -> None:
    pair = Pair(prefix=tokens(60, 6), target=(3,))
    scores = {k: score(f"k{k}_middle" if k > 1 else "k1", [pair])[0] for k in (1, 2, 3, 4)}
    assert [scores[k].rewound for k in scores] == [0, 2, 4, 6]
    assert len({round(s.score, 4) for s in scores.values()}) == 4


def test_bad_pairs_are_rejected() -> None:
    for pair in (Pair(prefix=(), target=(1,)), Pair(prefix=(1,), target=()), Pair(prefix=(159,), target=(1,))):
        with pytest.raises(InputError):
            score("k1", [pair])
    for policy in ("adaptive=0.2_middle", "trim=0.25_middle", "trim=0.25_middle.random"):
        with pytest.raises(InputError, match=f"policy {policy} cannot score log-likelihoods: it .* passes"):
            score(policy, [Pair(prefix=(1,), target=(2,))])
    with pytest.raises(InputError, match="unknown scoring 'sum'"):
        score("k1", [Pair(prefix=(1,), target=(2,))], method="sum")

"""Padded passes on the CPU: they give the tokens of exact ones, and a row's tokens do not depend on its batch."""

import random
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from gpu_kernels import attention_kernels, with_execution
from small_models import shallow

from sampler import DecodeSettings, LoadedModel, Prompt, ReusePolicy, decode_prompts, score_pairs
from sampler.attention import Backend
from sampler.records import Pair

torch.set_num_threads(1)

LENGTHS = (3, 31, 32, 50, 64, 70, 300, 5, 33)
POLICIES = ("k1", "k2_middle", "k3_first.output", "trim=0.25_middle", "trim=0.6_all", "mlp=2_last", "attn=2_middle")
SETTINGS = DecodeSettings(threshold=0.5, max_new_tokens=40)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    with attention_kernels():
        yield


@cache
def prompts() -> list[Prompt]:
    numbers = random.Random(0)
    return [Prompt(ids=tuple(numbers.randrange(157) for _ in range(length))) for length in LENGTHS]


def tokens(model: LoadedModel, policy: str, batch_size: int = 1, chosen: Sequence[int] | None = None) -> list[object]:
    documents = [prompts()[i] for i in (range(len(prompts())) if chosen is None else chosen)]
    found = dict(
        decode_prompts(
            model,
            documents,
            policy=ReusePolicy.parse(policy),
            settings=SETTINGS,
            batch_size=batch_size,
            with_text=False,
        )
    )
    return [(found[i].ids, found[i].counters) for i in range(len(documents))]


@cache
def exact_tokens(policy: str) -> list[object]:
    return tokens(shallow(), policy)


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("policy", POLICIES)
def test_padded_passes_give_the_same_tokens(policy: str, backend: Backend) -> None:
    assert tokens(with_execution(shallow(), backend), policy, batch_size=5) == exact_tokens(policy)


@pytest.mark.parametrize("backend", [Backend.VARLEN, Backend.EFFICIENT])
@pytest.mark.parametrize("policy", ["k1", "k2_middle"])
def test_padded_passes_give_the_same_scores(policy: str, backend: Backend) -> None:
    numbers = random.Random(1)
    shared = tuple(numbers.randrange(157) for _ in range(70))
    ends = [tuple(numbers.randrange(157) for _ in range(length)) for length in (1, 26, 30, 60)]
    pairs = [Pair(prefix=shared + end, target=target) for end in ends for target in ((5,), (9,), (3, 4))]
    scores, prefilled = [], []
    for model, batch in ((shallow(), 1), (with_execution(shallow(), backend), 3)):
        found = dict(score_pairs(model, pairs, policy=ReusePolicy.parse(policy), batch_size=batch))
        scores.append([found[i].score for i in range(len(pairs))])
        prefilled.append(sum(scored.counters.prefill_tokens for scored in found.values()))
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    assert prefilled[1] == prefilled[0]

"""The network in training form against the sampler's own transformer, and against one attention mask for all."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sampler import LoadedModel
from sampler.config import ModelConfig
from sampler.engine import Engine, Pass, Prefill, Row
from sampler.plan import Keeps, PassKind, compute_all
from sampler.random_model import TINY
from sampler.tiny.batches import Shard, pack
from sampler.tiny.examples import Example
from sampler.tiny.network import Blocks, Network, Weights, new_weights, qwen2_tensors
from sampler.tiny.rows import make_rows
from sampler.weights import build_transformer

CONFIG = replace(TINY, num_layers=3, vocab_size=40, mask_token_id=39, eos_token_ids=(38,), pad_token_id=37)
SIZE = CONFIG.block_size


def weights_of(config: ModelConfig) -> Weights:
    """Every weight random, biases and norms too, so that a forgotten one shows."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: weight + 0.3 * torch.randn(weight.shape, generator=generator)
        for name, weight in new_weights(config, generator).items()
    }


def example(length: int, prompt: int, seed: int = 0) -> Example:
    rng = random.Random(seed)
    return Example(tokens=(*(rng.randrange(30) for _ in range(length - 1)), 38), prompt=prompt)


def shard_of(*examples: Example, size: int = 24) -> Shard:
    rng = random.Random(3)
    return pack([make_rows(each, CONFIG, rng, 0.5) for each in examples], CONFIG, size)


class Everything:
    """Reads whole rows of logits."""

    def __call__(self, logits_NV: Tensor, asks: object) -> list[Tensor]:
        return list(logits_NV)


def sampled(weights: Weights, before: list[int], block: list[int]) -> Tensor:
    """The sampler's logits of one block behind a prefilled prompt."""
    tensors = qwen2_tensors(weights, CONFIG)
    network = build_transformer(tensors.__getitem__, CONFIG, dtype=torch.float32, device=torch.device("cpu"))
    model = LoadedModel(source="", revision=None, folder=Path(), config=CONFIG, network=network)

    def row() -> Row[Tensor]:
        if before:
            yield Prefill(tokens=before)
        rows = yield Pass(
            kind=PassKind.FULL,
            start=len(before),
            tokens=block,
            plan=compute_all(CONFIG.num_layers),
            opens_block=True,
            read=tuple(range(SIZE)),
            asks=((),) * SIZE,
        )
        return torch.stack(rows)

    engine: Engine[Tensor] = Engine(
        model.network, keeps=Keeps(), slots=1, capacity=len(before) + SIZE, reader=Everything()
    )
    (done,) = engine.run([row()])
    return done.result


def test_every_block_of_a_shard_has_the_logits_that_decoding_will_see() -> None:
    weights = weights_of(CONFIG)
    one = example(110, 40)
    rows = make_rows(one, CONFIG, random.Random(3), 0.5)
    shard = pack([rows], CONFIG, 12)
    every = torch.arange(12 * SIZE)
    logits = Network(CONFIG, compiled=False).logits(weights, shard.blocks, every).unflatten(0, (12, SIZE))
    clean = {row.place: list(row.tokens) for row in rows if not row.noisy}
    checked = 0
    for number, (tokens, place) in enumerate(zip(shard.blocks.tokens_BS, shard.blocks.place_B, strict=True)):
        if tokens[0] == CONFIG.pad_token_id:
            continue
        before = [token for earlier in range(int(place)) for token in clean[earlier]]
        expected = sampled(weights, before, tokens.tolist())
        torch.testing.assert_close(logits[number], expected, atol=1e-4, rtol=1e-4)
        checked += 1
    assert checked == len(rows) == 9  # three clean blocks, two copies of three that hold the answer

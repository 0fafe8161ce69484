"""The network in training form against the sampler's own transformer, and against one attention mask for all."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sampler import LoadedModel
from sampler.config import ModelConfig
from sampler.engine import Engine, Pass, Prefill, Row
from sampler.loading import build_transformer
from sampler.measure import TINY
from sampler.plan import CacheSpec, PassKind, compute_all
from tools.tiny.batches import Shard, make_blocks, pack
from tools.tiny.examples import Example
from tools.tiny.network import Network, PackedBlocks, Weights, new_weights, qwen2_tensors

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
    return pack([make_blocks(each, CONFIG, rng, 0.5) for each in examples], CONFIG, size)


class Everything:
    """Reads whole rows of logits."""

    def pack(self, queries: Sequence[Any], block_rows: Sequence[int]) -> Sequence[int]:  # noqa: ARG002
        return ()

    def read(self, logits_PV: Tensor, packed: Tensor) -> Tensor:  # noqa: ARG002
        return logits_PV.flatten().double()

    def unpack(self, numbers: Sequence[float], queries: Sequence[Any]) -> list[Tensor]:
        return list(torch.tensor(numbers).view(len(queries), -1))


def sampled(weights: Weights, before: list[int], block: list[int]) -> Tensor:
    """The sampler's logits of one block after a prefilled prompt."""
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
            queries=((),) * SIZE,
        )
        return torch.stack(rows)

    engine: Engine[Tensor] = Engine(
        model.network, cache_spec=CacheSpec(), slots=1, capacity=len(before) + SIZE, reader=Everything(), reads=SIZE
    )
    (done,) = engine.run([row()])
    return done.result


def test_every_block_of_a_shard_has_the_logits_that_decoding_will_see() -> None:
    weights = weights_of(CONFIG)
    one = example(110, 40)
    rows = make_blocks(one, CONFIG, random.Random(3), 0.5)
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


def test_blocks_see_what_one_mask_over_the_whole_batch_would_let_them_see() -> None:
    """The same attention once more, brute force: all keys of the batch, and a mask."""
    weights = weights_of(CONFIG)
    examples = [example(70, 20, 1), example(34, 32, 2), example(100, 65, 3)]
    shard = shard_of(*examples)
    at = torch.arange(24 * SIZE)
    fast = Network(CONFIG, compiled=False).logits(weights, shard.blocks, at)
    torch.testing.assert_close(fast, masked_logits(weights, shard.blocks), atol=2e-4, rtol=1e-4)


def masked_logits(weights: Weights, blocks: PackedBlocks) -> Tensor:
    """The network written down plainly, with one mask for all blocks."""
    sees = torch.zeros(len(blocks.tokens_BS), len(blocks.tokens_BS), dtype=torch.bool)
    for group in blocks.groups:
        for row, seen in zip(range(group.begin, group.end), group.seen.view(group.end - group.begin, -1), strict=True):
            sees[row, seen] = True
    mask = sees.repeat_interleave(SIZE, 0).repeat_interleave(SIZE, 1)
    position = (blocks.place_B[:, None] * SIZE + torch.arange(SIZE)).flatten()
    tensors = qwen2_tensors(weights, CONFIG)

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (CONFIG.hidden_size,), tensors[name], CONFIG.rms_norm_eps)

    def heads(x: Tensor, name: str, count: int) -> Tensor:
        y = x @ tensors[f"{name}.weight"].t() + tensors[f"{name}.bias"]
        return y.view(len(x), count, CONFIG.head_dim).transpose(0, 1)

    def turned(x: Tensor) -> Tensor:
        half = CONFIG.head_dim // 2
        angle = position[:, None] * CONFIG.rope_theta ** -(torch.arange(half) / half)
        left, right = x[..., :half], x[..., half:]
        turn = torch.polar(torch.ones_like(angle), angle)
        both = torch.complex(left, right) * turn
        return torch.cat((both.real, both.imag), -1)

    x = tensors["model.embed_tokens.weight"][blocks.tokens_BS.flatten()]
    for index in range(CONFIG.num_layers):
        layer = f"model.layers.{index}."
        y = norm(x, layer + "input_layernorm.weight")
        q = turned(heads(y, layer + "self_attn.q_proj", CONFIG.num_heads))
        k = turned(heads(y, layer + "self_attn.k_proj", CONFIG.num_kv_heads)).repeat_interleave(2, 0)
        v = heads(y, layer + "self_attn.v_proj", CONFIG.num_kv_heads).repeat_interleave(2, 0)
        scores = (q @ k.transpose(1, 2) / CONFIG.head_dim**0.5).masked_fill(~mask, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + mixed @ tensors[layer + "self_attn.o_proj.weight"].t()
        y = norm(x, layer + "post_attention_layernorm.weight")
        gate, up = (y @ tensors[f"{layer}mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ tensors[layer + "mlp.down_proj.weight"].t()
    return norm(x, "model.norm.weight") @ tensors["lm_head.weight"].t()


def test_a_noisy_copy_sees_clean_earlier_blocks_and_itself_only() -> None:
    """Changing another noisy copy, or a clean copy of the block itself, changes nothing; an earlier block does."""
    weights = weights_of(CONFIG)
    rows = make_blocks(example(100, 40), CONFIG, random.Random(0), 0.0)
    assert [(row.place, row.noisy) for row in rows] == [
        (0, False), (1, False), (2, False), (1, True), (1, True), (2, True), (2, True), (3, True), (3, True),
    ]  # fmt: skip
    network = Network(CONFIG, compiled=False)

    def logits(changed: int | None) -> list[Tensor]:
        """Of each row in order; in row `changed` another token stands first."""
        rows_now = [
            replace(row, tokens=((row.tokens[0] + 1) % 30, *row.tokens[1:])) if number == changed else row
            for number, row in enumerate(rows)
        ]
        shard = pack([rows_now], CONFIG, len(rows))
        order = sorted(range(len(rows)), key=lambda number: rows[number].place)  # as `pack` orders them
        out = network.logits(weights, shard.blocks, torch.arange(len(rows) * SIZE)).unflatten(0, (-1, SIZE))
        return [out[order.index(number)] for number in range(len(rows))]

    plain = logits(None)
    for changed, row in enumerate(rows):
        differ = {n for n, (a, b) in enumerate(zip(plain, logits(changed), strict=True)) if not torch.equal(a, b)}
        later = set() if row.noisy else {n for n, other in enumerate(rows) if other.place > row.place}
        assert differ == {changed} | later


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # from torch's own modules as its compiler is imported
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which its compiler looks at, and hides
def test_compiled_and_plain_agree() -> None:
    weights = {name: weight.requires_grad_() for name, weight in weights_of(CONFIG).items()}
    shard = shard_of(example(100, 40), example(60, 33))
    results = []
    for compiled in (False, True):
        logits = Network(CONFIG, compiled=compiled).logits(weights, shard.blocks, shard.at_M)
        loss = torch.nn.functional.cross_entropy(logits, shard.target_M)
        results.append((logits, torch.autograd.grad(loss, list(weights.values()))))
    (plain, plain_grads), (fast, fast_grads) = results
    torch.testing.assert_close(fast, plain, atol=1e-4, rtol=1e-4)
    for name, a, b in zip(weights, plain_grads, fast_grads, strict=True):
        torch.testing.assert_close(b, a, atol=1e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")

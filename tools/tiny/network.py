"""The network for training: many blocks packed into one batch, each with its own list of blocks it attends to.

The weights of all layers are stacked, so that the optimizer handles 36 matrices at once. Everything except attention
runs on one flat list of positions of fixed length and can be compiled. Attention runs over groups of blocks that attend
to the same number of blocks, so nothing is computed for padding.
Shapes: L layers, B blocks of the batch, S positions of a block, N = B × S, D model, F features of the MLP, H query
heads, K key/value heads, G = H / K, d head size, V vocabulary, M predictions.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from sampler.config import ModelConfig

EMBEDDING, HEAD, FINAL_NORM = "embedding", "head", "final_norm"
Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Adjacent blocks that attend to the same number of blocks; `seen` lists those of each block in turn."""

    begin: int
    end: int
    seen: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBlocks:
    """Input of a forward pass: the tokens of each block, its place in its sequence, and the blocks it attends to."""

    tokens_BS: Tensor
    place_B: Tensor
    groups: Sequence[Group]


@dataclass(frozen=True, slots=True)
class Functions:
    """The two halves of a layer around attention, compiled or not."""

    before: Callable[..., tuple[Tensor, Tensor, Tensor]]
    after: Callable[..., Tensor]


def new_weights(config: ModelConfig, generator: torch.Generator) -> Weights:
    """Random weights; the output of each layer is scaled down with the depth."""
    layers, hidden, ffn = config.num_layers, config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    small = 1 / math.sqrt(2 * layers)
    return {
        EMBEDDING: normal(config.vocab_size, hidden, scale=0.5),
        "attention_norm": torch.ones(layers, hidden),
        "qkv": normal(layers, queries + 2 * keys, hidden, scale=hidden**-0.5),
        "qkv_bias": torch.zeros(layers, queries + 2 * keys),
        "out": normal(layers, hidden, queries, scale=small * queries**-0.5),
        "mlp_norm": torch.ones(layers, hidden),
        "gate_up": normal(layers, 2 * ffn, hidden, scale=hidden**-0.5),
        "down": normal(layers, hidden, ffn, scale=small * ffn**-0.5),
        FINAL_NORM: torch.ones(hidden),
        HEAD: normal(config.vocab_size, hidden, scale=0.02),
    }


def grow_layers(weights: Mapping[str, Tensor], factor: int) -> Weights:
    """Replaces each layer by `factor` copies, each of which contributes its part of the output."""
    whole = (EMBEDDING, HEAD, FINAL_NORM)
    return {
        name: (
            tensor.clone()
            if name in whole
            else tensor.repeat_interleave(factor, 0) / (factor if name in ("out", "down") else 1)
        )
        for name, tensor in weights.items()
    }


def matrix_parts(config: ModelConfig) -> dict[str, list[int]]:
    """The stacked matrices, and the number of rows of each matrix fused into them."""
    keys = config.num_kv_heads * config.head_dim
    return {
        "qkv": [config.num_heads * config.head_dim, keys, keys],
        "out": [config.hidden_size],
        "gate_up": [config.intermediate_size] * 2,
        "down": [config.hidden_size],
    }


class Network:
    """Computes predictions from given weights."""

    def __init__(self, config: ModelConfig, *, compiled: bool) -> None:
        self.config = config
        before, after = self._before, self._after
        if compiled:
            before = torch.compile(before, dynamic=False)
            after = torch.compile(after, dynamic=False)
        self.functions = Functions(before, after)

    def states(self, weights: Weights, blocks: PackedBlocks) -> Tensor:
        """Hidden states after the final norm, one for each position of each block."""
        config = self.config
        x_ND = weights[EMBEDDING][blocks.tokens_BS.reshape(-1)]
        turn = self._rotation(blocks)
        names = ("attention_norm", "qkv", "qkv_bias", "out", "mlp_norm", "gate_up", "down")
        for norm, qkv, bias, out, mlp_norm, gate_up, down in zip(
            *(weights[name].unbind(0) for name in names), strict=True
        ):
            q, k, v = self.functions.before(x_ND, norm, qkv, bias, *turn)
            mixed = _attend(q, k, v, blocks.groups)
            x_ND = self.functions.after(x_ND, mixed, out, mlp_norm, gate_up, down)
        return _rms_norm(x_ND, weights[FINAL_NORM], config.rms_norm_eps)

    def logits(self, weights: Weights, blocks: PackedBlocks, at_M: Tensor) -> Tensor:
        """Logits at the given positions of the flat batch; each predicts the position after it."""
        return linear(self.states(weights, blocks)[at_M], weights[HEAD])

    def _rotation(self, blocks: PackedBlocks) -> tuple[Tensor, Tensor]:
        size, half = self.config.block_size, self.config.head_dim // 2
        position_N = (blocks.place_B[:, None] * size + torch.arange(size)).reshape(-1).float()
        frequency = self.config.rope_theta ** -(torch.arange(half).float() / half)
        angle = torch.outer(position_N, frequency)[:, None]
        return angle.cos(), angle.sin()

    def _before(
        self, x_ND: Tensor, norm: Tensor, qkv: Tensor, bias: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (K, B, G × S, d), keys and values (K, B × S, d), rotated."""
        c = self.config
        y = linear(_rms_norm(x_ND, norm, c.rms_norm_eps), qkv, bias)
        queries, keys, values = torch.split(y, matrix_parts(c)["qkv"], -1)
        q = _rotate(torch.unflatten(queries, -1, (c.num_heads, c.head_dim)), cos, sin)
        k = _rotate(torch.unflatten(keys, -1, (c.num_kv_heads, c.head_dim)), cos, sin)
        v = torch.unflatten(values, -1, (c.num_kv_heads, c.head_dim))
        blocks = torch.unflatten(q, 0, (-1, c.block_size))
        q = torch.unflatten(blocks, 2, (c.num_kv_heads, -1)).permute(2, 0, 3, 1, 4)
        return q.flatten(2, 3).contiguous(), k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()

    def _after(self, x_ND: Tensor, mixed: Tensor, out: Tensor, norm: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        c = self.config
        heads = torch.unflatten(mixed, 2, (-1, c.block_size)).permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)
        x_ND = x_ND + linear(heads, out)
        gate, up = linear(_rms_norm(x_ND, norm, c.rms_norm_eps), gate_up).chunk(2, -1)
        return x_ND + linear(silu(gate) * up, down)


def _attend(q: Tensor, k: Tensor, v: Tensor, groups: Sequence[Group]) -> Tensor:
    """Attention of each block over the blocks it may see; needs no mask, since a group sees equally many."""
    heads, size, width = q.shape[0], k.shape[1] // q.shape[1], q.shape[-1]
    mixed = []
    for group in groups:
        count = group.end - group.begin
        own_k, own_v = (
            t.view(heads, -1, size * width).index_select(1, group.seen).view(heads, count, -1, width) for t in (k, v)
        )
        mixed.append(scaled_dot_product_attention(q[:, group.begin : group.end], own_k, own_v))
    return torch.cat(mixed, 1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def qwen2_tensors(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The weights with the names and shapes of a Qwen2 checkpoint."""
    parts = matrix_parts(config)
    tensors = {
        "model.embed_tokens.weight": weights[EMBEDDING],
        "model.norm.weight": weights[FINAL_NORM],
        "lm_head.weight": weights[HEAD],
    }
    for index in range(config.num_layers):
        layer = {name: tensor[index] for name, tensor in weights.items() if tensor.shape[0] == config.num_layers}
        block = f"model.layers.{index}."
        for kind in ("weight", "bias"):
            fused = layer["qkv" if kind == "weight" else "qkv_bias"]
            for name, part in zip("qkv", torch.split(fused, parts["qkv"]), strict=True):
                tensors[f"{block}self_attn.{name}_proj.{kind}"] = part
        gate, up = torch.split(layer["gate_up"], parts["gate_up"])
        tensors |= {
            f"{block}self_attn.o_proj.weight": layer["out"],
            f"{block}mlp.gate_proj.weight": gate,
            f"{block}mlp.up_proj.weight": up,
            f"{block}mlp.down_proj.weight": layer["down"],
            f"{block}input_layernorm.weight": layer["attention_norm"],
            f"{block}post_attention_layernorm.weight": layer["mlp_norm"],
        }
    return tensors

"""The reference transformer (Qwen2, Qwen3, Llama) in plain steps: no batches, no prefix cache, executes layer plans.

Every forward pass recomputes the whole prefix. Values that earlier passes over a block computed are kept in dicts by
(layer, position). Positions are absolute, except those that a plan selects, which count from the start of the block.

Shapes: P positions of a forward, N those computed, T those attended to, D model, H heads, G key/value heads,
E head size, V vocabulary.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from sampler.plan import PARTIAL, SKIP, Checkpoint, CheckpointSignal, LayerPlan

HALVES = ([f"self_attn.{n}" for n in "qkvo"], [f"mlp.{n}" for n in ("gate", "up", "down")])

Cached = dict[tuple[int, int], Tensor]  # (layer, position) → one row


@dataclass(kw_only=True, slots=True)
class BlockState:
    """Values computed by earlier passes over one block; discarded with it. A missing value is a KeyError."""

    keys: Cached = field(default_factory=dict)
    values: Cached = field(default_factory=dict)
    inputs: Cached = field(default_factory=dict)  # last input of the layer
    attention: Cached = field(default_factory=dict)  # last output of attention
    mlp: Cached = field(default_factory=dict)  # last output of the MLP
    outputs: Cached = field(default_factory=dict)  # last output of the layer, for literal replay
    final: dict[int, Tensor] = field(default_factory=dict)  # by position: output of the last layer
    gap: float = torch.inf  # smallest distance between the scores of two positions that a checkpoint kept and dropped


class ReferenceModel:
    """Weights under their checkpoint names, and the two halves of a layer.

    `shift` is 1 if the logits at position i predict the token at i + 1 (token shift), and 0 if they predict that at i.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.depth: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.eps: float = config["rms_norm_eps"]
        self.theta: float = (config.get("rope_parameters") or config)["rope_theta"]
        self.block: int = config.get("bd_size") or config["block_size"]
        self.shift = int(config["model_type"] not in ("sdar", "qwen3", "llama"))
        self.mask: int = config["mask_token_id"]
        self.stop: int = config["eos_token_id"]
        assert isinstance(self.stop, int), "exactly one stop token is supported"
        size = [sum(weights[f"model.layers.0.{n}_proj.weight"].numel() for n in half) for half in HALVES]
        self.shares = [Fraction(part, sum(size)) for part in size]  # of a layer's weights: attention, MLP

    @classmethod
    def load(cls, folder: Path | str, dtype: torch.dtype = torch.float32) -> "ReferenceModel":
        config = json.loads((Path(folder) / "config.json").read_text())
        weights = load_file(Path(folder) / "model.safetensors")
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        return cls(config, {name: weight.to(dtype) for name, weight in weights.items()})

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weights[f"{name}.weight"]

    def head_norm(self, name: str, x_NM: Tensor, heads: int) -> Tensor:
        """Splits into heads, and normalises each if the model has weights for that."""
        x_NHE = x_NM.view(len(x_NM), heads, -1)
        return self.norm(name, x_NHE) if f"{name}.weight" in self.weights else x_NHE

    def rotate(self, x_NHE: Tensor, positions: Tensor) -> Tensor:
        half = x_NHE.shape[-1] // 2
        frequencies = self.theta ** -(torch.arange(half, dtype=x_NHE.dtype) / half)
        angles = positions[:, None, None] * frequencies
        cos, sin, left, right = angles.cos(), angles.sin(), x_NHE[..., :half], x_NHE[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def attention(self, layer: int, h_ND: Tensor, positions: list[int], start: int, state: BlockState) -> Tensor:
        """Output of attention at `positions`: the clean prefix before `start`, then some positions of the block.

        The block attends to all of itself; positions not computed now use the keys and values kept in `state`.
        """
        name, at_N = f"model.layers.{layer}.self_attn", torch.tensor(positions)
        q_NHE, k_NGE, v_NGE = self.projected(layer, h_ND, positions)
        _store(state.keys, layer, positions[start:], k_NGE[start:])
        _store(state.values, layer, positions[start:], v_NGE[start:])
        k_TGE, v_TGE = k_NGE[:start], v_NGE[:start]
        if positions[start:]:  # the prefix sees nothing of the block, which a skipped layer may never have computed
            block = range(start, start + self.block)
            k_TGE = torch.cat([k_TGE, _fetch(state.keys, layer, block)])
            v_TGE = torch.cat([v_TGE, _fetch(state.values, layer, block)])
        k_THE = k_TGE.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v_THE = v_TGE.repeat_interleave(self.heads // self.kv_heads, dim=1)
        later_NT = torch.arange(len(k_THE)) // self.block > (at_N // self.block)[:, None]
        scores_HNT = torch.einsum("nhe,the->hnt", q_NHE, k_THE) / k_THE.shape[-1] ** 0.5
        weights_HNT = scores_HNT.masked_fill(later_NT, -torch.inf).softmax(-1)
        return self.linear(f"{name}.o_proj", torch.einsum("hnt,the->nhe", weights_HNT, v_THE).flatten(1))

    def projected(self, layer: int, h_ND: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        name, at_N = f"model.layers.{layer}.self_attn", torch.tensor(positions)
        x_ND = self.norm(f"model.layers.{layer}.input_layernorm", h_ND)
        q_NHE = self.rotate(self.head_norm(f"{name}.q_norm", self.linear(f"{name}.q_proj", x_ND), self.heads), at_N)
        k_NGE = self.rotate(self.head_norm(f"{name}.k_norm", self.linear(f"{name}.k_proj", x_ND), self.kv_heads), at_N)
        v_NGE = self.linear(f"{name}.v_proj", x_ND).view(len(positions), self.kv_heads, -1)
        return q_NHE, k_NGE, v_NGE

    def mlp(self, layer: int, h_ND: Tensor) -> Tensor:
        name = f"model.layers.{layer}.mlp"
        x_ND = self.norm(f"model.layers.{layer}.post_attention_layernorm", h_ND)
        gate, up = self.linear(f"{name}.gate_proj", x_ND), self.linear(f"{name}.up_proj", x_ND)
        return self.linear(f"{name}.down_proj", F.silu(gate) * up)

    def logits(self, h_D: Tensor) -> Tensor:
        return self.linear("lm_head", self.norm("model.norm", h_D))


def _store(cached: Cached, layer: int, positions: Sequence[int], rows: Tensor) -> None:
    cached.update({(layer, position): row for position, row in zip(positions, rows, strict=True)})


def _fetch(cached: Cached, layer: int, positions: Sequence[int]) -> Tensor:
    return torch.stack([cached[layer, position] for position in positions])


def narrow(
    model: ReferenceModel, checkpoint: Checkpoint, h_WD: Tensor, window: range, live: list[int], state: BlockState
) -> list[int]:
    """The positions of `live` that a checkpoint keeps: those with the highest scores (ties: the lowest positions)."""
    layer, signal = checkpoint.layer, {}
    q_WHE, k_WGE, v_WGE = model.projected(layer, h_WD, window)
    k_WHE = k_WGE.repeat_interleave(model.heads // model.kv_heads, dim=1)
    weights_HWW = (torch.einsum("nhe,the->hnt", q_WHE, k_WHE) / q_WHE.shape[-1] ** 0.5).softmax(-1)
    for row, position in enumerate(window):
        before_D = state.inputs[layer, position]
        now, cached = v_WGE[row].flatten(), state.values[layer, position].flatten()
        signal[position] = {
            CheckpointSignal.INPUT_CHANGE: (h_WD[row] - before_D).abs().sum() / before_D.abs().sum(),
            CheckpointSignal.VALUE_CHANGE: -now @ cached / (now.norm() * cached.norm()),
            CheckpointSignal.ATTENTION: weights_HWW[:, :, row].mean(),
        }[checkpoint.signal]
    priors = dict(zip(window, checkpoint.priors, strict=True))
    score = {position: checkpoint.weight * float(signal[position]) + priors[position] for position in live}
    order = sorted(live, key=lambda position: (-score[position], position))
    kept, dropped = order[: checkpoint.keep], order[checkpoint.keep :]
    if score[kept[-1]] != score[dropped[0]]:  # if they are equal, rounding does not decide, only the position
        state.gap = min(state.gap, score[kept[-1]] - score[dropped[0]])
    return sorted(kept)


def forward(
    model: ReferenceModel,
    tokens: Sequence[int],
    window: range,
    plan: LayerPlan,
    state: BlockState,
    *,
    literal: bool = False,
) -> list[Fraction]:
    """Computes the whole clean prefix, and the window as `plan` says; returns the positions each layer computed.

    Half a layer counts as its share of the layer's weights.
    """
    start = window.start // model.block * model.block
    positions = [*range(start), *window]
    row = {position: i for i, position in enumerate(positions)}
    h_PD = model.weights["model.embed_tokens.weight"][[tokens[position] for position in positions]]
    ran = []
    live = [start + offset for offset in plan.selected] if plan.selected else [*window]
    for layer, step in enumerate(plan.steps):
        for checkpoint in plan.checkpoints:
            if checkpoint.layer == layer:
                live = narrow(model, checkpoint, h_PD[start:], window, live, state)
        _store(state.inputs, layer, window, h_PD[start:])
        chosen = live if step is PARTIAL else [*window]
        for runs, cached in ((step.runs_attention, state.attention), (step.runs_mlp, state.mlp)):
            computed = [*range(start), *(chosen if runs else [])]
            delta_ND = h_ND = h_PD[[row[position] for position in computed]]
            if computed and cached is state.attention:
                delta_ND = model.attention(layer, h_ND, computed, start, state)
            elif computed:
                delta_ND = model.mlp(layer, h_ND)
            _store(cached, layer, computed[start:], delta_ND[start:])
            if step is SKIP:  # it may have never run
                h_PD = torch.cat([h_PD[:start] + delta_ND[:start], h_PD[start:]])
            else:
                h_PD = h_PD + torch.cat([delta_ND[:start], _fetch(cached, layer, window)])
        if literal:
            _store(state.outputs, layer, computed[start:], h_PD[start : len(computed)])
            h_PD = torch.cat([h_PD[:start], _fetch(state.outputs, layer, window)])
        attention, mlp = model.shares
        ran.append(len(chosen) * (attention * step.runs_attention + mlp * step.runs_mlp))
    state.final.update(zip(window, h_PD[start:], strict=True))
    return ran

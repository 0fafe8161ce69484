"""The transformer and the only layer loop: `forward` obeys a plan. Knows no policies, no decoding, no text.

Shapes: B rows, W window, N = B·W, H query+key+value heads, d head size, D model, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from sampler.cache import FINAL, KeyValueCache, ReuseCache, Window
from sampler.config import ModelConfig
from sampler.linear import Linear
from sampler.plan import COMPUTE, REPLAY, Do, LayerPlan, LayerStep, Unit
from sampler.rotary import rotate


@dataclass(slots=True)
class Work:
    """What a pass did for each of its rows; counted where it is done."""

    computed: int = 0  # layers that ran
    reused: int = 0  # layers that did not
    positions: int = 0  # layers × positions that ran
    replays: int = 0  # cached values used


class Norm:
    """RMS normalisation. Where its weight and √D are folded into the product behind it, three small operations."""

    def __init__(self, size: int, eps: float, weight_D: Tensor | None) -> None:
        self.size, self.eps, self.weight_D = size, eps, weight_D
        self.floor_11 = torch.full((1, 1), (size * eps) ** 0.5)

    def __call__(self, x_ND: Tensor) -> Tensor:
        if self.weight_D is not None:
            return rms_norm(x_ND, (self.size,), self.weight_D, self.eps)
        return x_ND / torch.hypot(torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True), self.floor_11)


@dataclass(frozen=True, slots=True)
class Part:
    """The selected positions of a pass: as a window of their own, and as rows of the pass's states."""

    window: Window
    rows: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One transformer layer with fused projections."""

    index: int
    head_dim: int
    heads: tuple[int, int]  # query heads, and the key and value heads that follow them in the fused projection
    gates: tuple[int, int]
    attention_norm: Norm
    qkv: Linear
    attention_out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear

    def attention(self, x_ND: Tensor, window: Window) -> Tensor:
        y_NM = rotate(self.qkv(self.attention_norm(x_ND)), window.factors_NM)
        q_NHd, kv_NKd = torch.split_with_sizes(y_NM.view(len(y_NM), -1, self.head_dim), self.heads, dim=1)
        window.write(self.index, kv_NKd)
        return self.attention_out.onto(x_ND, window.attend(self.index, q_NHd))

    def mlp(self, x_ND: Tensor) -> Tensor:
        gate_NF, up_NF = torch.split_with_sizes(self.gate_up(self.mlp_norm(x_ND)), self.gates, dim=1)
        return self.down.onto(x_ND, silu(gate_NF).mul_(up_NF))

    def run(self, step: LayerStep, x_ND: Tensor, window: Window, reuse: ReuseCache | None, work: Work) -> Tensor:
        """Computes the layer, or all but the half that `step` replays, and keeps what later replays need."""
        work.computed += 1
        work.positions += window.width
        if step.attention is Do.REPLAY:
            assert reuse is not None
            assert reuse.keeps.unit is Unit.ATTENTION
            work.replays += 1
            middle_ND = x_ND + reuse.load(self.index, window)
        else:
            middle_ND = self.attention(x_ND, window)
        if step.mlp is Do.REPLAY:
            assert reuse is not None
            assert reuse.keeps.unit is Unit.MLP
            work.replays += 1
            return middle_ND + reuse.load(self.index, window)
        y_ND = self.mlp(middle_ND)
        if reuse is not None and self.index in reuse.rows and step.attention is Do.COMPUTE:
            before = middle_ND if reuse.keeps.unit is Unit.MLP else x_ND
            after = middle_ND if reuse.keeps.unit is Unit.ATTENTION else y_ND
            reuse.store(self.index, window, after - before)
        return y_ND

    def replay(self, x_ND: Tensor, window: Window, reuse: ReuseCache, work: Work) -> Tensor:
        """The input plus the layer's cached contribution; nothing runs and the layer's keys and values stay."""
        assert reuse.keeps.unit is Unit.LAYER
        work.reused += 1
        work.replays += 1
        return x_ND + reuse.load(self.index, window)

    def run_part(self, x_ND: Tensor, window: Window, part: Part, reuse: ReuseCache, work: Work) -> Tensor:
        """Computes the selected positions against everyone's keys as cached, and replays the others."""
        work.replays += 1
        y_ND = x_ND + reuse.load(self.index, window)
        y_ND[part.rows] = self.run(COMPUTE, x_ND[part.rows], part.window, reuse, work)
        return y_ND


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Weights ready to run. Holds no state of any sequence."""

    config: ModelConfig
    embedding_VD: Tensor
    layers: Sequence[Layer]
    final_norm: Norm
    head: Linear

    @property
    def device(self) -> torch.device:
        return self.embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VD.dtype

    def new_cache(self, slots: int, capacity: int) -> KeyValueCache:
        return KeyValueCache(self.config, slots, capacity, dtype=self.dtype, device=self.device)

    def logits(self, states_ND: Tensor) -> Tensor:
        """Next-token logits in float32: those at a position predict the position after it."""
        return self.head(self.final_norm(states_ND)).float()

    def forward(
        self,
        ids_N: Tensor,
        window: Window,
        plan: LayerPlan,
        reuse: ReuseCache | None = None,
        part: Part | None = None,
    ) -> tuple[Tensor, Work]:
        """The states behind the last layer. Prefill and commit passes bring no `reuse`: they leave nothing behind."""
        work = Work()
        if plan.stale:
            assert reuse is not None
            work.reused, work.replays = len(self.layers), 1
            return reuse.load(FINAL, window), work
        x_ND = self.embedding_VD[ids_N]
        for layer, step in zip(self.layers, plan.steps, strict=True):
            if not step.replays:
                x_ND = layer.run(step, x_ND, window, reuse, work)
                continue
            assert reuse is not None
            if step.partial:
                assert part is not None
                x_ND = layer.run_part(x_ND, window, part, reuse, work)
            elif step == REPLAY:
                x_ND = layer.replay(x_ND, window, reuse, work)
            else:
                x_ND = layer.run(step, x_ND, window, reuse, work)
        if reuse is not None and reuse.keeps.final_states:
            reuse.store(FINAL, window, x_ND)
        return x_ND, work

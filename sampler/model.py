"""The transformer and the only layer loop: `forward` obeys a plan. Knows no policies, no decoding, no text.

Shapes: N positions of all rows, M features of a fused projection, F features of the MLP, D model, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from sampler.cache import FINAL, Kept, KeyValueCache, Window
from sampler.config import ModelConfig
from sampler.plan import COMPUTE, INPUT, PARTIAL, REPLAY, REPLAY_ATTENTION, SKIP, LayerPlan, LayerStep, Unit

# Below this size a weight stays in the CPU's cache and a call's overhead is what counts: plain `addmm` wins.
# Above it, reading the weight is what counts: oneDNN's blocked layout reads it 1.2 to 1.4 times faster.
PACKING_PAYS_FROM = 1 << 17


class Linear(Protocol):
    """x_NK → x Wᵀ (+ bias), or accumulated onto a residual."""

    def __call__(self, x_NK: Tensor) -> Tensor: ...

    def onto(self, residual_NM: Tensor, x_NK: Tensor) -> Tensor: ...


class PlainLinear:
    """Holds Wᵀ as a (K, M) matrix, possibly a view, for any device and dtype."""

    def __init__(self, weight_KM: Tensor, bias_M: Tensor | None = None) -> None:
        self.weight_KM = weight_KM
        self.bias_M = bias_M

    def __call__(self, x_NK: Tensor) -> Tensor:
        if self.bias_M is None:
            return torch.mm(x_NK, self.weight_KM)
        return torch.addmm(self.bias_M, x_NK, self.weight_KM)

    def onto(self, residual_NM: Tensor, x_NK: Tensor) -> Tensor:
        return torch.addmm(residual_NM, x_NK, self.weight_KM)


class PackedLinear:
    """Holds W in oneDNN's blocked layout: float32 on a CPU, where streaming the weight is the cost."""

    def __init__(self, weight_MK: Tensor, bias_M: Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_MK, None)
        self.bias_M = bias_M

    def __call__(self, x_NK: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_NK, self.packed, self.bias_M, "none", [], "")
        return product

    def onto(self, residual_NM: Tensor, x_NK: Tensor) -> Tensor:
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x_NK, residual_NM, self.packed, self.bias_M, "add")
        return total


def make_linear(weight_MK: Tensor, bias_M: Tensor | None = None, *, shared: bool = False) -> Linear:
    """The fastest layout for this weight; a `shared` weight (tied embeddings) is used where it lies."""
    on_cpu = weight_MK.device.type == "cpu"
    if shared or not on_cpu:
        return PlainLinear(weight_MK.t(), bias_M)
    packable = weight_MK.dtype is torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if packable and weight_MK.numel() >= PACKING_PAYS_FROM:
        return PackedLinear(weight_MK, bias_M)
    return PlainLinear(weight_MK.t().contiguous(), bias_M)


def rotate(y_NM: Tensor, factors: tuple[Tensor, Tensor], sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Splits what the fused projection gave into rotated queries, and rotated keys with values."""
    dtype = y_NM.dtype
    if dtype is not torch.float32:
        queries, keys_values = rotate(y_NM.float(), factors, sizes)
        return queries.to(dtype), keys_values.to(dtype)
    queries, keys_values = torch.split_with_sizes(y_NM.view(torch.complex64), sizes, 1)
    return (queries * factors[0]).view(dtype), (keys_values * factors[1]).view(dtype)


@dataclass(slots=True)
class Work:
    """What a pass did for each of its rows; counted where it is done."""

    computed: int = 0  # layers that ran
    partial: int = 0  # those of them that ran for the selected positions only
    attention_only: int = 0  # those of them whose MLP was replayed
    mlp_only: int = 0  # those of them whose attention was replayed
    reused: int = 0  # layers that did not run
    replays: int = 0  # contributions taken from the cache, or left out


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
    """The selected positions of a pass: where they read and write, and which rows of the pass's states they are."""

    window: Window
    kept: Kept
    rows: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One transformer layer with fused projections; the sizes say how their outputs split."""

    index: int
    attention_norm: Norm
    qkv: Linear
    qkv_pairs: tuple[int, int]  # rotated pairs of queries, and of keys with values
    attention_out: Linear
    mlp_norm: Norm
    gate_up: Linear
    gate_up_sizes: tuple[int, int]
    down: Linear

    def attention(self, x_ND: Tensor, window: Window) -> Tensor:
        q_NM, kv_NM = rotate(self.qkv(self.attention_norm(x_ND)), window.factors, self.qkv_pairs)
        window.write(self.index, kv_NM)
        return self.attention_out.onto(x_ND, window.attend(self.index, q_NM))

    def mlp(self, x_ND: Tensor) -> Tensor:
        gate_NF, up_NF = torch.split_with_sizes(self.gate_up(self.mlp_norm(x_ND)), self.gate_up_sizes, 1)
        return self.down.onto(x_ND, silu(gate_NF).mul_(up_NF))

    def run(self, x_ND: Tensor, window: Window, kept: Kept | None, work: Work) -> Tensor:
        """Computes the layer and keeps what later replays need of it."""
        work.computed += 1
        middle_ND = self.attention(x_ND, window)
        y_ND = self.mlp(middle_ND)
        if kept is not None and kept.holds(self.index):
            before = middle_ND if kept.unit is Unit.MLP else x_ND
            after = middle_ND if kept.unit is Unit.ATTENTION else y_ND
            kept.store(self.index, after - before, after)
        return y_ND

    def replay(self, x_ND: Tensor, kept: Kept, work: Work) -> Tensor:
        """The input plus the layer's cached contribution; nothing runs and the layer's keys and values stay."""
        assert kept.unit is Unit.LAYER
        work.reused += 1
        work.replays += 1
        return x_ND + kept.load(self.index)

    def run_half(self, step: LayerStep, x_ND: Tensor, window: Window, kept: Kept, work: Work) -> Tensor:
        """Computes attention or the MLP, and replays the other half's contribution."""
        work.computed += 1
        work.replays += 1
        if step is REPLAY_ATTENTION:
            assert kept.unit is Unit.ATTENTION
            work.mlp_only += 1
            return self.mlp(x_ND + kept.load(self.index))
        assert kept.unit is Unit.MLP
        work.attention_only += 1
        return self.attention(x_ND, window) + kept.load(self.index)

    def run_part(self, x_ND: Tensor, part: Part, kept: Kept, work: Work) -> Tensor:
        """Computes the selected positions against everyone's keys as cached, and replays the others."""
        work.partial += 1
        work.replays += 1
        y_ND = x_ND + kept.load(self.index)
        y_ND[part.rows] = self.run(x_ND[part.rows], part.window, part.kept, work)
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
        self, ids_N: Tensor, window: Window, plan: LayerPlan, kept: Kept | None = None, part: Part | None = None
    ) -> tuple[Tensor, Work]:
        """The states behind the last layer. Prefill and commit passes bring no `kept`: they leave nothing behind."""
        assert not plan.stale, "a stale pass runs no layer: see `repeat`"
        work = Work()
        x_ND = self.embedding_VD[ids_N]
        for index, (layer, step) in enumerate(zip(self.layers, plan.steps, strict=True)):
            if kept is not None and kept.watches(index):
                kept.store(INPUT, x_ND)
            if step is COMPUTE:
                x_ND = layer.run(x_ND, window, kept, work)
                continue
            if step is SKIP:
                work.reused += 1
                work.replays += 1
                continue
            assert kept is not None
            if step is REPLAY:
                x_ND = layer.replay(x_ND, kept, work)
            elif step is PARTIAL:
                assert part is not None
                x_ND = layer.run_part(x_ND, part, kept, work)
            else:
                x_ND = layer.run_half(step, x_ND, window, kept, work)
        if kept is not None and kept.holds(FINAL):
            kept.store(FINAL, x_ND)
        return x_ND, work

    def repeat(self, kept: Kept) -> tuple[Tensor, Work]:
        """A stale pass: the states behind the last layer as they were last computed."""
        return kept.load(FINAL), Work(reused=len(self.layers), replays=1)

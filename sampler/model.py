"""The transformer: linear layers, attention, MLP, and the layer loop that executes a plan.

Shapes: N positions of all rows, M features of a fused projection, F features of the MLP, D model, V vocabulary; for a
linear layer, K inputs and M outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, rms_norm, silu

from sampler.attention import Attention, Backend
from sampler.cache import FINAL_STATES, CachePool, KeyValueView, ReuseCache, ReuseView
from sampler.config import ModelConfig
from sampler.plan import (
    COMPUTE,
    PARTIAL,
    REPLAY,
    REPLAY_ATTENTION,
    REPLAY_MLP,
    SKIP,
    WATCHED_INPUT,
    Checkpoint,
    CheckpointSignal,
    LayerPlan,
    LayerStep,
    Unit,
)

# Smaller weights stay in the CPU's cache, and call overhead dominates: plain `addmm` is faster. For larger weights
# reading them dominates: oneDNN's blocked layout reads them 1.2 to 1.4 times faster.
MIN_PACKED_ELEMENTS = 1 << 17


class Linear(Protocol):
    """x_NK → x Wᵀ (+ bias)."""

    def __call__(self, x_NK: Tensor) -> Tensor: ...

    def add_to(self, residual_NM: Tensor, x_NK: Tensor) -> Tensor:
        """residual + x Wᵀ in one operation."""


class PlainLinear:
    """Holds Wᵀ as a (K, M) matrix, possibly a view, on any device and in any dtype."""

    def __init__(self, weight_KM: Tensor, bias_M: Tensor | None = None) -> None:
        self.weight_KM = weight_KM
        self.bias_M = bias_M

    def __call__(self, x_NK: Tensor) -> Tensor:
        if self.bias_M is None:
            return torch.mm(x_NK, self.weight_KM)
        return torch.addmm(self.bias_M, x_NK, self.weight_KM)

    def add_to(self, residual_NM: Tensor, x_NK: Tensor) -> Tensor:
        return torch.addmm(residual_NM, x_NK, self.weight_KM)


class PackedLinear:
    """Holds W in oneDNN's blocked layout, for float32 on a CPU."""

    def __init__(self, weight_MK: Tensor, bias_M: Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_MK, None)
        self.bias_M = bias_M

    def __call__(self, x_NK: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_NK, self.packed, self.bias_M, "none", [], "")
        return product

    def add_to(self, residual_NM: Tensor, x_NK: Tensor) -> Tensor:
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x_NK, residual_NM, self.packed, self.bias_M, "add")
        return total


def make_linear(
    weight_MK: Tensor, bias_M: Tensor | None = None, *, shared: bool = False, packed: bool = True
) -> Linear:
    """The fastest layout for this weight. A `shared` weight (tied embeddings) is not copied."""
    on_cpu = weight_MK.device.type == "cpu"
    if shared or not on_cpu:
        return PlainLinear(weight_MK.t(), bias_M)
    packable = packed and weight_MK.dtype is torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if packable and weight_MK.numel() >= MIN_PACKED_ELEMENTS:
        return PackedLinear(weight_MK, bias_M)
    return PlainLinear(weight_MK.t().contiguous(), bias_M)


@dataclass(slots=True)
class LayerWork:
    """What a pass did for each of its rows, counted while it runs."""

    computed: int = 0  # layers that ran
    partial: int = 0  # of these, layers that ran for the positions that the plan selected
    narrowed: int = 0  # of these, layers that ran for the positions that a checkpoint kept
    narrowed_positions: int = 0  # of each row, summed over these layers
    attention_only: int = 0  # of these, layers whose MLP was replayed
    mlp_only: int = 0  # of these, layers whose attention was replayed
    reused: int = 0  # layers that did not run
    replays: int = 0  # contributions that were loaded from the cache or skipped


class Norm:
    """RMS normalisation. If weight_D is None, weight and √D are folded into the weights of the following product."""

    def __init__(self, size: int, eps: float, weight_D: Tensor | None) -> None:
        self.size, self.eps, self.weight_D = size, eps, weight_D
        self.floor_11 = torch.full((1, 1), (size * eps) ** 0.5)

    def __call__(self, x_ND: Tensor) -> Tensor:
        if self.weight_D is not None:
            return rms_norm(x_ND, (self.size,), self.weight_D, self.eps)
        return x_ND / torch.hypot(torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True), self.floor_11)


class HeadNorm:
    """RMS normalisation of each query and key head, in place, before the rotation (Qwen3)."""

    def __init__(self, weight_Hd: Tensor, eps: float) -> None:
        self.weight_Hd, self.eps = weight_Hd, eps
        self.width = weight_Hd.numel()

    def __call__(self, y_NM: Tensor) -> None:
        """Normalises the queries and keys in the output of the fused projection; values stay as they are."""
        heads_NHd = y_NM[:, : self.width].view(-1, *self.weight_Hd.shape)
        heads_NHd.copy_(rms_norm(heads_NHd, self.weight_Hd.shape[1:], None, self.eps) * self.weight_Hd)


def rotate(y_NM: Tensor, factors: tuple[Tensor, ...], pairs: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Splits the output of the fused projection into rotated queries, and rotated keys with values."""
    if len(factors) == 1:  # all in one product, in float32
        rotated_NM = _multiply_pairs(y_NM.float(), factors[0])
        queries, keys_values = torch.split_with_sizes(rotated_NM, (2 * pairs[0], 2 * pairs[1]), 1)
        return queries.to(y_NM.dtype).contiguous(), keys_values.to(y_NM.dtype)
    queries, keys_values = torch.split_with_sizes(y_NM.view(torch.complex64), pairs, 1)
    return (queries * factors[0]).view(torch.float32), (keys_values * factors[1]).view(torch.float32)


def _multiply_pairs(y_NM: Tensor, factors: Tensor) -> Tensor:
    """Pairs of features times complex factors, which may be given as pairs of real numbers."""
    if factors.is_complex():
        return (y_NM.view(torch.complex64) * factors).view(torch.float32)
    (a, b), (cos, sin) = y_NM.view(factors.shape).unbind(-1), factors.unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(1)


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected positions of a pass: their views of both caches, and their rows in the states of the pass."""

    keys_values: KeyValueView
    reuse: ReuseView
    rows: Tensor
    kept: int = 0  # by a checkpoint, of each row; 0: the plan selected the positions


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrowing:
    """What checkpoints need to select positions from S sequences of W positions each."""

    width: int
    factors_N: Tensor  # rotary
    firsts_S1: Tensor  # the first position of each sequence in the states of the pass
    rows_2N: Tensor  # of each position: its row in the flattened keys and values, and its row in the reuse cache
    targets: Sequence[Tensor]  # the flattened keys and values of each layer
    priors: Sequence[Tensor]  # (N,) for each checkpoint
    attention: Callable[[int], Attention]  # for a number of positions in each sequence, anywhere in its block

    def select(
        self, number: int, checkpoint: Checkpoint, signal_N: Tensor, live: Selection | None, reuse: ReuseCache
    ) -> Selection:
        """Selects the positions with the highest scores (ties: the lowest positions) in each sequence.

        Candidates are the positions in `live`, which earlier checkpoints selected; None: all positions.
        """
        score_N = torch.add(self.priors[number], signal_N, alpha=checkpoint.weight)
        if live is None:
            best_SW = torch.sort(score_N.view(-1, self.width), dim=-1, descending=True, stable=True).indices
            rows = (best_SW[:, : checkpoint.keep] + self.firsts_S1).flatten()
        else:
            live_SK = torch.sort(live.rows.view(-1, live.kept)).values
            best_SK = torch.sort(score_N[live_SK], dim=-1, descending=True, stable=True).indices
            rows = live_SK.gather(1, best_SK[:, : checkpoint.keep]).flatten()
        cache_rows, block_rows = self.rows_2N[:, rows]
        view = KeyValueView(
            factors=(self.factors_N[rows],),
            index=cache_rows,
            targets=self.targets,
            attention=self.attention(checkpoint.keep),
        )
        return Selection(view, ReuseView(reuse, block_rows), rows, checkpoint.keep)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One transformer layer with fused projections."""

    index: int
    attention_norm: Norm
    qkv: Linear
    qk_norm: HeadNorm | None
    qkv_pairs: tuple[int, int]  # number of rotated pairs of queries, and of keys with values
    attention_out: Linear
    mlp_norm: Norm
    gate_up: Linear
    gate_up_sizes: tuple[int, int]
    down: Linear

    def attention(self, x_ND: Tensor, keys_values: KeyValueView) -> Tensor:
        q_NM, kv_NM = rotate(self.fused_projection(x_ND), keys_values.factors, self.qkv_pairs)
        keys_values.write(self.index, kv_NM)
        return self.attention_out.add_to(x_ND, keys_values.attention.attend(self.index, q_NM))

    def fused_projection(self, x_ND: Tensor) -> Tensor:
        """Queries, keys and values before the rotation."""
        qkv_NM = self.qkv(self.attention_norm(x_ND))
        if self.qk_norm is not None:
            self.qk_norm(qkv_NM)
        return qkv_NM

    def mlp(self, x_ND: Tensor) -> Tensor:
        gate_NF, up_NF = torch.split_with_sizes(self.gate_up(self.mlp_norm(x_ND)), self.gate_up_sizes, 1)
        return self.down.add_to(x_ND, silu(gate_NF).mul_(up_NF))

    def run(self, x_ND: Tensor, keys_values: KeyValueView, reuse: ReuseView | None, work: LayerWork) -> Tensor:
        """Computes the layer and caches the contribution that later replays need."""
        work.computed += 1
        middle_ND = self.attention(x_ND, keys_values)
        y_ND = self.mlp(middle_ND)
        if reuse is not None:
            before_ND = middle_ND if reuse.unit is Unit.MLP else x_ND
            reuse.add(self.index, before_ND, middle_ND if reuse.unit is Unit.ATTENTION else y_ND)
        return y_ND

    def replay(self, x_ND: Tensor, reuse: ReuseView, work: LayerWork) -> Tensor:
        """Adds the cached contribution to the input. Nothing runs, and the layer's keys and values do not change."""
        work.reused += 1
        return x_ND + reuse.load(self.index)

    def run_half(
        self, step: LayerStep, x_ND: Tensor, keys_values: KeyValueView, reuse: ReuseView, work: LayerWork
    ) -> Tensor:
        """Computes attention or the MLP, and replays the contribution of the other half."""
        work.computed += 1
        if step is REPLAY_ATTENTION:
            assert reuse.unit is Unit.ATTENTION
            work.mlp_only += 1
            return self.mlp(x_ND + reuse.load(self.index))
        assert reuse.unit is Unit.MLP
        work.attention_only += 1
        return self.attention(x_ND, keys_values) + reuse.load(self.index)

    def run_selected(self, x_ND: Tensor, selection: Selection, selected_ND: Tensor | None, work: LayerWork) -> Tensor:
        """Computes the selected positions from their current states. They attend to the cached keys of all."""
        if selection.kept:
            work.narrowed += 1
            work.narrowed_positions += selection.kept
        else:
            work.partial += 1
        before_ND = x_ND[selection.rows] if selected_ND is None else selected_ND
        return self.run(before_ND, selection.keys_values, selection.reuse, work)


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How passes are executed; chosen when the model is loaded."""

    backend: Backend = Backend.REFERENCE
    padded: bool = False  # passes have fixed shapes, so that a row's result does not depend on the size of its batch
    compiled: bool = False  # with torch.compile; needs fixed shapes


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The weights of a model, ready to run. Holds no state of any sequence; `pool` keeps the memory of caches."""

    config: ModelConfig
    embedding_VD: Tensor
    layers: Sequence[Layer]
    final_norm: Norm
    head: Linear
    execution: Execution = Execution()
    pool: CachePool = field(default_factory=CachePool)

    @property
    def device(self) -> torch.device:
        return self.embedding_VD.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_VD.dtype

    def logits(self, states_ND: Tensor) -> Tensor:
        """Logits in float32. Which position they predict depends on the family, see `ModelConfig.predicted_at`."""
        return self.head(self.final_norm(states_ND)).float()

    def forward(
        self,
        ids_N: Tensor,
        keys_values: KeyValueView,
        plan: LayerPlan,
        reuse: ReuseView | None = None,
        selection: Selection | None = None,
        narrowing: Narrowing | None = None,
    ) -> tuple[Tensor, LayerWork]:
        """The states after the last layer. Prefill and commit passes have no `reuse`: they cache no contributions.

        The selected positions go through adjacent partial layers on their own, while all positions replay. After the
        last of these layers, and before a checkpoint, their states are written back. A stale pass runs no layer and
        returns the states as last computed.
        """
        if plan.stale:
            assert reuse is not None
            return reuse.load(FINAL_STATES), LayerWork(reused=len(self.layers), replays=1)
        work = LayerWork()
        checkpoints = {checkpoint.layer: number for number, checkpoint in enumerate(plan.checkpoints)}
        compared = () if reuse is None else reuse.cache.spec.compared_inputs
        x_ND = self.embedding_VD[ids_N]
        selected_ND: Tensor | None = None
        pending: list[int] = []  # layers that ran for some positions and are still to be replayed for the others
        for index, (layer, step) in enumerate(zip(self.layers, plan.steps, strict=True)):
            if reuse is not None and reuse.watches(index):
                assert selected_ND is None
                reuse.store(WATCHED_INPUT, x_ND)
            number = checkpoints.get(index)
            if number is not None or index in compared:
                assert reuse is not None
                if selection is not None and selected_ND is not None:
                    x_ND = _put_back(x_ND, selection, selected_ND, reuse, pending)
                    selected_ND = None
                signal_N = reuse.keep_input(index, x_ND, number is not None)
                if number is not None:
                    assert narrowing is not None
                    if signal_N is None:
                        signal_N = self._signal(layer, plan.checkpoints[number], x_ND, narrowing)
                    if selection is not None:
                        selection.reuse.finish()
                    selection = narrowing.select(number, plan.checkpoints[number], signal_N, selection, reuse.cache)
            if step is COMPUTE:
                x_ND = layer.run(x_ND, keys_values, reuse, work)
                continue
            work.replays += 1
            if step is SKIP:
                work.reused += 1
                continue
            assert reuse is not None
            if step is REPLAY_ATTENTION or step is REPLAY_MLP:
                x_ND = layer.run_half(step, x_ND, keys_values, reuse, work)
                continue
            assert reuse.unit is Unit.LAYER
            if step is REPLAY:
                x_ND = layer.replay(x_ND, reuse, work)
                continue
            assert selection is not None
            selected_ND = layer.run_selected(x_ND, selection, selected_ND, work)
            if selection.kept:
                pending.append(index)
            else:
                x_ND = x_ND + reuse.load(index)
            if plan.steps[index + 1 : index + 2] != (PARTIAL,):
                x_ND = _put_back(x_ND, selection, selected_ND, reuse, pending)
                selected_ND = None
        if reuse is not None:
            reuse.store(FINAL_STATES, x_ND)
            reuse.finish()
        if selection is not None:
            selection.reuse.finish()
        return x_ND, work

    def _signal(self, layer: Layer, checkpoint: Checkpoint, x_ND: Tensor, narrowing: Narrowing) -> Tensor:
        """The value change or the attention of each position at a checkpoint before this layer, in float32."""
        qkv_NM, width = layer.fused_projection(x_ND), layer.qkv_pairs[1]
        if checkpoint.signal is CheckpointSignal.VALUE_CHANGE:
            cached_NM = narrowing.targets[layer.index][narrowing.rows_2N[0], width:]
            return -cosine_similarity(qkv_NM[:, -width:].float(), cached_NM.float(), -1)
        assert checkpoint.signal is CheckpointSignal.ATTENTION
        q_NM, kv_NM = rotate(qkv_NM, (narrowing.factors_N,), layer.qkv_pairs)
        heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        sequences = len(x_ND) // narrowing.width
        q_SKQd = q_NM.view(sequences, -1, heads, head_dim).transpose(1, 2)
        keys_SKdW = kv_NM[:, :width].view(sequences, -1, heads, head_dim).permute(0, 2, 3, 1)
        score_SKQW = torch.matmul(q_SKQd, keys_SKdW).float()
        return torch.softmax(score_SKQW / head_dim**0.5, -1).mean((1, 2)).flatten()


def _put_back(x_ND: Tensor, selection: Selection, selected_ND: Tensor, reuse: ReuseView, pending: list[int]) -> Tensor:
    """Writes the selected positions' states back; all others first replay the pending layers, in one operation."""
    if pending:
        x_ND = x_ND + reuse.load_sum(pending)
        pending.clear()
    return x_ND.index_copy_(0, selection.rows, selected_ND)

"""Attention of a pass over cached keys and values, which are read in place, and rotary position factors.

Query heads that share a key head become additional queries, so keys are never repeated. A row's result does not depend
on the other rows: the kernels work on one sequence at a time, and splitting its keys (split-K) is switched off.
Shapes: L layers, B rows, N positions of all rows, K key/value heads, Q queries of a row, d head size, M features of a
fused projection, T queries of all rows (positions × query heads per key head), C rows of the flattened cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sampler.config import ModelConfig

try:
    from torch.nn.attention.varlen import varlen_attn_out
except ImportError:  # an older torch
    varlen_attn_out = None  # type: ignore[assignment]

MAX_MASKED_POSITIONS = 1024  # a prompt's mask has at most this many rows and columns; a longer prompt needs no mask
MAX_FLASH_HEAD_DIM = 256


class Backend(Enum):
    """How attention is computed; chosen when a model is loaded."""

    REFERENCE = "reference"  # scaled_dot_product_attention for each run of similar rows: exact shapes, on a CPU
    VARLEN = "varlen"  # flash attention over sequences of different lengths: one call per layer
    EFFICIENT = "efficient"  # the memory-efficient kernel with a length for each sequence: one call per layer
    DENSE = "dense"  # plain operations on gathered keys with a mask: static shapes on any device, for compiled passes


def pick_backend(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, compiled: bool = False) -> Backend:
    """Flash attention needs compute capability 8, half precision, and a head size that is a multiple of 8."""
    if device.type != "cuda":
        return Backend.DENSE if compiled else Backend.REFERENCE
    flash_head = config.head_dim % 8 == 0 and config.head_dim <= MAX_FLASH_HEAD_DIM
    has_kernel = varlen_attn_out is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    if has_kernel and flash_head and dtype is not torch.float32:
        return Backend.VARLEN
    return Backend.EFFICIENT


class Attention(Protocol):
    """Attention in one pass."""

    def attend(self, layer: int, q_NM: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Rows:
    """The positions of one pass: the slot of each row, and the row's positions that are forwarded.

    A row's positions belong to one block, or they are all positions of several blocks. Each position attends to its own
    block and everything before it.
    """

    slots: Sequence[int]
    positions: Sequence[Sequence[int]]

    def in_sequences(self, width: int, count: int, *, block: int, scratch: int) -> "Rows":
        """These rows, split into rows of `width` positions, and padding in the slot `scratch` up to `count` rows."""
        slots: list[int] = []
        positions: list[Sequence[int]] = []
        for slot, row in zip(self.slots, self.positions, strict=True):
            parts = [row[first : first + width] for first in range(0, len(row), width)]
            assert len(parts[-1]) == width
            assert parts[-1][0] // block == parts[-1][-1] // block
            slots += [slot] * len(parts)
            positions += parts
        missing = count - len(slots)
        assert missing >= 0
        return Rows(slots + [scratch] * missing, positions + [range(width)] * missing)

    def padded(self, count: int, total: int) -> "Rows":
        """`count` rows with `total` positions in all. Padding repeats the first position and stores the same values."""
        missing = total - sum(map(len, self.positions))
        empty = count - len(self.slots)
        padding = [self.positions[0][0]] * missing
        return Rows([*self.slots, *[self.slots[0]] * (empty + 1)], [*self.positions, padding, *[()] * empty])


@dataclass(frozen=True, slots=True)
class Run:
    """Rows in adjacent slots that attend in one call, over views of the cache."""

    size: int  # positions of all its rows
    query_shape: tuple[int, int, int, int]
    keys: tuple[Tensor, ...]  # per layer, (rows, K, C, d)
    values: tuple[Tensor, ...]
    mask: Tensor | None = None  # None: every query sees every key


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """One call for each run of rows."""

    runs: Sequence[Run]

    @classmethod
    def over(cls, rows: Rows, kv_LSCM: Tensor, config: ModelConfig) -> "ReferenceAttention":
        """Attention of these rows to the cached keys and values of L layers, S slots and C positions."""
        block = config.block_size
        return cls([run for adjacent in _adjacent_rows(rows, block) for run in _runs(rows, adjacent, kv_LSCM, config)])

    def attend(self, layer: int, q_NM: Tensor) -> Tensor:
        if len(self.runs) == 1:
            return self._attend(self.runs[0], layer, q_NM)
        parts = torch.split_with_sizes(q_NM, [run.size for run in self.runs])
        return torch.cat([self._attend(run, layer, q) for run, q in zip(self.runs, parts, strict=True)])

    def _attend(self, run: Run, layer: int, q_NM: Tensor) -> Tensor:
        q_BKQd = q_NM.view(run.query_shape).transpose(1, 2)
        out_BKQd = scaled_dot_product_attention(q_BKQd, run.keys[layer], run.values[layer], attn_mask=run.mask)
        return out_BKQd.transpose(1, 2).reshape(q_NM.shape)


def _adjacent_rows(rows: Rows, block: int) -> list[range]:
    """Splits rows into maximal runs of adjacent slots with the same number of positions and the same last block."""
    keys = [
        (slot - row, len(p), _block_end(p, block) if p else 0)
        for row, (slot, p) in enumerate(zip(rows.slots, rows.positions, strict=True))
    ]
    breaks = [row for row in range(1, len(keys)) if keys[row] != keys[row - 1]]
    return [range(first, last) for first, last in zip([0, *breaks], [*breaks, len(keys)], strict=True)]


def _runs(rows: Rows, adjacent: range, kv_LSCM: Tensor, config: ModelConfig) -> list[Run]:
    """One run, with a mask if its rows span several blocks. Of a long prompt, each block is a run of its own."""
    slot, positions, block = rows.slots[adjacent.start], rows.positions[adjacent.start], config.block_size
    if not positions:
        return []
    if positions[0] // block == positions[-1] // block:
        return [_run(slot, len(adjacent), positions, kv_LSCM, config)]
    assert isinstance(positions, range)
    if positions[-1] < MAX_MASKED_POSITIONS:
        mask = block_causal_mask(positions, config, kv_LSCM.dtype, kv_LSCM.device)
        return [_run(slot, len(adjacent), positions, kv_LSCM, config, mask)]
    blocks = [range(start, start + block) for start in range(positions.start, positions.stop, block)]
    return [_run(s, 1, positions, kv_LSCM, config) for s in range(slot, slot + len(adjacent)) for positions in blocks]


def _run(
    slot: int, count: int, positions: Sequence[int], kv_LSCM: Tensor, config: ModelConfig, mask: Tensor | None = None
) -> Run:
    heads, head_dim, end = config.num_kv_heads, config.head_dim, _block_end(positions, config.block_size)
    seen_LBCM = kv_LSCM[:, slot : slot + count, :end]
    keys, values = seen_LBCM.view(-1, count, end, 2, heads, head_dim).transpose(2, 4).unbind(3)
    return Run(count * len(positions), (count, -1, heads, head_dim), keys.unbind(0), values.unbind(0), mask)


def _block_end(positions: Sequence[int], block: int) -> int:
    """The end of the block that the last position lies in."""
    return positions[-1] // block * block + block


def block_causal_mask(positions: range, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Each position sees its own block and those before it."""
    block_C = torch.arange(positions[-1] + 1, device=device) // config.block_size
    hidden_NC = block_C[positions[0] :, None] < block_C
    hidden_QC = hidden_NC.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0)
    # Not boolean: SDPA's CPU kernel would convert it in every layer.
    return torch.zeros_like(hidden_QC, dtype=dtype).masked_fill_(hidden_QC, float("-inf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceAttention:
    """One call for all rows. A sequence is one row's positions in one block; it sees its block and all before it.

    The tensors that describe sequences are int32 on the device; the maxima do not depend on their content.
    """

    backend: Backend
    keys_values: Sequence[tuple[Tensor, Tensor]]  # per layer, (C, K, d) each
    query_starts: Tensor  # first query of each sequence, and the number of queries
    key_starts: Tensor  # first row of each sequence in the flattened cache, and one more entry, which is not read
    lengths: Tensor  # number of keys of each sequence
    max_queries: int
    max_keys: int

    def attend(self, layer: int, q_NM: Tensor) -> Tensor:
        keys_CKd, values_CKd = self.keys_values[layer]
        q_TKd = q_NM.view(-1, *keys_CKd.shape[1:])
        layout = self.query_starts, self.key_starts, self.max_queries, self.max_keys
        if self.backend is Backend.VARLEN:
            out_TKd = torch.empty_like(q_TKd)
            varlen_attn_out(  # one kernel; `varlen_attn` would also fill a random state
                *(out_TKd, q_TKd, keys_CKd, values_CKd),
                *layout,
                seqused_k=self.lengths,
                num_splits=1,
            )
        elif self.backend is Backend.EFFICIENT:
            out_TKd = torch.ops.aten._efficient_attention_forward(
                *(q_TKd[None], keys_CKd[None], values_CKd[None], None),
                *layout,
                *(0.0, 0, False),  # no dropout, no causal mask, no log-sum-exp
                seqlen_k=self.lengths,
            )[0]
        else:
            assert self.backend is Backend.DENSE, "the reference backend attends over runs of rows"
            out_TKd = self._attend_dense(q_TKd, keys_CKd, values_CKd)
        return out_TKd.view(q_NM.shape)

    def _attend_dense(self, q_TKd: Tensor, keys_CKd: Tensor, values_CKd: Tensor) -> Tensor:
        """Pads each sequence to the maxima. Indices out of range are clamped; their values are masked or not used."""
        query_B1, key_B1 = self.query_starts[:-1, None], self.key_starts[:-1, None]
        offset_Q = torch.arange(self.max_queries, device=q_TKd.device)
        offset_C = torch.arange(self.max_keys, device=q_TKd.device)
        query_BQ = (query_B1 + offset_Q).clamp(max=q_TKd.shape[0] - 1)
        key_BC = (key_B1 + offset_C).clamp(max=keys_CKd.shape[0] - 1)
        seen_B11C = (offset_C < self.lengths[:, None])[:, None, None]
        out_BKQd = scaled_dot_product_attention(
            q_TKd[query_BQ].transpose(1, 2),
            keys_CKd[key_BC].transpose(1, 2),
            values_CKd[key_BC].transpose(1, 2),
            attn_mask=seen_B11C,
        )
        query_T = torch.arange(q_TKd.shape[0], device=q_TKd.device, dtype=self.query_starts.dtype)
        sequence_T = torch.bucketize(query_T, self.query_starts[1:], right=True).clamp(max=self.lengths.shape[0] - 1)
        return out_BKQd.transpose(1, 2)[sequence_T, query_T - self.query_starts[sequence_T]]


def rotary_factors(config: ModelConfig, positions: int, device: torch.device) -> Tensor:
    """Complex factors at each position: for queries, for keys, and for values (whose factor is 1)."""
    frequency_d, scale = rotary_frequencies(config, device)
    angle_Cd = torch.outer(torch.arange(positions, device=device).float(), frequency_d)
    factor_Cd = torch.polar(torch.full_like(angle_Cd, scale), angle_Cd)
    keys = factor_Cd.repeat(1, config.num_kv_heads)
    return torch.cat((factor_Cd.repeat(1, config.num_heads), keys, torch.ones_like(keys)), -1)


def rotary_frequencies(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """The frequency of each rotated pair, and what queries and keys are multiplied by (llama3 and yarn scaling)."""
    if not config.rope_scaling:
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        return config.rope_theta**-half, 1.0
    from transformers import LlamaConfig  # slow to import, and rarely needed
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": config.rope_theta, **dict(config.rope_scaling)}
    described = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=rope,
    )
    frequency_d, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](described, device)
    return frequency_d, float(scale)

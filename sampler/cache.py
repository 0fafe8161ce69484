"""The caches a batch of rows decodes into: keys and values, and what replays need. Knows no policies, no tokens.

Lifetimes: a `KeyValueCache` and a `ReuseCache` live for one call; a slot of the first for one row, of the second
for one block; a `Window` for one pass.
Shapes: L layers, S slots, C capacity, B rows, W window, N = B·W, H heads, K key/value heads, d head size, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sampler.config import ModelConfig
from sampler.layout import rotary_factors
from sampler.plan import Keeps

Place = slice | Tensor  # rows of a flattened (slot, position) axis: a slice, and so a view, where they are adjacent


class KeyValueCache:
    """Keys and values of every slot, allocated once; the current block's lie right behind the committed prefix's."""

    def __init__(
        self, config: ModelConfig, slots: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.capacity = capacity
        width = 2 * config.num_kv_heads * config.head_dim
        self.kv_LSCM = torch.zeros((config.num_layers, slots, capacity, width), dtype=dtype, device=device)
        self.factors = rotary_factors(config, capacity, device)

    def window(
        self, slots: Sequence[int], positions: Sequence[Sequence[int]], *, clean_blocks: bool = False
    ) -> "Window":
        """Equally many positions of several rows, as seen by one pass.

        A row's positions lie in one block and see all of it and all before; with `clean_blocks` they run over
        several blocks (prefill), and each position sees its own block and those before it.
        """
        block = self.config.block_size
        starts = [row[0] // block * block for row in positions]
        ends = [row[-1] // block * block + block for row in positions]
        offsets = [[p - start for p in row] for row, start in zip(positions, starts, strict=True)]
        end = max(ends)
        at = _place(slots, positions, self.capacity, self.kv_LSCM.device)
        rotary_at = slice(positions[0][0], positions[0][-1] + 1) if isinstance(at, slice) else at % self.capacity
        first, last = slots[0], slots[-1] + 1
        adjacent = list(slots) == list(range(first, last))
        seen = self.kv_LSCM[:, first:last, :end] if adjacent else self.kv_LSCM[:, :, :end]
        heads, head_dim = self.config.num_kv_heads, self.config.head_dim
        flat = self.kv_LSCM.flatten(1, 2)
        return Window(
            slots=tuple(slots),
            width=len(positions[0]),
            factors=(self.factors[0][rotary_at], self.factors[1][rotary_at]),
            query_shape=(len(slots), -1, heads, head_dim),
            at=None if isinstance(at, slice) else at,
            targets=(flat[:, at] if isinstance(at, slice) else flat).unbind(0),
            spans=seen.view(*seen.shape[:3], 2, heads, head_dim).permute(0, 1, 3, 4, 2, 5).unbind(0),
            select=None if adjacent else torch.tensor(slots, device=flat.device),
            mask=self._block_causal(positions[0]) if clean_blocks else self._ragged(ends),
            in_block=_place(slots, offsets, block, flat.device),
            bits=tuple(sum(1 << offset for offset in row) for row in offsets),
        )

    def _ragged(self, ends: Sequence[int]) -> Tensor | None:
        """Hides what lies behind a shorter row's block; nothing to hide if all rows end alike."""
        if len(set(ends)) == 1:
            return None
        ends_B = torch.tensor(ends, device=self.kv_LSCM.device)
        return self._additive(torch.arange(max(ends), device=ends_B.device) >= ends_B[:, None, None, None])

    def _block_causal(self, positions: Sequence[int]) -> Tensor:
        block_C = torch.arange(positions[-1] + 1, device=self.kv_LSCM.device) // self.config.block_size
        hidden_WC = block_C[positions[0] :, None] < block_C
        group = self.config.num_heads // self.config.num_kv_heads
        return self._additive(hidden_WC.repeat_interleave(group, dim=0))

    def _additive(self, hidden: Tensor) -> Tensor:
        """SDPA's CPU kernel takes a float mask as it is and converts a boolean one on every call."""
        return torch.zeros_like(hidden, dtype=self.kv_LSCM.dtype).masked_fill_(hidden, float("-inf"))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.kv_LSCM[:, target, :length] = self.kv_LSCM[:, source, :length]

    def block(self, slot: int, start: int) -> Tensor:
        """A block's keys and values in all layers, as a view."""
        return self.kv_LSCM[:, slot, start : start + self.config.block_size]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Where one pass reads and writes: per-layer views made once, so that the layer loop makes none."""

    slots: tuple[int, ...]
    width: int
    factors: tuple[Tensor, Tensor]  # rotary: of queries, of keys with values
    query_shape: tuple[int, int, int, int]
    at: Tensor | None  # where to write in the flattened slots; None: `targets` are just that place
    targets: tuple[Tensor, ...]
    spans: tuple[Tensor, ...]  # per layer the keys and values in sight: (rows or all slots, 2, K, C, d)
    select: Tensor | None  # the rows' slots where they are not adjacent
    mask: Tensor | None
    in_block: Place  # the same positions where only the current block of each slot is held
    bits: tuple[int, ...]  # per row, one bit per position in the block

    def write(self, layer: int, kv_NM: Tensor) -> None:
        if self.at is None:
            self.targets[layer].copy_(kv_NM)
        else:
            self.targets[layer].index_copy_(0, self.at, kv_NM)

    def attend(self, layer: int, q_NM: Tensor) -> Tensor:
        """Attention of the window's positions over their rows' keys. Query heads that share keys are more queries."""
        span = self.spans[layer] if self.select is None else self.spans[layer].index_select(0, self.select)
        keys, values = span.unbind(1)
        q_BKQd = q_NM.view(self.query_shape).transpose(1, 2)
        out_BKQd = scaled_dot_product_attention(q_BKQd, keys, values, attn_mask=self.mask)
        return out_BKQd.transpose(1, 2).reshape(len(q_NM), -1)


class ReuseCache:
    """Contributions of layers (output − input) and final states, per slot and position of the current block.

    Per layer and position it knows whether it holds a value; a replay of what is not there is a fault.
    """

    def __init__(
        self, keeps: Keeps, config: ModelConfig, slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keeps = keeps
        self.block = config.block_size
        self.rows = {layer: row for row, layer in enumerate(keeps.layers)}
        if keeps.final_states:
            self.rows[FINAL] = len(self.rows)
        self.values = torch.zeros((len(self.rows), slots * self.block, config.hidden_size), dtype=dtype, device=device)
        self.valid = [[0] * slots for _ in self.rows]  # per kept layer and slot, one bit per position

    def reset(self, slot: int) -> None:
        """A new block: nothing of the old one may be replayed."""
        for bits in self.valid:
            bits[slot] = 0

    def store(self, layer: int, window: Window, value_ND: Tensor) -> None:
        row = self.rows[layer]
        self.values[row][window.in_block] = value_ND
        for slot, bits in zip(window.slots, window.bits, strict=True):
            self.valid[row][slot] |= bits

    def load(self, layer: int, window: Window) -> Tensor:
        row = self.rows[layer]
        for slot, bits in zip(window.slots, window.bits, strict=True):
            assert bits & ~self.valid[row][slot] == 0, f"layer {layer} replays positions it never computed"
        return self.values[row][window.in_block]

    def save(self, slot: int) -> tuple[Tensor, list[int]]:
        lo, hi = slot * self.block, (slot + 1) * self.block
        return self.values[:, lo:hi].clone(), [bits[slot] for bits in self.valid]

    def restore(self, slot: int, saved: tuple[Tensor, list[int]]) -> None:
        lo, hi = slot * self.block, (slot + 1) * self.block
        self.values[:, lo:hi] = saved[0]
        for bits, old in zip(self.valid, saved[1], strict=True):
            bits[slot] = old


FINAL = -1  # the key under which a reuse cache holds the states behind the last layer


def _place(slots: Sequence[int], positions: Sequence[Sequence[int]], stride: int, device: torch.device) -> Place:
    if len(slots) == 1 and positions[0][-1] - positions[0][0] + 1 == len(positions[0]):
        first = slots[0] * stride + positions[0][0]
        return slice(first, first + len(positions[0]))
    flat = [slot * stride + p for slot, row in zip(slots, positions, strict=True) for p in row]
    return torch.tensor(flat, device=device)

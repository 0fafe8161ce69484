"""The caches of a batch of rows: keys and values for attention, and layer contributions for replays.

Lifetimes: a `KeyValueCache` and a `ReuseCache` live for one call. A slot of the first belongs to one row, a slot of the
second to one block. A `KeyValueView` and a `ReuseView` belong to one pass.
Shapes: L layers, S slots, C capacity, B rows, N positions of all rows, K key/value heads, Q queries of a row,
d head size, M features of a fused projection, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sampler.config import ModelConfig
from sampler.plan import WATCHED_INPUT, CacheSpec, Unit

FINAL_STATES = -1  # key of the states after the last layer in a reuse cache; contributions have their layer's index

FlatIndex = slice | Tensor  # rows of a flattened (slot, position) axis: a slice, hence a view, if they are adjacent


@dataclass(frozen=True, slots=True)
class Rows:
    """The positions of one pass: the slot of each row, and the row's positions that are forwarded."""

    slots: Sequence[int]
    positions: Sequence[Sequence[int]]


class KeyValueCache:
    """Keys and values of every slot, allocated once. The current block follows the committed prefix directly."""

    def __init__(
        self, config: ModelConfig, slots: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.capacity = capacity
        width = 2 * config.num_kv_heads * config.head_dim
        self.kv_LSCM = torch.zeros((config.num_layers, slots, capacity, width), dtype=dtype, device=device)
        self.factors = rotary_factors(config, capacity, device)

    def view(self, rows: Rows, *, clean_blocks: bool = False) -> "KeyValueView":
        """Where a pass over these positions reads and writes.

        A row's positions lie in one block and attend to that block and everything before it. With `clean_blocks`
        (prefill) they span several blocks, and each position attends to its own block and those before it.
        """
        slots, positions = rows.slots, rows.positions
        index = _flat_index(slots, positions, self.capacity, self.kv_LSCM.device)
        at = slice(positions[0][0], positions[0][-1] + 1) if isinstance(index, slice) else index % self.capacity
        flat = self.kv_LSCM.flatten(1, 2)
        return KeyValueView(
            factors=(self.factors[0][at], self.factors[1][at]),
            index=None if isinstance(index, slice) else index,
            targets=(flat[:, index] if isinstance(index, slice) else flat).unbind(0),
            runs=tuple(self._run(rows, run) for run in self._adjacent_rows(rows)),
            mask=self._block_causal_mask(positions[0]) if clean_blocks else None,
        )

    def _adjacent_rows(self, rows: Rows) -> list[range]:
        """Splits rows into maximal runs of adjacent slots with the same number of positions and the same end."""
        keys = [
            (slot - row, len(p), self._end(p))
            for row, (slot, p) in enumerate(zip(rows.slots, rows.positions, strict=True))
        ]
        breaks = [row for row in range(1, len(keys)) if keys[row] != keys[row - 1]]
        return [range(first, last) for first, last in zip([0, *breaks], [*breaks, len(keys)], strict=True)]

    def _run(self, rows: Rows, run: range) -> "Run":
        slot, positions, count = rows.slots[run.start], rows.positions[run.start], len(run)
        heads, head_dim, end = self.config.num_kv_heads, self.config.head_dim, self._end(positions)
        seen_LBCM = self.kv_LSCM[:, slot : slot + count, :end]
        keys, values = seen_LBCM.view(-1, count, end, 2, heads, head_dim).transpose(2, 4).unbind(3)
        return Run(count * len(positions), (count, -1, heads, head_dim), keys.unbind(0), values.unbind(0))

    def _end(self, positions: Sequence[int]) -> int:
        """The end of the block that the positions lie in."""
        return positions[-1] // self.config.block_size * self.config.block_size + self.config.block_size

    def _block_causal_mask(self, positions: Sequence[int]) -> Tensor:
        block_C = torch.arange(positions[-1] + 1, device=self.kv_LSCM.device) // self.config.block_size
        hidden_WC = block_C[positions[0] :, None] < block_C
        group = self.config.num_heads // self.config.num_kv_heads
        hidden_QC = hidden_WC.repeat_interleave(group, dim=0)
        # Not boolean: SDPA's CPU kernel would convert it in every layer.
        return torch.zeros_like(hidden_QC, dtype=self.kv_LSCM.dtype).masked_fill_(hidden_QC, float("-inf"))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.kv_LSCM[:, target, :length] = self.kv_LSCM[:, source, :length]

    def clear(self, slot: int) -> None:
        self.kv_LSCM[:, slot] = 0

    def block(self, slot: int, start: int) -> Tensor:
        """A view of one block's keys and values in all layers."""
        return self.kv_LSCM[:, slot, start : start + self.config.block_size]


@dataclass(frozen=True, slots=True)
class Run:
    """Rows in adjacent slots that attend in one call, over views of the cache."""

    size: int  # positions of all its rows
    query_shape: tuple[int, int, int, int]
    keys: tuple[Tensor, ...]  # per layer, (rows, K, C, d)
    values: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValueView:
    """Where one pass reads and writes keys and values. The per-layer views are made once, not in the layer loop."""

    factors: tuple[Tensor, Tensor]  # rotary: for queries, and for keys with values
    index: Tensor | None  # where to write in the flattened slots; None: `targets` are exactly that place
    targets: tuple[Tensor, ...]
    runs: tuple[Run, ...]
    mask: Tensor | None

    def write(self, layer: int, kv_NM: Tensor) -> None:
        if self.index is None:
            self.targets[layer].copy_(kv_NM)
        else:
            self.targets[layer].index_copy_(0, self.index, kv_NM)

    def attend(self, layer: int, q_NM: Tensor) -> Tensor:
        """Attention over each row's own keys. Query heads that share a key head become additional queries.

        Rows are neither padded nor gathered, so each row gets the same result as in a batch of one.
        """
        if len(self.runs) == 1:
            return self._attend(self.runs[0], layer, q_NM)
        parts = torch.split_with_sizes(q_NM, [run.size for run in self.runs])
        return torch.cat([self._attend(run, layer, q) for run, q in zip(self.runs, parts, strict=True)])

    def _attend(self, run: Run, layer: int, q_NM: Tensor) -> Tensor:
        q_BKQd = q_NM.view(run.query_shape).transpose(1, 2)
        out_BKQd = scaled_dot_product_attention(q_BKQd, run.keys[layer], run.values[layer], attn_mask=self.mask)
        return out_BKQd.transpose(1, 2).reshape(q_NM.shape)


class ReuseCache:
    """Layer contributions (output − input), final states and the watched input, per slot and position of the block.

    It records which positions hold a value for each layer; replaying a missing value is an error.
    """

    def __init__(
        self, spec: CacheSpec, config: ModelConfig, slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec = spec
        self.block = config.block_size
        self.row_of = {layer: row for row, layer in enumerate(spec.layers)}
        self.measured = set(spec.layers) if spec.measures_contributions else set()
        if spec.final_states:
            self.row_of[FINAL_STATES] = len(self.row_of)
        if spec.watched_layer is not None:
            self.row_of[WATCHED_INPUT] = len(self.row_of)
            self.measured.add(WATCHED_INPUT)
        self.values = torch.zeros(
            (len(self.row_of), slots * self.block, config.hidden_size), dtype=dtype, device=device
        )
        self.valid = [[0] * slots for _ in self.row_of]  # per cached layer and slot, one bit per position

    def reset(self, slot: int) -> None:
        """Invalidates a slot at the start of a new block."""
        for bits in self.valid:
            bits[slot] = 0

    def view(self, rows: Rows) -> "ReuseView":
        """Where a pass over these positions loads and stores values."""
        offsets = [[position % self.block for position in row] for row in rows.positions]
        bits = tuple(sum(1 << offset for offset in row) for row in offsets)
        return ReuseView(self, rows.slots, _flat_index(rows.slots, offsets, self.block, self.values.device), bits)

    def save(self, slot: int) -> tuple[Tensor, list[int]]:
        low, high = slot * self.block, (slot + 1) * self.block
        return self.values[:, low:high].clone(), [bits[slot] for bits in self.valid]

    def restore(self, slot: int, saved: tuple[Tensor, list[int]]) -> None:
        low, high = slot * self.block, (slot + 1) * self.block
        self.values[:, low:high] = saved[0]
        for bits, old in zip(self.valid, saved[1], strict=True):
            bits[slot] = old


@dataclass(frozen=True, slots=True)
class ReuseView:
    """The values of one pass's positions in a reuse cache, and what the pass measures."""

    cache: ReuseCache
    slots: Sequence[int]
    index: FlatIndex
    bits: tuple[int, ...]  # per row, one bit per position in the block
    measured: dict[int, Tensor] = field(default_factory=dict)  # by layer or WATCHED_INPUT, see `Norms`

    def holds(self, layer: int) -> bool:
        return layer in self.cache.row_of

    def watches(self, layer: int) -> bool:
        return layer == self.cache.spec.watched_layer

    @property
    def unit(self) -> Unit:
        return self.cache.spec.unit

    def store(self, layer: int, value_ND: Tensor, stream_ND: Tensor | None = None) -> None:
        """Caches a value and, if the layer is measured, the norms of its change and of the residual stream."""
        row = self.cache.row_of[layer]
        if layer in self.cache.measured:
            before_ND = self.cache.values[row][self.index]
            streams = [] if stream_ND is None else [stream_ND]
            self.measured[layer] = _l1_norms(value_ND - before_ND, before_ND, *streams)
        self.cache.values[row][self.index] = value_ND
        for slot, bits in zip(self.slots, self.bits, strict=True):
            self.cache.valid[row][slot] |= bits

    def load(self, layer: int) -> Tensor:
        row = self.cache.row_of[layer]
        for slot, bits in zip(self.slots, self.bits, strict=True):
            missing = bits & ~self.cache.valid[row][slot]
            assert not missing, f"layer {layer} replays positions it never computed"
        return self.cache.values[row][self.index]


def rotary_factors(config: ModelConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Complex factors at each position: for queries, and for keys followed by values (whose factor is 1)."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    angle_Cd = torch.outer(torch.arange(positions, device=device).float(), config.rope_theta**-half)
    factor_Cd = torch.polar(torch.ones_like(angle_Cd), angle_Cd)
    keys = factor_Cd.repeat(1, config.num_kv_heads)
    return factor_Cd.repeat(1, config.num_heads), torch.cat((keys, torch.ones_like(keys)), -1)


def _l1_norms(*tensors_ND: Tensor) -> Tensor:
    """The L1 norms of all tensors at each position, in float32 because sums in half precision would overflow."""
    return torch.stack([torch.linalg.vector_norm(x, ord=1, dim=-1, dtype=torch.float32) for x in tensors_ND], -1)


def _flat_index(
    slots: Sequence[int], positions: Sequence[Sequence[int]], stride: int, device: torch.device
) -> FlatIndex:
    if len(slots) == 1 and positions[0][-1] - positions[0][0] + 1 == len(positions[0]):
        first = slots[0] * stride + positions[0][0]
        return slice(first, first + len(positions[0]))
    flat = [slot * stride + p for slot, row in zip(slots, positions, strict=True) for p in row]
    return torch.tensor(flat, device=device)

"""The caches a batch of rows decodes into: keys and values, and what replays need. Knows no policies, no tokens.

Lifetimes: a `KeyValueCache` and a `ReuseCache` live for one call; a slot of the first for one row, of the second
for one block; a `Window` for one pass.
Shapes: L layers, S slots, C capacity, B rows, N positions of all rows, K key/value heads, Q queries of a row,
d head size, M features of a fused projection, D model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sampler.config import ModelConfig
from sampler.plan import INPUT, Keeps, Unit

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

    def window(self, rows: "Rows", *, clean_blocks: bool = False) -> "Window":
        """What a pass over these positions reads and writes.

        A row's positions lie in one block and see all of it and all before; with `clean_blocks` they run over
        several blocks (prefill), and each position sees its own block and those before it.
        """
        slots, positions = rows.slots, rows.positions
        at = _place(slots, positions, self.capacity, self.kv_LSCM.device)
        rotary_at = slice(positions[0][0], positions[0][-1] + 1) if isinstance(at, slice) else at % self.capacity
        flat = self.kv_LSCM.flatten(1, 2)
        return Window(
            rows=rows,
            factors=(self.factors[0][rotary_at], self.factors[1][rotary_at]),
            at=None if isinstance(at, slice) else at,
            targets=(flat[:, at] if isinstance(at, slice) else flat).unbind(0),
            runs=tuple(self._run(rows, run) for run in self._adjacent(rows)),
            mask=self._block_causal(positions[0]) if clean_blocks else None,
        )

    def _adjacent(self, rows: "Rows") -> list[range]:
        """Rows cut into maximal runs of adjacent slots whose windows have one size and one end."""
        marks = [
            (slot - row, len(p), self._end(p))
            for row, (slot, p) in enumerate(zip(rows.slots, rows.positions, strict=True))
        ]
        breaks = [row for row in range(1, len(marks)) if marks[row] != marks[row - 1]]
        return [range(first, last) for first, last in zip([0, *breaks], [*breaks, len(marks)], strict=True)]

    def _run(self, rows: "Rows", run: range) -> "Run":
        slot, positions, count = rows.slots[run.start], rows.positions[run.start], len(run)
        heads, head_dim, end = self.config.num_kv_heads, self.config.head_dim, self._end(positions)
        seen_LBCM = self.kv_LSCM[:, slot : slot + count, :end]
        keys, values = seen_LBCM.view(-1, count, end, 2, heads, head_dim).transpose(2, 4).unbind(3)
        return Run(count * len(positions), (count, -1, heads, head_dim), keys.unbind(0), values.unbind(0))

    def _end(self, positions: Sequence[int]) -> int:
        """Positions see everything up to their block's end."""
        return positions[-1] // self.config.block_size * self.config.block_size + self.config.block_size

    def _block_causal(self, positions: Sequence[int]) -> Tensor:
        block_C = torch.arange(positions[-1] + 1, device=self.kv_LSCM.device) // self.config.block_size
        hidden_WC = block_C[positions[0] :, None] < block_C
        group = self.config.num_heads // self.config.num_kv_heads
        hidden_QC = hidden_WC.repeat_interleave(group, dim=0)
        # Not boolean: SDPA's CPU kernel would convert it in every layer.
        return torch.zeros_like(hidden_QC, dtype=self.kv_LSCM.dtype).masked_fill_(hidden_QC, float("-inf"))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.kv_LSCM[:, target, :length] = self.kv_LSCM[:, source, :length]

    def block(self, slot: int, start: int) -> Tensor:
        """A block's keys and values in all layers, as a view."""
        return self.kv_LSCM[:, slot, start : start + self.config.block_size]


@dataclass(frozen=True, slots=True)
class Rows:
    """The positions of one pass: for each row its slot, and which of its positions are forwarded."""

    slots: Sequence[int]
    positions: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Run:
    """Rows in adjacent slots with windows alike: they attend in one call, over views of the cache."""

    size: int  # positions of all its rows
    query_shape: tuple[int, int, int, int]
    keys: tuple[Tensor, ...]  # per layer, (rows, K, C, d)
    values: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Where one pass reads and writes: per-layer views made once, so that the layer loop makes none."""

    rows: Rows
    factors: tuple[Tensor, Tensor]  # rotary: of queries, of keys with values
    at: Tensor | None  # where to write in the flattened slots; None: `targets` are just that place
    targets: tuple[Tensor, ...]
    runs: tuple[Run, ...]
    mask: Tensor | None

    def write(self, layer: int, kv_NM: Tensor) -> None:
        if self.at is None:
            self.targets[layer].copy_(kv_NM)
        else:
            self.targets[layer].index_copy_(0, self.at, kv_NM)

    def attend(self, layer: int, q_NM: Tensor) -> Tensor:
        """Attention of the window's positions over their rows' keys. Query heads that share keys are more queries.

        No row is padded to another's length and nothing is gathered, so a row's result is that of a batch of one.
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
    """Contributions of layers (output − input), final states and a watched input, per slot and position of the block.

    Per layer and position it knows whether it holds a value; a replay of what is not there is a fault.
    """

    def __init__(
        self, keeps: Keeps, config: ModelConfig, slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keeps = keeps
        self.block = config.block_size
        self.row_of = {layer: row for row, layer in enumerate(keeps.layers)}
        self.measured = set(keeps.layers) if keeps.drifts else set()
        if keeps.final_states:
            self.row_of[FINAL] = len(self.row_of)
        if keeps.watched is not None:
            self.row_of[INPUT] = len(self.row_of)
            self.measured.add(INPUT)
        self.values = torch.zeros(
            (len(self.row_of), slots * self.block, config.hidden_size), dtype=dtype, device=device
        )
        self.valid = [[0] * slots for _ in self.row_of]  # per kept layer and slot, one bit per position

    def reset(self, slot: int) -> None:
        """A new block: nothing of the old one may be replayed."""
        for bits in self.valid:
            bits[slot] = 0

    def at(self, rows: Rows) -> "Kept":
        """Where these positions' values lie here, for as long as a pass takes."""
        offsets = [[position % self.block for position in row] for row in rows.positions]
        bits = tuple(sum(1 << offset for offset in row) for row in offsets)
        return Kept(self, rows.slots, _place(rows.slots, offsets, self.block, self.values.device), bits)

    def save(self, slot: int) -> tuple[Tensor, list[int]]:
        lo, hi = slot * self.block, (slot + 1) * self.block
        return self.values[:, lo:hi].clone(), [bits[slot] for bits in self.valid]

    def restore(self, slot: int, saved: tuple[Tensor, list[int]]) -> None:
        lo, hi = slot * self.block, (slot + 1) * self.block
        self.values[:, lo:hi] = saved[0]
        for bits, old in zip(self.valid, saved[1], strict=True):
            bits[slot] = old


@dataclass(frozen=True, slots=True)
class Kept:
    """The values of one pass's positions in a reuse cache, and how far those it measures moved."""

    cache: ReuseCache
    slots: Sequence[int]
    place: Place
    bits: tuple[int, ...]  # per row, one bit per position in the block
    moved: dict[int, Tensor] = field(default_factory=dict)  # by layer or INPUT, see `Norms`

    def holds(self, layer: int) -> bool:
        return layer in self.cache.row_of

    def watches(self, layer: int) -> bool:
        return layer == self.cache.keeps.watched

    @property
    def unit(self) -> Unit:
        return self.cache.keeps.unit

    def store(self, layer: int, value_ND: Tensor, stream_ND: Tensor | None = None) -> None:
        """Keeps a value; where it is measured, also how far it moved, and how large the stream is that it joins."""
        row = self.cache.row_of[layer]
        if layer in self.cache.measured:
            before_ND = self.cache.values[row][self.place]
            self.moved[layer] = _norms(value_ND - before_ND, before_ND, *([] if stream_ND is None else [stream_ND]))
        self.cache.values[row][self.place] = value_ND
        for slot, bits in zip(self.slots, self.bits, strict=True):
            self.cache.valid[row][slot] |= bits

    def load(self, layer: int) -> Tensor:
        row = self.cache.row_of[layer]
        for slot, bits in zip(self.slots, self.bits, strict=True):
            missing = bits & ~self.cache.valid[row][slot]
            assert not missing, f"layer {layer} replays positions it never computed"
        return self.cache.values[row][self.place]


def _norms(*tensors_ND: Tensor) -> Tensor:
    """The L1 norm of each at every position, side by side; sums of half precision would overflow."""
    return torch.stack([torch.linalg.vector_norm(x, ord=1, dim=-1, dtype=torch.float32) for x in tensors_ND], -1)


FINAL = -1  # the key under which a reuse cache holds the states behind the last layer


def _place(slots: Sequence[int], positions: Sequence[Sequence[int]], stride: int, device: torch.device) -> Place:
    if len(slots) == 1 and positions[0][-1] - positions[0][0] + 1 == len(positions[0]):
        first = slots[0] * stride + positions[0][0]
        return slice(first, first + len(positions[0]))
    flat = [slot * stride + p for slot, row in zip(slots, positions, strict=True) for p in row]
    return torch.tensor(flat, device=device)


def rotary_factors(config: ModelConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Complex factors at each position for queries, and for keys and values together; a value's factor is 1."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    angle_Cd = torch.outer(torch.arange(positions, device=device).float(), config.rope_theta**-half)
    factor_Cd = torch.polar(torch.ones_like(angle_Cd), angle_Cd)
    keys = factor_Cd.repeat(1, config.num_kv_heads)
    return factor_Cd.repeat(1, config.num_heads), torch.cat((keys, torch.ones_like(keys)), -1)

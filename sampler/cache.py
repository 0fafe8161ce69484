"""The caches of a batch of rows: keys and values for attention, and layer contributions for replays.

A slot of a `KeyValueCache` belongs to one row, a slot of a `ReuseCache` to one block. Later calls may use the same
memory (`CachePool`), because a row only reads what it has written itself. A `KeyValueView` and a `ReuseView` belong to
one pass.
Shapes: L layers, S slots, C capacity, B rows, N positions of all rows, K key/value heads, d head size, M features of a
fused projection, D model.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from sampler.attention import Attention, ReferenceAttention, Rows, rotary_factors
from sampler.config import ModelConfig
from sampler.plan import WATCHED_INPUT, CacheSpec, Unit

FINAL_STATES = -1  # key of the states after the last layer in a reuse cache; contributions have their layer's index
FIRST_INPUT = -3  # key of the input of layer 0 that checkpoints compare with; of layer n: FIRST_INPUT - n
MIN_POOLED_CAPACITY = 1024  # positions; pooled caches hold a power of two, so that calls of any length share them
MAX_VIEWS = 64

FlatIndex = slice | Tensor  # rows of a flattened (slot, position) axis: a slice, hence a view, if they are adjacent


class KeyValueCache:
    """Keys and values of every slot. The current block follows the committed prefix directly."""

    def __init__(
        self, config: ModelConfig, slots: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.slots, self.capacity = config, slots, capacity
        width = 2 * config.num_kv_heads * config.head_dim
        self.kv_LSCM = torch.zeros((config.num_layers, slots, capacity, width), dtype=dtype, device=device)
        self.flat_LTM = self.kv_LSCM.flatten(1, 2)
        self.factors = rotary_factors(config, capacity, device)
        self.real_factors = torch.view_as_real(self.factors)  # a compiled graph must not see complex numbers
        self._views: dict[object, KeyValueView] = {}

    @cached_property
    def views(self) -> "LayerViews":
        """The views of `layer_views`, created once because creating views costs time on the host."""
        return layer_views(self.flat_LTM, self.config)

    def view(self, rows: Rows) -> "KeyValueView":
        """Where a pass over these positions reads and writes. Repeated passes over the same positions share a view."""
        key = (*rows.slots, *rows.positions)
        view = self._views.get(key)
        if view is None:
            view = self._new_view(rows)
            if max(map(len, rows.positions)) <= self.config.block_size:  # a prefill's mask is large, and it runs once
                if len(self._views) == MAX_VIEWS:
                    self._views.clear()
                self._views[key] = view
        return view

    def _new_view(self, rows: Rows) -> "KeyValueView":
        slots, positions = rows.slots, rows.positions
        index = _flat_index(slots, positions, self.capacity, self.kv_LSCM.device)
        at = slice(positions[0][0], positions[0][-1] + 1) if isinstance(index, slice) else index % self.capacity
        pairs = self.config.num_heads * self.config.head_dim // 2
        return KeyValueView(
            factors=torch.tensor_split(self.factors[at], (pairs,), 1),
            index=None if isinstance(index, slice) else index,
            targets=(self.flat_LTM[:, index] if isinstance(index, slice) else self.flat_LTM).unbind(0),
            attention=self.reference_attention(rows),
        )

    def reference_attention(self, rows: Rows, count: int | None = None) -> ReferenceAttention:
        """Attention of these rows; with `count`, of any `count` positions in each row's block."""
        chosen = rows if count is None else Rows(rows.slots, [row[:count] for row in rows.positions])
        return ReferenceAttention.over(chosen, self.kv_LSCM, self.config)

    def pass_indices(self, rows: Rows) -> list[list[int]]:
        """Six lists of integers that describe a pass over these rows.

        For each position: the position itself, its row in the flattened keys and values, its row in the reuse cache.
        For each sequence: its first query, its first row in the flattened keys and values, and its number of keys.
        """
        group = self.config.num_heads // self.config.num_kv_heads
        capacity, block = self.capacity, self.config.block_size
        flat = [(slot, p) for slot, row in zip(rows.slots, rows.positions, strict=True) for p in row]
        return [
            [position for _, position in flat],
            [slot * capacity + position for slot, position in flat],
            [slot * block + position % block for slot, position in flat],
            [group * first for first in (0, *accumulate(map(len, rows.positions)))],
            [*(slot * capacity for slot in rows.slots), 0],
            [row[0] // block * block + block if row else block for row in rows.positions],
        ]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self.kv_LSCM[:, target, :length] = self.kv_LSCM[:, source, :length]

    def clear(self, slot: int) -> None:
        self.kv_LSCM[:, slot] = 0

    def block(self, slot: int, start: int) -> Tensor:
        """A view of one block's keys and values in all layers."""
        return self.kv_LSCM[:, slot, start : start + self.config.block_size]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValueView:
    """Where one pass reads and writes keys and values. The views of all layers are created before the layer loop."""

    factors: tuple[Tensor, ...]  # rotary: for queries, and for keys with values; or one, perhaps real, tensor for all
    index: Tensor | None  # which rows of `targets` to write; None: all of them
    targets: Sequence[Tensor]
    attention: Attention

    def write(self, layer: int, kv_NM: Tensor) -> None:
        if self.index is None:
            self.targets[layer].copy_(kv_NM)
        else:
            self.targets[layer].index_copy_(0, self.index, kv_NM)


LayerViews = tuple[Sequence[Tensor], Sequence[tuple[Tensor, Tensor]]]


def layer_views(flat_LTM: Tensor, config: ModelConfig) -> LayerViews:
    """Of each layer: the rows to write, and its keys and its values by head."""
    shape = (config.num_layers, flat_LTM.shape[1], 2, config.num_kv_heads, config.head_dim)
    keys, values = flat_LTM.view(shape).unbind(2)
    return flat_LTM.unbind(0), list(zip(keys.unbind(0), values.unbind(0), strict=True))


class ReuseCache:
    """Layer contributions (output − input), final states and the watched input, per slot and position of the block.

    It records which positions hold a value for each layer; replaying a missing value is an error.
    """

    def __init__(
        self,
        spec: CacheSpec,
        config: ModelConfig,
        slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pool: "CachePool | None" = None,
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
        for layer in spec.compared_inputs:
            self.row_of[FIRST_INPUT - layer] = len(self.row_of)
        shape = (len(self.row_of), slots * self.block, config.hidden_size)
        self.values = (pool or CachePool()).take_values(shape, dtype=dtype, device=device)
        self.valid = [[0] * slots for _ in self.row_of]  # per cached layer and slot, one bit per position

    def reset(self, slot: int) -> None:
        """Invalidates a slot at the start of a new block."""
        for bits in self.valid:
            bits[slot] = 0

    def view(self, rows: Rows) -> "ReuseView":
        """Where a pass over these positions loads and stores values."""
        offsets = [[position % self.block for position in row] for row in rows.positions]
        return ReuseView(self, _flat_index(rows.slots, offsets, self.block, self.values.device))

    def record(self, rows: Rows, *, loaded: Collection[int] = (), stored: Collection[int] = ()) -> None:
        """Records what a pass stored for these positions; asserts that what it loaded had been stored before."""
        for slot, positions in zip(rows.slots, rows.positions, strict=True):
            bits = sum(1 << position % self.block for position in positions)
            for layer in loaded:
                missing = bits & ~self.valid[self.row_of[layer]][slot]
                assert not missing, f"layer {layer} replays positions it never computed"
            for layer in stored:
                self.valid[self.row_of[layer]][slot] |= bits

    def save(self, slot: int) -> tuple[Tensor, list[int]]:
        """A copy of a slot's values and of which are valid, for `restore`."""
        low, high = slot * self.block, (slot + 1) * self.block
        return self.values[:, low:high].clone(), [bits[slot] for bits in self.valid]

    def restore(self, slot: int, saved: tuple[Tensor, list[int]]) -> None:
        low, high = slot * self.block, (slot + 1) * self.block
        self.values[:, low:high] = saved[0]
        for bits, old in zip(self.valid, saved[1], strict=True):
            bits[slot] = old


@dataclass(slots=True)
class ReuseView:
    """The values of one pass's positions in a reuse cache, and what the pass measures.

    The contributions of all layers are loaded at once, and stored at once by `finish`: per layer, each would cost a
    kernel or two.
    """

    cache: ReuseCache
    index: FlatIndex
    measured: dict[int, Tensor] = field(default_factory=dict)  # by layer or WATCHED_INPUT, see `Norms`
    loaded: list[int] = field(default_factory=list)  # layers whose values were loaded
    stored: list[int] = field(default_factory=list)  # layers whose values were stored
    values: Sequence[Tensor] = ()  # all cached values of these positions, once one was loaded
    states: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)  # not yet stored: layer, input, output

    @property
    def unit(self) -> Unit:
        return self.cache.spec.unit

    def watches(self, layer: int) -> bool:
        return layer == self.cache.spec.watched_layer

    def keep_input(self, layer: int, x_ND: Tensor, measure_change: bool) -> Tensor | None:
        """Caches the input of a layer, if the policy compares it; returns its relative L1 change, if requested."""
        row = self.cache.row_of.get(FIRST_INPUT - layer)
        if row is None:
            return None
        change_N = None
        if measure_change:
            before_ND = self.cache.values[row, self.index]
            change_N = _l1_norm(x_ND - before_ND) / _l1_norm(before_ND)
        self._store((FIRST_INPUT - layer,), x_ND[None])
        return change_N

    def load(self, layer: int) -> Tensor:
        self.loaded.append(layer)
        self.values = self.values or self.cache.values[:, self.index].unbind(0)
        return self.values[self.cache.row_of[layer]]

    def load_sum(self, layers: Sequence[int]) -> Tensor:
        """What adjacent cached layers contribute together."""
        rows = [self.cache.row_of[layer] for layer in layers]
        assert rows == list(range(rows[0], rows[-1] + 1)), "the layers are not adjacent in the cache"
        self.loaded += layers
        return self.cache.values[rows[0] : rows[-1] + 1, self.index].sum(0)

    def add(self, layer: int, before_ND: Tensor, after_ND: Tensor) -> None:
        """Queues the contribution of a layer, if the policy needs it; `finish` stores it."""
        row = self.cache.row_of.get(layer)
        if row is None:
            return
        if self.states and row != self.cache.row_of[self.states[-1][0]] + 1:
            self.finish()  # only adjacent rows can be stored at once
        self.states.append((layer, before_ND, after_ND))

    def finish(self) -> None:
        """Stores the queued contributions."""
        if self.states:
            layers, before, after = zip(*self.states, strict=True)
            self.states = []
            if all(later is earlier for later, earlier in zip(before[1:], after, strict=False)):  # one kernel less
                states_LND = torch.stack((before[0], *after))
                before_LND, after_LND = states_LND[:-1], states_LND[1:]
            else:
                before_LND, after_LND = torch.stack(before), torch.stack(after)
            self._store(layers, after_LND - before_LND, after_LND)

    def store(self, key: int, value_ND: Tensor) -> None:
        """Stores a value, if the policy needs it."""
        if key in self.cache.row_of:
            self._store((key,), value_ND[None])

    def _store(self, keys: Sequence[int], value_LND: Tensor, *streams_LND: Tensor) -> None:
        """Caches adjacent values and, if they are measured, the norms of their changes and of the residual stream."""
        self.stored += keys
        first = self.cache.row_of[keys[0]]
        values_LND = self.cache.values[first : first + len(keys)]
        if keys[0] in self.cache.measured:
            before_LND = values_LND[:, self.index]
            norms_LNn = _l1_norms(value_LND - before_LND, before_LND, *streams_LND)
            self.measured |= zip(keys, norms_LNn.unbind(0), strict=True)
        if isinstance(self.index, slice):
            values_LND[:, self.index] = value_LND
        else:
            values_LND.index_copy_(1, self.index, value_LND)


class CachePool:
    """Memory of caches that are not in use, kept for later calls: its addresses and shapes stay the same."""

    def __init__(self) -> None:
        self.keys_values: list[KeyValueCache] = []
        self.values: list[Tensor] = []

    def take_keys_values(
        self, config: ModelConfig, slots: int, capacity: int, *, dtype: torch.dtype, device: torch.device
    ) -> KeyValueCache:
        """The smallest pooled cache that is large enough, else a new one that replaces all pooled ones."""
        fitting = [cache for cache in self.keys_values if cache.slots == slots and cache.capacity >= capacity]
        if fitting:
            smallest = min(fitting, key=lambda cache: cache.capacity)
            self.keys_values.remove(smallest)
            return smallest
        self.keys_values.clear()
        rounded = max(MIN_POOLED_CAPACITY, 1 << (capacity - 1).bit_length())
        blocks = -(-min(rounded, max(config.max_positions, capacity)) // config.block_size)
        return KeyValueCache(config, slots, blocks * config.block_size, dtype=dtype, device=device)

    def take_values(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        for index, values in enumerate(self.values):
            if values.shape == shape:
                return self.values.pop(index)
        return torch.zeros(shape, dtype=dtype, device=device)

    def give_back(self, keys_values: KeyValueCache, values: Tensor) -> None:
        self.keys_values.append(keys_values)
        self.values.append(values)


def _l1_norms(*tensors_ND: Tensor) -> Tensor:
    """The L1 norms of all tensors at each position, in float32 because sums in half precision would overflow."""
    return torch.stack([_l1_norm(x) for x in tensors_ND], -1)


def _l1_norm(x_ND: Tensor) -> Tensor:
    norm_N: Tensor = torch.linalg.vector_norm(x_ND, ord=1, dim=-1, dtype=torch.float32)
    return norm_N


def _flat_index(
    slots: Sequence[int], positions: Sequence[Sequence[int]], stride: int, device: torch.device
) -> FlatIndex:
    """The index of these positions on a flattened axis that has `stride` rows for each slot."""
    if len(slots) == 1 and positions[0][-1] - positions[0][0] + 1 == len(positions[0]):
        first = slots[0] * stride + positions[0][0]
        return slice(first, first + len(positions[0]))
    flat = [slot * stride + p for slot, row in zip(slots, positions, strict=True) for p in row]
    return torch.tensor(flat, device=device)

"""Runs one forward pass for a group of rows: integers to the device, the layers, and the answers back.

Where passes are padded, they have fixed shapes (`Bucket`): the kernels that a device chooses, and therefore the
rounding of a row's results, do not depend on the other rows. All integers of a padded pass travel in one buffer.
Shapes: N positions of all rows, P positions whose logits are read, V vocabulary.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sampler.attention import Attention, Backend, SequenceAttention, Sequences
from sampler.cache import KeyValueCache, KeyValueView, ReuseCache, ReuseView, Rows, layer_views
from sampler.model import LayerWork, Selection, Transformer
from sampler.plan import CacheSpec, LayerPlan, Measurements, PassKind

# Positions of a padded pass by kind, for batch sizes up to `SHARED_BATCH`: about as many as a GPU computes in the time
# it takes to read the weights. A larger batch fits into one pass.
BUCKET_POSITIONS = {PassKind.PREFILL: 256, PassKind.FULL: 128, PassKind.COMMIT: 128, PassKind.SMALL: 64}
SHARED_BATCH = 8
MAX_GRAPHS = 1024  # compiled passes: plans × shapes
PREFILL_POSITIONS = 1024  # of a prefill that is not padded


class LogitReader(Protocol):
    """Answers one query per row of logits, such as "which token?" or "the log-probabilities of these tokens?"."""

    def pack(self, queries: Sequence[Any]) -> Sequence[int]:
        """What `read` needs to know about the queries, as 64-bit integers."""

    def read(self, logits_PV: Tensor, packed: Tensor) -> Tensor:
        """A vector of numbers. There may be more rows of logits than queries."""

    def unpack(self, numbers: Sequence[float], queries: Sequence[Any]) -> list[Any]:
        """The answers, from the numbers that `read` returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSegment:
    """One row's part of a pass. `read` counts from the segment's start, `selected` from the start of its block."""

    slot: int
    start: int
    tokens: Sequence[int]
    read: Sequence[int] = ()
    queries: Sequence[Any] = ()
    selected: Sequence[int] = ()


class PassResult(NamedTuple):
    work: LayerWork
    answers: list[list[Any]]  # of each segment
    measured: list[Measurements]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a padded pass: sequences (rows, or blocks of a prefill) of the same number of positions."""

    sequences: int
    width: int
    reads: int  # rows of logits
    selected: int = 0  # positions that partial layers compute
    reuse: bool = False  # whether the pass uses the reuse cache

    @property
    def positions(self) -> int:
        return self.sequences * self.width


class PassRunner:
    """The caches of one call, and the passes over them. At most `reads` logits of a row are read in a pass."""

    def __init__(
        self, network: Transformer, spec: CacheSpec, *, slots: int, capacity: int, reader: LogitReader, reads: int
    ) -> None:
        self.network, self.reader, self.reads, self.batch_size = network, reader, reads, slots
        self.block = network.config.block_size
        where: Any = {"dtype": network.dtype, "device": network.device}
        if self.padded:  # the last slot takes what padding writes
            self.keys_values = network.pool.take_keys_values(network.config, slots + 1, capacity, **where)
            self.reuse = ReuseCache(spec, network.config, slots + 1, **where, pool=network.pool)
            weakref.finalize(self, network.pool.give_back, self.keys_values, self.reuse.values)
        else:
            self.keys_values = KeyValueCache(network.config, slots, capacity, **where)
            self.reuse = ReuseCache(spec, network.config, slots, **where)

        self._compiled = compile_forward(network.device) if network.execution.compiled else None

    @property
    def padded(self) -> bool:
        return self.network.execution.padded

    def sequences(self, kind: PassKind, width: int) -> int:
        """How many rows (in a prefill: blocks) one padded pass takes."""
        positions = BUCKET_POSITIONS[kind]
        if self.batch_size > SHARED_BATCH:
            rows = 1 << (self.batch_size - 1).bit_length()
            positions = rows * BUCKET_POSITIONS[PassKind.SMALL if kind is PassKind.SMALL else PassKind.PREFILL] // 8
        return max(1, positions // width)

    @property
    def prefill_positions(self) -> int:
        """The largest number of positions in one prefill."""
        if self.padded:
            return self.sequences(PassKind.PREFILL, self.block) * self.block
        return max(1, PREFILL_POSITIONS // self.block) * self.block

    def selected_positions(self, kind: PassKind, width: int, selected: int) -> int:
        """The size of a padded selection: half of the positions, if a row selects at most half of its own."""
        positions = self.sequences(kind, width) * width
        return 0 if not selected else -(-positions // 2) if 2 * selected <= width else positions

    def run(self, segments: Sequence[PassSegment], plan: LayerPlan, kind: PassKind, *, reuse: bool) -> PassResult:
        """One forward. With `reuse`, values are cached for later passes, and the plan may replay cached values."""
        queries = [query for segment in segments for query in segment.queries]
        assert len(queries) == sum(len(segment.read) for segment in segments)
        packed = self.reader.pack(queries) if queries else ()
        run = self._run_padded if self.padded else self._run_exact
        work, measured, numbers = run(segments, plan, kind, packed, reuse)
        parts = [numbers] if numbers is not None else []
        host: list[float] = []
        if parts or measured:  # one transfer, hence one synchronisation
            whole = [*parts, *(norms.flatten() for norms in measured.values())]
            host = (whole[0] if len(whole) == 1 else torch.cat(whole)).cpu().tolist()
        read = len(parts[0]) if parts else 0
        answers = iter(self.reader.unpack(host[:read], queries) if queries else ())
        return PassResult(
            work,
            [[next(answers) for _ in segment.read] for segment in segments],
            _measurements(segments, {key: norms.shape for key, norms in measured.items()}, host[read:]),
        )

    def _run_exact(
        self, segments: Sequence[PassSegment], plan: LayerPlan, kind: PassKind, packed: Sequence[int], reuse: bool
    ) -> tuple[LayerWork, dict[int, Tensor], Tensor | None]:
        del kind
        rows = _rows(segments)
        view = self.reuse.view(rows) if reuse else None
        selection, selected = None, None
        if plan.stale:
            assert view is not None
            states_ND, work = self.network.repeat_final_states(view)
        else:
            if plan.selected:
                selected = _selected_rows(segments, self.block)
                state_rows = self._tensor(_selected_states(segments, self.block))
                selection = Selection(self.keys_values.view(selected), self.reuse.view(selected), state_rows)
            ids_N = self._tensor([token for segment in segments for token in segment.tokens])
            states_ND, work = self.network.forward(ids_N, self.keys_values.view(rows), plan, view, selection)
        if view is not None:
            self.reuse.record(rows, loaded=view.loaded, stored=view.stored)
        if selection is not None and selected is not None:
            self.reuse.record(selected, stored=selection.reuse.stored)
        read, measured = _read_rows(segments), view.measured if view is not None else {}
        if not read:
            return work, measured, None
        logits_PV = self.network.logits(states_ND[self._tensor(read)])
        return work, measured, self.reader.read(logits_PV, self._tensor(packed))

    def _run_padded(
        self, segments: Sequence[PassSegment], plan: LayerPlan, kind: PassKind, packed: Sequence[int], reuse: bool
    ) -> tuple[LayerWork, dict[int, Tensor], Tensor | None]:
        bucket = self._bucket(segments, plan, kind, reuse)
        rows = _padded_rows(segments, bucket, self.block, scratch=self.keys_values.slots - 1)
        selected = _padded_selection(segments, bucket, self.block) if bucket.selected else None
        words = self._words(segments, bucket, rows, selected)
        sent = torch.tensor([*words, *packed], dtype=torch.int64)
        if self.network.device.type == "cuda":  # pinned, so that the host does not wait for the transfer
            sent = sent.pin_memory().to(self.network.device, non_blocking=True)
        backend, attention = self.network.execution.backend, {}
        if backend is Backend.REFERENCE or (backend is Backend.DENSE and kind is PassKind.PREFILL):
            attention = {"": self.keys_values.reference_attention(rows)}
            if selected is not None:
                attention["selected_"] = self.keys_values.reference_attention(selected)
        forward = padded_forward if self._compiled is None or attention else self._compiled
        # A graph belongs to the steps of a plan; the selected positions are among the integers.
        steps = replace(plan, selected=plan.selected[:1])
        result = forward(self.network, steps, bucket, sent[: len(words)], self.keys_values, self.reuse, attention)
        self.reuse.record(_rows(segments), loaded=result.loaded, stored=result.stored)
        self.reuse.record(_selected_rows(segments, self.block), stored=result.stored_selected)
        numbers = None if result.logits_PV is None else self.reader.read(result.logits_PV, sent[len(words) :])
        return result.work, result.measured, numbers

    def _bucket(self, segments: Sequence[PassSegment], plan: LayerPlan, kind: PassKind, reuse: bool) -> Bucket:
        width = self.block if kind is PassKind.PREFILL else len(segments[0].tokens)
        sequences = self.sequences(kind, width)
        selected = max(len(segment.selected) for segment in segments) if plan.selected else 0
        reads = 1 if kind is PassKind.PREFILL else self.reads
        assert all(len(segment.read) <= reads for segment in segments)
        return Bucket(
            sequences,
            width,
            reads=sequences * reads if any(segment.read for segment in segments) else 0,
            selected=self.selected_positions(kind, width, selected),
            reuse=reuse,
        )

    def _words(self, segments: Sequence[PassSegment], bucket: Bucket, rows: Rows, selected: Rows | None) -> list[int]:
        """The integers of a padded pass, in the order of `_sections`."""
        group = self.network.config.num_heads // self.network.config.num_kv_heads
        capacity, block = self.keys_values.capacity, self.block

        def flat(rows: Rows, stride: int) -> list[int]:
            return [
                slot * stride + p % stride for slot, row in zip(rows.slots, rows.positions, strict=True) for p in row
            ]

        def of(rows: Rows, part: str) -> dict[str, list[int]]:
            return {
                part + "positions": [position for row in rows.positions for position in row],
                part + "cache_rows": flat(rows, capacity),
                part + "block_rows": flat(rows, block) if bucket.reuse else [],
                part + "query_starts": [group * first for first in (0, *accumulate(map(len, rows.positions)))],
                part + "key_starts": [*(slot * capacity for slot in rows.slots), 0],
                part + "lengths": [row[0] // block * block + block if row else block for row in rows.positions],
            }

        ids = [token for segment in segments for token in segment.tokens]
        read = _read_rows(segments)
        values = {
            "ids": ids + [0] * (bucket.positions - len(ids)),
            "read": read + [0] * (bucket.reads - len(read)),
            **of(rows, ""),
        }
        if selected is not None:
            states = _selected_states(segments, block)
            values["selected_states"] = states + states[:1] * (bucket.selected - len(states))
            values |= of(selected, "selected_")
        words: list[int] = []
        for name, section in _sections(bucket).items():
            assert len(values[name]) == section.size, name
            words += _pack_halves(values[name]) if section.halves else values[name]
            words += [0] * (section.end - len(words))
        return words

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.network.device)


class PaddedResult(NamedTuple):
    logits_PV: Tensor | None
    work: LayerWork
    measured: dict[int, Tensor]
    loaded: tuple[int, ...]  # layers whose cached values were used
    stored: tuple[int, ...]  # layers whose values were cached
    stored_selected: tuple[int, ...]  # the same for the selected positions


def padded_forward(
    network: Transformer,
    plan: LayerPlan,
    bucket: Bucket,
    words: Tensor,
    cache: KeyValueCache,
    reuse_cache: ReuseCache,
    attention: Mapping[str, Attention],
) -> PaddedResult:
    """A pass of fixed shape. `words` holds its integers; `attention` may replace the attention over sequences."""
    at = _unpack(words, bucket)
    group = network.config.num_heads // network.config.num_kv_heads
    compiling = torch.compiler.is_compiling()  # then keys and values must be one tensor, and complex numbers are slow
    targets, keys_values = layer_views(cache.flat_LTM, network.config) if compiling else cache.views

    def view(part: str, max_positions: int) -> KeyValueView:
        sequences = Sequences(
            query_starts=at[part + "query_starts"],
            key_starts=at[part + "key_starts"],
            lengths=at[part + "lengths"],
            max_queries=max_positions * group,
            max_keys=cache.capacity,
        )
        factors = cache.real_factors[at[part + "positions"]]
        return KeyValueView(
            factors=(factors if compiling else torch.view_as_complex(factors),),
            index=at[part + "cache_rows"],
            targets=targets,
            attention=attention.get(part) or SequenceAttention(network.execution.backend, keys_values, sequences),
        )

    reuse = ReuseView(reuse_cache, at["block_rows"]) if bucket.reuse else None
    selection = None
    if plan.stale:
        assert reuse is not None
        states_ND, work = network.repeat_final_states(reuse)
    else:
        if bucket.selected:
            selection = Selection(
                view("selected_", max(bucket.width, bucket.selected)),
                ReuseView(reuse_cache, at["selected_block_rows"]),
                at["selected_states"],
            )
        states_ND, work = network.forward(at["ids"], view("", bucket.width), plan, reuse, selection)
    return PaddedResult(
        logits_PV=network.logits(states_ND[at["read"]]) if bucket.reads else None,
        work=work,
        measured=reuse.measured if reuse else {},
        loaded=tuple(reuse.loaded) if reuse else (),
        stored=tuple(reuse.stored) if reuse else (),
        stored_selected=tuple(selection.reuse.stored) if selection else (),
    )


def compile_forward(device: torch.device) -> Callable[..., PaddedResult]:
    """`padded_forward` with one graph for each plan and bucket. On CUDA a graph is launched at once, not by kernel."""
    mode = "reduce-overhead" if device.type == "cuda" else None
    compiled = torch.compile(padded_forward, fullgraph=True, dynamic=False, mode=mode)

    def forward(*arguments: Any) -> PaddedResult:
        with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS, accumulated_recompile_limit=MAX_GRAPHS):
            return compiled(*arguments)

    return forward


class _Section(NamedTuple):
    """Where some of a pass's integers lie among its 64-bit words."""

    start: int
    end: int
    size: int
    halves: bool  # 32-bit integers, two per word


def _sections(bucket: Bucket) -> dict[str, _Section]:
    """Names and places of the integers of a padded pass. Each section begins at a multiple of 16 bytes."""
    counts = {"ids": bucket.positions, "read": bucket.reads}
    parts = [("", bucket.positions, bucket.sequences)]
    if bucket.selected:
        counts["selected_states"] = bucket.selected
        parts.append(("selected_", bucket.selected, bucket.sequences + 1))
    for part, positions, sequences in parts:
        counts |= {part + "positions": positions, part + "cache_rows": positions}
        counts |= {part + "block_rows": positions if bucket.reuse else 0}
        counts |= {
            part + "query_starts": sequences + 1,
            part + "key_starts": sequences + 1,
            part + "lengths": sequences,
        }
    sections: dict[str, _Section] = {}
    start = 0
    for name, count in counts.items():
        halves = name.endswith(("starts", "lengths"))
        words = -(-count // 2) if halves else count
        sections[name] = _Section(start, start + words + words % 2, count, halves)
        start = sections[name].end
    return sections


def _unpack(words: Tensor, bucket: Bucket) -> dict[str, Tensor]:
    found = {}
    for name, section in _sections(bucket).items():
        part = words[section.start : section.end]
        found[name] = (part.view(torch.int32) if section.halves else part)[: section.size]
    return found


def _pack_halves(values: Sequence[int]) -> list[int]:
    """Two 32-bit integers per word, the first in the lower half."""
    padded = [*values, 0][: len(values) + len(values) % 2]
    return [low | high << 32 for low, high in zip(padded[::2], padded[1::2], strict=True)]


def _padded_rows(segments: Sequence[PassSegment], bucket: Bucket, block: int, *, scratch: int) -> Rows:
    """One row per sequence: what a segment has in one block, then padding in the scratch slot."""
    slots: list[int] = []
    positions: list[range] = []
    for segment in segments:
        end = segment.start + len(segment.tokens)
        for start in range(segment.start, end, bucket.width):
            slots.append(segment.slot)
            positions.append(range(start, start + bucket.width))
        assert positions[-1].stop == end
        assert positions[-1].start // block == (end - 1) // block
    missing = bucket.sequences - len(slots)
    assert missing >= 0
    return Rows(slots + [scratch] * missing, positions + [range(bucket.width)] * missing)


def _padded_selection(segments: Sequence[PassSegment], bucket: Bucket, block: int) -> Rows:
    """The selected positions of each row, then the first of them as padding: it computes once more what is there."""
    chosen = _selected_rows(segments, block)
    slot, position = chosen.slots[0], chosen.positions[0][0]
    empty = bucket.sequences - len(chosen.slots)
    padding = [position] * (bucket.selected - sum(map(len, chosen.positions)))
    return Rows([*chosen.slots, *[slot] * (empty + 1)], [*chosen.positions, padding, *[()] * empty])


def _rows(segments: Sequence[PassSegment]) -> Rows:
    return Rows(
        [segment.slot for segment in segments],
        [range(segment.start, segment.start + len(segment.tokens)) for segment in segments],
    )


def _selected_rows(segments: Sequence[PassSegment], block: int) -> Rows:
    """The positions that partial layers compute."""
    starts = [segment.start // block * block for segment in segments]
    return Rows(
        [segment.slot for segment in segments],
        [[start + p for p in segment.selected] for start, segment in zip(starts, segments, strict=True)],
    )


def _first_states(segments: Sequence[PassSegment]) -> list[int]:
    """The row of each segment's first position in the states of the pass."""
    return [0, *accumulate(len(segment.tokens) for segment in segments[:-1])]


def _read_rows(segments: Sequence[PassSegment]) -> list[int]:
    firsts = _first_states(segments)
    return [first + i for first, segment in zip(firsts, segments, strict=True) for i in segment.read]


def _selected_states(segments: Sequence[PassSegment], block: int) -> list[int]:
    firsts = _first_states(segments)
    return [
        first + segment.start // block * block + p - segment.start
        for first, segment in zip(firsts, segments, strict=True)
        for p in segment.selected
    ]


def _measurements(
    segments: Sequence[PassSegment], shapes: Mapping[int, Sequence[int]], numbers: Sequence[float]
) -> list[Measurements]:
    """Gives each segment the norms of its own positions."""
    by_key: dict[int, list[Sequence[float]]] = {}
    start = 0
    for key, (positions, norms) in shapes.items():
        by_key[key] = [numbers[at : at + norms] for at in range(start, start + positions * norms, norms)]
        start += positions * norms
    firsts = _first_states(segments)
    return [
        {key: rows[first : first + len(segment.tokens)] for key, rows in by_key.items()}
        for first, segment in zip(firsts, segments, strict=True)
    ]

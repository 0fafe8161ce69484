"""Runs one forward pass for a group of rows: sends the tokens to the device, runs the layers, returns the answers.

Padded passes have fixed shapes (`Bucket`), so that the kernels that a device chooses, and therefore the rounding of a
row's results, do not depend on the other rows. All integers of a padded pass are sent to the device in one buffer.
Shapes: N positions of all rows, P positions whose logits are read, V vocabulary.
"""

import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sampler.attention import Attention, Backend, Rows, SequenceAttention
from sampler.cache import KeyValueCache, KeyValueView, ReuseCache, ReuseView, layer_views
from sampler.model import LayerWork, Narrowing, Selection, Transformer
from sampler.plan import CacheSpec, LayerPlan, Measurements, PassKind

# Positions of a padded pass by kind, for batch sizes up to `SHARED_BATCH`: about as many as a GPU computes in the time
# it takes to read the weights. A larger batch fits into one pass.
BUCKET_POSITIONS = {PassKind.PREFILL: 256, PassKind.FULL: 128, PassKind.COMMIT: 128, PassKind.SMALL: 64}
SHARED_BATCH = 8
MAX_GRAPHS = 1024  # compiled passes: plans × shapes
PREFILL_POSITIONS = 1024  # of a prefill that is not padded


class LogitReader(Protocol):
    """Answers one query per row of logits, such as "which token?" or "the log-probabilities of these tokens?"."""

    def pack(self, queries: Sequence[Any], block_rows: Sequence[int]) -> Sequence[int]:
        """What `read` needs, as 64-bit integers. `block_rows`: the rows of the read positions in the reuse cache."""

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
    priors: Sequence[Sequence[float]] = ()  # of its positions, for each checkpoint of the plan


class PassResult(NamedTuple):
    work: LayerWork
    answers: list[list[Any]]  # of each segment
    measured: list[Measurements]


class ForwardResult(NamedTuple):
    """What a forward computed, and for which layers it loaded and stored values of the reuse cache."""

    logits_PV: Tensor | None
    work: LayerWork
    measured: Mapping[int, Tensor]
    loaded: Sequence[int]
    stored: Sequence[int]
    stored_selected: Sequence[int]  # layers whose values were stored for the selected positions only


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
        self.block, self.padded = network.config.block_size, network.execution.padded
        capacity = -(-capacity // self.block) * self.block
        where: Any = {"dtype": network.dtype, "device": network.device}
        if self.padded:  # padding is written to the last slot
            self.keys_values = network.pool.take_keys_values(network.config, slots + 1, capacity, **where)
            self.reuse = ReuseCache(spec, network.config, slots + 1, **where, pool=network.pool)
            weakref.finalize(self, network.pool.give_back, self.keys_values, self.reuse.values)
        else:
            self.keys_values = KeyValueCache(network.config, slots, capacity, **where)
            self.reuse = ReuseCache(spec, network.config, slots, **where)
        self._compiled = compile_forward(network.device) if network.execution.compiled else None

    def sequences(self, kind: PassKind, width: int) -> int:
        """The number of rows (in a prefill: blocks) of one padded pass."""
        positions = BUCKET_POSITIONS[kind]
        if self.batch_size > SHARED_BATCH:
            rows = 1 << (self.batch_size - 1).bit_length()
            positions = rows * BUCKET_POSITIONS[PassKind.SMALL if kind is PassKind.SMALL else PassKind.PREFILL] // 8
        return max(1, positions // width)

    @property
    def prefill_positions(self) -> int:
        """The largest number of positions in one prefill."""
        blocks = self.sequences(PassKind.PREFILL, self.block) if self.padded else PREFILL_POSITIONS // self.block
        return max(1, blocks) * self.block

    def selected_positions(self, kind: PassKind, width: int, selected: int) -> int:
        """The size of a padded selection: half of the positions, if a row selects at most half of its own."""
        positions = self.sequences(kind, width) * width
        return 0 if not selected else -(-positions // 2) if 2 * selected <= width else positions

    def run(self, segments: Sequence[PassSegment], plan: LayerPlan, kind: PassKind, *, reuse: bool) -> PassResult:
        """One forward. With `reuse`, values are cached for later passes, and the plan may replay cached values."""
        queries = [query for segment in segments for query in segment.queries]
        packed = self.reader.pack(queries, _block_rows_read(segments, self.block)) if queries else ()
        rows = _rows(segments)
        if self.padded:
            done, numbers = self._run_padded(segments, plan, kind, packed, reuse)
        else:
            done, numbers = self._run_exact(segments, rows, plan, packed, reuse)
        if done.loaded or done.stored:
            self.reuse.record(rows, loaded=done.loaded, stored=done.stored)
        if done.stored_selected:
            self.reuse.record(_selected_rows(segments, self.block), stored=done.stored_selected)
        outputs = [norms.flatten() for norms in done.measured.values()]
        if numbers is not None:
            outputs.insert(0, numbers)
        # One transfer, hence one synchronisation
        host: list[float] = (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).cpu().tolist() if outputs else []
        answer_numbers = 0 if numbers is None else len(numbers)
        answers = iter(self.reader.unpack(host[:answer_numbers], queries) if queries else ())
        return PassResult(
            done.work,
            [[next(answers) for _ in segment.read] for segment in segments],
            _measurements(segments, done.measured, host[answer_numbers:]),
        )

    def _run_exact(
        self, segments: Sequence[PassSegment], rows: Rows, plan: LayerPlan, packed: Sequence[int], reuse: bool
    ) -> tuple[ForwardResult, Tensor | None]:
        view, selection = self.reuse.view(rows) if reuse else None, None
        if plan.selected:
            selected = _selected_rows(segments, self.block)
            state_rows = self._tensor(_selected_states(segments, self.block))
            selection = Selection(self.keys_values.view(selected), self.reuse.view(selected), state_rows)
        ids_N = self._tensor([token for segment in segments for token in segment.tokens])
        narrowing = None
        if plan.checkpoints:
            width = len(segments[0].tokens)
            positions, *cache_rows = self.keys_values.pass_indices(rows)[:3]
            narrowing = Narrowing(
                width=width,
                firsts_S1=self._tensor(_first_states(segments))[:, None],
                factors_N=self.keys_values.factors[positions],
                rows_2N=torch.tensor(cache_rows, device=self.network.device),
                targets=self.keys_values.views[0],
                priors=_as_priors(self._tensor(_prior_bits(segments, len(segments) * width)), len(plan.checkpoints)),
                attention=partial(self.keys_values.reference_attention, rows),
            )
        states_ND, work = self.network.forward(ids_N, self.keys_values.view(rows), plan, view, selection, narrowing)
        read = _read_rows(segments)
        logits_PV = self.network.logits(states_ND[self._tensor(read)]) if read else None
        numbers = None if logits_PV is None else self.reader.read(logits_PV, self._tensor(packed))
        return _forward_result(logits_PV, work, view, selection), numbers

    def _run_padded(
        self, segments: Sequence[PassSegment], plan: LayerPlan, kind: PassKind, packed: Sequence[int], reuse: bool
    ) -> tuple[ForwardResult, Tensor | None]:
        bucket = self._bucket(segments, plan, kind, reuse)
        scratch = self.keys_values.slots - 1
        rows = _rows(segments).in_sequences(bucket.width, bucket.sequences, block=self.block, scratch=scratch)
        chosen = _selected_rows(segments, self.block)
        selected = chosen.padded(bucket.sequences, bucket.selected) if bucket.selected else None
        sections = [*self._integers(segments, bucket, rows, selected), _prior_bits(segments, bucket.positions)]
        words = [word for section in sections for word in section]
        sent = torch.tensor([*words, *packed], dtype=torch.int64)
        if self.network.device.type == "cuda":  # pinned, so that the host does not wait for the transfer
            sent = sent.pin_memory().to(self.network.device, non_blocking=True)
        backend = self.network.execution.backend
        attention: list[Attention] = []
        attention_of: Callable[[int], Attention] | None = None
        if backend is Backend.REFERENCE or (backend is Backend.DENSE and kind is PassKind.PREFILL):
            attention = [self.keys_values.reference_attention(part) for part in (rows, selected) if part is not None]
            attention_of = partial(self.keys_values.reference_attention, rows)
        forward = padded_forward if self._compiled is None or attention else self._compiled
        sizes = tuple(map(len, sections))
        caches = self.keys_values, self.reuse
        done = forward(self.network, plan.template, bucket, sizes, sent[: len(words)], *caches, attention, attention_of)
        return done, None if done.logits_PV is None else self.reader.read(done.logits_PV, sent[len(words) :])

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

    def _integers(
        self, segments: Sequence[PassSegment], bucket: Bucket, rows: Rows, selected: Rows | None
    ) -> list[list[int]]:
        """The sections of `words`: tokens, states to read, selected states, `pass_indices` of all and selected rows."""
        ids = [token for segment in segments for token in segment.tokens]
        read, states = _read_rows(segments), _selected_states(segments, self.block)
        return [
            ids + [0] * (bucket.positions - len(ids)),
            read + [0] * (bucket.reads - len(read)),
            states + states[:1] * (bucket.selected - len(states)),
            *self.keys_values.pass_indices(rows),
            *([] if selected is None else self.keys_values.pass_indices(selected)),
        ]

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.network.device)


def padded_forward(
    network: Transformer,
    plan: LayerPlan,
    bucket: Bucket,
    sizes: Sequence[int],
    words: Tensor,
    cache: KeyValueCache,
    reuse_cache: ReuseCache,
    attention: Sequence[Attention],
    attention_of: Callable[[int], Attention] | None,
) -> ForwardResult:
    """A pass of fixed shape. `words` holds its integers, in sections of these `sizes`; see `PassRunner._integers`.

    By default attention runs over sequences. `attention` and `attention_of` replace it: `attention` for all positions
    and for the selected ones, `attention_of` for any number of positions that a checkpoint selects in each sequence.
    """
    ids, read, states, *indices, prior_bits = torch.split_with_sizes(words, sizes)
    short_indices = torch.split_with_sizes(words.int(), sizes)[3:]  # attention takes 32-bit integers
    group = network.config.num_heads // network.config.num_kv_heads
    compiling = torch.compiler.is_compiling()  # then keys and values must be one tensor, and complex numbers are slow
    targets, keys_values = layer_views(cache.flat_LTM, network.config) if compiling else cache.views

    def view(part: int, max_positions: int) -> tuple[KeyValueView, ReuseView]:
        positions, cache_rows, block_rows = indices[6 * part : 6 * part + 3]
        query_starts, key_starts, lengths = short_indices[6 * part + 3 : 6 * part + 6]
        factors = cache.real_factors[positions]
        sequences = SequenceAttention(
            backend=network.execution.backend,
            keys_values=keys_values,
            query_starts=query_starts,
            key_starts=key_starts,
            lengths=lengths,
            max_queries=max_positions * group,
            max_keys=cache.capacity,
        )
        view = KeyValueView(
            factors=(factors if compiling else torch.view_as_complex(factors),),
            index=cache_rows,
            targets=targets,
            attention=attention[part] if attention else sequences,
        )
        return view, ReuseView(reuse_cache, block_rows)

    keys_values_view, reuse = view(0, bucket.width)
    selection = Selection(*view(1, max(bucket.width, bucket.selected)), states) if bucket.selected else None
    narrowing = None
    if plan.checkpoints:
        sequences = keys_values_view.attention

        def narrowed(count: int) -> Attention:
            assert isinstance(sequences, SequenceAttention)
            step = count * group
            starts = torch.arange(0, (bucket.sequences + 1) * step, step, dtype=torch.int32, device=words.device)
            return replace(sequences, query_starts=starts, max_queries=step)

        narrowing = Narrowing(
            width=bucket.width,
            firsts_S1=torch.arange(0, bucket.positions, bucket.width, device=words.device)[:, None],
            factors_N=keys_values_view.factors[0],
            rows_2N=words[sum(sizes[:4]) : sum(sizes[:6])].view(2, -1),
            targets=targets,
            priors=_as_priors(prior_bits, len(plan.checkpoints)),
            attention=attention_of or narrowed,
        )
    used = reuse if bucket.reuse else None
    states_ND, work = network.forward(ids, keys_values_view, plan, used, selection, narrowing)
    logits_PV = network.logits(states_ND[read]) if bucket.reads else None
    return _forward_result(logits_PV, work, reuse, selection)


def _forward_result(
    logits_PV: Tensor | None, work: LayerWork, reuse: ReuseView | None, selection: Selection | None
) -> ForwardResult:
    return ForwardResult(
        logits_PV,
        work,
        measured=reuse.measured if reuse else {},
        loaded=tuple(reuse.loaded) if reuse else (),
        stored=tuple(reuse.stored) if reuse else (),
        stored_selected=tuple(selection.reuse.stored) if selection else (),
    )


def compile_forward(device: torch.device) -> Callable[..., ForwardResult]:
    """`padded_forward` with one graph for each plan and bucket. On CUDA a graph is launched as a whole."""
    mode = "reduce-overhead" if device.type == "cuda" else None
    compiled = torch.compile(padded_forward, fullgraph=True, dynamic=False, mode=mode)

    def forward(*arguments: Any) -> ForwardResult:
        with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS, accumulated_recompile_limit=MAX_GRAPHS):
            return compiled(*arguments)

    return forward


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
        [tuple(start + p for p in segment.selected) for start, segment in zip(starts, segments, strict=True)],
    )


def _prior_bits(segments: Sequence[PassSegment], positions: int) -> list[int]:
    """The bits of the priors at all positions of a pass, checkpoint after checkpoint; those of padding are 0."""
    bits: list[int] = []
    for number in range(len(segments[0].priors)):
        priors = [prior for segment in segments for prior in segment.priors[number]]
        priors += [0.0] * (positions - len(priors))
        bits += struct.unpack(f"{positions}q", struct.pack(f"{positions}d", *priors))
    return bits


def _as_priors(bits: Tensor, checkpoints: int) -> Sequence[Tensor]:
    return bits.view(torch.float64).float().chunk(checkpoints)


def _first_states(segments: Sequence[PassSegment]) -> list[int]:
    """The row of each segment's first position in the states of the pass."""
    return [0, *accumulate(len(segment.tokens) for segment in segments[:-1])]


def _read_rows(segments: Sequence[PassSegment]) -> list[int]:
    firsts = _first_states(segments)
    return [first + i for first, segment in zip(firsts, segments, strict=True) for i in segment.read]


def _block_rows_read(segments: Sequence[PassSegment], block: int) -> list[int]:
    return [s.slot * block + (s.start + i) % block for s in segments for i in s.read]


def _selected_states(segments: Sequence[PassSegment], block: int) -> list[int]:
    firsts = _first_states(segments)
    return [
        first + segment.start // block * block + p - segment.start
        for first, segment in zip(firsts, segments, strict=True)
        for p in segment.selected
    ]


def _measurements(
    segments: Sequence[PassSegment], measured: Mapping[int, Tensor], numbers: Sequence[float]
) -> list[Measurements]:
    """Gives each segment the norms of its own positions."""
    by_key: dict[int, list[Sequence[float]]] = {}
    start = 0
    for key, tensor in measured.items():
        positions, norms = tensor.shape
        by_key[key] = [numbers[at : at + norms] for at in range(start, start + positions * norms, norms)]
        start += positions * norms
    return [
        {key: rows[first : first + len(segment.tokens)] for key, rows in by_key.items()}
        for first, segment in zip(_first_states(segments), segments, strict=True)
    ]

"""Runs many rows as batches.

A row is a generator: it yields a command and receives the answer. The engine groups the passes that rows wait for, runs
one group at a time, and gives the slot of a finished row to the next one. A row never sees other rows, so its tokens
cannot depend on its batch.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sampler.cache import ReuseCache, ReuseView, Rows
from sampler.device import numeric_flags
from sampler.errors import NonFiniteError
from sampler.model import LayerWork, Selection, Transformer
from sampler.plan import CacheSpec, LayerPlan, Measurements, PassKind, compute_all
from sampler.records import Counters

Result = TypeVar("Result")
# Answers one query per row of logits, such as "which token?" or "the log-probabilities of these tokens?"
LogitReader = Callable[[Tensor, Sequence[Any]], list[Any]]
# Is given the index of a failed row and its error
OnFailure = Callable[[int, NonFiniteError], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """Caches keys and values of complete blocks of known tokens; `queries` are about the last position."""

    tokens: Sequence[int]
    queries: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Forwards `tokens` at positions from `start` on; `queries` are about the positions in `read`, one each."""

    kind: PassKind
    start: int
    tokens: Sequence[int]
    plan: LayerPlan
    opens_block: bool = False  # from here on, nothing cached in an earlier block may be replayed
    eligible: bool = False  # the policy requested a replay
    read: tuple[int, ...] = ()
    queries: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class SaveBlock:
    """Returns a copy of the row's caches for the block that begins at `start`."""

    start: int


@dataclass(frozen=True, slots=True)
class RestoreBlock:
    """Restores what a `SaveBlock` returned."""

    start: int
    saved: Any


@dataclass(frozen=True, slots=True)
class GetMeasurements:
    """Returns the measurements of the row's last pass; empty if the pass opened a block."""


Command = Prefill | Pass | SaveBlock | RestoreBlock | GetMeasurements
Row = Generator[Command, Any, Result]


class Stopwatch:
    """Seconds spent in the engine; paused while the caller handles results or text is decoded."""

    def __init__(self) -> None:
        self.paused_seconds = 0.0

    def now(self) -> float:
        return time.perf_counter() - self.paused_seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.paused_seconds += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class FinishedRow(Generic[Result]):
    """A row's result and its share of the work; times are on the engine's stopwatch."""

    index: int
    result: Result
    counters: Counters
    started: float
    seconds: float


@dataclass(kw_only=True, eq=False)
class _ActiveRow(Generic[Result]):
    index: int
    slot: int
    row: Row[Result]
    started: float | None = None
    counters: Counters = field(default_factory=Counters)
    waiting_for: Pass | None = None
    rounds_waited: int = 0
    measured: Measurements = field(default_factory=dict)


class Engine(Generic[Result]):
    """The caches of one call and the rows that use them. With `share_prefixes`, common blocks are prefilled once."""

    def __init__(
        self,
        network: Transformer,
        *,
        cache_spec: CacheSpec,
        slots: int,
        capacity: int,
        reader: LogitReader,
        share_prefixes: bool = False,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Without `on_failure`, the first row that fails ends the run."""
        self.network, self.reader, self.share_prefixes = network, reader, share_prefixes
        self.on_failure = on_failure
        self.block = network.config.block_size
        self.keys_values = network.new_cache(slots, capacity)
        self.reuse = ReuseCache(cache_spec, network.config, slots, dtype=network.dtype, device=network.device)
        self.prefilled: list[Sequence[int]] = [()] * slots  # the tokens of the complete blocks in each slot
        self.stopwatch = Stopwatch()

    def run(self, rows: Iterable[Row[Result]]) -> Iterator[FinishedRow[Result]]:
        """Yields results in order of completion. Raises if replays were requested but none happened."""
        total = Counters()
        rounds = self._rounds(enumerate(rows))
        while (finished := self._next(rounds)) is not None:
            total += finished.counters
            with self.stopwatch.paused():
                yield finished
        if total.eligible and not total.replayed:
            raise RuntimeError(f"{total.eligible} passes should have replayed layers, but none did: reuse is broken")

    def _next(self, rounds: Iterator[FinishedRow[Result]]) -> FinishedRow[Result] | None:
        """The next finished row, if any. The numeric flags are those of the caller when it gets the row."""
        with numeric_flags():
            return next(rounds, None)

    @torch.inference_mode()
    def _rounds(self, waiting: Iterator[tuple[int, Row[Result]]]) -> Iterator[FinishedRow[Result]]:
        """Each round gives free slots to waiting rows or, if there are none, runs the passes of one group."""
        free = list(range(len(self.prefilled)))
        active: list[_ActiveRow[Result]] = []
        while True:
            group = [
                _ActiveRow(index=index, slot=slot, row=row) for slot, (index, row) in zip(free, waiting, strict=False)
            ]
            answers: list[Any] = [None] * len(group)
            if group:
                del free[: len(group)]
                active += group
            elif active:
                group = self._next_group(active)
                answers = self._run_group(group)
            else:
                return
            for row, answer in zip(group, answers, strict=True):
                try:
                    finished = self._advance(row, answer)
                except NonFiniteError as error:
                    self._fail(row, error)
                else:
                    if finished is None:
                        continue
                    yield finished
                active.remove(row)
                free.append(row.slot)

    def _advance(self, active: _ActiveRow[Result], answer: Any) -> FinishedRow[Result] | None:
        """Sends a row its answer and executes its commands until it waits for a pass or is finished."""
        if active.started is None:
            active.started = self._synchronised_now()
        try:
            while True:
                command = active.row.send(answer)
                match command:
                    case Pass():
                        active.waiting_for, active.rounds_waited = command, 0
                        return None
                    case Prefill():
                        answer = self._prefill(active, command)
                    case GetMeasurements():
                        answer = active.measured
                    case SaveBlock(start):
                        answer = self.keys_values.block(active.slot, start).clone(), self.reuse.save(active.slot)
                    case RestoreBlock(start, (keys_values, contributions)):
                        self.keys_values.block(active.slot, start).copy_(keys_values)
                        self.reuse.restore(active.slot, contributions)
                        answer = None
        except StopIteration as stop:
            seconds = self.stopwatch.now() - active.started
            return FinishedRow(active.index, stop.value, active.counters, active.started, seconds)

    def _fail(self, row: _ActiveRow[Result], error: NonFiniteError) -> None:
        """Reports a failed row and clears its slot: NaN times a weight of zero would still be NaN for the next row."""
        if self.on_failure is None:
            raise error
        self.keys_values.clear(row.slot)
        self.prefilled[row.slot] = ()
        with self.stopwatch.paused():
            self.on_failure(row.index, error)

    def _prefill(self, active: _ActiveRow[Result], command: Prefill) -> list[Any]:
        tokens = command.tokens
        start = self._copy_shared_prefix(active.slot, tokens, needs_last=bool(command.queries))
        self.prefilled[active.slot] = tuple(tokens)
        if start == len(tokens):
            return []
        view = self.keys_values.view(Rows([active.slot], [range(start, len(tokens))]), clean_blocks=True)
        plan = compute_all(self.network.config.num_layers)
        states_ND, work = self.network.forward(self._tensor(tokens[start:]), view, plan)
        self._count(active.counters, PassKind.PREFILL, work, len(tokens) - start)
        active.counters.prefill_tokens += len(tokens) - start
        return self.reader(self.network.logits(states_ND[-1:]), command.queries) if command.queries else []

    def _copy_shared_prefix(self, slot: int, tokens: Sequence[int], *, needs_last: bool) -> int:
        """Copies the longest prefix of whole blocks that any slot holds; returns its number of tokens."""
        if not self.share_prefixes:
            return 0
        limit = len(tokens) // self.block - needs_last
        common = [_common_blocks(tokens, held, self.block, limit) for held in self.prefilled]
        source = max(range(len(common)), key=lambda other: (common[other], other == slot))
        length = common[source] * self.block
        if source != slot and length:
            self.keys_values.copy_prefix(source, slot, length)
        return length

    def _next_group(self, active: list[_ActiveRow[Result]]) -> list[_ActiveRow[Result]]:
        """The rows that can run together and have waited for the most rounds in total: usually the largest group.

        Running one group per round lets the others grow; counting rounds keeps a single row from waiting forever.
        """
        groups: dict[object, list[_ActiveRow[Result]]] = {}
        for row in sorted(active, key=lambda row: row.slot):
            wanted = row.waiting_for
            assert wanted is not None
            row.rounds_waited += 1
            key = wanted.plan.batch_key, self._uses_reuse_cache(wanted)
            groups.setdefault(key, []).append(row)
        return max(groups.values(), key=lambda group: sum(row.rounds_waited for row in group))

    def _uses_reuse_cache(self, wanted: Pass) -> bool:
        """Commit passes do not: no later pass of the block replays them."""
        return bool(self.reuse.row_of) and wanted.kind is not PassKind.COMMIT

    def _run_group(self, group: list[_ActiveRow[Result]]) -> list[list[Any]]:
        """One forward for all rows of a group; returns the answers to each row's queries."""
        passes = [row.waiting_for for row in group if row.waiting_for is not None]
        for row, wanted in zip(group, passes, strict=True):
            if wanted.opens_block:
                self.reuse.reset(row.slot)
        windows = [range(wanted.start, wanted.start + len(wanted.tokens)) for wanted in passes]
        rows = Rows([row.slot for row in group], windows)
        reuse = self.reuse.view(rows) if self._uses_reuse_cache(passes[0]) else None
        states_ND, work = self._forward(rows, passes, reuse)
        for row, wanted in zip(group, passes, strict=True):
            self._count(row.counters, wanted.kind, work, len(wanted.tokens), len(wanted.plan.selected))
            row.counters.eligible += wanted.eligible
            row.counters.replayed += work.replays > 0
            row.measured = {}
        answers = self._read(states_ND, passes)
        if reuse is not None and reuse.measured:  # after reading the logits, so as not to synchronise twice
            _distribute_measurements(group, passes, reuse.measured)
        return answers

    def _forward(self, rows: Rows, passes: Sequence[Pass], reuse: ReuseView | None) -> tuple[Tensor, LayerWork]:
        plan = passes[0].plan
        if plan.stale:
            assert reuse is not None
            return self.network.repeat_final_states(reuse)
        ids_N = self._tensor([token for wanted in passes for token in wanted.tokens])
        selection = self._selection(rows, passes) if plan.selected else None
        return self.network.forward(ids_N, self.keys_values.view(rows), plan, reuse, selection)

    def _read(self, states_ND: Tensor, passes: Sequence[Pass]) -> list[list[Any]]:
        rows = [first + i for first, wanted in zip(_first_rows(passes), passes, strict=True) for i in wanted.read]
        if not rows:
            return [[] for _ in passes]
        queries = [query for wanted in passes for query in wanted.queries]
        answers = iter(self.reader(self.network.logits(states_ND[self._tensor(rows)]), queries))
        return [[next(answers) for _ in wanted.read] for wanted in passes]

    def _selection(self, rows: Rows, passes: Sequence[Pass]) -> Selection:
        """The positions that partial layers compute; in a plan they count from the block's start."""
        starts = [wanted.start // self.block * self.block for wanted in passes]
        positions = [[start + p for p in wanted.plan.selected] for start, wanted in zip(starts, passes, strict=True)]
        state_rows = [
            first + position - wanted.start
            for first, wanted, selected in zip(_first_rows(passes), passes, positions, strict=True)
            for position in selected
        ]
        selected_rows = Rows(rows.slots, positions)
        return Selection(self.keys_values.view(selected_rows), self.reuse.view(selected_rows), self._tensor(state_rows))

    def _count(self, counters: Counters, kind: PassKind, work: LayerWork, positions: int, selected: int = 0) -> None:
        setattr(counters, kind.value, getattr(counters, kind.value) + 1)
        counters.layers_computed += work.computed
        counters.layers_reused += work.reused
        halves = work.attention_only + work.mlp_only
        counters.layer_positions += (work.computed - work.partial - halves) * positions + work.partial * selected
        if halves:
            attention, mlp = self.network.config.layer_weights
            weighted = (work.attention_only * attention + work.mlp_only * mlp) * positions
            counters.layer_positions += _rounded_quotient(weighted, attention + mlp)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.network.device)

    def _synchronised_now(self) -> float:
        if self.network.device.type == "cuda":
            torch.cuda.synchronize(self.network.device)
        return self.stopwatch.now()


def _first_rows(passes: Sequence[Pass]) -> list[int]:
    """The first row of each pass in the states of the whole group."""
    return [0, *accumulate(len(wanted.tokens) for wanted in passes[:-1])]


def _distribute_measurements(
    group: Sequence[_ActiveRow[Any]], passes: Sequence[Pass], measured: Mapping[int, Tensor]
) -> None:
    """Gives each row the measurements of its own positions."""
    values = [norms.tolist() for norms in measured.values()]
    for row, wanted, first in zip(group, passes, _first_rows(passes), strict=True):
        own = slice(first, first + len(wanted.tokens))
        row.measured = (
            {} if wanted.opens_block else {key: rows[own] for key, rows in zip(measured, values, strict=True)}
        )


def _common_blocks(tokens: Sequence[int], held: Sequence[int], block: int, limit: int) -> int:
    blocks = 0
    while blocks < limit and tuple(tokens[blocks * block :][:block]) == tuple(held[blocks * block :][:block]):
        blocks += 1
    return blocks


def _rounded_quotient(part: int, whole: int) -> int:
    """part ÷ whole, rounded to the nearest integer without floating point."""
    return (2 * part + whole) // (2 * whole)

"""Runs many rows as batches.

A row is a generator: it yields a command and receives the answer. The engine groups the passes that rows wait for, runs
one group at a time, and gives the slot of a finished row to the next one. A row never sees other rows, so its tokens
cannot depend on its batch.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from sampler.device import numeric_flags, synchronise
from sampler.errors import NonFiniteError
from sampler.model import LayerWork, Transformer
from sampler.passes import LogitReader, PassRunner, PassSegment
from sampler.plan import CacheSpec, LayerPlan, Measurements, PassKind, compute_all
from sampler.records import Counters

Result = TypeVar("Result")
OnFailure = Callable[[int, NonFiniteError], None]  # gets the index of a failed row and its error


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Forwards `tokens` at positions from `start` on. `read` counts from `start` and has one position per query."""

    kind: PassKind
    start: int
    tokens: Sequence[int]
    plan: LayerPlan
    opens_block: bool = False  # from here on, nothing cached in an earlier block may be replayed
    eligible: bool = False  # the policy requested a replay
    read: tuple[int, ...] = ()
    queries: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """Caches keys and values of complete blocks of known tokens; `queries` are about the last position.

    `then` is a pass over the next block that computes every layer. It runs in the same forward pass, and the answer is
    that of its queries.
    """

    tokens: Sequence[int]
    queries: tuple[Any, ...] = ()
    then: Pass | None = None


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
    prefill: "_PrefillProgress | None" = None
    measured: Measurements = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class _PrefillProgress:
    """A prefill that a row waits for."""

    command: Prefill
    tokens: Sequence[int]  # the prefix, then the block of the pass that runs with it, if any
    begun: bool = False
    start: int = 0  # tokens copied from another row
    done: int = 0  # tokens copied or forwarded so far


class Engine(Generic[Result]):
    """The rows of one call, and the passes that they wait for.

    A row reads at most `reads` logits in a pass. With `share_prefixes`, common blocks are prefilled once.
    """

    def __init__(
        self,
        network: Transformer,
        *,
        cache_spec: CacheSpec,
        slots: int,
        capacity: int,
        reader: LogitReader,
        reads: int,
        share_prefixes: bool = False,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Without `on_failure`, the first row that fails ends the run."""
        self.network, self.share_prefixes, self.on_failure = network, share_prefixes, on_failure
        self.block = network.config.block_size
        self.runner = PassRunner(network, cache_spec, slots=slots, capacity=capacity, reader=reader, reads=reads)
        self.keys_values, self.reuse = self.runner.keys_values, self.runner.reuse
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
            elif prefills := [row for row in active if row.prefill is not None]:
                group, answers = self._run_prefills(prefills)
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
            synchronise(self.network.device)
            active.started = self.stopwatch.now()
        try:
            while True:
                command = active.row.send(answer)
                match command:
                    case Pass():
                        active.waiting_for, active.rounds_waited = command, 0
                        return None
                    case Prefill(tokens=tokens, then=then):
                        assert not (command.queries and then)
                        active.prefill = _PrefillProgress(
                            command=command, tokens=(*tokens, *then.tokens) if then else tokens
                        )
                        return None
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
        self.keys_values.clear(row.slot)
        self.prefilled[row.slot] = ()
        if self.on_failure is None:
            raise error
        with self.stopwatch.paused():
            self.on_failure(row.index, error)

    def _run_prefills(self, waiting: Sequence[_ActiveRow[Result]]) -> tuple[list[_ActiveRow[Result]], list[list[Any]]]:
        """One forward over blocks of one or several rows; returns the rows whose prefill is complete, and answers."""
        remaining = self.runner.prefill_positions
        parts: list[tuple[_ActiveRow[Result], PassSegment]] = []
        for row in waiting:
            if remaining and self._begin_prefill(row, waiting):
                parts.append((row, self._prefill_segment(row, remaining)))
                remaining -= len(parts[-1][1].tokens)
        forwarded = [segment for _, segment in parts if segment.tokens]  # others were copied from other rows
        work, segment_answers = LayerWork(), list[list[Any]]()
        if forwarded:
            plan = compute_all(self.network.config.num_layers)
            work, segment_answers, _ = self.runner.run(forwarded, plan, PassKind.PREFILL, reuse=False)
        next_answers = iter(segment_answers)
        complete: list[_ActiveRow[Result]] = []
        answers: list[list[Any]] = []
        for row, segment in parts:
            assert row.prefill is not None
            answer = next(next_answers) if segment.tokens else []
            progress, prefix = row.prefill, row.prefill.command.tokens
            progress.done += len(segment.tokens)
            self.prefilled[row.slot] = tuple(prefix[: progress.done])
            if progress.done < len(progress.tokens):
                continue
            complete.append(row)
            answers.append(answer)
            row.prefill = None
            if progress.start < len(prefix):
                row.counters.prefill_tokens += len(prefix) - progress.start
                self._count(row.counters, PassKind.PREFILL, work, len(prefix) - progress.start)
            if progress.command.then is not None:
                self._count(row.counters, progress.command.then.kind, work, self.block)
        return complete, answers

    def _begin_prefill(self, row: _ActiveRow[Result], waiting: Sequence[_ActiveRow[Result]]) -> bool:
        """Copies blocks of a row's prefix from another slot. False if a prefill in progress will have more of them."""
        assert row.prefill is not None
        if row.prefill.begun:
            return True
        command, start = row.prefill.command, 0
        if self.share_prefixes:
            limit = len(command.tokens) // self.block - bool(command.queries)
            common = [_common_blocks(command.tokens, tokens, self.block, limit) for tokens in self.prefilled]
            source = max(range(len(common)), key=lambda other: (common[other], other == row.slot))
            begun = [other.prefill.command for other in waiting if other.prefill and other.prefill.begun]
            if any(_common_blocks(command.tokens, b.tokens, self.block, limit) > common[source] for b in begun):
                return False
            start = common[source] * self.block
            if source != row.slot and start:
                self.keys_values.copy_prefix(source, row.slot, start)
        row.prefill.begun, row.prefill.start, row.prefill.done = True, start, start
        self.prefilled[row.slot] = tuple(command.tokens[:start])
        return True

    def _prefill_segment(self, row: _ActiveRow[Result], remaining: int) -> PassSegment:
        """The next blocks of a row's prefill, and what is read at its end."""
        assert row.prefill is not None
        command, tokens, start = row.prefill.command, row.prefill.tokens, row.prefill.done
        end = min(len(tokens), start + remaining)
        last = end == len(tokens)
        if last and command.then is not None:
            first = len(command.tokens) - start
            read, queries = tuple(first + i for i in command.then.read), command.then.queries
        else:
            queries = command.queries if last else ()
            read = (end - start - 1,) * len(queries)
        return PassSegment(slot=row.slot, start=start, tokens=tokens[start:end], read=read, queries=queries)

    def _next_group(self, active: list[_ActiveRow[Result]]) -> list[_ActiveRow[Result]]:
        """The rows that can run together and have waited for the most rounds in total: usually the largest group.

        Running one group per round lets the others grow; counting rounds keeps a single row from waiting forever.
        """
        if len(active) == 1:
            return active[:]
        groups: dict[object, list[_ActiveRow[Result]]] = {}
        for row in sorted(active, key=lambda row: row.slot):
            request = row.waiting_for
            assert request is not None
            row.rounds_waited += 1
            groups.setdefault(self._group_key(request), []).append(row)
        group = max(groups.values(), key=lambda group: sum(row.rounds_waited for row in group))
        request = group[0].waiting_for
        assert request is not None
        if self.runner.padded and len(group) > (most := self.runner.sequences(request.kind, len(request.tokens))):
            waited_longest = sorted(group, key=lambda row: -row.rounds_waited)[:most]
            group = [row for row in group if row in waited_longest]
        return group

    def _group_key(self, request: Pass) -> object:
        """Equal for passes that can run together: padded ones must also have the same shape."""
        width, shape = len(request.tokens), None
        if self.runner.padded:
            shape = width, self.runner.selected_positions(request.kind, width, len(request.plan.selected))
        return request.plan.batch_key, self._uses_reuse_cache(request), shape

    def _uses_reuse_cache(self, request: Pass) -> bool:
        """Commit passes do not: no later pass of the block replays them."""
        return bool(self.reuse.row_of) and request.kind is not PassKind.COMMIT

    def _run_group(self, group: list[_ActiveRow[Result]]) -> list[list[Any]]:
        """One forward for all rows of a group; returns the answers to each row's queries."""
        passes = [row.waiting_for for row in group if row.waiting_for is not None]
        segments = []
        for row, request in zip(group, passes, strict=True):
            if request.opens_block:
                self.reuse.reset(row.slot)
            segments.append(
                PassSegment(
                    slot=row.slot,
                    start=request.start,
                    tokens=request.tokens,
                    read=request.read,
                    queries=request.queries,
                    selected=request.plan.selected,
                    priors=request.plan.priors,
                )
            )
        plan, reuse = passes[0].plan, self._uses_reuse_cache(passes[0])
        work, answers, measured = self.runner.run(segments, plan, passes[0].kind, reuse=reuse)
        for row, request, norms in zip(group, passes, measured, strict=True):
            self._count(row.counters, request.kind, work, len(request.tokens), len(request.plan.selected))
            row.counters.eligible += request.eligible
            row.counters.replayed += work.replays > 0
            row.measured = {} if request.opens_block else norms
        return answers

    def _count(self, counters: Counters, kind: PassKind, work: LayerWork, positions: int, selected: int = 0) -> None:
        setattr(counters, kind.value, getattr(counters, kind.value) + 1)
        counters.layers_computed += work.computed
        counters.layers_reused += work.reused
        halves = work.attention_only + work.mlp_only
        whole = work.computed - work.partial - work.narrowed - halves
        counters.layer_positions += whole * positions + work.partial * selected + work.narrowed_positions
        if halves:
            attention, mlp = self.network.config.layer_weights
            weighted = (work.attention_only * attention + work.mlp_only * mlp) * positions
            counters.layer_positions += _rounded_quotient(weighted, attention + mlp)


def slots_needed(network: Transformer, batch_size: int, rows: int) -> int:
    """One slot per row, up to the batch size.

    Padded passes have the shape of the whole batch, so that the number of rows does not affect rounding.
    """
    return batch_size if network.execution.padded else min(batch_size, max(1, rows))


def _common_blocks(tokens: Sequence[int], other: Sequence[int], block: int, limit: int) -> int:
    """The number of leading blocks that two sequences share, up to `limit`."""
    blocks = 0
    while blocks < limit and tuple(tokens[blocks * block :][:block]) == tuple(other[blocks * block :][:block]):
        blocks += 1
    return blocks


def _rounded_quotient(part: int, whole: int) -> int:
    """part ÷ whole, rounded to the nearest integer without floating point."""
    return (2 * part + whole) // (2 * whole)

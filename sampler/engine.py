"""Runs many rows as batches: rows say which pass they want next, the engine groups, runs and answers them.

A row (see `commands`) sees no other row, so its tokens cannot depend on its batch mates; a finished row's slot goes to
the next one waiting. Knows nothing of policies, thresholds or targets.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sampler.cache import Kept, ReuseCache, Rows
from sampler.model import Part, Transformer, Work
from sampler.plan import Keeps, LayerPlan, Movements, PassKind, compute_all
from sampler.records import Counters, rounded

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """Put the keys and values of complete clean blocks into the row's slot; `asks` are put to the last position."""

    tokens: Sequence[int]
    asks: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Forward `tokens` at positions from `start` on, and put each of `asks` to the position in `read`."""

    kind: PassKind
    start: int
    tokens: Sequence[int]
    plan: LayerPlan
    opens_block: bool = False  # nothing cached in an earlier block may be replayed from here on
    eligible: bool = False  # the policy asked for a replay
    read: tuple[int, ...] = ()
    asks: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Save:
    """Answered with a copy of the row's state in the block that begins at `start`."""

    start: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Puts back what a `Save` was answered with."""

    start: int
    saved: Any


@dataclass(frozen=True, slots=True)
class Measured:
    """Answered with the movements that the row's last pass measured; none if it opened a block."""


Command = Prefill | Pass | Save | Restore | Measured
Row = Generator[Command, Any, Result]


Reader = Callable[[Tensor, Sequence[Any]], list[Any]]  # logits and what is asked of each position → answers


class Clock:
    """Seconds spent in the engine: it stands while results are being consumed, or text is looked at."""

    def __init__(self) -> None:
        self.paused = 0.0

    def now(self) -> float:
        return time.perf_counter() - self.paused

    @contextmanager
    def standing(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.paused += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Finished(Generic[Result]):
    """A row's result and its share of the work; `started` and `seconds` are the engine's clock."""

    index: int
    result: Result
    counters: Counters
    started: float
    seconds: float


@dataclass(kw_only=True, eq=False)
class _Seat(Generic[Result]):
    """A row at work in its slot."""

    index: int
    slot: int
    row: Row[Result]
    started: float | None = None
    counters: Counters = field(default_factory=Counters)
    waiting_for: Pass | None = None
    rounds_waited: int = 0
    moved: Movements = field(default_factory=dict)


class Engine(Generic[Result]):
    """The caches of one call and the rows that use them. `share_prefixes` prefills common blocks once."""

    def __init__(
        self,
        network: Transformer,
        *,
        keeps: Keeps,
        slots: int,
        capacity: int,
        reader: Reader,
        share_prefixes: bool = False,
    ) -> None:
        self.network, self.reader, self.share_prefixes = network, reader, share_prefixes
        self.block = network.config.block_size
        self.cache = network.new_cache(slots, capacity)
        self.reuse = ReuseCache(keeps, network.config, slots, dtype=network.dtype, device=network.device)
        self.resident: list[Sequence[int]] = [()] * slots  # the clean blocks each slot holds
        self.clock = Clock()

    def run(self, rows: Iterable[Row[Result]]) -> Iterator[Finished[Result]]:
        """Results in order of completion. Passes that were to replay layers, and no replay at all, are a fault."""
        total = Counters()
        for finished in self._rounds(enumerate(rows)):
            total += finished.counters
            with self.clock.standing():
                yield finished
        if total.eligible and not total.replayed:
            raise RuntimeError(f"{total.eligible} passes were to replay layers and none did: reuse is not working")

    @torch.inference_mode()
    def _rounds(self, waiting: Iterator[tuple[int, Row[Result]]]) -> Iterator[Finished[Result]]:
        """Each round seats rows that wait for a free slot or, with none to seat, runs one group's passes."""
        free = list(range(len(self.resident)))
        seats: list[_Seat[Result]] = []
        while True:
            group = [_Seat(index=index, slot=slot, row=row) for slot, (index, row) in zip(free, waiting, strict=False)]
            answers: list[Any] = [None] * len(group)
            if group:
                del free[: len(group)]
                seats += group
            elif seats:
                group = self._most_pressing(seats)
                answers = self._run(group)
            else:
                return
            for seat, answer in zip(group, answers, strict=True):
                finished = self._advance(seat, answer)
                if finished is not None:
                    seats.remove(seat)
                    free.append(seat.slot)
                    yield finished

    def _advance(self, seat: _Seat[Result], answer: Any) -> Finished[Result] | None:
        """Sends a row its answer and serves it until it wants a pass, which may be shared, or has finished."""
        if seat.started is None:
            seat.started = self._synchronised_now()
        try:
            while True:
                command = seat.row.send(answer)
                match command:
                    case Pass():
                        seat.waiting_for, seat.rounds_waited = command, 0
                        return None
                    case Prefill():
                        answer = self._prefill(seat, command)
                    case Measured():
                        answer = seat.moved
                    case Save(start):
                        answer = self.cache.block(seat.slot, start).clone(), self.reuse.save(seat.slot)
                    case Restore(start, (keys_values, contributions)):
                        self.cache.block(seat.slot, start).copy_(keys_values)
                        self.reuse.restore(seat.slot, contributions)
                        answer = None
        except StopIteration as stop:
            seconds = self.clock.now() - seat.started
            return Finished(seat.index, stop.value, seat.counters, seat.started, seconds)

    def _prefill(self, seat: _Seat[Result], command: Prefill) -> list[Any]:
        tokens = command.tokens
        start = self._already_there(seat.slot, tokens, needs_last=bool(command.asks))
        self.resident[seat.slot] = tuple(tokens)
        if start == len(tokens):
            return []
        window = self.cache.window(Rows([seat.slot], [range(start, len(tokens))]), clean_blocks=True)
        plan = compute_all(self.network.config.num_layers)
        states_ND, work = self.network.forward(self._tensor(tokens[start:]), window, plan)
        self._count(seat.counters, PassKind.PREFILL, work, len(tokens) - start)
        seat.counters.prefill_tokens += len(tokens) - start
        return self.reader(self.network.logits(states_ND[-1:]), command.asks) if command.asks else []

    def _already_there(self, slot: int, tokens: Sequence[int], *, needs_last: bool) -> int:
        """How many leading tokens some slot holds in whole blocks; they are brought into this one."""
        if not self.share_prefixes:
            return 0
        limit = len(tokens) // self.block - needs_last
        common = [_common_blocks(tokens, held, self.block, limit) for held in self.resident]
        source = max(range(len(common)), key=lambda other: (common[other], other == slot))
        length = common[source] * self.block
        if source != slot and length:
            self.cache.copy_prefix(source, slot, length)
        return length

    def _most_pressing(self, seats: list[_Seat[Result]]) -> list[_Seat[Result]]:
        """The group of rows that can run together and has waited longest, all in all: mostly the largest one.

        Running one group a round lets the others grow; counting rounds keeps a lone row from waiting for ever.
        """
        groups: dict[object, list[_Seat[Result]]] = {}
        for seat in sorted(seats, key=lambda seat: seat.slot):
            wanted = seat.waiting_for
            assert wanted is not None
            seat.rounds_waited += 1
            key = wanted.plan.shape, self._leaves_traces(wanted)
            groups.setdefault(key, []).append(seat)
        return max(groups.values(), key=lambda group: sum(seat.rounds_waited for seat in group))

    def _leaves_traces(self, wanted: Pass) -> bool:
        """Whether a pass fills the reuse cache; a commit belongs to no later step, so it never does."""
        return bool(self.reuse.row_of) and wanted.kind is not PassKind.COMMIT

    def _run(self, group: list[_Seat[Result]]) -> list[list[Any]]:
        """One forward for all rows of a group; each gets the answers to what it asked."""
        passes = [seat.waiting_for for seat in group if seat.waiting_for is not None]
        for seat, wanted in zip(group, passes, strict=True):
            if wanted.opens_block:
                self.reuse.reset(seat.slot)
        windows = [range(wanted.start, wanted.start + len(wanted.tokens)) for wanted in passes]
        rows = Rows([seat.slot for seat in group], windows)
        kept = self.reuse.at(rows) if self._leaves_traces(passes[0]) else None
        states_ND, work = self._forward(rows, passes, kept)
        for seat, wanted in zip(group, passes, strict=True):
            self._count(seat.counters, wanted.kind, work, len(wanted.tokens), len(wanted.plan.selected))
            seat.counters.eligible += wanted.eligible
            seat.counters.replayed += work.replays > 0
            seat.moved = {}
        answers = self._read(states_ND, passes)
        if kept is not None and kept.moved:
            _note_movements(group, passes, kept.moved)
        return answers

    def _forward(self, rows: Rows, passes: Sequence[Pass], kept: Kept | None) -> tuple[Tensor, Work]:
        plan = passes[0].plan
        if plan.stale:
            assert kept is not None
            return self.network.repeat(kept)
        ids_N = self._tensor([token for wanted in passes for token in wanted.tokens])
        part = self._part(rows, passes) if plan.selected else None
        return self.network.forward(ids_N, self.cache.window(rows), plan, kept, part)

    def _read(self, states_ND: Tensor, passes: Sequence[Pass]) -> list[list[Any]]:
        rows = [first + i for first, wanted in zip(_first_rows(passes), passes, strict=True) for i in wanted.read]
        if not rows:
            return [[] for _ in passes]
        asks = [ask for wanted in passes for ask in wanted.asks]
        answers = iter(self.reader(self.network.logits(states_ND[self._tensor(rows)]), asks))
        return [[next(answers) for _ in wanted.read] for wanted in passes]

    def _part(self, rows: Rows, passes: Sequence[Pass]) -> Part:
        """The positions that partial layers compute; a plan counts them from the block's start."""
        starts = [wanted.start // self.block * self.block for wanted in passes]
        selected = [[start + p for p in wanted.plan.selected] for start, wanted in zip(starts, passes, strict=True)]
        places = [
            first + position - wanted.start
            for first, wanted, positions in zip(_first_rows(passes), passes, selected, strict=True)
            for position in positions
        ]
        chosen = Rows(rows.slots, selected)
        return Part(self.cache.window(chosen), self.reuse.at(chosen), self._tensor(places))

    def _count(self, counters: Counters, kind: PassKind, work: Work, positions: int, selected: int = 0) -> None:
        setattr(counters, kind.value, getattr(counters, kind.value) + 1)
        counters.layers_computed += work.computed
        counters.layers_reused += work.reused
        halves = work.attention_only + work.mlp_only
        counters.layer_positions += (work.computed - work.partial - halves) * positions + work.partial * selected
        if halves:
            attention, mlp = self.network.config.layer_weights
            weighed = (work.attention_only * attention + work.mlp_only * mlp) * positions
            counters.layer_positions += rounded(weighed, attention + mlp)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, device=self.network.device)

    def _synchronised_now(self) -> float:
        if self.network.device.type == "cuda":
            torch.cuda.synchronize(self.network.device)
        return self.clock.now()


def _first_rows(passes: Sequence[Pass]) -> list[int]:
    """Where each pass's states begin among those of the whole group."""
    return [0, *accumulate(len(wanted.tokens) for wanted in passes[:-1])]


def _note_movements(seats: Sequence[_Seat[Any]], passes: Sequence[Pass], moved: Mapping[int, Tensor]) -> None:
    """Each seat gets its own positions' movements; behind the predictions, so that nothing waits for the device."""
    values = [norms.tolist() for norms in moved.values()]
    for seat, wanted, first in zip(seats, passes, _first_rows(passes), strict=True):
        own = slice(first, first + len(wanted.tokens))
        seat.moved = {} if wanted.opens_block else {key: rows[own] for key, rows in zip(moved, values, strict=True)}


def _common_blocks(tokens: Sequence[int], held: Sequence[int], block: int, limit: int) -> int:
    blocks = 0
    while blocks < limit and tuple(tokens[blocks * block :][:block]) == tuple(held[blocks * block :][:block]):
        blocks += 1
    return blocks

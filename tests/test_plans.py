"""Plans without a policy: the layer loop executes them as the oracle does."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from oracle.model import BlockState, forward
from small_models import DEPTH, shallow, shallow_oracle

from sampler.engine import Engine, GetMeasurements, Pass
from sampler.plan import (
    COMPUTE,
    PARTIAL,
    REPLAY,
    REPLAY_ATTENTION,
    REPLAY_MLP,
    SKIP,
    WATCHED_INPUT,
    CacheSpec,
    LayerPlan,
    PassKind,
    Unit,
)
from sampler.plan import LayerStep as Do

torch.set_num_threads(1)

ALL = (COMPUTE,) * DEPTH
REUSED = (2, 3, 5)


class States:
    """A reader that returns the logits; `forwards` counts the queries of each forward."""

    def __init__(self) -> None:
        self.forwards: list[int] = []

    def pack(self, queries: Sequence[Any], block_rows: Sequence[int]) -> Sequence[int]:
        del block_rows
        self.forwards.append(len(queries))
        return ()

    def read(self, logits_PV: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        assert not len(packed)
        return logits_PV.flatten()

    def unpack(self, numbers: Sequence[float], queries: Sequence[Any]) -> list[torch.Tensor]:
        vocabulary = shallow().config.vocab_size
        return list(torch.tensor(numbers).view(-1, vocabulary)[: len(queries)])


def engine_for(spec: CacheSpec, *, slots: int = 1, reader: States | None = None) -> Engine[None]:
    return Engine(shallow().network, cache_spec=spec, slots=slots, capacity=32, reader=reader or States(), reads=32)


def plan(step: Do, selected: tuple[int, ...] = ()) -> LayerPlan:
    return LayerPlan(tuple(step if layer in REUSED else COMPUTE for layer in range(DEPTH)), selected=selected)


def sequence(row: int) -> list[list[int]]:
    """Three states of one block: more and more of it revealed."""
    full = [(7 * row + 13 * position) % 150 for position in range(32)]
    return [full[:shown] + [159] * (32 - shown) for shown in (5, 9, 14)]


@pytest.mark.parametrize("window", [range(32), range(8, 16)], ids=["full", "small"])
@pytest.mark.parametrize(
    ("step", "unit", "selected"),
    [
        (REPLAY, Unit.LAYER, ()),
        (REPLAY_ATTENTION, Unit.ATTENTION, ()),
        (REPLAY_MLP, Unit.MLP, ()),
        (PARTIAL, Unit.LAYER, (9, 12)),
        (PARTIAL, Unit.LAYER, tuple(range(8, 16))),
        (SKIP, Unit.LAYER, ()),
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_plans_equal_the_oracle(step: Do, unit: Unit, selected: tuple[int, ...], window: range, rows: int) -> None:
    """Computed, then twice by the plan: each row of a batch has its own tokens and its own selected positions."""
    got: dict[int, list[torch.Tensor]] = {}

    def row(number: int) -> Any:
        first, *later = sequence(number)
        chosen = tuple(sorted((position - 8 + number) % 8 + 8 for position in selected))
        everything = {"kind": PassKind.FULL, "start": 0, "read": tuple(range(32)), "queries": (None,) * 32}
        got[number] = yield Pass(tokens=first, plan=LayerPlan(ALL), opens_block=True, **everything)
        for tokens in later:
            got[number] = yield Pass(
                kind=PassKind.FULL if len(window) == 32 else PassKind.SMALL,
                start=window.start,
                tokens=[tokens[position] for position in window],
                plan=plan(step, chosen),
                read=tuple(range(len(window))),
                queries=(None,) * len(window),
            )

    engine = engine_for(CacheSpec(REUSED, unit), slots=rows)
    for _ in engine.run(row(number) for number in range(rows)):
        pass
    for number in range(rows):
        oracle, state = shallow_oracle(), BlockState()
        first, *later = sequence(number)
        chosen = tuple(sorted((position - 8 + number) % 8 + 8 for position in selected))
        forward(oracle, first, range(32), LayerPlan(ALL), state)
        for tokens in later:
            forward(oracle, tokens, window, plan(step, chosen), state)
        for position, logits_V in zip(window, got[number], strict=True):
            torch.testing.assert_close(logits_V, oracle.logits(state.final[position]), atol=2e-3, rtol=1e-4)


def test_cached_layers_may_run_and_replay_in_one_pass() -> None:
    """Contributions are stored at once: those of layers 2 and 5 are not adjacent in the cache when 3 is replayed."""
    mixed = LayerPlan(tuple(REPLAY if layer == 3 else COMPUTE for layer in range(DEPTH)))
    plans = [LayerPlan(ALL), mixed, plan(REPLAY)]
    got: list[torch.Tensor] = []

    def row() -> Any:
        for tokens, wanted in zip(sequence(0), plans, strict=True):
            got[:] = yield Pass(
                kind=PassKind.FULL,
                start=0,
                tokens=tokens,
                plan=wanted,
                opens_block=wanted.steps == ALL,
                read=tuple(range(32)),
                queries=(None,) * 32,
            )

    list(engine_for(CacheSpec(REUSED)).run([row()]))
    oracle, state = shallow_oracle(), BlockState()
    for tokens, wanted in zip(sequence(0), plans, strict=True):
        forward(oracle, tokens, range(32), wanted, state)
    for position, logits_V in enumerate(got):
        torch.testing.assert_close(logits_V, oracle.logits(state.final[position]), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("step", "unit"), [(REPLAY, Unit.LAYER), (REPLAY_ATTENTION, Unit.ATTENTION), (REPLAY_MLP, Unit.MLP)]
)
def test_replaying_with_unchanged_inputs_equals_computing(step: Do, unit: Unit) -> None:
    seen: list[torch.Tensor] = []

    def row() -> Any:
        for do in (COMPUTE, step):
            logits = yield Pass(
                kind=PassKind.FULL,
                start=0,
                tokens=sequence(0)[1],
                plan=plan(do),
                opens_block=do is COMPUTE,
                read=tuple(range(32)),
                queries=(None,) * 32,
            )
            seen.append(torch.stack(logits).log_softmax(-1))

    list(engine_for(CacheSpec(REUSED, unit)).run([row()]))
    torch.testing.assert_close(seen[0], seen[1], atol=1e-4, rtol=0)


def test_rows_with_different_selections_share_a_forward() -> None:
    """Each row counts its own work, but there is only one forward."""
    reader = States()

    def row(number: int) -> Any:
        for do, chosen in ((COMPUTE, ()), (PARTIAL, tuple(range(number + 1)))):
            yield Pass(
                kind=PassKind.FULL,
                start=0,
                tokens=sequence(number)[1],
                plan=plan(do, chosen),
                opens_block=do is COMPUTE,
                read=(3,),
                queries=(None,),
            )

    engine = engine_for(CacheSpec(REUSED), slots=3, reader=reader)
    done = {one.index: one.counters.layer_positions for one in engine.run(row(number) for number in range(3))}
    assert reader.forwards == [3, 3]
    assert done == {n: DEPTH * 32 + (DEPTH - len(REUSED)) * 32 + len(REUSED) * (n + 1) for n in range(3)}


def test_rows_receive_the_measurements_of_their_watched_input() -> None:
    heard: dict[int, list[Any]] = {0: [], 1: []}

    def row(number: int) -> Any:
        states = sequence(number)
        for tokens in (states[0], states[0], states[1]):
            yield Pass(kind=PassKind.FULL, start=0, tokens=tokens, plan=LayerPlan(ALL), opens_block=not heard[number])
            heard[number].append((yield GetMeasurements()))

    spec = CacheSpec(REUSED, watched_layer=0)
    list(engine_for(spec, slots=2).run(row(number) for number in range(2)))
    embedding = shallow().network.embedding_VD
    for number, (opening, unchanged, moved) in heard.items():
        before, now, _ = sequence(number)
        assert opening == {}
        assert [change for change, _ in unchanged[WATCHED_INPUT]] == [0.0] * 32
        change = (embedding[now] - embedding[before]).abs().sum(-1)
        torch.testing.assert_close(torch.tensor([c for c, _ in moved[WATCHED_INPUT]]), change)
        torch.testing.assert_close(torch.tensor([s for _, s in moved[WATCHED_INPUT]]), embedding[before].abs().sum(-1))
        assert [c > 0 for c in change] == [5 <= p < 9 for p in range(32)]


def test_replaying_a_missing_value_is_an_error() -> None:
    def row() -> Any:
        yield Pass(kind=PassKind.FULL, start=0, tokens=[1] * 32, plan=plan(REPLAY), opens_block=True)

    with pytest.raises(AssertionError, match="layer 2 replays positions it never computed"):
        list(engine_for(CacheSpec(REUSED)).run([row()]))

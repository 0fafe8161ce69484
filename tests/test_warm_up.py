"""A warm-up runs every kind of pass, stops when it gets no faster, and has a time limit."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, count

import pytest
import torch

from sampler.loading import random_model
from sampler.measure import MAX_WARM_UP_ROUNDS, TINY, settled, warm_up

torch.set_num_threads(1)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("layers", [1, 4])
def test_every_kind_of_pass_is_run_in_every_row(batch_size: int, layers: int) -> None:
    done = warm_up(random_model(replace(TINY, num_layers=layers)), batch_size=batch_size)
    rounds = len(done.rounds)
    assert 4 <= rounds <= MAX_WARM_UP_ROUNDS
    passes = done.counters
    assert (passes.prefill, passes.commit) == (rounds * batch_size, rounds * batch_size)
    assert (passes.full, passes.small) == (2 * rounds * batch_size, 2 * rounds * batch_size)
    assert passes.replayed == 2 * rounds * batch_size
    assert done.seconds >= sum(done.rounds) > 0


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([1.0, 1.0, 1.0], False),  # too few to tell
        ([2.0, 1.0, 1.0, 1.0], False),  # the last three were a gain
        ([2.0, 1.0, 1.0, 1.0, 1.0], True),
        ([2.0, 1.0, 5.0, 1.0, 9.0], True),  # slow ones in between prove nothing
        ([5.0, 4.0, 3.0, 2.0, 1.0], False),
    ],
)
def test_times_have_settled_after_three_rounds_without_improvement(rounds: list[float], expected: bool) -> None:
    assert settled(rounds) is expected


def test_a_warm_up_lasts_as_long_as_asked_and_runs_the_longest_rows() -> None:
    model = random_model(replace(TINY, num_layers=1))
    ticks = count()
    done = warm_up(model, clock=lambda: 0.01 * next(ticks), min_seconds=3.0, positions=(160, 320))
    assert done.settled
    assert done.seconds >= 3.0
    assert done.counters.prefill == 2 * len(done.rounds) > MAX_WARM_UP_ROUNDS
    assert done.counters.prefill_tokens == (128 + 288) * len(done.rounds)


def ever_faster(step: float) -> Callable[[], float]:
    return accumulate(step * 0.9**i for i in range(10_000)).__next__


def test_a_warm_up_that_never_settles_is_bounded() -> None:
    model = random_model(replace(TINY, num_layers=1))
    assert len(warm_up(model, clock=ever_faster(1.0)).rounds) == MAX_WARM_UP_ROUNDS
    slow = warm_up(model, clock=ever_faster(50.0))
    assert len(slow.rounds) == 1
    assert not slow.settled

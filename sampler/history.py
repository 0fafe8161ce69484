"""What the passes over a block so far say about its positions. Pure functions; know no policy, no tensors."""

from collections.abc import Sequence

from sampler.plan import INPUT, PastPass


def input_change(done: PastPass) -> float:
    """The relative L1 change of the watched input over a pass's positions together; 0 where nothing was measured."""
    norms = done.moved.get(INPUT, ())
    before = sum(size for _, size in norms)
    return sum(change for change, _ in norms) / before if before else 0.0


def input_changes(past: Sequence[PastPass]) -> dict[int, float]:
    """The relative L1 change at each position, as measured in the last pass that forwarded it a second time."""
    found: dict[int, float] = {}
    for done in past:
        for position, (change, size) in zip(done.window, done.moved.get(INPUT, ()), strict=False):
            found[position] = change / size if size else 0.0
    return found


def computed_at(past: Sequence[PastPass]) -> dict[int, int]:
    """The last step in which each position went through every layer."""
    found: dict[int, int] = {}
    for step, done in enumerate(past):
        for position in done.plan.selected if done.plan.replays else done.window:
            found[position] = step
    return found

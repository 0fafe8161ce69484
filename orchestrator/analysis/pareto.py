"""Which configurations no other one beats in both accuracy and speed. Knows points only."""

from collections.abc import Sequence


def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each (accuracy, speed-up): no other point is at least as good in both and better in one."""
    return [not any(beats(other, point) for other in points) for point in points]


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] >= other[0] and one[1] >= other[1] and one != other

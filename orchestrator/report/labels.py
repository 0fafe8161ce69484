"""Finds room for the names of points in a drawing, beside each point and off the others. Knows no data."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

OFFSETS = ((7, 5), (7, -11), (-7, 5), (-7, -11), (0, 10), (0, -17), (14, 14), (14, -20), (-14, 14), (-14, -20))
POINT = 6  # pixels around a point that a name keeps free
LEADER = {"arrowstyle": "-", "linewidth": 0.5, "color": "#5f6368", "shrinkA": 1, "shrinkB": 3}


Place = tuple[float, float]


def place(
    axes: Axes, points: Sequence[Place], names: Sequence[str | None], lines: Sequence[tuple[Place, Place]] = ()
) -> None:
    """Writes each name at the first of some offsets that covers nothing; else at the one that covers least."""
    figure: Any = axes.figure
    figure.draw_without_rendering()  # limits and sizes are known after this
    renderer = figure.canvas.get_renderer()
    pixels: Any = axes.transData.transform(list(points)) if points else []
    taken = [Bbox.from_bounds(x - POINT, y - POINT, 2 * POINT, 2 * POINT) for x, y in pixels]
    for ends in lines:
        (x0, y0), (x1, y1) = axes.transData.transform(ends)
        taken.append(Bbox([[min(x0, x1) - 1, min(y0, y1) - 1], [max(x0, x1) + 1, max(y0, y1) + 1]]))
    frame = axes.get_window_extent(renderer)
    for point, name in zip(points, names, strict=True):
        if name is None:
            continue
        tries = []
        for number, (dx, dy) in enumerate(OFFSETS):
            note = _note(axes, name, point, dx, dy, leader=number >= 6)
            box = note.get_window_extent(renderer)
            note.remove()
            outside = not (frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1)
            tries.append((sum(_overlap(box, other) for other in taken) + 1e4 * outside, number, box))
        _, number, box = min(tries, key=lambda one: one[:2])
        _note(axes, name, point, *OFFSETS[number], leader=number >= 6)
        taken.append(box)


def _note(axes: Axes, name: str, point: tuple[float, float], dx: int, dy: int, *, leader: bool) -> Annotation:
    side = "left" if dx > 0 else "right" if dx < 0 else "center"
    return axes.annotate(
        name,
        point,
        xytext=(dx, dy),
        textcoords="offset points",
        ha=side,
        fontsize=8,
        bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.4},
        arrowprops=LEADER if leader else None,
        annotation_clip=False,
    )


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))

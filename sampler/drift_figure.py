"""Draws a drift profile: layers across, steps down, one panel for each group of positions. Needs matplotlib."""

import math
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from sampler.drift import GROUPS, Profile
from sampler.errors import InputError
from sampler.subsets import parse_indices

FORMATS = {".svg": FigureCanvasSVG, ".png": FigureCanvasAgg}


def draw(profile: Profile, suggested: str, path: Path) -> None:
    """Writes the figure as .svg or .png; the suggested layers are marked below the panels."""
    check_path(path)
    figure = Figure(figsize=(8.0, 1.2 + 1.7 * len(GROUPS)), layout="constrained")
    panels = figure.subplots(len(GROUPS), 1, sharex=True)
    tables = [_table(profile, group) for group in GROUPS]
    values = sorted(v for table in tables for row in table for v in row if not math.isnan(v))
    top = values[int(0.98 * (len(values) - 1))] if values else 1.0  # a few wild cells must not pale the others
    for axes, group, table in zip(panels, GROUPS, tables, strict=True):
        drawn = axes.imshow(table, aspect="auto", origin="upper", cmap="viridis", vmin=0, vmax=top)
        axes.set_title(f"{group} positions", loc="left", fontsize=9)
        axes.set_yticks(range(len(profile.steps)), [str(step) for step in profile.steps], fontsize=6)
        axes.set_ylabel("step")
    for layer in parse_indices(suggested.partition("_")[2]):
        panels[-1].plot(layer, len(profile.steps) - 0.35, marker="^", color="#d55e00", clip_on=False, markersize=5)
    panels[-1].set_xlabel(f"layer; marked: {suggested}")
    figure.colorbar(drawn, ax=panels, label="relative change of the contribution (L1)")
    FORMATS[path.suffix](figure)
    try:
        figure.savefig(path, format=path.suffix[1:], dpi=160)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); another --figure is needed") from None


def check_path(path: Path) -> None:
    if path.suffix not in FORMATS:
        raise InputError(f"figure {path}: a name that ends in {' or '.join(FORMATS)} is allowed")
    if not path.parent.is_dir():
        raise InputError(f"figure {path}: there is no folder {path.parent}")


def _table(profile: Profile, group: str) -> list[list[float]]:
    def cell(layer: int, step: int) -> float:
        value = profile.of(layer, step=step, group=group).relative
        return math.nan if value is None else value

    return [[cell(layer, step) for layer in range(profile.depth)] for step in profile.steps]

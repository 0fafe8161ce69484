"""How far each layer's contribution moves from step to step, by what has become of a position. Draws nothing.

A profile decodes at k=1 and changes nothing: every pass computes every layer, keeps its contribution, and measures
how far that moved since the position was last forwarded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sampler.decode import Step, decode_prompts
from sampler.errors import InputError
from sampler.loading import LoadedModel
from sampler.plan import Keeps, LayerPlan, StepContext, compute_all
from sampler.policy import parse_indices, print_indices
from sampler.records import DecodeSettings, Prompt

MASKED, REVEALED, SETTLED = "masked", "just revealed", "settled"
GROUPS = (MASKED, REVEALED, SETTLED)
LAST_STEP = 16  # later steps of a block are counted with this one


@dataclass(frozen=True, kw_only=True, slots=True)
class Watching:
    """Computes every layer and keeps every contribution, to be compared with the next."""

    compute: LayerPlan
    keeps: Keeps
    period: int = 1

    def plan(self, context: StepContext) -> LayerPlan:
        del context
        return self.compute


class Watch:
    """What `decode_prompts` takes in place of a policy's name."""

    def bind(self, depth: int, subset_size: int | None = None) -> Watching:
        del subset_size
        return Watching(compute=compute_all(depth), keeps=Keeps(tuple(range(depth)), drifts=True))


@dataclass(slots=True)
class Sums:
    """L1 norms summed over positions: of how far contributions moved, what they were, and the residual stream."""

    change: float = 0.0
    size: float = 0.0
    stream: float = 0.0
    positions: int = 0

    @property
    def relative(self) -> float | None:
        return self.change / self.size if self.size else None

    @property
    def of_stream(self) -> float | None:
        """What a replay would have left wrong in the residual stream behind the layer."""
        return self.change / self.stream if self.stream else None

    def add(self, change: float, size: float, stream: float, positions: int = 1) -> None:
        self.change += change
        self.size += size
        self.stream += stream
        self.positions += positions


@dataclass(slots=True)
class Profile:
    """Sums of norms by layer, step of the block (1 is the second pass) and group of positions."""

    depth: int
    cells: dict[tuple[int, int, str], Sums] = field(default_factory=dict)
    passes: int = 0

    def note(self, step: Step) -> None:
        """Adds what a pass measured; the first of a block has nothing to compare with."""
        now, moved = step.context, step.done.moved
        groups = [group_of(now.revealed_at[position], now.step) for position in now.window]
        for layer, norms in moved.items():
            for group, (change, size, stream) in zip(groups, norms, strict=True):
                self.cells.setdefault((layer, min(now.step, LAST_STEP), group), Sums()).add(change, size, stream)
        self.passes += bool(moved)

    def of(self, layer: int, *, step: int | None = None, group: str | None = None) -> Sums:
        """The sum over all cells of a layer, or of one step or group of it."""
        total = Sums()
        for (at, when, which), norms in self.cells.items():
            if at == layer and step in (None, when) and group in (None, which):
                total.add(norms.change, norms.size, norms.stream, norms.positions)
        return total

    @property
    def steps(self) -> list[int]:
        return sorted({step for _, step, _ in self.cells})

    def suggestion(self, size: int) -> str:
        """The `size` layers whose contribution moves least against the stream it is added to, as the grid names them.

        Against the stream and not against itself: a small contribution may change altogether and matter little. Layer
        0 is left out: it turns embeddings into states, and a revealed token comes in through it.
        """
        wrong = {layer: self.of(layer).of_stream for layer in range(1, self.depth)}
        known = sorted((value, layer) for layer, value in wrong.items() if value is not None)
        return f"k2_{print_indices(tuple(sorted(layer for _, layer in known[:size])))}"

    def as_json(self, size: int) -> dict[str, object]:
        layers = [
            {
                "layer": layer,
                "change": self.of(layer).relative,
                "of_stream": self.of(layer).of_stream,
                **{group: self.of(layer, group=group).relative for group in GROUPS},
                "steps": {
                    str(step): {group: self.of(layer, step=step, group=group).relative for group in GROUPS}
                    for step in self.steps
                },
            }
            for layer in range(self.depth)
        ]
        return {"passes": self.passes, "layers": layers, "suggested": self.suggestion(size)}


def group_of(revealed_at: int | None, step: int) -> str:
    """What a position is in a pass: masked, revealed by the pass before it, or settled longer ago."""
    if revealed_at is None:
        return MASKED
    return REVEALED if revealed_at == step - 1 and step > 0 and revealed_at >= 0 else SETTLED


def profile(model: LoadedModel, prompts: Sequence[Prompt], *, settings: DecodeSettings, batch_size: int = 1) -> Profile:
    """Decodes the prompts at k=1 and looks on."""
    found = Profile(depth=model.config.num_layers)
    for _ in decode_prompts(
        model,
        prompts,
        policy=Watch(),
        settings=settings,
        batch_size=batch_size,
        with_text=False,
        on_step=found.note,
    ):
        pass
    return found


FIGURE_FORMATS = (".svg", ".png")


def draw(profile: Profile, suggested: str, path: Path) -> None:
    """Writes the figure as .svg or .png; the suggested layers are marked below the panels."""
    from matplotlib.figure import Figure  # slow to import, and needed only here

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
    try:
        figure.savefig(path, format=path.suffix[1:], dpi=160)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); another --figure is needed") from None


def check_path(path: Path) -> None:
    if path.suffix not in FIGURE_FORMATS:
        raise InputError(f"figure {path}: a name that ends in {' or '.join(FIGURE_FORMATS)} is allowed")
    if not path.parent.is_dir():
        raise InputError(f"figure {path}: there is no folder {path.parent}")


def _table(profile: Profile, group: str) -> list[list[float]]:
    def cell(layer: int, step: int) -> float:
        value = profile.of(layer, step=step, group=group).relative
        return math.nan if value is None else value

    return [[cell(layer, step) for layer in range(profile.depth)] for step in profile.steps]

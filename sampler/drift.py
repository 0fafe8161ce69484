"""Drift profiles: how much each layer's contribution changes between steps, by state of the position.

Profiling decodes at k=1 and does not change the tokens: every pass computes every layer, caches its contribution, and
measures how much that changed since the position was last forwarded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sampler.decode import Step, decode_prompts
from sampler.errors import InputError
from sampler.loading import LoadedModel
from sampler.plan import BoundPolicy, CacheSpec, compute_all
from sampler.policies.periodic import Periodic
from sampler.policy import format_indices, parse_indices
from sampler.records import DecodeSettings, Prompt

MASKED, REVEALED, SETTLED = "masked", "just revealed", "settled"
GROUPS = (MASKED, REVEALED, SETTLED)
LAST_STEP = 16  # includes all later steps of a block
FIGURE_FORMATS = (".svg", ".png")


class Profiler:
    """Passed to `decode_prompts` in place of a policy: computes and measures every layer on every pass."""

    def bind(self, depth: int, subset_size: int | None = None) -> BoundPolicy:
        del subset_size
        spec = CacheSpec(tuple(range(depth)), measures_contributions=True)
        return Periodic(period=1, replay=compute_all(depth), cache_spec=spec)


@dataclass(slots=True)
class ChangeSums:
    """L1 norms summed over positions: of changes, of previous contributions, and of the residual stream."""

    change: float = 0.0
    size: float = 0.0
    stream: float = 0.0
    positions: int = 0

    @property
    def relative(self) -> float | None:
        return self.change / self.size if self.size else None

    @property
    def of_stream(self) -> float | None:
        """The error that a replay would have left in the residual stream after the layer."""
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
    cells: dict[tuple[int, int, str], ChangeSums] = field(default_factory=dict)
    passes: int = 0

    def add(self, step: Step) -> None:
        """Adds the measurements of a pass; the first pass of a block has none."""
        context, measured = step.context, step.done.measured
        groups = [group_of(context.revealed_at[position], context.step) for position in context.window]
        for layer, norms in measured.items():
            for group, (change, size, stream) in zip(groups, norms, strict=True):
                cell = self.cells.setdefault((layer, min(context.step, LAST_STEP), group), ChangeSums())
                cell.add(change, size, stream)
        self.passes += bool(measured)

    def of(self, layer: int, *, step: int | None = None, group: str | None = None) -> ChangeSums:
        """The sum over all cells of a layer, or over one step or group."""
        total = ChangeSums()
        for (at, when, which), norms in self.cells.items():
            if at == layer and step in (None, when) and group in (None, which):
                total.add(norms.change, norms.size, norms.stream, norms.positions)
        return total

    @property
    def steps(self) -> list[int]:
        return sorted({step for _, step, _ in self.cells})

    def suggestion(self, size: int) -> str:
        """A k2 policy with the `size` layers whose contribution changes least relative to the residual stream.

        Not relative to itself: a small contribution may change completely and matter little. Layer 0 is left out
        because a newly revealed token enters through it.
        """
        errors = {layer: self.of(layer).of_stream for layer in range(1, self.depth)}
        known = sorted((value, layer) for layer, value in errors.items() if value is not None)
        return f"k2_{format_indices(tuple(sorted(layer for _, layer in known[:size])))}"

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

    def table(self, size: int) -> str:
        """A line for each layer, then the suggested layers."""
        head = f"{'layer':>5}  {'of stream':>9}  {'of itself':>9}" + "".join(f"  {group:>13}" for group in GROUPS)
        lines = [f"relative L1 change of each layer's contribution between steps, {self.passes} passes", "", head]
        for layer in range(self.depth):
            cells = [self.of(layer, group=group).relative for group in GROUPS]
            shown = "".join(f"  {'–' if value is None else f'{value:.3f}':>13}" for value in cells)
            whole = self.of(layer)
            lines.append(f"{layer:>5}  {whole.of_stream or 0:>9.3f}  {whole.relative or 0:>9.3f}{shown}")
        suggested = f"the {size} layers that change least relative to the residual stream: {self.suggestion(size)}"
        return "\n".join([*lines, "", suggested])


def group_of(revealed_at: int | None, step: int) -> str:
    """The state of a position in a pass: masked, revealed by the previous pass, or settled before that."""
    if revealed_at is None:
        return MASKED
    return REVEALED if revealed_at >= 0 and revealed_at == step - 1 else SETTLED


def profile(model: LoadedModel, prompts: Sequence[Prompt], *, settings: DecodeSettings, batch_size: int = 1) -> Profile:
    """Decodes the prompts at k=1 and returns the changes that its passes measured."""
    result = Profile(depth=model.config.num_layers)
    for _ in decode_prompts(
        model,
        prompts,
        policy=Profiler(),
        settings=settings,
        batch_size=batch_size,
        with_text=False,
        on_step=result.add,
    ):
        pass
    return result


def draw(profile: Profile, suggested: str, path: Path) -> None:
    """Writes a heat map of layers × steps for each group of positions; marks the suggested layers."""
    from matplotlib.figure import Figure  # slow to import, and needed only here

    check_path(path)
    figure = Figure(figsize=(8.0, 1.2 + 1.7 * len(GROUPS)), layout="constrained")
    panels = figure.subplots(len(GROUPS), 1, sharex=True)
    tables = [_table(profile, group) for group in GROUPS]
    values = sorted(v for table in tables for row in table for v in row if not math.isnan(v))
    top = values[int(0.98 * (len(values) - 1))] if values else 1.0  # a few outliers must not wash out the others
    for axes, group, table in zip(panels, GROUPS, tables, strict=True):
        image = axes.imshow(table, aspect="auto", origin="upper", cmap="viridis", vmin=0, vmax=top)
        axes.set_title(f"{group} positions", loc="left", fontsize=9)
        axes.set_yticks(range(len(profile.steps)), [str(step) for step in profile.steps], fontsize=6)
        axes.set_ylabel("step")
    for layer in parse_indices(suggested.partition("_")[2]):
        panels[-1].plot(layer, len(profile.steps) - 0.35, marker="^", color="#d55e00", clip_on=False, markersize=5)
    panels[-1].set_xlabel(f"layer; marked: {suggested}")
    figure.colorbar(image, ax=panels, label="relative change of the contribution (L1)")
    try:
        figure.savefig(path, format=path.suffix[1:], dpi=160)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); choose another --figure") from None


def check_path(path: Path) -> None:
    if path.suffix not in FIGURE_FORMATS:
        raise InputError(f"figure {path} must end in {' or '.join(FIGURE_FORMATS)}")
    if not path.parent.is_dir():
        raise InputError(f"figure {path}: directory {path.parent} does not exist")


def _table(profile: Profile, group: str) -> list[list[float]]:
    """The relative change at each step (rows) and layer (columns); NaN where nothing was measured."""

    def cell(layer: int, step: int) -> float:
        value = profile.of(layer, step=step, group=group).relative
        return math.nan if value is None else value

    return [[cell(layer, step) for layer in range(profile.depth)] for step in profile.steps]

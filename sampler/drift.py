"""How far each layer's contribution moves from step to step, by what has become of a position. Draws nothing.

A profile decodes at k=1 and changes nothing: every pass computes every layer, keeps its contribution, and measures
how far that moved since the position was last forwarded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sampler.decode import Step, decode_prompts
from sampler.loading import LoadedModel
from sampler.plan import Keeps, LayerPlan, StepContext, compute_all
from sampler.records import DecodeSettings, Prompt
from sampler.subsets import print_indices

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
    """L1 norms summed over positions: of how far contributions moved, and of what they were."""

    change: float = 0.0
    size: float = 0.0
    positions: int = 0

    @property
    def relative(self) -> float | None:
        return self.change / self.size if self.size else None

    def add(self, change: float, size: float, positions: int = 1) -> None:
        self.change += change
        self.size += size
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
            for group, (change, size) in zip(groups, norms, strict=True):
                self.cells.setdefault((layer, min(now.step, LAST_STEP), group), Sums()).add(change, size)
        self.passes += bool(moved)

    def of(self, layer: int, *, step: int | None = None, group: str | None = None) -> Sums:
        """The sum over all cells of a layer, or of one step or group of it."""
        total = Sums()
        for (at, when, which), norms in self.cells.items():
            if at == layer and step in (None, when) and group in (None, which):
                total.add(norms.change, norms.size, norms.positions)
        return total

    @property
    def steps(self) -> list[int]:
        return sorted({step for _, step, _ in self.cells})

    def suggestion(self, size: int) -> str:
        """The `size` layers whose contribution moves least, as a policy of the grid names them.

        Layer 0 is left out: it turns embeddings into states, and a revealed token comes in through it.
        """
        relative = {layer: self.of(layer).relative for layer in range(1, self.depth)}
        known = sorted((value, layer) for layer, value in relative.items() if value is not None)
        return f"k2_{print_indices(tuple(sorted(layer for _, layer in known[:size])))}"

    def as_json(self, size: int) -> dict[str, object]:
        layers = [
            {
                "layer": layer,
                "change": self.of(layer).relative,
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

"""Reuse policies and their names: `rule_layers[.option]`, safe in a shell and as a folder. Knows no tensors.

k1                  every pass computes every layer
k2_middle           every second pass replays the middle layers' cached residuals
k3_last.output      every pass but each third repeats the last logits; no layer runs
k2_4-9+20.small     layers 4 to 9 and 20; only small passes replay
"""

import re
from dataclasses import dataclass, field

from sampler.errors import InputError
from sampler.plan import COMPUTE, REPLAY, Keeps, LayerPlan, PassKind, Policy, StepContext, compute_all

SUBSET_SIZE = 12
SUBSETS = ("first", "middle", "last", "all")
GRAMMAR = (
    "a policy is rule_layers[.option], such as k1, k2_middle, k3_last.output or k2_4-9+20.small; "
    f"layers are {', '.join(SUBSETS)} or indices"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Periodic:
    """Computes all layers on each `period`-th pass of a block and replays the chosen ones in between."""

    period: int
    replay: LayerPlan
    keeps: Keeps
    small_only: bool
    compute: LayerPlan = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "compute", compute_all(len(self.replay.steps)))

    def plan(self, context: StepContext) -> LayerPlan:
        due = context.step % self.period == 0
        held_back = self.small_only and context.kind is not PassKind.SMALL
        return self.compute if due or held_back else self.replay


@dataclass(frozen=True, kw_only=True, slots=True)
class ReusePolicy:
    """A policy by name, not yet tied to a model. `str` and `parse` are inverse."""

    k: int
    layers: str | None = None
    mode: str = "residual"
    small_only: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InputError(f"policy k{self.k}: k must be at least 1 (k1 computes every layer on every pass)")
        if self.k > 1 and self.layers is None:
            raise InputError(f"policy k{self.k} needs layers, such as k{self.k}_middle; {GRAMMAR}")
        if self.layers is not None and self.layers not in SUBSETS:
            object.__setattr__(self, "layers", _print_indices(_parse_indices(self.layers)))

    @classmethod
    def parse(cls, name: str) -> "ReusePolicy":
        """The policy called `name`; an unknown name is an error that says what is allowed."""
        rule, *options = name.split(".")
        rule, underscore, layers = rule.partition("_")
        matched = re.fullmatch(r"k(0|[1-9][0-9]{0,5})", rule)
        unknown = [option for option in options if option not in OPTIONS]
        if not matched or unknown or len(set(options)) < len(options) or (underscore and not layers):
            reason = f"no option .{unknown[0]}, only .output and .small" if unknown else GRAMMAR
            raise InputError(f"unknown policy {name!r}: {reason}")
        settings: dict[str, object] = {}
        for option in options:
            settings.update(OPTIONS[option])
        return cls(k=int(matched[1]), layers=layers or None, **settings)  # type: ignore[arg-type]

    def __str__(self) -> str:
        layers = "" if self.layers is None else f"_{self.layers}"
        output = ".output" if self.mode == "output" else ""
        return f"k{self.k}{layers}{output}{'.small' if self.small_only else ''}"

    def bind(self, depth: int, subset_size: int | None = None) -> Policy:
        """This policy on a model of `depth` layers."""
        indices = self.layer_indices(depth, subset_size)
        if self.k == 1:
            indices = ()
        replaying = set(indices)
        stale = self.mode == "output" and self.k > 1
        steps = (COMPUTE,) * depth if stale else tuple(REPLAY if i in replaying else COMPUTE for i in range(depth))
        keeps = Keeps(final_states=True) if stale else Keeps(layers=indices)
        return Periodic(period=self.k, replay=LayerPlan(steps, stale=stale), keeps=keeps, small_only=self.small_only)

    def layer_indices(self, depth: int, subset_size: int | None = None) -> tuple[int, ...]:
        """The layers this policy names in a model of `depth` layers; every subset has the same size."""
        if self.layers is None:
            return ()
        if self.layers in SUBSETS:
            return tuple(_subset(self.layers, depth, checked_subset_size(depth, subset_size)))
        indices = _parse_indices(self.layers)
        if indices[-1] >= depth:
            raise InputError(
                f"policy {self}: layer {indices[-1]} is outside the model, whose layers are 0 to {depth - 1}"
            )
        return indices


OPTIONS: dict[str, dict[str, object]] = {"output": {"mode": "output"}, "small": {"small_only": True}}


def _subset(name: str, depth: int, size: int) -> range:
    """Layer 0 is never in `first`: it turns embeddings into states and has no earlier state to stand on."""
    start = {"first": 1, "middle": (depth - size) // 2, "last": depth - size}
    return range(depth) if name == "all" else range(start[name], start[name] + size)


def checked_subset_size(depth: int, requested: int | None = None) -> int:
    """Layers in each of first, middle, last: as requested, else 12, else a third of a stack too shallow for 12."""
    if requested is None:
        return SUBSET_SIZE if depth > SUBSET_SIZE else max(1, depth // 3)
    if not 1 <= requested < depth:
        raise InputError(
            f"subset size {requested} does not fit a model of {depth} layers; 1 to {depth - 1} are allowed"
        )
    return requested


def _parse_indices(text: str) -> tuple[int, ...]:
    indices: list[int] = []
    for part in text.split("+"):
        matched = re.fullmatch(r"(0|[1-9][0-9]{0,5})(?:-(0|[1-9][0-9]{0,5}))?", part)
        if not matched:
            raise InputError(f"unknown layers {text!r}: {', '.join(SUBSETS)} or indices such as 4-9+20 are allowed")
        low, high = int(matched[1]), int(matched[2] or matched[1])
        if high < low:
            raise InputError(f"layers {text!r}: the range {part} runs backwards; write {high}-{low}")
        indices.extend(range(low, high + 1))
    if len(set(indices)) < len(indices):
        raise InputError(f"layers {text!r}: a layer is named twice; name each layer once, as in 4-9+20")
    return tuple(sorted(indices))


def _print_indices(indices: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

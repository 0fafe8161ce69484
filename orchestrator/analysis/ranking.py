"""All configurations of a task on the same axes: against k=1 at the task's first decode settings.

A policy has to beat more than k=1: a lower threshold or a larger small block makes k=1 faster too. So decode settings
and policies are ranked together, by accuracy and by tokens/s, layer executions or layer-positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orchestrator.analysis.columns import Array
from orchestrator.analysis.intervals import Estimate, paired_bootstrap
from orchestrator.analysis.runs import ResolvedConfiguration, TaskRuns
from orchestrator.core.configuration import DECODE_SETTINGS, Configuration

SPEED, EXECUTIONS, POSITIONS = "tokens/s", "layer executions", "layer-positions"
AXES = (SPEED, EXECUTIONS, POSITIONS)

REFERENCE = "k=1"
SEVERAL_SETTINGS = "several decode settings"
GRID, OUTPUT = "fixed grid", "output mode"
RULES = (
    "adaptive",
    "trim",
    "trim, random",
    "mlp",
    "attn",
    "skip",
    "stale",
    "delayed",
    "dllm",
    "elastic",
    "es",
    "focus",
)
SETTING_FAMILIES = tuple(name.replace("_", " ") for name in DECODE_SETTINGS)
FAMILIES = (REFERENCE, *SETTING_FAMILIES, SEVERAL_SETTINGS, GRID, OUTPUT, *RULES)


def family_order(family: str) -> tuple[int, str]:
    """Sort key for tables and legends; unknown families come last, by name."""
    return (FAMILIES.index(family), "") if family in FAMILIES else (len(FAMILIES), family)


def family_of(resolved: ResolvedConfiguration, reference: Configuration) -> str:
    """For k=1 the decode setting that it changes, for other policies their rule."""
    if resolved.k == 1:
        changed = [name.replace("_", " ") for name in resolved.configuration.changed_from(reference)]
        return REFERENCE if not changed else changed[0] if len(changed) == 1 else SEVERAL_SETTINGS
    if resolved.k is not None:
        return OUTPUT if resolved.mode == "output" else GRID
    rule = resolved.policy.partition("_")[0].partition("=")[0]
    return "trim, random" if rule == "trim" and resolved.policy.endswith(".random") else rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Ratios against k=1 at the first settings, per token and on the same documents: above 1 is a gain."""

    name: str  # the policy and its decode settings that differ from the reference
    family: str
    points: Estimate  # paired accuracy difference; negative is worse
    speed: Estimate | None
    executions: float | None  # half a layer counts by its share of the layer's weights
    positions: float | None
    beaten_by: tuple[str | None, ...] = (None,) * len(AXES)  # on each axis, a configuration that dominates this one

    def gain(self, axis: str) -> float | None:
        speed = None if self.speed is None else self.speed.value
        return {SPEED: speed, EXECUTIONS: self.executions, POSITIONS: self.positions}[axis]

    def on_front(self, axis: str) -> bool:
        return self.gain(axis) is not None and self.beaten_by[AXES.index(axis)] is None


def rank(
    rows: TaskRuns,
    number: int,
    reference: Configuration,
    speed: Estimate | None,
    model: Mapping[str, Any],
    rng: np.random.Generator,
) -> Ranking | None:
    """One configuration against k=1 at the settings of `reference`; None if they share no document."""
    resolved, runs, base = rows.configurations[number], rows.runs_of(number), rows.baseline_runs(reference.settings)
    both = rows.present(runs) & rows.present(base)
    if not both.any():
        return None

    def gain(work: Callable[[Array], Array]) -> float | None:
        """Work per token at k=1 ÷ work per token here."""
        sums = [(work(side)[both].sum(), rows.mean(side, "tokens")[both].sum()) for side in (base, runs)]
        (base_work, base_tokens), (own_work, own_tokens) = sums
        if not (base_tokens > 0 and own_tokens > 0 and own_work > 0):
            return None
        return float((base_work / base_tokens) / (own_work / own_tokens))

    if resolved.is_baseline and resolved.settings == reference.settings:
        points = Estimate(value=0.0, low=0.0, high=0.0)
    else:
        differences = 100 * (rows.mean(runs, "score") - rows.mean(base, "score"))[both]
        points = paired_bootstrap(differences, rows.strata[both], rng)[0]
    configuration = resolved.configuration
    return Ranking(
        name=configuration.label(configuration.changed_from(reference)),
        family=family_of(resolved, reference),
        points=points,
        speed=speed,
        executions=gain(lambda side: _executions(rows, side, resolved, model)),
        positions=gain(lambda side: rows.mean(side, "layer_positions")),
    )


def _executions(rows: TaskRuns, runs: Array, resolved: ResolvedConfiguration, model: Mapping[str, Any]) -> Array:
    """Layers that ran; a replayed half layer is subtracted by its share of the layer's weights."""
    weights = model.get("layer_weights") or (0, 0)
    halves = {"attn": weights[0], "mlp": weights[1]}
    share = halves.get(str(resolved.mode), 0) / max(1, sum(weights))
    replayed = rows.mean(runs, "replayed") * len(resolved.layers) * share
    result: Array = rows.mean(runs, "layers_computed") - replayed
    return result


def dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """At least as good in both coordinates, and better in one."""
    return one[0] >= other[0] and one[1] >= other[1] and one != other


def with_beaten_by(accuracies: Sequence[float], rankings: Sequence[Ranking | None]) -> list[Ranking | None]:
    """Fills `beaten_by`. Decode settings of k=1 are named before policies: they cost nothing."""
    pairs = list(zip(accuracies, rankings, strict=True))
    ranked = sorted(((a, one) for a, one in pairs if one is not None), key=lambda pair: family_order(pair[1].family))
    return [
        None if one is None else replace(one, beaten_by=tuple(_beaten_by(accuracy, one, ranked, axis) for axis in AXES))
        for accuracy, one in pairs
    ]


def _beaten_by(accuracy: float, one: Ranking, ranked: Sequence[tuple[float, Ranking]], axis: str) -> str | None:
    own = one.gain(axis)
    for other_accuracy, other in ranked:
        gain = other.gain(axis)
        if own is not None and gain is not None and dominates((other_accuracy, gain), (accuracy, own)):
            return other.name
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class FastestOfFamily:
    """The fastest configuration of a family whose accuracy interval lies above minus the margin."""

    family: str
    tried: int
    index: int | None  # into the task's configurations; None: none is within the margin


def fastest_within_margin(
    rankings: Sequence[Ranking | None], margin: float, axis: str = SPEED
) -> list[FastestOfFamily]:
    result = []
    for family in sorted({one.family for one in rankings if one is not None}, key=family_order):
        members = {index: one for index, one in enumerate(rankings) if one is not None and one.family == family}
        gains = {index: one.gain(axis) or 0.0 for index, one in members.items() if one.points.low > -margin}
        best = max(gains, key=gains.__getitem__) if gains else None
        result.append(FastestOfFamily(family=family, tried=len(members), index=best))
    return result


def beyond_fixed_grid(rankings: Sequence[Ranking | None]) -> bool:
    """Whether there is more than the fixed grid at one set of decode settings."""
    return any(one is not None and one.family not in (REFERENCE, GRID, OUTPUT) for one in rankings)

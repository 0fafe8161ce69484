"""Every configuration on the same axes: against k=1 at the task's first decode settings. Knows no clock of its own.

A policy has to beat more than k=1: lowering the threshold or taking a larger small block makes k=1 faster too. So
decode settings and policies stand side by side here, over tokens/s, layer executions and layer-positions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orchestrator.analysis.accuracy import interval
from orchestrator.analysis.columns import Array
from orchestrator.analysis.families import GRID, OUTPUT, REFERENCE, family, place_of, short_name
from orchestrator.analysis.pairs import Configuration, Settings, TaskRows
from orchestrator.analysis.pareto import beats
from orchestrator.analysis.resample import Estimate

SPEED, EXECUTIONS, POSITIONS = "tokens/s", "layer executions", "layer-positions"
AXES = (SPEED, EXECUTIONS, POSITIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Ratios against k=1 at the first settings, per token and on the same documents: above 1 is a gain."""

    name: str  # the policy, with decode settings that are not the first ones
    family: str
    points: Estimate  # accuracy, paired; negative is worse
    speed: Estimate | None
    executions: float | None  # half a layer counts by its share of the layer's weights
    positions: float | None
    beaten: tuple[str | None, ...] = (None,) * len(AXES)  # on each, who is as accurate, as good, and better in one

    def gain(self, axis: str) -> float | None:
        return {
            SPEED: None if self.speed is None else self.speed.value,
            EXECUTIONS: self.executions,
            POSITIONS: self.positions,
        }[axis]

    def on_front(self, axis: str) -> bool:
        return self.gain(axis) is not None and self.beaten[AXES.index(axis)] is None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Standings:
    """Of one task; `reference` are the settings of the k=1 that all are measured against."""

    rows: TaskRows
    reference: Settings
    model: Mapping[str, Any]
    rng: np.random.Generator

    def of(self, number: int, speed: Estimate | None) -> Standing | None:
        """None where the configuration shares no document with the reference."""
        rows, base = self.rows, self.rows.baseline_runs(self.reference)
        runs, configuration = rows.runs_of(number), rows.configurations[number]
        both = rows.present(runs) & rows.present(base)
        if not both.any():
            return None
        apart = 100 * (rows.mean(runs, "score") - rows.mean(base, "score"))[both]
        same = configuration.is_baseline and configuration.settings == self.reference
        zero = Estimate(value=0.0, low=0.0, high=0.0)
        return Standing(
            name=short_name(configuration, self.reference),
            family=family(configuration, self.reference),
            points=zero if same else interval(apart, rows.strata[both], self.rng)[0],
            speed=speed,
            executions=self._gain(runs, base, both, lambda of: self._executions(of, configuration)),
            positions=self._gain(runs, base, both, lambda of: rows.mean(of, "layer_positions")),
        )

    def _gain(self, runs: Array, base: Array, both: Array, work: Callable[[Array], Array]) -> float | None:
        """What k=1 takes per token ÷ what these runs take; None where a side delivered no token or ran nothing."""
        sums = [(work(of)[both].sum(), self.rows.mean(of, "tokens")[both].sum()) for of in (base, runs)]
        (base_work, base_tokens), (own_work, own_tokens) = sums
        if not (base_tokens > 0 and own_tokens > 0 and own_work > 0):
            return None
        return float((base_work / base_tokens) / (own_work / own_tokens))

    def _executions(self, runs: Array, configuration: Configuration) -> Array:
        """Layers that ran; where half of one was replayed, that half is taken off by its share of the weights."""
        weights = self.model.get("layer_weights") or (0, 0)
        halves = {"attn": weights[0], "mlp": weights[1]}
        share = halves.get(str(configuration.mode), 0) / max(1, sum(weights))
        replayed = self.rows.mean(runs, "replayed") * len(configuration.layers) * share
        result: Array = self.rows.mean(runs, "layers_computed") - replayed
        return result


Placed = tuple[float, Standing]  # with its accuracy


def with_fronts(accuracies: Sequence[float], found: Sequence[Standing | None]) -> list[Standing | None]:
    """Tells each who beats it on each axis; decode settings of k=1 are named before policies: they cost nothing."""
    placed = [(accuracy, one) for accuracy, one in zip(accuracies, found, strict=True) if one is not None]
    placed.sort(key=lambda each: place_of(each[1].family))
    return [
        None if one is None else replace(one, beaten=tuple(_beaten(one, accuracy, placed, axis) for axis in AXES))
        for accuracy, one in zip(accuracies, found, strict=True)
    ]


def _beaten(one: Standing, accuracy: float, placed: Sequence[Placed], axis: str) -> str | None:
    own = one.gain(axis)
    for theirs, other in placed:
        gain = other.gain(axis)
        if own is not None and gain is not None and beats((theirs, gain), (accuracy, own)):
            return other.name
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Iso:
    """The fastest of a family whose accuracy is within the margin, by the low end of its interval."""

    family: str
    tried: int
    place: int | None  # in the task's configurations; None: none is within the margin


def iso_accuracy(found: Sequence[Standing | None], margin: float, axis: str = SPEED) -> list[Iso]:
    result = []
    for name in sorted({one.family for one in found if one is not None}, key=place_of):
        members = {place: one for place, one in enumerate(found) if one is not None and one.family == name}
        gains = {place: one.gain(axis) or 0.0 for place, one in members.items() if one.points.low > -margin}
        best = max(gains, key=gains.__getitem__) if gains else None
        result.append(Iso(family=name, tried=len(members), place=best))
    return result


def worth_showing(found: Sequence[Standing | None]) -> bool:
    """Whether there is more than the fixed grid at one set of decode settings."""
    usual = (REFERENCE, GRID, OUTPUT)
    return any(one is not None and one.family not in usual for one in found)

"""Which family a configuration belongs to: a decode setting of k=1 that was changed, or the rule of its policy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orchestrator.analysis.columns import Array
from orchestrator.analysis.intervals import Estimate, interval
from orchestrator.analysis.runs import Configuration, Settings, TaskRows

REFERENCE = "k=1"
DECODING = ("threshold", "small block", "block cache")  # in the order of Settings
SEVERAL = "several decode settings"
GRID, OUTPUT = "fixed grid", "output mode"
RULES = ("adaptive", "trim", "trim, random", "mlp", "attn", "skip", "stale")
FAMILIES = (REFERENCE, *DECODING, SEVERAL, GRID, OUTPUT, *RULES)


def place_of(family: str) -> tuple[int, str]:
    """Its place in tables and legends: rules that nobody has put into the order come last, by name."""
    return (FAMILIES.index(family), "") if family in FAMILIES else (len(FAMILIES), family)


def _changed(configuration: Configuration, reference: Settings) -> dict[str, float]:
    pairs = zip(DECODING, configuration.settings, reference, strict=True)
    return {name: now for name, now, usual in pairs if now != usual}


def short_name(configuration: Configuration, reference: Settings) -> str:
    """The policy, with only those decode settings that are not the reference's."""
    changed = _changed(configuration, reference).items()
    said = [f"{name} {('off', 'on')[now] if isinstance(now, bool) else f'{now:g}'}" for name, now in changed]
    return " ".join([configuration.policy, *said])


def family(configuration: Configuration, reference: Settings) -> str:
    """A policy is of its rule's family whatever its decode settings; k=1 is of the one setting that it changes."""
    if configuration.is_baseline:
        changed = [*_changed(configuration, reference)]
        return REFERENCE if not changed else changed[0] if len(changed) == 1 else SEVERAL
    if configuration.k is not None:
        return OUTPUT if configuration.mode == "output" else GRID
    rule = configuration.policy.partition("_")[0].partition("=")[0]
    return "trim, random" if rule == "trim" and configuration.policy.endswith(".random") else rule


def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """For each (accuracy, speed-up): no other point is at least as good in both and better in one."""
    return [not any(beats(other, point) for other in points) for point in points]


def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] >= other[0] and one[1] >= other[1] and one != other


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

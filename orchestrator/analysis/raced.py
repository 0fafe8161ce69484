"""Verdicts of a race, and intervals of an unfinished sweep: they are valid however often one looks at them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from orchestrator.analysis.accuracy import PairedDifference
from orchestrator.analysis.gates import IMPORTED
from orchestrator.analysis.intervals import CONFIDENCE, Bounds, Estimate, around
from orchestrator.analysis.runs import ResolvedConfiguration
from orchestrator.analysis.speedups import Speedup
from orchestrator.analysis.verdicts import (
    ACCURACY_ONLY,
    CONFIRMED,
    SPEED_AND_ACCURACY,
    UNDECIDED,
    Compared,
    Criteria,
    Verdict,
)
from orchestrator.core.configuration import Configuration
from orchestrator.core.evidence import MeanSequence, difference_bounds
from orchestrator.core.race import DECISIONS_KEY, SPEED, Look, Race, RaceEntry, TaskRace
from orchestrator.core.trial import WantedDocuments, shards_of_table
from sampler.errors import InputError

DEFAULT_ALPHA = 0.05  # of a sweep that is not a race


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceResult:
    """A configuration in a race. If it was stopped early, its estimates are biased, because they are why it stopped."""

    entry: RaceEntry
    path: tuple[Look, ...]  # the evidence after each shard
    stopped_early: bool

    @property
    def note(self) -> str:
        """A warning to show next to the estimates; empty if the configuration was not stopped early."""
        used = f"{self.entry.documents:,} of {self.entry.planned:,} documents"
        return f"stopped early: {used}, estimates are biased" if self.stopped_early else ""

    @classmethod
    def of(cls, race: TaskRace, configuration: Configuration) -> "RaceResult":
        entry = next(one for one in race.entries() if one.configuration == configuration)
        path = tuple(race.lanes[configuration].path)
        return cls(entry=entry, path=path, stopped_early=entry.documents_saved > 0)


def replay_race(
    rows: pa.Table, documents: Mapping[str, pa.Table], request: Mapping[str, Any], criteria: Criteria
) -> Race | None:
    """The evidence of a sweep in the order of its shards, whether it is a race or not.

    None for several sweeps together and for imported results, whose documents have no order. With criteria other than
    the declared ones, stored decisions are ignored.
    """
    declared = all(name in request for name in ("identity", "settings", "tasks"))
    if IMPORTED in request or not declared or len(rows["sweep"].unique()) != 1:
        return None
    settings = {"race_alpha": DEFAULT_ALPHA, **request["settings"], "race": True}
    record = {**request, "settings": settings, "margin": criteria.margin, "speedup": criteria.speedup}
    if criteria.exploratory or not is_race(request):
        record[DECISIONS_KEY] = []
    by_shard = {task: shards_of_table(table) for task, table in documents.items()}
    try:
        race = Race.from_record(record, WantedDocuments(by_shard=by_shard))
    except InputError:
        if is_race(request):
            raise
        return None  # an older sweep, whose sweep.json lacks what a race needs
    assert race is not None
    race.add_rows(rows, look=is_race(request))
    return race


def is_race(request: Mapping[str, Any]) -> bool:
    """Whether this sweep.json is that of a race."""
    return bool(request.get("settings", {}).get("race"))


def race_verdict(race: TaskRace, resolved: ResolvedConfiguration, criteria: Criteria) -> Verdict:
    """The decision of the race on a configuration, as a verdict; undecided if there is none."""
    lane, rules, label = race.lanes[resolved.configuration], race.rules, resolved.label
    error = f"race: valid at every look, with an error of {100 * rules.alpha:g} % on this task"
    if lane.decision is None:
        used = lane.path[-1].documents if lane.path else 0
        state = "it is still racing" if used < race.population else "the race ended before it was certain"
        sentence = f"{label} is undecided: {state}, after {used:,} of {race.population:,} documents{_shown(lane.path)}."
        outcome, level = UNDECIDED, None
    else:
        outcome, look = lane.decision.outcome, lane.decision.look
        speed = f"the speed-up is {'above' if outcome == CONFIRMED else 'below'} the declared {rules.speedup:.2f}×"
        accuracy = f"{'less' if outcome == CONFIRMED else 'more'} than {rules.margin:g} points are lost"
        reasons = [speed if criterion == SPEED else accuracy for criterion in lane.decision.because]
        sentence = (
            f"{label} is {outcome}: {' and '.join(reasons)}, which was certain after {look.documents:,} of "
            f"{race.population:,} documents{_shown([look])}."
        )
        level = 1 - rules.alpha / rules.comparisons
    return Verdict(
        outcome=outcome,
        sentence=sentence,
        basis=f"{SPEED_AND_ACCURACY if rules.generates else ACCURACY_ONLY}; {error}",
        exploratory=criteria.exploratory,
        level=level,
    )


def _shown(path: list[Look]) -> str:
    """The evidence at the last look, in parentheses; empty if there was no look."""
    if not path:
        return ""
    look = path[-1]
    ends = (look.speedup_low, look.speedup_high)
    speed = "" if None in ends else f", speed-up {ends[0]:.2f}× to {ends[1]:.2f}×"
    return f" (e-values {_e_value(look.log_e_plus)} for and {_e_value(look.log_e_minus)} against{speed})"


def _e_value(log_e: float) -> str:
    return f"{math.exp(log_e):.2g}" if log_e < math.log(1e6) else "above a million"


def anytime(race: TaskRace, resolved: ResolvedConfiguration, fixed: Compared) -> Compared:
    """The same estimates with intervals and bounds that are valid at any time, from the shards completed in order."""
    if resolved.configuration not in race.lanes:
        return fixed
    difference = _difference(race, resolved.configuration, fixed.difference)
    return replace(fixed, difference=difference, speedup=_speedup(race, resolved.configuration, fixed.speedup))


def _difference(race: TaskRace, configuration: Configuration, fixed: PairedDifference) -> PairedDifference:
    own, base = race.pairs(configuration)
    if not own:
        return fixed
    differences, bounded = race.differences(own, base)
    if not bounded.all():
        return fixed

    def ends(level: float) -> tuple[float, float]:
        low, high = difference_bounds(differences, race.population, level)
        return 100 * low, 100 * high

    level = race.rules.alpha / race.rules.comparisons
    low, high = ends(level)[0], ends(level / 2)[1]
    interval = around(fixed.points.value, *ends((1 - CONFIDENCE) / 2))
    return replace(fixed, points=interval, bounds=_with_ends(fixed.bounds, low, high))


def _speedup(race: TaskRace, configuration: Configuration, fixed: Speedup | None) -> Speedup | None:
    """The speed-up with the ends of its confidence sequences; unbounded before the burn-in."""
    if fixed is None or fixed.tokens is None or fixed.tokens_bounds is None:
        return fixed
    speed = race.speed(*race.pairs(configuration))
    level = race.rules.alpha / race.rules.comparisons

    def ends(sequence: MeanSequence | None, low: float, high: float) -> tuple[float, float]:
        if sequence is None:
            return 0.0, math.inf
        return math.exp(float(sequence.low(low)[-1])), math.exp(float(sequence.high(high)[-1]))

    half = (1 - CONFIDENCE) / 2
    tokens, documents = (None, None) if speed is None else (speed.tokens, speed.documents)
    return replace(
        fixed,
        tokens=_around(fixed.tokens, ends(tokens, half, half)),
        tokens_bounds=_with_ends(fixed.tokens_bounds, *ends(tokens, level, level / 4)),
        seconds=_around(fixed.seconds, ends(documents, half, half)),
        seconds_bounds=_with_ends(fixed.seconds_bounds, *ends(documents, level, level / 4)),
    )


def _around(estimate: Estimate, ends: tuple[float, float]) -> Estimate:
    return around(estimate.value, *ends, level=estimate.level)


def _with_ends(bounds: Bounds, low: float, high: float) -> Bounds:
    return replace(bounds, low=low, high=high, joint_high=high)

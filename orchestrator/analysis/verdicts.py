"""Confirmed, rejected or undecided, from the ends of intervals against what was declared. Computes no interval.

confirmed   the speed-up's low end lies above the declared one and the noise floor, and the worst end of the accuracy
            difference lies above minus the margin
rejected    the speed-up's high end lies below the declared one by more than the noise floor, or the difference's best
            end lies below minus the margin
undecided   otherwise: the intervals do not settle it

The intervals are simultaneous: with m configurations compared in a task each holds at 1 − 5 %/m (Bonferroni). A bad
configuration is confirmed only if the one-sided interval of what is bad about it misses (2.5 %/m); a good one is
rejected only if one of two one-sided intervals misses (2 × 2.5 %/m). So the chance of any wrong verdict in a task's
whole grid, and with it of a wrong one on the hypothesis (confirmed if some configuration is, rejected if all are), is
at most 5 %. Each task is a family of its own. Holm's p-values are printed beside and decide nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.analysis.accuracy import Difference
from orchestrator.analysis.speedups import NoiseFloor, Speedup

CONFIRMED, REJECTED, UNDECIDED = "confirmed", "rejected", "undecided"
SPEED_AND_ACCURACY, ACCURACY_ONLY = "speed and accuracy", "accuracy only"


@dataclass(frozen=True, kw_only=True, slots=True)
class Criteria:
    """What must hold: a drop of less than `margin` points, more than `speedup` times the speed of k=1."""

    margin: float
    speedup: float
    exploratory: bool = False  # not what was declared before the run


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    outcome: str
    sentence: str
    basis: str = SPEED_AND_ACCURACY
    exploratory: bool = False

    def __post_init__(self) -> None:
        assert self.outcome in (CONFIRMED, REJECTED, UNDECIDED), self.outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One criterion: held, failed or open, and how to say it."""

    state: str
    text: str


def judge(
    label: str,
    difference: Difference,
    speedup: Speedup | None,
    floor: NoiseFloor | None,
    criteria: Criteria,
    *,
    generates: bool = True,
) -> Verdict:
    """A configuration's verdict; where nothing is generated, accuracy alone is judged."""
    parts = [_accuracy(difference, criteria.margin)]
    if generates:
        parts.insert(0, _speed(speedup, floor, criteria.speedup))
    states = {part.state for part in parts}
    outcome = REJECTED if REJECTED in states else CONFIRMED if states == {CONFIRMED} else UNDECIDED
    told = [part for part in parts if part.state == outcome]
    reason = "; ".join(part.text for part in (told if outcome != CONFIRMED else parts))
    if outcome == UNDECIDED and difference.detectable > criteria.margin:
        reason += (
            f"; {difference.documents} documents show a change of {difference.detectable:.1f} points or more, "
            f"so a margin of {criteria.margin:g} is out of their reach"
        )
    return Verdict(
        outcome=outcome,
        sentence=f"{label} is {outcome}: {reason}.",
        basis=SPEED_AND_ACCURACY if generates else ACCURACY_ONLY,
        exploratory=criteria.exploratory,
    )


def _accuracy(difference: Difference, margin: float) -> _Part:
    ends = difference.simultaneous
    said = f"the accuracy difference lies between {_points(ends.low)} and {_points(ends.high)} points"
    if ends.low > -margin:
        return _Part(state=CONFIRMED, text=f"{said}, inside the margin of {margin:g}")
    if ends.high < -margin:
        return _Part(state=REJECTED, text=f"{said}, a drop beyond the margin of {margin:g}")
    return _Part(state=UNDECIDED, text=f"{said}, which does not settle a margin of {margin:g}")


def _speed(speedup: Speedup | None, floor: NoiseFloor | None, declared: float) -> _Part:
    ends = None if speedup is None else speedup.tokens_simultaneous
    if speedup is None or ends is None:
        return _Part(state=UNDECIDED, text="no tokens and times could be compared with those of k=1")
    said = f"the speed-up lies between {_times(ends.low)} and {_times(ends.high)}"
    if floor is None:
        return _Part(
            state=UNDECIDED,
            text=f"{said}, but k=1 ran once, so the noise floor is unknown (add k1_middle, or a second repeat)",
        )
    noise = f"within the noise floor: runs at k=1 differ by up to {_times(floor.spread.high)}"
    if ends.high * floor.spread.high < declared:
        return _Part(state=REJECTED, text=f"{said}, below the {_times(declared)} asked for")
    if ends.high < declared:
        return _Part(state=UNDECIDED, text=f"{said}, below the {_times(declared)} asked for but {noise}")
    if ends.low <= declared:
        return _Part(state=UNDECIDED, text=f"{said}, which does not settle the {_times(declared)} asked for")
    if ends.low <= floor.spread.high:
        return _Part(state=UNDECIDED, text=f"{said}, {noise}")
    return _drift(speedup, declared, f"{said}, above the {_times(declared)} asked for")


def _drift(speedup: Speedup, declared: float, said: str) -> _Part:
    """A configuration that writes more is not faster for it: documents must come out faster too."""
    each = speedup.seconds_simultaneous
    if not speedup.drifts or each.low > declared:
        return _Part(state=CONFIRMED, text=said)
    return _Part(
        state=UNDECIDED,
        text=f"{said} in tokens per second, but its answers changed in length (×{speedup.length_ratio or 1:.2f}) and "
        f"documents come out only {_times(each.low)} to {_times(each.high)} as fast",
    )


def withheld(verdict: Verdict, gates: Sequence[str]) -> Verdict:
    """A verdict on rows that a validity gate says cannot be compared is none."""
    if verdict.outcome == UNDECIDED or not gates:
        return verdict
    label = verdict.sentence.partition(" is ")[0]
    return replace(
        verdict,
        outcome=UNDECIDED,
        sentence=f"{label} is undecided, because a validity gate failed ({', '.join(gates)}); the figures alone would "
        f"say {verdict.outcome}.",
    )


def hypothesis(task: str, verdicts: Sequence[tuple[str, Verdict]], criteria: Criteria) -> Verdict:
    """Confirmed if some configuration is, rejected if all are, else undecided."""
    accuracy_only = bool(verdicts) and all(verdict.basis == ACCURACY_ONLY for _, verdict in verdicts)
    basis = ACCURACY_ONLY if accuracy_only else SPEED_AND_ACCURACY
    goal = f"a drop of less than {criteria.margin:g} points"
    if not accuracy_only:
        goal = f"more than {_times(criteria.speedup)} the speed of k=1 at {goal}"
    by_outcome = {
        outcome: [label for label, verdict in verdicts if verdict.outcome == outcome]
        for outcome in (CONFIRMED, REJECTED, UNDECIDED)
    }
    if by_outcome[CONFIRMED]:
        outcome, why = CONFIRMED, f"{_listed(by_outcome[CONFIRMED])} reached {goal}"
    elif verdicts and len(by_outcome[REJECTED]) == len(verdicts):
        outcome, why = REJECTED, f"no configuration reached {goal}; all {len(verdicts)} are rejected"
    elif verdicts:
        outcome = UNDECIDED
        why = f"no configuration is shown to reach {goal}, and {_listed(by_outcome[UNDECIDED])} may"
    else:
        outcome, why = UNDECIDED, "no configuration can be compared with k=1"
    return Verdict(
        outcome=outcome, sentence=f"{task} is {outcome}: {why}.", basis=basis, exploratory=criteria.exploratory
    )


def _listed(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _points(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _times(value: float) -> str:
    return f"{value:.2f}×"

"""Verdicts: confirmed, rejected or undecided, from the ends of intervals against the declared criteria.

confirmed   the low end of the speed-up lies above the declared one and above the noise floor, and the low end of the
            accuracy difference lies above minus the margin
rejected    the high end of the speed-up lies below the declared one by more than the noise floor, or the high end of
            the accuracy difference lies below minus the margin
undecided   otherwise

The intervals are simultaneous: with m compared configurations each holds at 1 − 5 %/m (Bonferroni). A bad
configuration is confirmed only if the one-sided interval of its failing criterion misses (2.5 %/m); a good one is
rejected only if one of two one-sided intervals misses (2 × 2.5 %/m). So the chance of any wrong verdict within a task
is at most 5 %, and so is that of a wrong verdict on the task (confirmed if some configuration is, rejected if all
are). Holm's p-values are reported and decide nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.analysis.accuracy import PairedDifference
from orchestrator.analysis.speedups import NoiseFloor, Speedup

CONFIRMED, REJECTED, UNDECIDED = "confirmed", "rejected", "undecided"
SPEED_AND_ACCURACY, ACCURACY_ONLY = "speed and accuracy", "accuracy only"


@dataclass(frozen=True, kw_only=True, slots=True)
class Criteria:
    """A drop of less than `margin` points at more than `speedup` times the speed of k=1."""

    margin: float
    speedup: float
    exploratory: bool = False  # not what was declared before the run


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """On a configuration or a task. summary.json contains these fields."""

    outcome: str
    sentence: str
    basis: str = SPEED_AND_ACCURACY
    exploratory: bool = False

    def __post_init__(self) -> None:
        assert self.outcome in (CONFIRMED, REJECTED, UNDECIDED), self.outcome


@dataclass(frozen=True, slots=True)
class _Criterion:
    """The outcome of one criterion, and its reason."""

    outcome: str
    reason: str


def judge(
    label: str,
    difference: PairedDifference,
    speedup: Speedup | None,
    noise_floor: NoiseFloor | None,
    criteria: Criteria,
    *,
    generates: bool = True,
) -> Verdict:
    """A configuration's verdict; if nothing is generated, accuracy alone is judged."""
    parts = [_accuracy(difference, criteria.margin)]
    if generates:
        parts.insert(0, _speed(speedup, noise_floor, criteria.speedup))
    outcomes = {part.outcome for part in parts}
    outcome = REJECTED if REJECTED in outcomes else CONFIRMED if outcomes == {CONFIRMED} else UNDECIDED
    reason = "; ".join(part.reason for part in parts if part.outcome == outcome)
    if outcome == UNDECIDED and difference.detectable > criteria.margin:
        reason += (
            f"; {difference.documents} documents can only show a change of {difference.detectable:.1f} points or more, "
            f"more than the margin of {criteria.margin:g}"
        )
    return Verdict(
        outcome=outcome,
        sentence=f"{label} is {outcome}: {reason}.",
        basis=SPEED_AND_ACCURACY if generates else ACCURACY_ONLY,
        exploratory=criteria.exploratory,
    )


def _accuracy(difference: PairedDifference, margin: float) -> _Criterion:
    ends = difference.simultaneous
    range_ = f"the accuracy difference lies between {_points(ends.low)} and {_points(ends.high)} points"
    if ends.low > -margin:
        return _Criterion(CONFIRMED, f"{range_}, inside the margin of {margin:g}")
    if ends.high < -margin:
        return _Criterion(REJECTED, f"{range_}, a drop beyond the margin of {margin:g}")
    return _Criterion(UNDECIDED, f"{range_}, which is too wide to decide on a margin of {margin:g}")


def _speed(speedup: Speedup | None, noise_floor: NoiseFloor | None, declared: float) -> _Criterion:
    ends = None if speedup is None else speedup.tokens_simultaneous
    if speedup is None or ends is None:
        return _Criterion(UNDECIDED, "there are no tokens and times to compare with those of k=1")
    range_ = f"the speed-up lies between {_times(ends.low)} and {_times(ends.high)}"
    if noise_floor is None:
        hint = "k=1 ran once, so the noise floor is unknown (add k1_middle, or a second repeat)"
        return _Criterion(UNDECIDED, f"{range_}, but {hint}")
    spread = noise_floor.spread.high
    noise = f"within the noise floor: runs at k=1 differ by up to {_times(spread)}"
    if ends.high * spread < declared:
        return _Criterion(REJECTED, f"{range_}, below the declared {_times(declared)}")
    if ends.high < declared:
        return _Criterion(UNDECIDED, f"{range_}, below the declared {_times(declared)} but {noise}")
    if ends.low <= declared:
        return _Criterion(UNDECIDED, f"{range_}, which is too wide to decide on the declared {_times(declared)}")
    if ends.low <= spread:
        return _Criterion(UNDECIDED, f"{range_}, {noise}")
    reason, each = f"{range_}, above the declared {_times(declared)}", speedup.seconds_simultaneous
    if not speedup.length_changed or each.low > declared:
        return _Criterion(CONFIRMED, reason)
    # longer answers at more tokens per second are no gain: documents must be finished faster too
    return _Criterion(
        UNDECIDED,
        f"{reason} in tokens per second, but its answers changed in length (×{speedup.length_ratio or 1:.2f}) and its "
        f"speed-up in documents lies between {_times(each.low)} and {_times(each.high)}",
    )


def withhold(verdict: Verdict, gates: Sequence[str]) -> Verdict:
    """Undecided if a validity gate found that the rows cannot be compared."""
    if verdict.outcome == UNDECIDED or not gates:
        return verdict
    label = verdict.sentence.partition(" is ")[0]
    return replace(
        verdict,
        outcome=UNDECIDED,
        sentence=f"{label} is undecided, because a validity gate failed ({', '.join(gates)}); without it the verdict "
        f"would be {verdict.outcome}.",
    )


def judge_task(task: str, verdicts: Sequence[tuple[str, Verdict]], criteria: Criteria) -> Verdict:
    """Confirmed if some configuration is, rejected if all are, else undecided."""
    accuracy_only = bool(verdicts) and all(verdict.basis == ACCURACY_ONLY for _, verdict in verdicts)
    goal = f"a drop of less than {criteria.margin:g} points"
    if not accuracy_only:
        goal = f"more than {_times(criteria.speedup)} the speed of k=1 at {goal}"
    labels = {
        outcome: [label for label, verdict in verdicts if verdict.outcome == outcome]
        for outcome in (CONFIRMED, REJECTED, UNDECIDED)
    }
    if labels[CONFIRMED]:
        outcome, reason = CONFIRMED, f"{_listed(labels[CONFIRMED])} reached {goal}"
    elif verdicts and len(labels[REJECTED]) == len(verdicts):
        outcome, reason = REJECTED, f"no configuration reached {goal}; all {len(verdicts)} are rejected"
    elif verdicts:
        outcome, reason = UNDECIDED, f"no configuration is shown to reach {goal}; {_listed(labels[UNDECIDED])} may"
    else:
        outcome, reason = UNDECIDED, "no configuration can be compared with k=1"
    return Verdict(
        outcome=outcome,
        sentence=f"{task} is {outcome}: {reason}.",
        basis=ACCURACY_ONLY if accuracy_only else SPEED_AND_ACCURACY,
        exploratory=criteria.exploratory,
    )


def _listed(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _points(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _times(value: float) -> str:
    return f"{value:.2f}×"

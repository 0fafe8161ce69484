"""Verdicts: confirmed, rejected or undecided, from one-sided bounds against the declared criteria.

confirmed   the lower bound of the speed-up lies above the declared one, and the lower bound of the accuracy difference
            above minus the margin; if answers changed in length, documents per second must reach the speed-up too
rejected    the upper bound of the speed-up lies below the declared one, or that of the accuracy difference below minus
            the margin; or answers certainly changed in length and documents per second certainly miss the speed-up
undecided   otherwise

With m compared configurations and a familywise error of 5 %:
- A bad configuration is confirmed only if the bound of its failing criterion misses. Both criteria must hold, so each
  bound may use 5 %/m (an intersection-union test).
- A good configuration is rejected only if one of two bounds misses: 2 × 2.5 %/m.
- All configurations are rejected, and the task with them, if each fails at 2.5 % per criterion. That is wrong only if
  a good one is among them, and its own bound missed: no correction for m is needed.
So the chance of any wrong verdict within a task is at most 5 %. Holm's p-values and the noise floor are printed and
decide nothing.

These are verdicts for a fixed number of documents: a sweep that is not complete gets none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scipy import special

from orchestrator.analysis.accuracy import POWER, PairedDifference, documents_needed
from orchestrator.analysis.intervals import Bounds, Levels, one_sided
from orchestrator.analysis.speedups import Speedup
from sampler.errors import InputError, listed

DEFAULT_MARGIN, DEFAULT_SPEEDUP = 5.0, 1.2  # for a sweep.json without criteria
CONFIRMED, REJECTED, UNDECIDED = "confirmed", "rejected", "undecided"
SPEED_AND_ACCURACY, ACCURACY_ONLY = "speed and accuracy", "accuracy only"
UNFINISHED = "none: the sweep is not finished"
MAX_NAMED = 9  # configurations that a sentence lists by name
MAX_TRIALS_NEEDED = 1_000_000  # per configuration; a larger number is not reported


@dataclass(frozen=True, kw_only=True, slots=True)
class Criteria:
    """A configuration should lose less than `margin` points and reach more than `speedup` times the speed of k=1."""

    margin: float
    speedup: float
    exploratory: bool = False  # True: not what was declared before the run

    @classmethod
    def declared_in(cls, request: Mapping[str, Any]) -> "Criteria":
        """The criteria that sweep.json declares."""
        return cls(
            margin=_declared(request, "margin", DEFAULT_MARGIN), speedup=_declared(request, "speedup", DEFAULT_SPEEDUP)
        )

    def overridden(self, margin: float | None, speedup: float | None) -> "Criteria":
        """The criteria with another margin or speed-up, which makes them exploratory; None keeps a value."""
        for name, value in (("margin", margin), ("speed-up", speedup)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"the {name} must be a number above 0 (got {value})")
        chosen = replace(
            self,
            margin=self.margin if margin is None else margin,
            speedup=self.speedup if speedup is None else speedup,
        )
        return replace(chosen, exploratory=chosen != self)


def _declared(request: Mapping[str, Any], name: str, default: float) -> float:
    value = request.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise InputError(f"sweep.json: {name} must be a number above 0 (got {value!r})")
    return float(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict on a configuration, a task or a sweep. summary.json contains these fields."""

    outcome: str
    sentence: str
    basis: str = SPEED_AND_ACCURACY
    exploratory: bool = False
    level: float | None = None  # of the one-sided bounds that decided; None if undecided
    documents_needed: int | None = None  # to decide, if no estimate changes; None if unknown or decided

    def __post_init__(self) -> None:
        assert self.outcome in (CONFIRMED, REJECTED, UNDECIDED), self.outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """A configuration against k=1, as it is judged. `speedup` is None if no times can be compared."""

    label: str
    difference: PairedDifference
    speedup: Speedup | None


def judge_all(
    compared: Sequence[Compared], criteria: Criteria, levels: Levels, *, generates: bool = True, valid: bool = True
) -> list[Verdict]:
    """A verdict on each configuration of a task; if nothing is generated, accuracy alone is judged.

    If a gate failed for some configuration (`valid` False), they are not rejected all at once.
    """
    joint = [_failures(one, criteria, generates=generates, joint=True) for one in compared]
    if valid and compared and all(joint):
        together = f"all {len(compared)} configurations fail" if len(compared) > 1 else ""
        level = one_sided(levels.joint)
        return [
            _verdict(one, REJECTED, [*reasons, *([together] if together else [])], criteria, levels, generates, level)
            for one, reasons in zip(compared, joint, strict=True)
        ]
    return [_judge(one, criteria, levels, generates=generates) for one in compared]


def _judge(one: Compared, criteria: Criteria, levels: Levels, *, generates: bool) -> Verdict:
    failures = _failures(one, criteria, generates=generates, joint=False)
    if failures:
        return _verdict(one, REJECTED, failures, criteria, levels, generates, one_sided(levels.simultaneous))
    doubts = _doubts(one, criteria, levels, generates=generates)
    if doubts:
        verdict = _verdict(one, UNDECIDED, [doubt.reason for doubt in doubts], criteria, levels, generates, None)
        return replace(verdict, documents_needed=_needed(doubts))
    bounds, speed = one.difference.bounds, one.speedup
    reasons = [f"at most {_drop(bounds.low)} points lost, inside the margin of {criteria.margin:g}"]
    if generates:
        assert speed is not None
        assert speed.tokens_bounds is not None
        low = speed.tokens_bounds.low
        reasons.insert(0, f"at least {_times(low)} as fast, above the declared {_times(criteria.speedup)}")
    return _verdict(one, CONFIRMED, reasons, criteria, levels, generates, one_sided(levels.confirming))


def _verdict(
    one: Compared,
    outcome: str,
    reasons: Sequence[str],
    criteria: Criteria,
    levels: Levels,
    generates: bool,
    level: float | None,
) -> Verdict:
    shown = "" if level is None else f" ({_percent(level)} bounds)"
    basis = SPEED_AND_ACCURACY if generates else ACCURACY_ONLY
    if levels.looks > 1:
        basis += f"; look {levels.looks}, so the error of 5 % is divided by {levels.looks}"
    return Verdict(
        outcome=outcome,
        sentence=f"{one.label} is {outcome}: {'; '.join(reasons)}{shown}.",
        basis=basis,
        exploratory=criteria.exploratory,
        level=level,
    )


def _failures(one: Compared, criteria: Criteria, *, generates: bool, joint: bool) -> list[str]:
    """A reason for each criterion that the configuration certainly misses.

    `joint`: at the level that applies if all configurations are rejected at once.
    """

    def high(bounds: Bounds) -> float:
        return bounds.joint_high if joint else bounds.high

    reasons = []
    speed, goal = one.speedup, criteria.speedup
    if generates and speed is not None and speed.noise_known and speed.tokens_bounds is not None:
        tokens, documents = high(speed.tokens_bounds), high(speed.seconds_bounds)
        if tokens < goal:
            reasons.append(f"at most {_times(tokens)} as fast, below the declared {_times(goal)}")
        elif documents < goal and speed.length_certainly_changed:
            reasons.append(
                f"at most {_times(documents)} as fast in documents per second, below the declared {_times(goal)}: its "
                f"answers changed in length (×{speed.length_ratio or 1:.2f})"
            )
    points = high(one.difference.bounds)
    if points < -criteria.margin:
        reasons.append(f"at least {_drop(points)} points lost, beyond the margin of {criteria.margin:g}")
    return reasons


@dataclass(frozen=True, kw_only=True, slots=True)
class _Doubt:
    """A criterion that is neither certainly met nor certainly missed."""

    reason: str
    meets: bool = True  # whether the estimate meets it
    documents: int | None = None  # needed to decide on it; None if unknown


def _needed(doubts: Sequence[_Doubt]) -> int | None:
    """Documents needed to decide: to reject, on one criterion that is missed; to confirm, on all. None if unknown."""
    missed = [doubt for doubt in doubts if not doubt.meets]
    known = [doubt.documents for doubt in missed or doubts if doubt.documents is not None]
    if missed:
        return min(known, default=None)
    return max(known) if len(known) == len(doubts) else None


def _doubts(one: Compared, criteria: Criteria, levels: Levels, *, generates: bool) -> list[_Doubt]:
    """Why a configuration that is not rejected is not confirmed either, and what would settle it."""
    doubts = [_speed_doubt(one.speedup, criteria.speedup, levels)] if generates else []
    own, margin = one.difference, criteria.margin
    if own.bounds.low <= -margin:
        value = own.points.value
        needed = documents_needed(own.disagreement, value, margin, levels)
        if needed is None:
            more = f"{_points(value)} points is too close to it for any number of documents"
        else:
            needed = max(needed, own.documents + 1)
            more = f"if it stays at {_points(value)}, about {_rounded(needed)} documents would settle it"
        ends = f"the accuracy difference lies between {_points(own.bounds.low)} and {_points(own.bounds.high)} points"
        reason = f"{ends}, which is too wide to decide on a margin of {margin:g} ({more})"
        doubts.append(_Doubt(reason=reason, meets=value > -margin, documents=needed))
    return [doubt for doubt in doubts if doubt is not None]


def _speed_doubt(speed: Speedup | None, goal: float, levels: Levels) -> _Doubt | None:
    bounds = None if speed is None else speed.tokens_bounds
    if speed is None or bounds is None:
        return _Doubt(reason="there are no tokens and times of complete shards to compare with those of k=1")
    range_ = f"the speed-up lies between {_times(bounds.low)} and {_times(bounds.high)}"
    if not speed.noise_known:
        hint = "k=1 ran once, in one trial, so the noise between trials is unknown (add k1_middle, or more documents)"
        return _Doubt(reason=f"{range_}, but {hint}")
    assert speed.tokens is not None
    if bounds.low <= goal:
        reason = f"{range_}, which is too wide to decide on the declared {_times(goal)}"
        return _wide_interval(reason, speed, goal, levels)
    each = speed.seconds_bounds
    if speed.length_changed and each.low <= goal:
        # longer answers at more tokens per second are no gain: documents must be finished faster too
        reason = (
            f"{range_} in tokens per second, but its answers changed in length (×{speed.length_ratio or 1:.2f}) and "
            f"its speed-up in documents lies between {_times(each.low)} and {_times(each.high)}"
        )
        return _wide_interval(reason, speed, goal, levels, per_document=True)
    return None


def _wide_interval(reason: str, speed: Speedup, goal: float, levels: Levels, *, per_document: bool = False) -> _Doubt:
    """A doubt about the speed-up, with the number of trials that would settle it if the estimate does not change.

    These are trials of each configuration, of the same size as those so far.
    """
    bounds = speed.seconds_bounds if per_document else speed.tokens_bounds
    estimate = speed.seconds if per_document else speed.tokens
    assert bounds is not None
    assert estimate is not None
    meets, distance = estimate.value > goal, abs(math.log(estimate.value / goal))
    width = math.log(bounds.high / bounds.low) if bounds.low > 0 and math.isfinite(bounds.high) else math.inf
    deviation = width / float(special.ndtri(bounds.low_level) + special.ndtri(bounds.high_level))
    level = one_sided(levels.confirming if meets else levels.joint)
    reach = float(special.ndtri(level) + special.ndtri(POWER))
    trials = (reach * deviation / distance) ** 2 * speed.trials if distance else math.inf
    if not trials <= MAX_TRIALS_NEEDED:
        more = f"{_times(estimate.value)} is too close to it for any number of trials"
        return _Doubt(reason=f"{reason} ({more})", meets=meets)
    needed = max(math.ceil(trials), math.floor(speed.trials) + 1)
    documents = math.ceil(needed * speed.documents / max(speed.trials, 1.0))
    more = f"{_rounded(needed)} trials per configuration, or {_rounded(documents)} documents"
    return _Doubt(
        reason=f"{reason} (if it stays at {_times(estimate.value)}, about {more}, would settle it)",
        meets=meets,
        documents=documents,
    )


def no_verdict_yet(compared: Sequence[Compared], missing: Sequence[str], criteria: Criteria) -> list[Verdict]:
    """Undecided verdicts for a task that is not complete; `missing` has a sentence for each thing that has not run."""
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    reason = (
        f"the sweep is not finished: {missing[0].rstrip('.')}{more}; a verdict before all planned documents are in "
        "would be wrong more often than stated"
    )
    return [
        Verdict(
            outcome=UNDECIDED,
            sentence=f"{one.label} has no verdict yet, because {reason}.",
            basis=UNFINISHED,
            exploratory=criteria.exploratory,
        )
        for one in compared
    ]


def withhold(label: str, verdict: Verdict, gates: Sequence[str]) -> Verdict:
    """The verdict, or an undecided one if validity gates failed, so that the rows cannot be compared."""
    if verdict.outcome == UNDECIDED or not gates:
        return verdict
    return replace(
        verdict,
        outcome=UNDECIDED,
        level=None,
        sentence=f"{label} is undecided, because a validity gate failed ({', '.join(gates)}); without it the verdict "
        f"would be {verdict.outcome}.",
    )


def judge_task(
    task: str, verdicts: Sequence[tuple[str, Verdict]], criteria: Criteria, gates: Sequence[str] = ()
) -> Verdict:
    """The verdict on a task, from its configurations' labels and verdicts, and the gates that failed for any of them.

    Confirmed if at least one configuration is confirmed, rejected if all are rejected, else undecided.
    """
    accuracy_only = bool(verdicts) and all(verdict.basis.startswith(ACCURACY_ONLY) for _, verdict in verdicts)
    goal = f"a drop of less than {criteria.margin:g} points"
    if not accuracy_only:
        goal = f"more than {_times(criteria.speedup)} the speed of k=1 at {goal}"
    by_outcome: Mapping[str, list[str]] = {
        outcome: [label for label, verdict in verdicts if verdict.outcome == outcome]
        for outcome in (CONFIRMED, REJECTED, UNDECIDED)
    }
    if verdicts and verdicts[0][1].basis == UNFINISHED:
        label, unfinished = verdicts[0]
        return replace(unfinished, sentence=task + unfinished.sentence.removeprefix(label))
    open_needs = [verdict.documents_needed for _, verdict in verdicts if verdict.outcome == UNDECIDED]
    needs = [count for count in open_needs if count is not None]
    needed = max(needs) if needs and len(needs) == len(open_needs) and not gates else None
    if by_outcome[CONFIRMED]:
        outcome, reason = CONFIRMED, f"{_named(by_outcome[CONFIRMED])} reached {goal}"
    elif verdicts and len(by_outcome[REJECTED]) == len(verdicts):
        outcome, reason = REJECTED, f"no configuration reached {goal}; all {len(verdicts)} are rejected"
    elif verdicts:
        outcome, reason = UNDECIDED, f"no configuration is shown to reach {goal}"
        if gates:
            reason += f", and validity gates failed ({', '.join(gates)})"
        else:
            reason += f"; {_named(by_outcome[UNDECIDED])} may"
        if needed is not None:
            reason += f"; about {_rounded(needed)} documents would settle it"
    else:
        outcome, reason = UNDECIDED, "no configuration can be compared with k=1"
    return Verdict(
        outcome=outcome,
        sentence=f"{task} is {outcome}: {reason}.",
        basis=verdicts[0][1].basis if verdicts else SPEED_AND_ACCURACY,
        exploratory=criteria.exploratory,
        level=next((verdict.level for _, verdict in verdicts if verdict.outcome == outcome), None),
        documents_needed=needed if outcome == UNDECIDED else None,
    )


def _named(labels: Sequence[str]) -> str:
    return listed(labels, "and") if len(labels) <= MAX_NAMED else f"{len(labels)} configurations"


def _points(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _drop(points: float) -> str:
    return f"{max(0.0, -points):.1f}"


def _times(value: float) -> str:
    return f"{value:.2f}×"


def _percent(level: float) -> str:
    return f"{100 * level:.3g} %" if level < 0.995 else f"{100 * level:.4g} %"


def _rounded(count: int) -> str:
    """Two significant digits, upwards: a power calculation is no more precise than that."""
    unit = 10 ** max(0, len(str(count)) - 2)
    return f"{math.ceil(count / unit) * unit:,}"

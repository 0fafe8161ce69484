"""How the actors spent their time between the first and the last trial, from each trial.json.

Every second of every actor belongs to exactly one of PARTS, so their shares add up to one.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

PARTS = (
    "decoding",  # wall time of the batches
    "calibration",  # decoding the fixed documents before and within each trial
    "scoring",  # scoring answers, building rows and the rest of a trial
    "waiting",  # for rows to be stored, beyond what overlaps with decoding
    "finishing",  # writing a trial's rows into one file
    "between",  # from the end of a trial to the start of the actor's next
    "idle",  # before an actor's first trial and after its last
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A completed attempt, in seconds of the result actor's clock."""

    actor: str
    start: float  # before the calibration
    end: float
    calibration: float
    decoding: float
    waiting: float
    worked: float  # calibration, decoding, scoring and waiting together
    load: float
    warm_up: float

    @classmethod
    def of(cls, attempt: Mapping[str, Any]) -> "Span | None":
        """None for an attempt that was interrupted or had nothing to do."""
        if attempt.get("ended_at") is None or attempt.get("decode_seconds") is None:
            return None
        before = attempt["calibration_seconds"]
        return cls(
            actor=attempt["actor"],
            start=datetime.fromisoformat(attempt["started_at"]).timestamp() - attempt["preparing_seconds"],
            end=datetime.fromisoformat(attempt["ended_at"]).timestamp(),
            calibration=before + attempt.get("recalibration_seconds", 0.0),
            decoding=attempt["decode_seconds"],
            waiting=attempt["waiting_seconds"],
            worked=attempt["seconds"],
            load=attempt["load_seconds"],
            warm_up=attempt["warm_up_seconds"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All actors from the start of the first trial to the end of the last."""

    trials: int
    actors: int
    seconds: float
    parts: Mapping[str, float]  # seconds of all actors, by PARTS
    gaps: tuple[float, ...]  # seconds between consecutive trials of an actor
    loads: int
    load_seconds: float  # of all loads
    warm_up_seconds: float

    def share(self, part: str) -> float:
        return self.parts[part] / (self.actors * self.seconds)

    def as_json(self) -> dict[str, Any]:
        return {
            "trials": self.trials,
            "actors": self.actors,
            "seconds": self.seconds,
            "shares": {part: self.share(part) for part in PARTS},
            "between_trials": {"median": _quantile(self.gaps, 0.5), "p90": _quantile(self.gaps, 0.9)},
            "loads": self.loads,
            "load_seconds": self.load_seconds,
            "warm_up_seconds": self.warm_up_seconds,
        }


def timeline(trials: Iterable[Mapping[str, Any]]) -> Timeline | None:
    """From each trial.json; None if no trial is complete."""
    found = (Span.of(attempt) for facts in trials for attempt in facts["attempts"])
    spans = sorted((span for span in found if span is not None), key=lambda span: span.start)
    if not spans:
        return None
    first, last = spans[0].start, max(span.end for span in spans)
    by_actor: dict[str, list[Span]] = {}
    for span in spans:
        by_actor.setdefault(span.actor, []).append(span)
    gaps = [after.start - before.end for own in by_actor.values() for before, after in pairwise(own)]
    parts = {
        "decoding": sum(span.decoding for span in spans),
        "calibration": sum(span.calibration for span in spans),
        "scoring": sum(span.worked - span.calibration - span.decoding - span.waiting for span in spans),
        "waiting": sum(span.waiting for span in spans),
        "finishing": sum(span.end - span.start - span.worked for span in spans),
        "between": sum(gaps),
        "idle": sum(own[0].start - first + last - own[-1].end for own in by_actor.values()),
    }
    return Timeline(
        trials=len(spans),
        actors=len(by_actor),
        seconds=last - first,
        parts=parts,
        gaps=tuple(gaps),
        loads=len(by_actor),
        load_seconds=sum(own[0].load for own in by_actor.values()),
        warm_up_seconds=sum(own[0].warm_up for own in by_actor.values()),
    )


def _quantile(values: tuple[float, ...], share: float) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]

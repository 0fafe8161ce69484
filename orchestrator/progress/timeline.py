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
    by_actor: dict[str, list[tuple[float, float, Mapping[str, Any]]]] = {}  # start, end and attempt
    for attempt in (attempt for facts in trials for attempt in facts["attempts"]):
        if attempt.get("ended_at") is not None and attempt.get("decode_seconds") is not None:  # else interrupted
            start = datetime.fromisoformat(attempt["started_at"]).timestamp() - attempt["preparing_seconds"]
            end = datetime.fromisoformat(attempt["ended_at"]).timestamp()
            by_actor.setdefault(attempt["actor"], []).append((start, end, attempt))
    if not by_actor:
        return None
    actors = [sorted(own, key=lambda span: span[0]) for own in by_actor.values()]
    spans = [span for own in actors for span in own]
    first, last = min(start for start, _, _ in spans), max(end for _, end, _ in spans)
    gaps = [after[0] - before[1] for own in actors for before, after in pairwise(own)]

    def total(key: str) -> float:
        return float(sum(attempt.get(key, 0.0) for _, _, attempt in spans))

    decoding, waiting, worked = total("decode_seconds"), total("waiting_seconds"), total("seconds")
    calibration = total("calibration_seconds") + total("recalibration_seconds")
    parts = {
        "decoding": decoding,
        "calibration": calibration,
        "scoring": worked - calibration - decoding - waiting,
        "waiting": waiting,
        "finishing": sum(end - start for start, end, _ in spans) - worked,
        "between": sum(gaps),
        "idle": sum(own[0][0] - first + last - own[-1][1] for own in actors),
    }
    return Timeline(
        trials=len(spans),
        actors=len(actors),
        seconds=last - first,
        parts=parts,
        gaps=tuple(gaps),
        loads=len(actors),
        load_seconds=sum(own[0][2]["load_seconds"] for own in actors),
        warm_up_seconds=sum(own[0][2]["warm_up_seconds"] for own in actors),
    )


def _quantile(values: tuple[float, ...], share: float) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[round(100 * share) - 1]

"""How far a sweep is, how fast its documents arrive, and how its actors spend their time."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.core.configuration import BaselineRule
from orchestrator.core.evidence import ROW_COLUMNS
from orchestrator.core.race import Race, RaceEntry
from orchestrator.core.totals import COLUMNS, RunningTotals, Sums, TaskConfiguration, Totals, trial_sums
from orchestrator.core.trial import Trial, WantedDocuments
from orchestrator.store import Store
from orchestrator.store.trial_files import TOTALS_KEY

TrialFacts = Mapping[str, Mapping[str, Any]]  # each trial.json, by trial id
WINDOW_SECONDS = 300.0  # the pace looks back this far, or further if few documents arrived
SAMPLE_SECONDS = 5.0  # between the samples kept
STEADY_DOCUMENTS = 20  # that a window needs for a steady pace
FIRST_DOCUMENTS = 3  # needed for the first estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A sweep at one point in time. Created by the result actor or from a folder; read by views and metrics."""

    sweep: str
    totals: tuple[Totals, ...]
    trials: int
    finished: int = 0
    failed: int = 0
    running: tuple[str, ...] = ()  # labels of running trials
    actors: int = 0
    started: int = 0  # workers started by this run
    warm: int = 0
    race: tuple[RaceEntry, ...] = ()

    @property
    def documents(self) -> int:
        return sum(totals.documents for totals in self.totals)

    @property
    def wanted(self) -> int:
        return sum(totals.wanted for totals in self.totals)


def stored_totals(
    record: Mapping[str, Any], trials: Sequence[Trial], wanted: WantedDocuments, store: Store, facts: TrialFacts
) -> RunningTotals:
    """Totals of the wanted documents in a folder."""
    totals = RunningTotals(wanted.rows(trials), BaselineRule.by_task(record))
    for trial in trials:
        known = facts.get(trial.trial_id)
        if known is not None:
            sums = stored_sums(store, trial.trial_id, known, wanted.of(trial))
            totals.add_sums(trial, sums)
    return totals


def stored_sums(store: Store, trial_id: str, facts: Mapping[str, Any], wanted: Sequence[str] | None = None) -> Sums:
    """Sums over one trial, from trial.json if that has them, else from the rows; `wanted`: only these documents."""
    summary = facts.get(TOTALS_KEY) or {}
    complete = facts["status"] == "finished" and Sums.is_stored(summary) and summary["documents"] == facts["rows"]
    if complete and (wanted is None or facts["rows"] <= len(wanted)):  # a smaller set is part of a larger one
        return Sums.from_json(facts[TOTALS_KEY])
    rows = store.rows([trial_id], ["doc_id", *COLUMNS], verify=False)
    if wanted is not None:
        rows = rows.filter(pc.is_in(rows["doc_id"], pa.array(wanted, pa.string())))
    return trial_sums(rows)


def add_compacted(totals: RunningTotals, store: Store, trials: pa.Table) -> None:
    """Adds compacted trials (`store.compaction.SUMMARY`); the rows of those without stored totals are read."""
    stored = pc.is_valid(trials["documents"])
    totals.add_trials(trials.filter(stored))
    for trial_id in trials.filter(pc.invert(stored))["trial_id"].to_pylist():  # of an older version
        facts = store.trial(trial_id)
        assert facts is not None, trial_id
        totals.add_sums(Trial.from_dict(facts["trial"]), stored_sums(store, trial_id, facts))


def stored_race(record: Mapping[str, Any], wanted: WantedDocuments, store: Store, facts: TrialFacts) -> Race | None:
    """The race of a folder, with the evidence of all its finished trials; None if the sweep is not a race."""
    race = Race.from_record(record, wanted)
    if race is not None:
        add_finished_trials(race, store, facts)
    return race


def add_finished_trials(race: Race, store: Store, facts: TrialFacts) -> None:
    """Adds the rows of all finished trials to a race."""
    finished = [trial_id for trial_id, known in facts.items() if known["status"] == "finished"]
    race.add_rows(store.rows(finished, ROW_COLUMNS, verify=False))


class Pace:
    """Documents per second and time left, measured from the arrival of this run's first document.

    Loading and warm-up are not counted, nor are documents of an earlier run. Documents are weighted by the time that
    documents of their configuration have taken so far.
    """

    def __init__(self) -> None:
        self._before: int | None = None
        self._samples: deque[tuple[float, Mapping[TaskConfiguration, int]]] = deque()
        self._now = 0.0
        self._totals: tuple[Totals, ...] = ()

    def observe(self, at: float, totals: tuple[Totals, ...]) -> None:
        self._now, self._totals = at, totals
        documents = sum(line.documents for line in totals)
        if self._before is None:
            self._before = documents
        if documents > self._before and (not self._samples or at - self._samples[-1][0] >= SAMPLE_SECONDS):
            self._samples.append((at, {line.key: line.documents for line in totals}))
        while len(self._samples) > 1 and self._has_steady_window():
            self._samples.popleft()

    @property
    def documents_per_s(self) -> float | None:
        seconds = self._seconds()
        return self._since(0) / seconds if seconds else None

    @property
    def seconds_left(self) -> float | None:
        if self._totals and all(line.documents >= line.wanted for line in self._totals):
            return 0.0
        seconds, costs = self._seconds(), self._costs()
        if not seconds or not costs:
            return None
        then = self._samples[0][1]
        done = sum(costs[t.key] * (t.documents - then.get(t.key, 0)) for t in self._totals)
        missing = sum(costs[t.key] * max(0, t.wanted - t.documents) for t in self._totals)
        return missing / done * seconds if done > 0 else None

    def _has_steady_window(self) -> bool:
        """Whether the samples after the first one are enough."""
        return self._now - self._samples[1][0] >= WINDOW_SECONDS and self._since(1) >= STEADY_DOCUMENTS

    def _since(self, sample: int) -> int:
        return sum(line.documents for line in self._totals) - sum(self._samples[sample][1].values())

    def _seconds(self) -> float | None:
        enough = self._samples and self._since(0) >= FIRST_DOCUMENTS
        return self._now - self._samples[0][0] if enough else None

    def _costs(self) -> dict[TaskConfiguration, float]:
        """Seconds per document. A configuration without documents has the mean of its task, or else of all tasks."""
        overall = _cost(self._totals)
        if overall is None:
            return {}
        by_task: dict[str, list[Totals]] = {}
        for line in self._totals:
            by_task.setdefault(line.task, []).append(line)
        tasks = {task: _cost(tuple(lines)) or overall for task, lines in by_task.items()}
        return {line.key: _cost((line,)) or tasks[line.task] for line in self._totals}


def _cost(totals: tuple[Totals, ...]) -> float | None:
    documents = sum(line.documents for line in totals)
    return sum(line.seconds for line in totals) / documents or None if documents else None


# Every second of every actor belongs to exactly one of these, so their shares add up to one.
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
    """The timeline of a sweep, from each trial.json; None if no trial is complete."""
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

"""The race of a sweep: which configurations are decided, and which trials are no longer needed.

The evidence on a configuration is evaluated after each shard that it and k=1 have completed, in the order of the
shards. Such a look uses only the rows of the shards up to that one, so the same rows always lead to the same decisions,
in any order of arrival and with any number of interruptions.

With m configurations on a task and a familywise error of α:
confirmed   E⁺ ≥ m/α, and the lower bound of the speed-up at level α/m is above the goal
rejected    E⁻ ≥ 2m/α, or the upper bound of the speed-up is below the goal, at a level of α/2m in total
If answers change in length by more than MAX_LENGTH_CHANGE, documents per second must reach the goal too; confidence
bounds of both decide this, within the same levels.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa

from orchestrator.core.configuration import OWN_BASELINE, BaselineRule, Configuration, grid
from orchestrator.core.evidence import (
    BURN_IN_SHARDS,
    RaceRules,
    SpeedEvidence,
    TrialEvidence,
    log_ratios,
    log_wealth,
    trial_evidence,
)
from orchestrator.core.speed import Array
from orchestrator.core.totals import TaskConfiguration
from orchestrator.core.trial import Trial, TrialKey, WantedDocuments, race_position, trial_key
from sampler.errors import InputError
from sampler.policy import ReusePolicy
from sampler.records import LOGLIKELIHOOD

RACING, CONFIRMED, REJECTED, FINISHED = "racing", "confirmed", "rejected", "finished"
SPEED, ACCURACY = "speed", "accuracy"
DECISIONS_KEY = "race_decisions"  # in sweep.json: a list that only grows


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The evidence on a configuration after its first `shards` shards. Speed-ups are None before the burn-in."""

    shards: int
    documents: int
    difference: float  # mean accuracy difference so far, in points
    log_e_plus: float
    log_e_minus: float
    speedup: float | None = None  # in tokens/s: geometric mean over shards
    speedup_low: float | None = None  # at the level that confirms
    speedup_high: float | None = None  # at the level that rejects


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Stored in sweep.json together with its evidence; never changed."""

    task: str
    configuration: Configuration
    outcome: str
    because: tuple[str, ...]  # criteria that decided: SPEED, ACCURACY
    look: Look
    rules: RaceRules

    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            **self.configuration.as_dict(),
            "outcome": self.outcome,
            "because": list(self.because),
            "look": asdict(self.look),
            "rules": asdict(self.rules),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Decision":
        return cls(
            task=values["task"],
            configuration=Configuration.from_mapping(values),
            outcome=values["outcome"],
            because=tuple(values["because"]),
            look=Look(**{item.name: values["look"][item.name] for item in fields(Look)}),
            rules=RaceRules(**{k: v for k, v in values["rules"].items() if k in RaceRules.__slots__}),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RaceEntry:
    """The state of a configuration in the race. Created by `Race.entries`; read by views, metrics and reports."""

    task: str
    configuration: Configuration
    state: str
    documents: int  # in finished trials
    planned: int  # without the race
    look: Look | None  # the latest; None for k=1, and before the first shard is complete
    rules: RaceRules
    seconds_saved: float  # of decoding, had it run as many documents as the configuration with the most
    seconds_saved_at_end: float  # of decoding all documents, if nothing else is decided

    @property
    def documents_saved(self) -> int:
        return 0 if self.state == RACING else self.planned - self.documents

    @property
    def key(self) -> TaskConfiguration:
        return self.task, self.configuration

    @property
    def nearest(self) -> float | None:
        """How close the evidence on accuracy is to its nearest decision: 1 means reached."""
        known = self.measures
        return max(0.0, known["evidence_for"], known["evidence_against"]) if known else None

    @property
    def measures(self) -> dict[str, float]:
        """The known evidence on accuracy (1 means decided) and bounds of the speed-up."""
        if self.look is None:
            return {}
        values = {
            "evidence_for": self.look.log_e_plus / self.rules.log_e_confirm,
            "evidence_against": self.look.log_e_minus / self.rules.log_e_reject,
            "speedup_low": self.look.speedup_low,
            "speedup_high": self.look.speedup_high,
        }
        return {name: value for name, value in values.items() if value is not None}

    def as_json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "documents": self.documents,
            "planned": self.planned,
            "look": None if self.look is None else asdict(self.look),
            "log_e_confirm": self.rules.log_e_confirm,
            "log_e_reject": self.rules.log_e_reject,
            "goal": self.rules.speedup,
            "documents_saved": self.documents_saved,
            "seconds_saved": self.seconds_saved,
            "seconds_saved_at_end": self.seconds_saved_at_end,
        }


@dataclass(kw_only=True, slots=True, eq=False)
class _Lane:
    """One configuration on one task: its finished trials and the looks so far."""

    trials: dict[int, TrialEvidence] = field(default_factory=dict)  # by the shard's index in the order
    path: list[Look] = field(default_factory=list)
    decision: Decision | None = None
    fast: bool = False  # at any look so far: the levels account for repeated looks
    accurate: bool = False  # at any look so far


class TaskRace:
    """The race on one task."""

    def __init__(
        self,
        task: str,
        *,
        shards: Mapping[int, Sequence[str]],
        configurations: Sequence[Configuration],
        rules: Mapping[str, Any],
        generates: bool,
        baseline: BaselineRule = OWN_BASELINE,
    ) -> None:
        self.task = task
        self._shards = [tuple(shards[number]) for number in sorted(shards)]
        self.population = sum(map(len, self._shards))
        self._index = {number: index for index, number in enumerate(sorted(shards))}
        self.lanes = {one: _Lane() for one in configurations}
        self.baseline = baseline
        self._k1: dict[tuple[Any, ...], list[Configuration]] = {}
        for one in configurations:
            if ReusePolicy.parse(one.policy).k == 1 and baseline.is_baseline(one):
                self._k1.setdefault(one.settings, []).append(one)
        self.compared = [one for one in configurations if one not in self._k1.get(one.settings, ())]
        self.rules = RaceRules(
            **rules, comparisons=max(1, len(self.compared)), generates=generates, shards=max(1, len(shards))
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any], task: str, shards: Mapping[int, Sequence[str]]) -> "TaskRace":
        """As sweep.json declares it; `shards` has the wanted documents of the task, in any order."""
        settings, generates = record["settings"], record["tasks"][task]["kind"] != LOGLIKELIHOOD
        sort_key = partial(race_position, record["identity"].get("seed", 0), task)
        return cls(
            task,
            shards={shard: sorted(ids, key=sort_key) for shard, ids in shards.items()},
            configurations=grid(settings, decoded=generates),
            rules={"alpha": settings["race_alpha"], "margin": record["margin"], "speedup": record["speedup"]},
            generates=generates,
            baseline=BaselineRule.by_task(record)[task],
        )

    def add(self, configuration: Configuration, shard: int, evidence: TrialEvidence) -> None:
        """Adds a finished trial, unless another command planned it or some of its documents failed."""
        index = self._index.get(shard)
        if index is not None and configuration in self.lanes and evidence.scores.keys() == set(self._shards[index]):
            self.lanes[configuration].trials[index] = evidence

    def look(self, settings: tuple[Any, ...] | None = None) -> list[Decision]:
        """Takes all due looks and returns the new decisions; `settings` are those of the k=1 run compared with."""
        looked = (self._look(one) for one in self.compared if settings in (None, self.baseline.settings_for(one)))
        return [decision for decision in looked if decision is not None]

    def _k1_of(self, configuration: Configuration) -> Configuration | None:
        """The k=1 run that a configuration is compared with. Others are replicates, needed only during the burn-in."""
        return next(iter(self._k1.get(self.baseline.settings_for(configuration), ())), None)

    def needed_shards(self, configuration: Configuration) -> int:
        """The number of shards, counted from the first, that this configuration has to run."""
        lane, baseline = self.lanes[configuration], self._k1_of(configuration)
        if configuration in self.compared:
            return len(self._shards) if lane.decision is None else lane.decision.look.shards
        settings = self.baseline.settings_for(configuration)
        rivals = [self.needed_shards(one) for one in self.compared if self.baseline.settings_for(one) == settings]
        longest = max(rivals, default=len(self._shards))
        return longest if configuration == baseline else min(longest, BURN_IN_SHARDS)

    def is_needed(self, configuration: Configuration, shard: int) -> bool:
        """Whether the trial on this shard has to run; True also for trials that are not part of the race."""
        return configuration not in self.lanes or self._index.get(shard, 0) < self.needed_shards(configuration)

    def unneeded_trials(self) -> Iterator[TrialKey]:
        for configuration in self.lanes:
            for shard in list(self._index)[self.needed_shards(configuration) :]:
                yield trial_key({"task": self.task, **configuration.as_dict(), "repeat": 0, "shard": shard})

    def needed_documents(self, configuration: Configuration) -> int:
        return sum(map(len, self._shards[: self.needed_shards(configuration)]))

    def pairs(self, configuration: Configuration) -> tuple[list[TrialEvidence], list[TrialEvidence]]:
        """The trials of the configuration and of k=1 on all shards before the first that one of them is missing."""
        baseline = self._k1_of(configuration)
        own, base = self.lanes[configuration].trials, {} if baseline is None else self.lanes[baseline].trials
        ready = next(index for index in count() if index not in own or index not in base)
        return [own[index] for index in range(ready)], [base[index] for index in range(ready)]

    def differences(self, own: Sequence[TrialEvidence], base: Sequence[TrialEvidence]) -> tuple[Array, Array]:
        """For each document in race order: the difference of scores, and whether all scores so far are in 0 to 1."""
        documents = [(index, doc_id) for index, ids in enumerate(self._shards[: len(own)]) for doc_id in ids]
        scores = np.array([[trials[index].scores[doc_id] for index, doc_id in documents] for trials in (own, base)])
        bounded = np.logical_and.accumulate(((scores >= 0) & (scores <= 1)).all(axis=0))
        return scores[0] - scores[1], bounded

    def _look(self, configuration: Configuration) -> Decision | None:
        """Takes a look after each new shard, in order, until one decides; returns the new decision, if any."""
        lane, (own, base) = self.lanes[configuration], self.pairs(configuration)
        known = lane.decision
        first, last = len(lane.path), len(own) if known is None else min(len(own), known.look.shards)
        if first >= last:
            return None
        differences, bounded = self.differences(own[:last], base[:last])
        bets = np.where(bounded, differences, 0.0)  # no bets on metrics beyond 0 and 1
        wealth = log_wealth(bets, -self.rules.margin / 100, self.population)
        plus, minus = (np.where(bounded, path, 0.0) for path in wealth)
        ends = np.cumsum([len(shard) for shard in self._shards[:last]])
        for index in range(first, last):
            speed = self.speed(own[: index + 1], base[: index + 1])
            end = int(ends[index])
            look = Look(
                shards=index + 1,
                documents=end,
                difference=100 * float(differences[:end].mean()),
                log_e_plus=float(plus[end - 1]),
                log_e_minus=float(minus[end - 1]),
                **({} if speed is None else speed.bounds(self.rules)),
            )
            lane.path.append(look)
            if known is None and (decision := self._decide(configuration, lane, look, speed)) is not None:
                lane.decision = decision
                return decision
        return None

    def speed(self, own: Sequence[TrialEvidence], base: Sequence[TrialEvidence]) -> SpeedEvidence | None:
        """None during the burn-in, and for tasks that do not generate tokens."""
        if not self.rules.generates or len(own) < BURN_IN_SHARDS:
            return None
        return SpeedEvidence.of(*log_ratios(own, base), self.rules)

    def _decide(
        self, configuration: Configuration, lane: _Lane, look: Look, speed: SpeedEvidence | None
    ) -> Decision | None:
        rules = self.rules
        slow = speed is not None and bool(speed.is_slow(rules)[-1])
        inaccurate = look.log_e_minus >= rules.log_e_reject
        lane.fast |= not rules.generates or (speed is not None and bool(speed.is_fast(rules)[-1]))
        lane.accurate |= look.log_e_plus >= rules.log_e_confirm
        if slow or inaccurate:
            outcome, because = REJECTED, [SPEED] * slow + [ACCURACY] * inaccurate
        elif lane.fast and lane.accurate:
            outcome, because = CONFIRMED, [SPEED] * rules.generates + [ACCURACY]
        else:
            return None
        return Decision(
            task=self.task,
            configuration=configuration,
            outcome=outcome,
            because=tuple(because),
            look=look,
            rules=rules,
        )

    def restore(self, decision: Decision) -> None:
        if decision.configuration in self.lanes:
            self.lanes[decision.configuration].decision = decision

    def entries(self) -> Iterable[RaceEntry]:
        most_documents = max((self._documents(lane) for lane in self.lanes.values()), default=0)
        for configuration, lane in self.lanes.items():
            documents, needed = self._documents(lane), self.needed_documents(configuration)
            decided, undecided = lane.decision, FINISHED if documents >= needed else RACING
            each = sum(one.seconds for one in lane.trials.values()) / documents if documents else 0.0
            yield RaceEntry(
                task=self.task,
                configuration=configuration,
                state=undecided if decided is None else decided.outcome,
                documents=documents,
                planned=self.population,
                look=decided.look if decided is not None else lane.path[-1] if lane.path else None,
                rules=self.rules,
                seconds_saved=each * max(0, most_documents - max(documents, needed)),
                seconds_saved_at_end=each * max(0, self.population - max(documents, needed)),
            )

    def _documents(self, lane: _Lane) -> int:
        return sum(len(self._shards[index]) for index in lane.trials)


class Race:
    """The race of a sweep on all its tasks, determined by its rows and the decisions stored earlier."""

    def __init__(self, tasks: Iterable[TaskRace], primary: Mapping[str, str]) -> None:
        self.tasks = {race.task: race for race in tasks}
        self.primary = dict(primary)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], wanted: WantedDocuments) -> "Race | None":
        """The race that sweep.json declares, with the decisions stored there; None if the sweep is not a race."""
        if not record.get("settings", {}).get("race"):
            return None
        try:
            races = [
                TaskRace.from_record(record, task, shards)
                for task, shards in wanted.by_shard.items()
                if task in record["tasks"]
            ]
            race = cls(races, {one.task: str(record["tasks"][one.task].get("primary", "")) for one in races})
            for decision in map(Decision.from_dict, record.get(DECISIONS_KEY, ())):
                if decision.task in race.tasks:
                    race.tasks[decision.task].restore(decision)
        except (KeyError, TypeError) as problem:
            raise InputError(f"sweep.json declares a race but lacks {problem}; restore the original file") from None
        return race

    def add_rows(self, rows: pa.Table, *, look: bool = True) -> list[Decision]:
        """Adds the rows (with ROW_COLUMNS) of finished trials, in any order; returns the new decisions."""
        touched = set()
        for trial, evidence in trial_evidence(rows, self.primary):
            if trial.task in self.tasks and not trial.repeat:
                race = self.tasks[trial.task]
                race.add(trial.configuration, trial.shard, evidence)
                touched.add((trial.task, race.baseline.settings_for(trial.configuration)))
        return [one for task, settings in sorted(touched) for one in self.tasks[task].look(settings)] if look else []

    def merged_decisions(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """All decisions, to be stored in sweep.json: those already there, then the new ones."""
        stored = list(record.get(DECISIONS_KEY, ()))
        known = {(one.task, one.configuration) for one in map(Decision.from_dict, stored)}
        return stored + [
            lane.decision.as_dict()
            for race in self.tasks.values()
            for configuration, lane in race.lanes.items()
            if lane.decision is not None and (race.task, configuration) not in known
        ]

    def is_needed(self, trial: Trial) -> bool:
        """Whether the trial is part of the evidence of a past or a possible decision."""
        race = self.tasks.get(trial.task)
        return race is None or race.is_needed(trial.configuration, trial.shard)

    def skipped_trials(self, begun: Collection[TrialKey]) -> int:
        """The number of trials that are neither begun nor needed."""
        return sum(key not in begun for race in self.tasks.values() for key in race.unneeded_trials())

    def needed_documents(self) -> dict[TaskConfiguration, int]:
        return {
            (task, configuration): race.needed_documents(configuration)
            for task, race in self.tasks.items()
            for configuration in race.lanes
        }

    def entries(self) -> tuple[RaceEntry, ...]:
        return tuple(entry for race in self.tasks.values() for entry in race.entries())

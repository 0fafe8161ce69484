"""Totals of each configuration on each task: documents, accuracy, tokens per second, speed-up over k=1.

`Sums` add up; `Totals` are derived from them. Speed-ups are those of orchestrator.core.speed, as in a report.
The accuracy interval is unpaired and only for display; verdicts come from orchestrator.analysis.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from orchestrator.core.configuration import CONFIGURATION_KEYS, OWN_BASELINE, BaselineRule, Configuration
from orchestrator.core.speed import TrialTimes, calibrate, paired_speedups
from orchestrator.core.trial import Trial

TaskConfiguration = tuple[str, Configuration]
KEYS = ("task", *CONFIGURATION_KEYS)
COLUMNS = (
    *("trial_id", *KEYS, "k", "repeat", "shard", "attempt", "actor"),
    *("correct", "tokens", "layer_positions", "batch_id", "batch_seconds", "calibration"),
)
Z_95 = 1.959963984540054


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """One configuration on one task so far; None where there is nothing to divide by."""

    task: str
    configuration: Configuration
    documents: int
    wanted: int
    scored: int  # documents whose primary metric is right or wrong
    correct: int
    accuracy: float | None
    accuracy_low: float | None  # 95 % Wilson interval
    accuracy_high: float | None
    tokens: int
    seconds: float  # wall time of the decode batches
    tokens_per_s: float | None
    calibration: float | None  # mean tokens/s of the fixed k=1 documents
    speedup: float | None  # calibrated tokens/s relative to k=1 on the shards that both have completed
    layer_positions: float | None  # computed per token (or per document, if none is generated), relative to k=1

    @property
    def key(self) -> TaskConfiguration:
        return self.task, self.configuration

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {"task": values.pop("task"), **values.pop("configuration"), **values}


@dataclass(kw_only=True, slots=True)
class Sums:
    """Sums over rows: of an attempt, a trial, a configuration, or all k=1 configurations of a task."""

    baseline: bool = False
    documents: int = 0
    correct: int = 0
    tokens: int = 0
    seconds: float = 0.0
    work: float = 0.0  # seconds × calibration: the tokens that k=1 would have generated on this actor in that time
    layer_positions: int = 0
    scored: dict[int, int] = field(default_factory=dict)  # by repeat: a repeated document is not a new document
    actor: str = ""  # of the last attempt

    def add(self, other: "Sums") -> None:
        self.baseline |= other.baseline
        self.actor = other.actor or self.actor
        self.documents += other.documents
        self.correct += other.correct
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.work += other.work
        self.layer_positions += other.layer_positions
        for repeat, count in other.scored.items():
            self.scored[repeat] = self.scored.get(repeat, 0) + count

    def as_json(self) -> dict[str, Any]:
        """As trial.json stores it for a finished trial, so that readers of many trials need not open the rows."""
        values = {**asdict(self), "scored": {str(repeat): count for repeat, count in self.scored.items()}}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }

    @classmethod
    def is_stored(cls, values: Mapping[str, Any]) -> bool:
        """Whether trial.json has all these sums; an older version may have stored fewer."""
        return values.keys() >= set(cls.__slots__)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Sums":
        scored = {int(repeat): count for repeat, count in values["scored"].items()}
        known: dict[str, Any] = {name: values[name] for name in cls.__slots__} | {"scored": scored}
        if None in known.values():
            known = {name: math.nan if value is None else value for name, value in known.items()}
        return cls(**known)

    @property
    def positions_per_token(self) -> float | None:
        return _ratio(self.layer_positions, self.tokens or self.documents)


class RunningTotals:
    """Totals that grow as rows arrive, each row added once.

    `wanted` is the number of rows that each configuration will have; it is part of the totals before its first row.
    `baselines` has the rule of each task that says which k=1 run a configuration is compared with.
    """

    def __init__(
        self,
        wanted: Mapping[TaskConfiguration, int] | None = None,
        baselines: Mapping[str, BaselineRule] | None = None,
    ) -> None:
        self._wanted = dict(wanted or {})
        self._sums: dict[TaskConfiguration, Sums] = {}
        self._baselines = defaultdict(lambda: OWN_BASELINE, baselines or {})
        self._times = _TrialTimesBuilder(self._baselines)

    def reduce_wanted(self, wanted: Mapping[TaskConfiguration, int]) -> None:
        """Lowers the wanted rows to those that a race still needs, but not below the rows that are there already."""
        for key in self._wanted.keys() & wanted.keys():
            self._wanted[key] = max(wanted[key], self._sums[key].documents if key in self._sums else 0)

    def add_rows(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Rows with at least COLUMNS; all rows of a decode batch come together."""
        for trial, sums in sums_by_attempt(rows):
            self.add_sums(trial, sums)

    def add_sums(self, trial: Trial, sums: Sums) -> None:
        self._sums.setdefault((trial.task, trial.configuration), Sums()).add(sums)
        self._times.add(trial, sums)

    def add_trials(self, trials: pa.Table) -> None:
        """Sums of many trials that were not added before, as columns (see store.compaction.SUMMARY)."""
        names = [name for name in Sums.__slots__ if name not in ("actor", "baseline", "scored")]
        wanted = [("baseline", "max"), ("scored", "sum"), *((name, "sum") for name in names)]
        for line in trials.group_by([*KEYS, "repeat"]).aggregate(wanted).to_pylist():
            sums = Sums(baseline=line["baseline_max"], scored={line["repeat"]: line["scored_sum"]})
            for name in names:
                setattr(sums, name, line[f"{name}_sum"])
            self._sums.setdefault((line["task"], Configuration.from_mapping(line)), Sums()).add(sums)
        self._times.add_columns(trials)

    def totals(self) -> tuple[Totals, ...]:
        """Wanted configurations in their order, then those that only appeared in rows."""
        baselines: dict[tuple[object, ...], Sums] = {}
        for (task, configuration), sums in self._sums.items():
            if sums.baseline and self._baselines[task].is_baseline(configuration):
                baselines.setdefault((task, configuration.settings), Sums()).add(sums)
        nothing, speedups = Sums(), self._times.speedups()
        return tuple(
            _totals(
                key,
                self._wanted.get(key),
                self._sums.get(key, nothing),
                baselines.get((key[0], self._baselines[key[0]].settings_for(key[1])), nothing),
                speedups.get(key),
            )
            for key in dict.fromkeys((*self._wanted, *self._sums))
        )


class _TrialTimesBuilder:
    """Collects the times of trials in flat arrays, since a large sweep has hundreds of thousands."""

    def __init__(self, baselines: Mapping[str, BaselineRule]) -> None:
        self._baselines = baselines
        self._index: dict[str, int] = {}
        self._codes: dict[str, dict[object, int]] = {}
        integers = ("shard", "baseline", "configuration", "is_k1", "actor", "documents")
        self._integers = {name: array("q") for name in integers}
        self._floats = {name: array("d") for name in ("tokens", "seconds", "work")}

    def add(self, trial: Trial, sums: Sums) -> None:
        index, rule = self._index.setdefault(trial.trial_id, len(self._index)), self._baselines[trial.task]
        own = {
            "shard": self._code("shard", (trial.task, trial.shard)),
            "baseline": self._code("baseline", (trial.task, rule.settings_for(trial.configuration))),
            "configuration": self._code("configuration", (trial.task, trial.configuration)),
            "is_k1": int(sums.baseline and rule.is_baseline(trial.configuration)),
            "actor": self._code("actor", sums.actor),
        }
        if index == len(self._integers["shard"]):
            for counts in self._integers.values():
                counts.append(0)
            for amounts in self._floats.values():
                amounts.append(0.0)
        for name, value in own.items():
            self._integers[name][index] = value
        self._integers["documents"][index] += sums.documents
        for name, column in self._floats.items():
            column[index] += getattr(sums, name)

    def add_columns(self, trials: pa.Table) -> None:
        """Adds trials that were not added before, given as columns."""
        columns = {name: trials[name].to_pylist() for name in ("trial_id", *KEYS, "shard", "actor")}
        keys = list(zip(*(columns[name] for name in KEYS), strict=True))
        known = {key: Configuration.from_mapping(dict(zip(KEYS, key, strict=True))) for key in set(keys)}
        configuration = {key: self._code("configuration", (key[0], one)) for key, one in known.items()}
        rules = {key: self._baselines[key[0]] for key in known}
        baseline = {key: self._code("baseline", (key[0], rules[key].settings_for(one))) for key, one in known.items()}
        is_baseline = {key: rules[key].is_baseline(one) for key, one in known.items()}
        first = len(self._index)
        self._index.update(zip(columns["trial_id"], range(first, first + len(trials)), strict=True))
        shards = zip(columns["task"], columns["shard"], strict=True)
        self._integers["shard"].extend([self._code("shard", shard) for shard in shards])
        self._integers["baseline"].extend([baseline[key] for key in keys])
        self._integers["configuration"].extend([configuration[key] for key in keys])
        k1 = zip(trials["baseline"].to_pylist(), keys, strict=True)
        self._integers["is_k1"].extend([int(at_k1 and is_baseline[key]) for at_k1, key in k1])
        self._integers["actor"].extend([self._code("actor", actor) for actor in columns["actor"]])
        self._integers["documents"].extend(trials["documents"].to_pylist())
        for name, column in self._floats.items():
            column.extend(trials[name].to_pylist())

    def _code(self, kind: str, value: object) -> int:
        codes = self._codes.setdefault(kind, {})
        return codes.setdefault(value, len(codes))

    def speedups(self) -> dict[TaskConfiguration, float]:
        if not self._index:
            return {}
        columns = {name: np.array(column) for name, column in (self._integers | self._floats).items()}
        work = columns.pop("work")
        with np.errstate(divide="ignore", invalid="ignore"):
            columns["calibration"] = work / columns["seconds"]
        times = TrialTimes(**{**columns, "is_k1": columns["is_k1"] == 1})
        found = paired_speedups(times, calibrate(times).work)
        names: list[Any] = list(self._codes["configuration"])
        return {names[code]: value for code, value in found.items()}


def totals_of(rows: pa.Table, wanted: Mapping[TaskConfiguration, int] | None = None) -> tuple[Totals, ...]:
    running = RunningTotals(wanted)
    running.add_rows(rows)
    return running.totals()


def trial_sums(rows: pa.Table) -> Sums:
    """Sums over all attempts of one trial."""
    total = Sums()
    for _, sums in sums_by_attempt(rows):
        total.add(sums)
    return total


def wilson_interval(correct: float, count: float) -> tuple[float, float]:
    """95 % interval of a proportion that stays within 0 and 1 and is not empty at either end."""
    share, z = correct / count, Z_95
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def sums_by_attempt(rows: pa.Table | pa.RecordBatch) -> list[tuple[Trial, Sums]]:
    """The sums of each attempt at each trial, in the order of attempts."""
    found: dict[tuple[int, str], tuple[Trial, Sums]] = {}
    batches: set[tuple[int, str, int]] = set()
    for row in rows.select(list(COLUMNS)).to_pylist():
        key = row["attempt"], row["trial_id"]
        if key not in found:
            own = Sums(baseline=row["k"] == 1, scored={row["repeat"]: 0}, actor=row["actor"])
            found[key] = Trial.from_dict(row), own
        sums = found[key][1]
        sums.documents += 1
        sums.tokens += row["tokens"]
        sums.layer_positions += row["layer_positions"]
        if row["correct"] is not None:
            sums.correct += row["correct"]
            sums.scored[row["repeat"]] += 1
        if (*key, row["batch_id"]) not in batches:  # the wall time of a decode batch is in all its rows
            batches.add((*key, row["batch_id"]))
            sums.seconds += row["batch_seconds"]
            sums.work += row["batch_seconds"] * (row["calibration"] if row["calibration"] > 0 else math.nan)
    return [found[key] for key in sorted(found)]


def _totals(key: TaskConfiguration, wanted: int | None, sums: Sums, baseline: Sums, speedup: float | None) -> Totals:
    scored = sum(sums.scored.values())
    accuracy = _ratio(sums.correct, scored)
    low, high = (None, None)
    if accuracy is not None:
        independent = max(sums.scored.values())
        low, high = wilson_interval(accuracy * independent, independent)
    return Totals(
        task=key[0],
        configuration=key[1],
        documents=sums.documents,
        wanted=sums.documents if wanted is None else wanted,
        scored=scored,
        correct=sums.correct,
        accuracy=accuracy,
        accuracy_low=low,
        accuracy_high=high,
        tokens=sums.tokens,
        seconds=sums.seconds,
        tokens_per_s=_ratio(sums.tokens, sums.seconds) if sums.tokens else None,
        calibration=_ratio(sums.work, sums.seconds),
        speedup=speedup,
        layer_positions=_quotient(sums.positions_per_token, baseline.positions_per_token),
    )


def _ratio(part: float, whole: float) -> float | None:
    ratio = part / whole if whole else math.nan
    return ratio if math.isfinite(ratio) else None


def _quotient(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None

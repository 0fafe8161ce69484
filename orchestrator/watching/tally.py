"""Running totals of a sweep's rows, configuration by configuration. Knows no files, no Ray and no terminal.

A configuration is what a reader compares: task, policy and decode settings. Its totals come either row by row
(`Tally`, for whoever receives record batches) or from a whole table (`tally_of`); both give the same numbers. The
statistics here are those of a progress display: intervals of single shares, no pairing, no verdict.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

SETTINGS = ("threshold", "small_block", "block_cache")
KEYS = ("task", "policy", *SETTINGS)
BATCH = ("trial_id", "attempt", "batch_id")  # whose wall time counts once
COLUMNS = (*BATCH, *KEYS, "k", "repeat", "correct", "tokens", "batch_seconds", "layer_positions", "calibration")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Configuration:
    """What trials have in common that differ only in their documents."""

    task: str
    policy: str
    threshold: float
    small_block: int
    block_cache: bool

    @property
    def settings(self) -> tuple[float, int, bool]:
        return self.threshold, self.small_block, self.block_cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """One configuration so far; None where there is nothing to divide by."""

    configuration: Configuration
    documents: int
    wanted: int
    scored: int  # documents with a yes or no
    correct: int
    accuracy: float | None
    accuracy_low: float | None  # Wilson, 95 %
    accuracy_high: float | None
    tokens: int
    seconds: float  # wall time of the batches
    tokens_per_s: float | None
    calibration: float | None  # tokens/s of the fixed k=1 documents, in the mean
    speedup: float | None  # tokens/s against all k=1 rows of the task and settings, each side by its calibration
    layer_positions: float | None  # computed for each token (or document, if none is generated), against k=1

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {**fields.pop("configuration"), **fields}


@dataclass(kw_only=True, slots=True)
class Sums:
    """What adds up: of an attempt at a trial, of a configuration, of all k=1 configurations of a task."""

    baseline: bool = False
    documents: int = 0
    correct: int = 0
    tokens: int = 0
    seconds: float = 0.0
    work: float = 0.0  # seconds × calibration: the tokens k=1 would have written on this actor meanwhile
    layer_positions: int = 0
    scored: dict[int, int] = field(default_factory=dict)  # by repeat: repeating a document adds no new document

    def add(self, other: "Sums") -> None:
        self.baseline |= other.baseline
        self.documents += other.documents
        self.correct += other.correct
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.work += other.work
        self.layer_positions += other.layer_positions
        for repeat, count in other.scored.items():
            self.scored[repeat] = self.scored.get(repeat, 0) + count

    def as_json(self) -> dict[str, Any]:
        """As a finished trial's trial.json keeps it, so that a reader of many trials need not open their rows."""
        fields = {**asdict(self), "scored": {str(repeat): count for repeat, count in self.scored.items()}}
        return {name: _finite(value) for name, value in fields.items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Sums":
        scored = {int(repeat): count for repeat, count in fields["scored"].items()}
        known: dict[str, Any] = {name: fields[name] for name in cls.__slots__} | {"scored": scored}
        if None in known.values():
            known = {name: math.nan if value is None else value for name, value in known.items()}
        return cls(**known)

    @property
    def relative_speed(self) -> float | None:
        """Tokens for each token of the calibration; no number if any trial ran without one."""
        return _ratio(self.tokens, self.work)

    @property
    def effort(self) -> float | None:
        return _ratio(self.layer_positions, self.tokens or self.documents)


class Tally:
    """Totals that grow by record batches, each row given once. Memory grows with trials, not with rows.

    `wanted`: how many rows each configuration will have; also those without any so far appear in the totals.
    """

    def __init__(self, wanted: Mapping[Configuration, int] | None = None) -> None:
        self._wanted = dict(wanted or {})
        self._sums: dict[Configuration, Sums] = {}
        self._batches: dict[tuple[str, int], int] = {}  # a bit for each batch_id whose time was counted

    def add(self, batch: pa.RecordBatch) -> None:
        for row in batch.select(list(COLUMNS)).to_pylist():
            self.add_sums(Configuration(**{key: row[key] for key in KEYS}), self._sums_of(row))

    def add_sums(self, configuration: Configuration, sums: Sums) -> None:
        self._sums.setdefault(configuration, Sums()).add(sums)

    def totals(self) -> tuple[Totals, ...]:
        """Configurations in the order in which they were wanted, then those that only came with rows."""
        baselines: dict[tuple[object, ...], Sums] = {}
        for configuration, sums in self._sums.items():
            if sums.baseline:
                baselines.setdefault((configuration.task, configuration.settings), Sums()).add(sums)
        nothing = Sums()
        return tuple(
            _totals(
                configuration,
                self._wanted.get(configuration),
                self._sums.get(configuration, nothing),
                baselines.get((configuration.task, configuration.settings), nothing),
            )
            for configuration in dict.fromkeys((*self._wanted, *self._sums))
        )

    def _sums_of(self, row: Mapping[str, Any]) -> Sums:
        attempt = (row["trial_id"], row["attempt"])
        counted, bit = self._batches.get(attempt, 0), 1 << row["batch_id"]
        self._batches[attempt] = counted | bit
        seconds = 0.0 if counted & bit else row["batch_seconds"]
        return Sums(
            baseline=row["k"] == 1,
            documents=1,
            correct=bool(row["correct"]),
            tokens=row["tokens"],
            seconds=seconds,
            work=_work(seconds, row["calibration"]),
            layer_positions=row["layer_positions"],
            scored={row["repeat"]: row["correct"] is not None},
        )


def tally_of(table: pa.Table, wanted: Mapping[Configuration, int] | None = None) -> tuple[Totals, ...]:
    """The totals of a table that has at least COLUMNS, each (trial, document) once."""
    tally = Tally(wanted)
    for configuration, sums in sums_of(table):
        tally.add_sums(configuration, sums)
    return tally.totals()


def sums_of(table: pa.Table) -> Iterable[tuple[Configuration, Sums]]:
    """Each attempt's configuration and sums, from its rows."""
    table = _numbered(table.select(list(COLUMNS)))
    batches = table.group_by(list(BATCH)).aggregate([("batch_seconds", "one"), ("calibration", "one")])
    speed = pc.if_else(pc.greater(batches["calibration_one"], 0), batches["calibration_one"], math.nan)
    batches = batches.append_column("work", pc.multiply(batches["batch_seconds_one"], speed))
    times = batches.group_by(["trial_id", "attempt"]).aggregate([("batch_seconds_one", "sum"), ("work", "sum")])
    by_attempt = {(row["trial_id"], row["attempt"]): row for row in times.to_pylist()}
    constant = [(name, "one") for name in (*KEYS, "k", "repeat")]
    added = [("correct", "sum"), ("correct", "count"), ("tokens", "sum"), ("layer_positions", "sum")]
    attempts = table.group_by(["trial_id", "attempt"]).aggregate([*constant, *added, ("tokens", "count")])
    for row in attempts.to_pylist():
        spent = by_attempt[row["trial_id"], row["attempt"]]
        sums = Sums(
            baseline=row["k_one"] == 1,
            documents=row["tokens_count"],
            correct=row["correct_sum"] or 0,
            tokens=row["tokens_sum"],
            seconds=spent["batch_seconds_one_sum"],
            work=spent["work_sum"],
            layer_positions=row["layer_positions_sum"],
            scored={row["repeat_one"]: row["correct_count"]},
        )
        yield Configuration(**{key: row[f"{key}_one"] for key in KEYS}), sums


def trial_sums(table: pa.Table) -> Sums:
    """All attempts of one trial together; `as_json()` of it is the fact `tally` of a finished trial."""
    total = Sums()
    for _, sums in sums_of(table):
        total.add(sums)
    return total


def wilson(correct: float, count: float) -> tuple[float, float]:
    """The 95 % interval of a share, which stays within 0 and 1 and is not empty at either end."""
    z, share = 1.959963984540054, correct / count
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def _numbered(table: pa.Table) -> pa.Table:
    """Plain columns, and numbers for the trials' names: grouping by them takes a third of the time."""
    for position, field_ in enumerate(table.schema):
        if pa.types.is_dictionary(field_.type):
            table = table.set_column(position, field_.name, table[field_.name].cast(field_.type.value_type))
    names = table["trial_id"].combine_chunks().dictionary_encode()
    return table.set_column(table.schema.get_field_index("trial_id"), "trial_id", names.indices)


def _totals(configuration: Configuration, wanted: int | None, sums: Sums, baseline: Sums) -> Totals:
    scored = sum(sums.scored.values())
    accuracy = _ratio(sums.correct, scored)
    low, high = (None, None)
    if accuracy is not None:
        independent = max(sums.scored.values())
        low, high = wilson(accuracy * independent, independent)
    return Totals(
        configuration=configuration,
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
        speedup=_quotient(sums.relative_speed, baseline.relative_speed),
        layer_positions=_quotient(sums.effort, baseline.effort),
    )


def _work(seconds: float, calibration: float) -> float:
    return seconds * calibration if calibration > 0 else math.nan


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _ratio(part: float, whole: float) -> float | None:
    ratio = part / whole if whole else math.nan
    return ratio if math.isfinite(ratio) else None


def _quotient(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None

"""The status of a sweep, read from its folder: what was requested, what is done, failed or missing.

trial.json summarizes a finished trial. Only rows of unfinished trials are opened, one trial at a time, so the cost does
not grow with the number of rows. The status of a race reads all rows, since its decisions depend on every document.
"""

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.core.configuration import BaselineRule, grid
from orchestrator.core.race import Race, RaceEntry
from orchestrator.core.totals import RunningTotals, TaskConfiguration, Totals
from orchestrator.core.trial import Trial, WantedDocuments, documents_by_shard, shards_of_table
from orchestrator.progress.progress import Progress, add_compacted, add_finished_trials, stored_sums
from orchestrator.store import Store
from orchestrator.store.lock import LockHolder, active_writer
from orchestrator.store.schema import SCHEMA_VERSION
from orchestrator.store.trial_files import ROWS_FILE, segment_numbers, segment_path
from sampler.errors import InputError
from sampler.records import LOGLIKELIHOOD

STATES = ("finished", "running", "unfinished", "failed", "pending", "skipped")  # skipped: a race does not need it


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFailure:
    """A trial whose last attempt failed; the next run tries it again."""

    trial_id: str
    label: str
    attempts: int
    reason: str
    documents: Mapping[str, str]  # by id: why the model cannot compute it; empty if the trial failed as a whole


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepStatus:
    """Created by `read_status`; read by the status command."""

    folder: Path
    record: Mapping[str, Any]  # sweep.json
    totals: tuple[Totals, ...]
    trials: Mapping[str, int]  # count by state, see STATES
    failures: tuple[TrialFailure, ...]
    writer: LockHolder | None
    corrupted: tuple[str, ...]  # a sentence for each corrupted file
    quarantined: int  # quarantined files: corrupted, or replaced by --force
    last_row: datetime | None
    notices: tuple[str, ...] = ()
    race: tuple[RaceEntry, ...] = ()

    @property
    def state(self) -> str:
        if self.writer is not None:
            return "running"
        done = self.trials["finished"] + self.trials["skipped"]
        return "complete" if done == sum(self.trials.values()) and not self.missing else "stopped"

    @property
    def documents(self) -> int:
        return sum(line.documents for line in self.totals)

    @property
    def wanted(self) -> int:
        return sum(line.wanted for line in self.totals)

    @property
    def missing(self) -> int:
        return sum(max(0, line.wanted - line.documents) for line in self.totals)

    @property
    def progress(self) -> Progress:
        return Progress(
            sweep=str(self.record.get("sweep") or self.folder.name),
            totals=self.totals,
            trials=sum(self.trials.values()) - self.trials["skipped"],
            finished=self.trials["finished"],
            failed=self.trials["failed"],
            race=self.race,
        )

    def as_json(self) -> dict[str, Any]:
        """Keys may be added, never removed: other programs read them."""
        writer, race = self.writer, {entry.key: entry.as_json() for entry in self.race}
        return {
            "schema": SCHEMA_VERSION,
            "folder": str(self.folder),
            "sweep": self.record.get("sweep"),
            "state": self.state,
            "writer": None if writer is None else {"host": writer.host, "pid": writer.pid, "since": writer.since},
            "last_row": None if self.last_row is None else self.last_row.isoformat(timespec="seconds"),
            "documents": {"done": self.documents, "wanted": self.wanted, "missing": self.missing},
            "trials": {"wanted": sum(self.trials.values()), **self.trials},
            "failures": [asdict(failure) for failure in self.failures],
            "configurations": [
                {**t.as_json(), "missing": max(0, t.wanted - t.documents), "race": race.get(t.key)} for t in self.totals
            ],
            "corrupted": list(self.corrupted),
            "damage": list(self.corrupted),  # the former name of `corrupted`
            "quarantined": self.quarantined,
            "set_aside": self.quarantined,  # the former name of `quarantined`
            "notices": list(self.notices),
            "model": self.record.get("model"),
            "settings": self.record.get("settings"),
            "imported": self.record.get("imported"),
        }


def read_status(folder: Path, record: Mapping[str, Any] | None = None) -> SweepStatus:
    """Reads the status of a sweep from its folder; `record` is the content of sweep.json, if it was read before."""
    store = Store(folder)
    record = store.read_sweep_record() if record is None else record
    if record is None:
        writer = active_writer(folder)
        if writer is not None:
            raise InputError(
                f"{folder}: process {writer.pid} on {writer.host} is preparing a sweep there; try again in a moment"
            )
        missing = "has no sweep.json" if folder.is_dir() else "does not exist"
        raise InputError(f"{folder} {missing}; give the directory of a sweep, such as results/demo")
    return _StatusReader(store, record).read()


class _StatusReader:
    def __init__(self, store: Store, record: Mapping[str, Any]) -> None:
        self._store, self._record = store, record
        try:
            self._settings = record["settings"]
            tasks: dict[str, Mapping[str, Any]] = {task: record["tasks"][task] for task in self._settings["tasks"]}
            self._configurations = {
                task: grid(self._settings, decoded=facts["kind"] != LOGLIKELIHOOD) for task, facts in tasks.items()
            }
            self._repeats = int(self._settings["repeats"])
            self._shard_size = int(self._settings["shard_size"])
            for facts in tasks.values():
                int(facts["documents"])
        except (KeyError, TypeError) as problem:
            raise InputError(f"{store.folder}/sweep.json lacks {problem}: it was edited or is not a sweep's") from None
        self._writer = active_writer(store.folder)  # before the trials, so that a sweep that ends now is seen as ended
        self._notes: list[str] = []
        self._wanted = WantedDocuments(by_shard={name: self._by_shard(name, facts) for name, facts in tasks.items()})
        self._last: float | None = None
        self._trials = str(store.folder / "trials")

    def read(self) -> SweepStatus:
        wanted_rows: dict[TaskConfiguration, int] = {
            (task, configuration): self._repeats * self._wanted.count(task)
            for task, configurations in self._configurations.items()
            for configuration in configurations
        }
        totals = RunningTotals(wanted_rows, BaselineRule.by_task(self._record))
        states: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        states["pending"] = sum(
            self._repeats * len(self._wanted.by_shard[task]) * len(configurations)
            for task, configurations in self._configurations.items()
        )
        failures, seen = [], set()
        for trial_id, facts in self._store.iter_trials():
            seen.add(trial_id)
            trial = Trial.from_dict(facts["trial"])
            self._note_last_row(trial_id, facts)
            sums = stored_sums(self._store, trial_id, facts)
            totals.add_sums(trial, sums)
            state = self._state(trial, facts, sums.documents)
            states[state] += 1
            states["pending"] -= 1
            if state == "failed":
                failures.append(_failure(trial, facts))
        self._add_compacted(self._store.compacted_trials(without=seen), totals, states)
        race = self._race(totals, states)
        return SweepStatus(
            folder=self._store.folder,
            record=self._record,
            totals=totals.totals(),
            trials={**states, "pending": max(0, states["pending"])},
            failures=tuple(failures),
            writer=self._writer,
            corrupted=(*self._notes, *map(str, self._store.corrupted.values())),
            quarantined=self._store.count_quarantined_files(),
            last_row=None if self._last is None else datetime.fromtimestamp(self._last, UTC),
            notices=tuple(self._store.notices),
            race=() if race is None else race.entries(),
        )

    def _race(self, totals: RunningTotals, states: Counter[str]) -> Race | None:
        """The race, if the sweep is one; counts the trials that it does not need as skipped instead of pending.

        Reads the rows of all finished trials, since a race depends on every document.
        """
        race = Race.from_record(self._record, self._wanted)
        if race is None:
            return None
        facts = self._store.trials()
        add_finished_trials(race, self._store, facts)
        begun = {Trial.from_dict(known["trial"]).key for known in facts.values()}
        totals.reduce_wanted(race.needed_documents())
        skipped = race.skipped_trials(begun)
        states["skipped"], states["pending"] = skipped, states["pending"] - skipped
        return race

    def _add_compacted(self, trials: pa.Table, totals: RunningTotals, states: Counter[str]) -> None:
        """Compacted trials are finished. Their totals are columns: 100,000 trials take a fraction of a second."""
        if not len(trials):
            return  # grouping would import pandas, which takes longer than everything else in a small sweep
        add_compacted(totals, self._store, trials)
        with suppress(ValueError, TypeError):  # none, or not a time
            last = datetime.fromisoformat(pc.max(trials["ended_at"]).as_py())  # all are in UTC, in one format
            self._last = max(self._last or 0.0, last.timestamp())
        counts = trials.group_by(["task", "shard", "rows"]).aggregate([([], "count_all")])
        for line in counts.to_pylist():
            done = line["rows"] >= len(self._wanted.ids(line["task"], line["shard"]))
            states["finished" if done else "unfinished"] += line["count_all"]
        states["pending"] -= len(trials)

    def _by_shard(self, task: str, facts: Mapping[str, Any]) -> Mapping[int, tuple[str, ...]]:
        """Ids from the table of documents; if that cannot be read, as many documents as sweep.json states."""
        try:
            table = self._store.documents(task)
        except InputError as problem:
            self._notes.append(str(problem))
            return documents_by_shard((str(number), number // self._shard_size) for number in range(facts["documents"]))
        return shards_of_table(table)

    def _note_last_row(self, trial_id: str, facts: Mapping[str, Any]) -> None:
        if facts["status"] == "finished":
            path = f"{self._trials}/{trial_id}/{ROWS_FILE}"
            if not self._note_time(path) and not self._store.has_rows_file(trial_id):
                self._notes.append(f"{path} is missing")
            return
        folder = Path(self._trials, trial_id)
        for number in segment_numbers(folder):
            self._note_time(str(segment_path(folder, number)))

    def _note_time(self, path: str) -> bool:
        try:
            self._last = max(self._last or 0.0, os.stat(path).st_mtime)
        except OSError:
            return False
        return True

    def _state(self, trial: Trial, facts: Mapping[str, Any], documents: int) -> str:
        status = str(facts["status"])
        if status == "failed":
            return status
        if status == "finished":
            return status if documents >= len(self._wanted.of(trial)) else "unfinished"  # --limit may have grown
        return "running" if self._writer is not None else "unfinished"


def _failure(trial: Trial, facts: Mapping[str, Any]) -> TrialFailure:
    attempts = facts["attempts"]
    reason = str(attempts[-1].get("reason") or "no reason was recorded") if attempts else "no attempt was recorded"
    documents = attempts[-1].get("failed_documents", {}) if attempts else {}
    return TrialFailure(
        trial_id=trial.trial_id, label=trial.label, attempts=len(attempts), reason=reason, documents=documents
    )

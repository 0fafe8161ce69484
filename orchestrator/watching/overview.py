"""What a sweep's folder says of the sweep: asked for, done, failed, missing. Reads the store and nothing else.

A finished trial is summed up in its trial.json; rows are opened where that is not so, one trial at a time, so a million
rows cost neither time nor memory.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.planning.grid import TrialSpec, configurations_of
from orchestrator.planning.settings import SweepSettings
from orchestrator.store import Store
from orchestrator.store.lock import LockHolder, active_writer
from orchestrator.store.schema import SCHEMA_VERSION
from orchestrator.store.trial_files import ROWS_FILE, segment_numbers, segment_path
from orchestrator.watching.tally import COLUMNS, KEYS, Configuration, Sums, Tally, Totals
from sampler.errors import InputError

STATES = ("finished", "running", "unfinished", "failed", "pending")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A trial that was given up for now; the next run tries again."""

    trial_id: str
    label: str
    attempts: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """A folder at one moment."""

    folder: Path
    request: Mapping[str, Any]
    totals: tuple[Totals, ...]
    trials: Mapping[str, int]  # how many are in each of STATES
    failures: tuple[Failure, ...]
    writer: LockHolder | None
    damage: tuple[str, ...]
    set_aside: int  # files that were moved away, damaged or run again
    last_row: datetime | None

    @property
    def state(self) -> str:
        if self.writer is not None:
            return "running"
        return "complete" if self.trials["finished"] == sum(self.trials.values()) and not self.missing else "stopped"

    @property
    def documents(self) -> int:
        return sum(line.documents for line in self.totals)

    @property
    def wanted(self) -> int:
        return sum(line.wanted for line in self.totals)

    @property
    def missing(self) -> int:
        return sum(max(0, line.wanted - line.documents) for line in self.totals)

    def as_json(self) -> dict[str, Any]:
        """Keys that stay: what a program may rely on."""
        writer = self.writer
        return {
            "schema": SCHEMA_VERSION,
            "folder": str(self.folder),
            "sweep": self.request.get("sweep"),
            "state": self.state,
            "writer": None if writer is None else {"host": writer.host, "pid": writer.pid, "since": writer.since},
            "last_row": None if self.last_row is None else self.last_row.isoformat(timespec="seconds"),
            "documents": {"done": self.documents, "wanted": self.wanted, "missing": self.missing},
            "trials": {"wanted": sum(self.trials.values()), **self.trials},
            "failures": [asdict(failure) for failure in self.failures],
            "configurations": [{**t.as_json(), "missing": max(0, t.wanted - t.documents)} for t in self.totals],
            "damage": list(self.damage),
            "set_aside": self.set_aside,
            "model": self.request.get("model"),
            "settings": self.request.get("settings"),
        }


def look(folder: Path) -> Overview:
    """InputError where there is no sweep."""
    store = Store(folder)
    request = store.read_request()
    if request is None:
        writer = active_writer(folder)
        if writer is not None:
            raise InputError(f"{folder}: process {writer.pid} on {writer.host} prepares a sweep there; look again soon")
        raise InputError(f"{folder} holds no sweep: a folder with a sweep.json is expected, such as results/NAME")
    return _Look(store, request).overview()


class _Look:
    """One reading of a folder."""

    def __init__(self, store: Store, request: Mapping[str, Any]) -> None:
        self._store, self._request = store, request
        try:
            self._settings = SweepSettings.from_dict(request["settings"])
            self._tasks: dict[str, Mapping[str, Any]] = {task: request["tasks"][task] for task in self._settings.tasks}
        except (KeyError, TypeError) as problem:
            raise InputError(f"{store.folder}/sweep.json lacks {problem}: it is no sweep's, or was edited") from None
        self._writer = active_writer(store.folder)  # before the trials: what ends meanwhile is seen as ended
        self._notes: list[str] = []
        self._shards = {task: self._shard_sizes(task) for task in self._tasks}
        self._last: float | None = None
        self._trials = str(store.folder / "trials")

    def overview(self) -> Overview:
        tally = Tally(self._wanted())
        states: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        states["pending"] = sum(
            self._settings.repeats * len(self._shards[task]) * len(list(self._configurations(task)))
            for task in self._tasks
        )
        failures = []
        known = {(*asdict(one).values(),): one for one in self._wanted()}  # made once, not for each trial
        for trial_id, facts in self._store.iter_trials():
            trial = facts["trial"]
            summed = self._summed(trial_id, facts)
            if summed is None:
                documents = self._add_rows(trial_id, tally)
            else:
                documents, key = summed.documents, tuple(trial[name] for name in KEYS)
                tally.add_sums(known.get(key) or Configuration(**dict(zip(KEYS, key, strict=True))), summed)
            state = self._state(trial, facts, documents)
            states[state] += 1
            states["pending"] -= 1
            if state == "failed":
                failures.append(_failure(TrialSpec.from_dict(trial), facts))
        return Overview(
            folder=self._store.folder,
            request=self._request,
            totals=tally.totals(),
            trials={**states, "pending": max(0, states["pending"])},
            failures=tuple(failures),
            writer=self._writer,
            damage=(*self._notes, *map(str, self._store.corrupted.values())),
            set_aside=self._store.count_quarantined_files(),
            last_row=None if self._last is None else datetime.fromtimestamp(self._last, UTC),
        )

    def _wanted(self) -> dict[Configuration, int]:
        return {
            configuration: self._settings.repeats * sum(self._shards[task].values())
            for task in self._tasks
            for configuration in self._configurations(task)
        }

    def _configurations(self, task: str) -> Iterator[Configuration]:
        decoded = self._tasks[task]["kind"] != "loglikelihood"
        for policy, threshold, small_block, block_cache in configurations_of(self._settings, decoded=decoded):
            yield Configuration(
                task=task, policy=policy, threshold=threshold, small_block=small_block, block_cache=block_cache
            )

    def _shard_sizes(self, task: str) -> Counter[int]:
        """Wanted documents in each shard; evenly spread if the table of documents cannot be read."""
        try:
            return Counter(self._store.documents(task)["shard"].to_pylist())
        except InputError as problem:
            self._notes.append(str(problem))
            size = self._settings.shard_size
            return Counter(number // size for number in range(self._tasks[task]["documents"]))

    def _summed(self, trial_id: str, facts: Mapping[str, Any]) -> Sums | None:
        """What a finished trial says of itself, if that is of all its rows."""
        summed = facts.get("tally")
        if facts["status"] != "finished" or summed is None or summed["documents"] != facts["rows"]:
            return None
        path = f"{self._trials}/{trial_id}/{ROWS_FILE}"
        if not self._seen(path):
            self._notes.append(f"{path} is missing")
        return Sums.from_json(summed)

    def _add_rows(self, trial_id: str, tally: Tally) -> int:
        folder = Path(self._trials, trial_id)
        for number in segment_numbers(folder):
            self._seen(str(segment_path(folder, number)))
        (rows,) = self._store.tables([trial_id], COLUMNS, verify=False)
        for batch in rows.to_batches():
            tally.add(batch)
        return len(rows)

    def _seen(self, path: str) -> bool:
        try:
            self._last = max(self._last or 0.0, os.stat(path).st_mtime)
        except FileNotFoundError:
            return False
        return True

    def _state(self, trial: Mapping[str, Any], facts: Mapping[str, Any], documents: int) -> str:
        status = str(facts["status"])
        if status == "failed":
            return status
        if status == "finished":
            wanted = self._shards[trial["task"]][trial["shard"]] if trial["task"] in self._shards else 0
            return status if documents >= wanted else "unfinished"  # or the limit has grown
        return "running" if self._writer is not None else "unfinished"


def _failure(trial: TrialSpec, facts: Mapping[str, Any]) -> Failure:
    attempts = facts["attempts"]
    reason = str(attempts[-1].get("reason") or "no reason was recorded") if attempts else "no attempt was recorded"
    return Failure(trial_id=trial.trial_id, label=trial.label, attempts=len(attempts), reason=reason)

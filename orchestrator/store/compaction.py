"""Compacted files: the rows of many finished trials of a task in one Parquet file, together with each trial.json.

    compacted/<task>-<number>-<random>.parquet

Trials are short so that all policies run at each speed of a machine, and a file per trial would be slow to read: a
million rows are 100,000 trials. The key-value metadata of a compacted file holds a table of its trials (TRIALS) with a
checksum of its own, so the status of a sweep reads only the ends of these files.

A file is never changed. It is complete on disk before the folders of its trials are removed, and a trial that goes on
gets its folder back first. So a trial can be in both places, or in two compacted files after some of its trials were
replaced: then each row counts once, and the newest compacted file and the trial's own trial.json apply.
"""

import base64
import hashlib
import io
import json
import math
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq

from orchestrator.core.configuration import DECODE_SETTINGS, default_of
from orchestrator.core.totals import Sums
from orchestrator.core.trial import TRIAL_KEYS
from orchestrator.core.untrusted import Shape, shape_problem
from orchestrator.store.files import DECODE_ERRORS, CorruptedFile, StoreError, encode_table, open_regular, read_table
from orchestrator.store.record_checks import TRIAL_RECORD, attempt_problem, trial_record_problem
from orchestrator.store.schema import (
    ATTEMPT_NUMBERS,
    ATTEMPT_TEXTS,
    ATTEMPT_VALUES,
    ATTEMPTS,
    ROWS,
    attempts_of,
    select_fields,
)
from orchestrator.store.trial_files import READ_ATTEMPTS, TOTALS_KEY, Corruption, TrialRows
from sampler.errors import InputError

COMPACTED_FOLDER = "compacted"
COMPACTED_NAME = re.compile(r"(.+)-([0-9]{6,18})-[0-9a-f]{8}\.parquet")
MIN_ROWS = 1_000  # of a compacted file
FULL_ROWS = 4_000  # as many finished rows of a task are compacted while the sweep runs
TRIALS_METADATA_KEY = "reuse_sweep_trials"  # of the Parquet file: digest and base64 of an Arrow stream
VALUES_METADATA_KEY = b"values"  # of that stream: values that many trials share, as a JSON list
SHARED_KEY = ""  # in a stored record: names of shared values and their indices in that list
OWN_KEYS = ("trial", TOTALS_KEY, "attempts")  # of trial.json: never shared
IPC_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")
SUM_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
SUMS = {name: SUM_TYPES[type(value)] for name in Sums.__slots__ if type(value := getattr(Sums(), name)) in SUM_TYPES}

TRIALS = pa.schema(
    [
        pa.field("trial_id", pa.string(), nullable=False),
        *(pa.field(name, ROWS.field(name).type) for name in TRIAL_KEYS),
        pa.field("rows", pa.int64()),
        pa.field("ended_at", pa.string()),  # of the last attempt
        *(pa.field(name, kind) for name, kind in SUMS.items()),  # null if trial.json has no totals
        pa.field("scored", pa.int64()),
        pa.field("record", pa.string(), nullable=False),  # trial.json, without values that many trials share
    ]
)

USUAL_RECORDS = pyarrow.json.ParseOptions(
    explicit_schema=pa.schema(
        [
            ("trial", pa.struct([("trial_id", pa.string())])),
            ("status", pa.string()),
            (
                "attempts",
                pa.list_(
                    pa.struct(
                        [
                            ("attempt", pa.int64()),
                            *((name, pa.string()) for name in ATTEMPT_TEXTS),
                            *((name, pa.float64()) for name in ATTEMPT_NUMBERS),
                            (SHARED_KEY, pa.struct([(name, pa.int64()) for name in ATTEMPT_VALUES])),
                        ]
                    )
                ),
            ),
        ]
    ),
    unexpected_field_behavior="ignore",
)
SUMMARY = pa.schema([column for column in TRIALS if column.name != "record"])
REQUIRED = ("trial_id", "task", "policy", "repeat", "shard", "rows")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompactedFile:
    path: Path
    trials: pa.Table  # TRIALS without `record`
    stream: bytes  # of the whole table; records are only decoded when they are read

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each trial id with its trial.json. Values that trials share are the same object: do not change them."""
        try:
            yield from self.parse()
        except CorruptedFile as error:
            raise InputError(f"{self.path} {error}; continue the sweep to run them again") from error

    def record(self, trial_id: str) -> dict[str, Any]:
        return next(record for found, record in self.records() if found == trial_id)

    def attempts(self) -> pa.Table:
        """ATTEMPTS of these trials. Arrow parses usual records several times as fast as `parse`, which reads all."""
        try:
            return self._usual_attempts()
        except (ValueError, LookupError, *DECODE_ERRORS):
            return attempts_of(self.records())

    def _usual_attempts(self) -> pa.Table:
        """Raises ValueError, LookupError or one of DECODE_ERRORS if a record is unusual; `parse` can then read it."""
        stored = pa.ipc.open_stream(self.stream).read_all()
        text = "\n".join(stored["record"].to_pylist()).encode()
        whole = pyarrow.json.ReadOptions(use_threads=False, block_size=len(text) + 1)
        records = pyarrow.json.read_json(io.BytesIO(text), whole, USUAL_RECORDS).combine_chunks()
        lists, ids = records["attempts"].chunk(0), pc.struct_field(records["trial"], "trial_id")
        usual = pc.and_(pc.equal(records["status"], "finished"), pc.equal(ids, self.trials["trial_id"]))
        if not pc.all(pc.and_(usual, pc.greater(pc.list_value_length(lists), 0)), skip_nulls=False).as_py():
            raise ValueError("a trial is not finished, or has no attempts")
        found = pa.Table.from_struct_array(lists.flatten())
        if not all(pc.all(pc.is_finite(found[name])).as_py() is not False for name in ATTEMPT_NUMBERS):
            raise ValueError("a number is not finite")
        shared = pa.Table.from_struct_array(found[SHARED_KEY].combine_chunks())
        values = pa.array([_to_json(value) for value in json.loads(stored.schema.metadata[VALUES_METADATA_KEY])])
        own = self.trials.take(pc.list_parent_indices(lists))
        columns = {"status": pa.repeat("finished", len(own)), "attempt": found["attempt"]}
        columns |= {name: found[name] for name in (*ATTEMPT_TEXTS, *ATTEMPT_NUMBERS)}
        for name in ATTEMPT_VALUES:
            indices = shared[name].combine_chunks().cast(pa.int32())
            columns[name] = pa.DictionaryArray.from_arrays(indices, values)
        for name in ("trial_id", "rows", *TRIAL_KEYS):
            columns[name] = own[name].fill_null(default_of(name)) if name in DECODE_SETTINGS else own[name]
        for name in ("actor", "node_id", *ATTEMPT_VALUES):
            for value in pa.chunked_array(columns[name]).unique().drop_null().to_pylist():
                problem = attempt_problem({name: json.loads(value) if name in ATTEMPT_VALUES else value})
                if problem is not None:
                    raise ValueError(problem)
        return pa.table(columns).select(ATTEMPTS.names).cast(ATTEMPTS)

    def parse(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Raises CorruptedFile if the records are not those of the trials."""
        ids = self.trials["trial_id"].to_pylist()
        try:
            table = pa.ipc.open_stream(self.stream).read_all().select(["record"])
            values = json.loads(table.schema.metadata[VALUES_METADATA_KEY])
            records = json.loads(f"[{','.join(table['record'].to_pylist())}]")  # at once: equal keys are one object
            checked: set[tuple[str, int]] = set()
            checked_in_attempts: set[tuple[str, int]] = set()
            for trial_id, record in zip(ids, records, strict=True):
                if (problem := trial_record_problem(record, trial_id)) is not None:
                    raise ValueError(problem)
                _add_shared(record, values, TRIAL_RECORD, checked)
                for attempt in record["attempts"]:
                    _add_shared(attempt, values, TRIAL_RECORD["attempts"][0], checked_in_attempts)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, *DECODE_ERRORS) as error:
            raise CorruptedFile(f"has records of trials that cannot be used ({error})") from error
        yield from zip(ids, records, strict=True)


def _add_shared(part: dict[str, Any], values: Sequence[Any], shape: Shape, checked: set[tuple[str, int]]) -> None:
    """Adds the values that a part of trial.json shares with others. `checked` has the values known to be valid."""
    for name, index in part.pop(SHARED_KEY, {}).items():
        if (name, index) not in checked:
            if name in OWN_KEYS:
                raise ValueError(f"{name!r} refers to a shared value")
            problem = shape_problem({name: values[index]}, shape)
            if problem is not None:
                raise ValueError(problem)
            checked.add((name, index))
        part.setdefault(name, values[index])


def read_trials_rows(
    path: Path, trial_ids: Collection[str], columns: Collection[str] | None = None, *, verify: bool = True
) -> TrialRows:
    """The rows of some trials of a compacted file, as `trial_files.read_rows` returns those of a folder.

    Raises FileNotFoundError if the file was replaced meanwhile.
    """
    schema = select_fields(ROWS, columns)
    try:
        rows, ignored = read_table(path, ROWS, None if columns is None else {*columns, "trial_id"}, verify=verify)
    except CorruptedFile as error:
        return TrialRows(rows=schema.empty_table(), corrupted=[Corruption(path=path, problem=str(error))])
    mine = pc.is_in(rows["trial_id"], pa.array(trial_ids, pa.string()))
    rows = rows if pc.all(mine).as_py() else rows.filter(mine)
    return TrialRows(rows=rows if columns is None else rows.select(schema.names), ignored_columns=ignored)


def encode_compacted(rows: pa.Table, records: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The content of a compacted file; `records` has the trial.json of each trial in `rows`."""
    values: dict[str, int] = {}
    lines = [_trial_columns(trial_id, record, values) for trial_id, record in records.items()]
    stored = f"[{','.join(values)}]".encode()
    table = pa.Table.from_pylist(lines, schema=TRIALS.with_metadata({VALUES_METADATA_KEY: stored}))
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=IPC_OPTIONS) as stream:
        stream.write_table(table)
    data = base64.b64encode(sink.getvalue())
    return encode_table(rows, {TRIALS_METADATA_KEY: hashlib.sha256(data).hexdigest().encode() + data}, many=True)


def _trial_columns(trial_id: str, record: Mapping[str, Any], values: dict[str, int]) -> dict[str, Any]:
    sums = record.get(TOTALS_KEY) or {}
    known: dict[str, Any] = {}
    if Sums.is_stored(sums):  # trial.json has null for NaN
        known = {name: math.nan if sums[name] is None else sums[name] for name in SUMS}
        known["scored"] = sum(sums["scored"].values())
    attempts = record["attempts"]
    own = {**_without_shared(record, values), "attempts": [_without_shared(attempt, values) for attempt in attempts]}
    return {
        "trial_id": trial_id,
        **{name: record["trial"].get(name) for name in TRIAL_KEYS},
        "rows": record["rows"],
        "ended_at": attempts[-1].get("ended_at") if attempts else None,
        **{name: known.get(name) for name in (*SUMS, "scored")},
        "record": _to_json(own),
    }


def _without_shared(part: Mapping[str, Any], values: dict[str, int]) -> dict[str, Any]:
    """Replaces objects and lists by their indices in the shared values, to which new ones are added."""
    shared = {
        name: values.setdefault(_to_json(value), len(values))
        for name, value in part.items()
        if isinstance(value, dict | list) and name not in OWN_KEYS
    }
    return {**{name: value for name, value in part.items() if name not in shared}, SHARED_KEY: shared}


_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def read_compacted(path: Path) -> CompactedFile:
    """The trials of a compacted file, from its end alone. Raises CorruptedFile or FileNotFoundError."""
    try:
        open_regular(path).close()
        data = (pq.read_metadata(path).metadata or {}).get(TRIALS_METADATA_KEY.encode(), b"")
        digest, encoded = data[:64], data[64:]
        if hashlib.sha256(encoded).hexdigest().encode() != digest:
            raise CorruptedFile("does not match the checksum of its trials")
        stream = base64.b64decode(encoded)
        names = pa.ipc.open_stream(stream).schema.names
        wanted = pa.ipc.IpcReadOptions(included_fields=[names.index(n) for n in names if n != "record"])
        table = pa.ipc.open_stream(stream, options=wanted).read_all()
        columns = [table[f.name] if f.name in names else pa.nulls(len(table), f.type) for f in SUMMARY]
        trials = pa.Table.from_arrays(columns, schema=SUMMARY)
        trials.validate(full=True)
        if (
            any(trials[name].null_count for name in REQUIRED)
            or not pc.all(pc.utf8_is_alnum(trials["trial_id"])).as_py()
        ):
            raise CorruptedFile("lists trials without a name, a number of rows or a record")
        return CompactedFile(path=path, trials=trials, stream=stream)
    except FileNotFoundError:
        raise
    except (OSError, *DECODE_ERRORS) as error:
        raise CorruptedFile(f"cannot be read as a compacted file ({error})") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class CompactedFiles:
    """The compacted files of a sweep folder as they were when they were listed; `refreshed` lists them again."""

    folder: Path
    listed: Mapping[str, CompactedFile | None] = field(default_factory=dict)  # by name, oldest first; None: corrupted
    file_of: Mapping[str, CompactedFile] = field(default_factory=dict)  # by trial id: the newest file that has it
    corrupted: tuple[Corruption, ...] = ()

    def refreshed(self) -> "CompactedFiles":
        """Lists the files until the list does not change while they are read; only new files are read."""
        known = self
        for _ in range(READ_ATTEMPTS):
            names = compacted_names(self.folder)
            if names == list(known.listed):
                return known
            try:
                known = known._read(names)
            except FileNotFoundError:
                continue
        raise StoreError(f"{self.folder} changes too quickly to be read")

    def _read(self, names: Sequence[str]) -> "CompactedFiles":
        listed: dict[str, CompactedFile | None] = {}
        corrupted = [one for one in self.corrupted if one.path.name in names]
        for name in names:
            try:
                listed[name] = self.listed[name] if name in self.listed else read_compacted(self.folder / name)
            except CorruptedFile as error:
                corrupted.append(Corruption(path=self.folder / name, problem=str(error)))
                listed[name] = None
        intact = [file for file in listed.values() if file is not None]
        file_of = {trial_id: file for file in intact for trial_id in file.trials["trial_id"].to_pylist()}
        return replace(self, listed=listed, file_of=file_of, corrupted=tuple(corrupted))

    @property
    def files(self) -> list[CompactedFile]:
        return [file for file in self.listed.values() if file is not None]

    def trials(self, without: Collection[str] = ()) -> pa.Table:
        """SUMMARY of all compacted trials, each once; `without`: not of these trials."""
        tables = [pa.Table.from_batches([], SUMMARY)]  # `empty_table` imports pandas
        for file in self.files:
            ids, trials = file.trials["trial_id"].to_pylist(), file.trials
            keep = [self.file_of.get(trial_id) is file and trial_id not in without for trial_id in ids]
            tables.append(trials if all(keep) else trials.filter(pa.array(keep, pa.bool_())))
        return pa.concat_tables(tables)

    def records(self, without: Collection[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each compacted trial's id and trial.json, one file at a time; `without`: not of these trials."""
        for file in self.files:
            for trial_id, record in file.records():
                if self.file_of.get(trial_id) is file and trial_id not in without:
                    yield trial_id, record

    def attempts(self, without: Collection[str] = ()) -> pa.Table:
        """ATTEMPTS of all compacted trials, each trial once; `without`: not of these trials."""
        file_of, tables = self.file_of, [ATTEMPTS.empty_table()]
        for file in self.files:
            found = file.attempts()
            keep = [file_of.get(one) is file and one not in without for one in found["trial_id"].to_pylist()]
            tables.append(found if all(keep) else found.filter(pa.array(keep, pa.bool_())))
        return pa.concat_tables(tables).unify_dictionaries()

    def next_name(self, task: str) -> str:
        """A name for a new file, with a higher number than all others."""
        numbers = [int(match[2]) for name in self.listed if (match := COMPACTED_NAME.fullmatch(name))]
        return f"{task}-{max(numbers, default=0) + 1:06}-{uuid.uuid4().hex[:8]}.parquet"


def compacted_names(folder: Path) -> list[str]:
    """The names of compacted files, oldest first."""
    try:
        found = [match for name in os.listdir(folder) if (match := COMPACTED_NAME.fullmatch(name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [match[0] for match in sorted(found, key=lambda match: (int(match[2]), match[0]))]


def compaction_groups(
    finished: Mapping[str, Mapping[str, Any]], *, minimum: int = MIN_ROWS, full: int = FULL_ROWS
) -> list[tuple[str, list[str]]]:
    """Groups of finished trials, each for one compacted file, as pairs of task and trial ids.

    `finished` has the trial.json of each trial by id.
    Each file gets `full` rows; the last one of a task has at least `minimum`, or waits for more.
    """
    by_task: dict[str, list[str]] = {}
    for trial_id, record in sorted(finished.items(), key=lambda item: _sort_key(item[1])):
        by_task.setdefault(str(record["trial"]["task"]), []).append(trial_id)
    groups = []
    for task, trial_ids in by_task.items():
        group: list[str] = []
        rows = 0
        for trial_id in trial_ids:
            group.append(trial_id)
            rows += finished[trial_id]["rows"]
            if rows >= full:
                groups.append((task, group))
                group, rows = [], 0
        if group and rows >= minimum:
            groups.append((task, group))
    return groups


def _sort_key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    trial: Mapping[str, Any] = record["trial"]
    return trial["task"], trial["repeat"], trial["shard"], trial["policy"], trial["trial_id"]

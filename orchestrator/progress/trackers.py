"""Sends the totals of a sweep to experiment trackers: one run per task and configuration.

Each tracker runs in its own process. If the process fails, the sweep continues and prints one warning. Each point has
the totals of the trials that had finished by then. Its step is the number of documents of the whole sweep, since a
speed-up also changes with the rows of k=1. The folder records what was sent, so that a resumed sweep continues the
same runs.
"""

import hashlib
import json
import math
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from orchestrator.core.configuration import BaselineRule
from orchestrator.core.evidence import ROW_COLUMNS
from orchestrator.core.race import CONFIRMED, DECISIONS_KEY, FINISHED, RACING, REJECTED, Race, RaceEntry
from orchestrator.core.system import TRACKER_PACKAGES
from orchestrator.core.totals import RunningTotals, Totals
from orchestrator.core.trial import Trial, WantedDocuments, shards_of_table
from orchestrator.core.untrusted import path_below
from orchestrator.progress.progress import stored_sums
from orchestrator.progress.status import read_status
from orchestrator.store import Store
from orchestrator.store.files import DISK, make_folders, write_file
from sampler.errors import InputError

POLL_SECONDS = 5.0
FINISH_TIMEOUT_SECONDS = 60.0  # at the end of a sweep
REPLAYED_POINTS = 100  # of each run, at most, when a finished sweep is sent
SERIES = ("accuracy", "tokens_per_s", "speedup", "documents")  # of Totals
RACE = "race"  # series of a race: its state; names that begin with this have the evidence of the decision
RACE_VALUES = {RACING: 0.0, CONFIRMED: 1.0, REJECTED: -1.0, FINISHED: 0.5}
FOLDER = "trackers"  # in the sweep's folder
FEED = "import sys; from orchestrator.cli.reports import feed_tracker; feed_tracker(sys.argv[1], sys.argv[2])"
Summary = Mapping[str, Mapping[str, str]]  # by run: what is known at the end


class Tracker(Protocol):
    """One experiment tracker. Runs are opened when their first value is sent; ids of earlier runs are in `ids`."""

    ids: dict[str, str]

    def log(self, run: str, step: int, values: Mapping[str, float]) -> None: ...
    def summarize(self, run: str, values: Mapping[str, str]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def check_installed(names: Sequence[str]) -> None:
    """InputError if the package of a tracker is missing."""
    for name in names:
        package = TRACKER_PACKAGES[name]
        if find_spec(package) is None:
            raise InputError(f"the tracker {name} is not installed; install it with: pip install {package}")


class TrackerProcesses:
    """A context manager that feeds trackers, each in its own process. `note` shows a line to the user.

    At the end, the trackers have `timeout` seconds for the last points and the summary.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        note: Callable[[str], None],
        *,
        timeout: float | None = FINISH_TIMEOUT_SECONDS,
    ) -> None:
        self._folder, self._names, self._note, self._timeout = folder, names, note, timeout
        self._children: dict[str, tuple[subprocess.Popen[bytes], Any]] = {}
        self.failed: list[str] = []

    def __enter__(self) -> "TrackerProcesses":
        for name in self._names:
            output = tempfile.TemporaryFile()
            command = [sys.executable, "-c", FEED, str(self._folder), name]
            streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": output}
            child = subprocess.Popen(command, **streams, start_new_session=True)  # Ctrl-C is for the sweep
            self._children[name] = child, output
        return self

    def __exit__(self, *_: object) -> None:
        """Closing their input tells the trackers that the sweep has ended."""
        for child, _ in self._children.values():
            assert child.stdin is not None
            child.stdin.close()
        for name, (child, output) in self._children.items():
            try:
                code = child.wait(self._timeout)
            except subprocess.TimeoutExpired:
                child.kill()
                code = child.wait()
            if code:
                self.failed.append(name)
                self._note(
                    f"warning: {name} did not get all values: {_reason(code, output)}; no rows are affected, and "
                    f"`reuse-sweep track {self._folder} --to {name}` sends them again"
                )
            output.close()


def _reason(code: int, output: Any) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines and code > 0 else f"its process ended with code {code}"


def feed(folder: Path, name: str, summary: Callable[[], Summary]) -> None:
    """Sends the points of a sweep until standard input ends, and then the summary."""
    check_installed([name])
    store = Store(folder)
    record = store.read_sweep_record()
    assert record is not None, folder
    sent = _Sent(folder, name)
    tracker = _OPENERS[name](folder, record, sent.ids)
    points = _Points(store, record)
    for totals in points.replay():
        _send(tracker, sent, totals, points.entries())
    while not select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
        _send(tracker, sent, points.new(), points.entries())
    _send(tracker, sent, points.new(), points.entries())
    status = read_status(folder)
    _send(tracker, sent, status.totals, status.race)  # also the rows of trials that did not finish
    for run, values in summary().items():
        tracker.summarize(run, values)
    tracker.close()
    sent.save(closed=True)


def run_name(totals: Totals) -> str:
    return f"{totals.task}/{totals.configuration.slug()}"


def _send(tracker: Tracker, sent: "_Sent", totals: Sequence[Totals], race: Sequence[RaceEntry]) -> None:
    by_key = {entry.key: _race_values(entry) for entry in race}
    step = sum(line.documents for line in totals)
    if step <= sent.step:
        return
    sent.step = step
    for line in totals:
        run = run_name(line)
        values = {name: getattr(line, name) for name in SERIES} | by_key.get(line.key, {})
        if line.documents and values != sent.values.get(run):
            sent.values[run] = values
            tracker.log(run, step, {name: float(value) for name, value in values.items() if value is not None})
    tracker.flush()
    sent.save()


def _race_values(entry: RaceEntry) -> dict[str, float]:
    measures = {f"{RACE}_{name}": value for name, value in entry.measures.items() if math.isfinite(value)}
    return {RACE: RACE_VALUES[entry.state], **measures}


class _Points:
    """Totals of the finished trials, in the order in which they finished, and the race on their rows."""

    def __init__(self, store: Store, record: Mapping[str, Any]) -> None:
        self._store, self._seen = store, set[str]()
        self._totals = RunningTotals(baselines=BaselineRule.by_task(record))
        self._race: Race | None = None
        if record["settings"].get(RACE):
            by_shard = {task: shards_of_table(store.documents(task)) for task in record["settings"]["tasks"]}
            undecided = {key: value for key, value in record.items() if key != DECISIONS_KEY}
            self._race = Race.from_record(undecided, WantedDocuments(by_shard=by_shard))

    def entries(self) -> tuple[RaceEntry, ...]:
        return () if self._race is None else self._race.entries()

    def new(self) -> tuple[Totals, ...]:
        """The current totals. Reads only trials that had not finished at the last call."""
        unseen = (trial_id for trial_id in self._store.trial_folders() if trial_id not in self._seen)
        read = ((trial_id, self._store.trial(trial_id)) for trial_id in unseen)
        records = {trial_id: record for trial_id, record in read if record is not None}
        for _, trial_id, record in self._finished(records):
            self._add(trial_id, record)
        return self._totals.totals()

    def replay(self) -> Iterator[tuple[Totals, ...]]:
        """The totals as the trials finished so far, in up to REPLAYED_POINTS steps."""
        finished = self._finished(self._store.trials())
        for number, (_, trial_id, facts) in enumerate(finished, start=1):
            self._add(trial_id, facts)
            if number * REPLAYED_POINTS // len(finished) > (number - 1) * REPLAYED_POINTS // len(finished):
                yield self._totals.totals()

    def _finished(self, trials: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str, Mapping[str, Any]]]:
        """End, id and trial.json of finished trials, in order of time."""
        return sorted(
            (
                (str((facts["attempts"] or [{}])[-1].get("ended_at")), trial_id, facts)
                for trial_id, facts in trials.items()
                if facts["status"] == "finished"
            ),
            key=lambda one: one[:2],
        )

    def _add(self, trial_id: str, facts: Mapping[str, Any]) -> None:
        self._seen.add(trial_id)
        self._totals.add_sums(Trial.from_dict(facts["trial"]), stored_sums(self._store, trial_id, facts))
        if self._race is not None:
            self._race.add_rows(self._store.rows([trial_id], ROW_COLUMNS, verify=False))


class _Sent:
    """What was sent to a tracker: the last step, which a kill may have cut short, and the ids of its runs."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = path_below(folder, f"{FOLDER}/{name}.json")
        self.values: dict[str, Mapping[str, float | None]] = {}  # by run: the last values that this process sent
        try:
            stored = json.loads(self._path.read_bytes())
            self.step = int(stored["step"]) - (not stored.get("closed"))  # so that the last step is sent again
            self.ids: dict[str, str] = {str(run): str(one) for run, one in stored["ids"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no file yet, or another content
            self.step, self.ids = 0, {}

    def save(self, *, closed: bool = False) -> None:
        make_folders(DISK, self._path.parent)
        stored = {"step": self.step, "closed": closed, "ids": self.ids}
        write_file(DISK, self._path, json.dumps(stored, indent=1).encode())


def _configuration(record: Mapping[str, Any], run: str) -> dict[str, Any]:
    """What a tracker shows as the settings of a run."""
    task, _, configuration = run.partition("/")
    model = record.get("model") or {}
    known = {"sweep": record.get("sweep"), "task": task, "configuration": configuration}
    known |= {"model": model.get("source"), "model_revision": model.get("revision")}
    return known | {f"settings.{name}": value for name, value in record["settings"].items()}


class TensorBoardTracker:
    """Event files below trackers/tensorboard, which Ray Tune's own dependency tensorboardX writes."""

    def __init__(self, folder: Path, record: Mapping[str, Any], ids: dict[str, str]) -> None:
        self._folder, self._record, self.ids = folder / FOLDER / "tensorboard", record, ids
        self._writers: dict[str, Any] = {}

    def _run(self, run: str) -> Any:
        if run not in self._writers:
            from tensorboardX import SummaryWriter

            self._writers[run] = SummaryWriter(str(path_below(self._folder, run)))
            if run not in self.ids:
                self.ids[run] = run
                text = json.dumps(_configuration(self._record, run), indent=1, default=str)
                self._writers[run].add_text("settings", f"    {text}".replace("\n", "\n    "))
        return self._writers[run]

    def log(self, run: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._run(run).add_scalar(name, value, step)

    def summarize(self, run: str, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            self._run(run).add_text(name, value)

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class WandbTracker:
    """Weights & Biases. Its environment variables select the server; WANDB_MODE=offline uses none."""

    def __init__(self, folder: Path, record: Mapping[str, Any], ids: dict[str, str]) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        self._folder, self._record, self.ids = folder / FOLDER, record, ids
        self._runs: dict[str, Any] = {}

    def _run(self, run: str) -> Any:
        if run not in self._runs:
            import wandb

            known = f"{self._record.get('sweep')}/{self._record.get('created')}/{run}"
            self._runs[run] = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "reuse-sweep"),
                group=self._record.get("sweep"),
                name=run,
                id=self.ids.setdefault(run, hashlib.sha256(known.encode()).hexdigest()[:16]),
                resume="allow",
                reinit="create_new",
                dir=str(self._folder),
                config=_configuration(self._record, run),
            )
        return self._runs[run]

    def log(self, run: str, step: int, values: Mapping[str, float]) -> None:
        self._run(run).log(dict(values), step=step)

    def summarize(self, run: str, values: Mapping[str, str]) -> None:
        self._run(run).summary.update(dict(values))

    def flush(self) -> None:
        """wandb sends in the background."""

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


class MlflowTracker:
    """The server in MLFLOW_TRACKING_URI, else files below trackers/mlflow. The experiment is the sweep."""

    def __init__(self, folder: Path, record: Mapping[str, Any], ids: dict[str, str]) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (folder / FOLDER / "mlflow").resolve().as_uri()
        from mlflow import MlflowClient

        self._client, self._record, self.ids = MlflowClient(tracking_uri=uri), record, ids
        name = str(record.get("sweep") or folder.name)
        found = self._client.get_experiment_by_name(name)
        self._experiment = found.experiment_id if found is not None else self._client.create_experiment(name)

    def _run(self, run: str) -> str:
        if run not in self.ids:  # it may exist: the process may have ended before it could note the id
            runs = self._client.search_runs([self._experiment])
            found = next((one for one in runs if one.info.run_name == run), None)
            found = found or self._client.create_run(self._experiment, run_name=run)
            self.ids[run] = found.info.run_id
            for name, value in _configuration(self._record, run).items():
                self._client.log_param(self.ids[run], name, value)
        return self.ids[run]

    def log(self, run: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run(run), name, value, step=step)

    def summarize(self, run: str, values: Mapping[str, str]) -> None:
        for name, value in values.items():
            self._client.set_tag(self._run(run), name, value)

    def flush(self) -> None:
        """Every value is sent at once."""

    def close(self) -> None:
        for run_id in self.ids.values():
            self._client.set_terminated(run_id)


class TrackioTracker:
    """Trackio, on this machine. Its environment variables select the directory. The project is the sweep."""

    def __init__(self, folder: Path, record: Mapping[str, Any], ids: dict[str, str]) -> None:
        self._project, self._record, self.ids = str(record.get("sweep") or folder.name), record, ids
        self._runs: dict[str, Any] = {}

    def _run(self, run: str) -> Any:
        if run not in self._runs:
            import trackio

            self.ids[run] = run
            self._runs[run] = trackio.init(
                project=self._project, name=run, resume="allow", config=_configuration(self._record, run), embed=False
            )
        return self._runs[run]

    def log(self, run: str, step: int, values: Mapping[str, float]) -> None:
        self._run(run).log(dict(values), step=step)

    def summarize(self, run: str, values: Mapping[str, str]) -> None:
        self._run(run).log({f"summary/{name}": value for name, value in values.items()})

    def flush(self) -> None:
        """trackio sends in the background."""

    def close(self) -> None:
        for run in self._runs.values():
            run.finish()


_OPENERS: Mapping[str, Callable[[Path, Mapping[str, Any], dict[str, str]], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}

"""Experiment trackers get the totals of a sweep, continue their runs, and cannot harm a sweep when they fail."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from simulated_sweep import Simulation, write_sweep
from sweep_process import BUNDLED, grid_flags

from orchestrator.cli.__main__ import dispatch
from orchestrator.core.system import TRACKER_PACKAGES
from orchestrator.progress import trackers
from orchestrator.progress.status import read_status
from orchestrator.progress.trackers import FOLDER, TrackerProcesses, run_name
from orchestrator.store import Store
from sampler.errors import InputError

ROOT = Path(__file__).parents[1]
SIMULATION = Simulation(documents={"gsm8k": 60, "mmlu": 57}, policies=("k1", "k2_middle"), shard_size=10)
Points = list[tuple[int, float]]
Series = dict[str, Points]  # by series: steps and values


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "finished", SIMULATION)


def read_tensorboard(folder: Path, run: str) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / FOLDER / "tensorboard" / run), size_guidance={"scalars": 0})
    found.Reload()
    return {name: [(p.step, p.value) for p in found.Scalars(name)] for name in found.Tags()["scalars"]}


def read_mlflow(folder: Path, run: str) -> Series:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / FOLDER / "mlflow").resolve().as_uri())
    (experiment,) = (one for one in client.search_experiments() if one.name != "Default")
    (found,) = (one for one in client.search_runs([experiment.experiment_id]) if one.info.run_name == run)
    return {
        name: [(p.step, p.value) for p in client.get_metric_history(found.info.run_id, name)]
        for name in found.data.metrics
    }


def read_wandb(folder: Path, run: str) -> Series:
    """From the files that an offline run writes, with wandb's own reader."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    run_id = json.loads((folder / FOLDER / "wandb.json").read_text())["ids"][run]
    found: Series = {}
    for path in sorted((folder / FOLDER / "wandb").glob(f"offline-run-*-{run_id}/run-*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                for name in values.keys() - {"_step", "_runtime", "_timestamp"}:
                    found.setdefault(name, []).append((int(values["_step"]), float(values[name])))
    return found


def read_trackio(folder: Path, run: str) -> Series:
    from trackio.sqlite_storage import SQLiteStorage

    found: Series = {}
    for line in SQLiteStorage.get_logs(str((Store(folder).read_sweep_record() or {})["sweep"]), run):
        for name in line.keys() - {"step", "timestamp"}:
            if isinstance(line[name], int | float):
                found.setdefault(name, []).append((line["step"], line[name]))
    return found


READERS: dict[str, Callable[[Path, str], Series]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
    "trackio": read_trackio,
}
READER_PACKAGES = TRACKER_PACKAGES | {"tensorboard": "tensorboard"}


@pytest.fixture(params=["tensorboard", *(pytest.param(name, marks=pytest.mark.slow) for name in list(READERS)[1:])])
def tracker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A tracker that is installed, without a server."""
    name = str(request.param)
    if find_spec(READER_PACKAGES[name]) is None:
        pytest.skip(f"{READER_PACKAGES[name]} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trackers' own packages
        yield name


def check(folder: Path, name: str, *, least: int) -> None:
    """Each run's last values are the totals of the store, and its steps only go up."""
    found = read_status(folder)
    documents = found.documents
    for totals in found.totals:
        series = READERS[name](folder, run_name(totals))
        points = series["documents"]
        steps = [step for step, _ in points]
        assert steps == sorted(steps)
        assert len(set(points)) == len(set(steps)), "a point that was sent again, after a kill, has the same value"
        assert len(points) >= least
        assert points[-1][1] == totals.documents
        assert points[-1][0] <= documents
        for key in ("accuracy", "tokens_per_s", "speedup"):
            value = getattr(totals, key)
            assert (key in series) == (value is not None), key
            if value is not None:
                assert series[key][-1][1] == pytest.approx(value, rel=1e-6), key


def test_series_are_the_totals_and_continue(tracker: str, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "half"
    shutil.copytree(finished, folder)
    later = sorted((folder / "trials").iterdir())[::2]
    for trial in later:
        trial.rename(tmp_path / trial.name)
    dispatch(["track", str(folder), "--to", tracker])
    check(folder, tracker, least=2)
    runs = json.loads((folder / FOLDER / f"{tracker}.json").read_text())["ids"]
    for trial in later:
        (tmp_path / trial.name).rename(trial)
    dispatch(["track", str(folder), "--to", tracker])
    check(folder, tracker, least=4)
    assert json.loads((folder / FOLDER / f"{tracker}.json").read_text())["ids"] == runs
    assert Store(folder).rows().equals(Store(finished).rows())


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_the_summary_has_the_verdict(finished: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shutil.copytree(finished, tmp_path / "sweep")
    dispatch(["track", str(tmp_path / "sweep"), "--to", "tensorboard"])
    found = EventAccumulator(str(tmp_path / "sweep" / FOLDER / "tensorboard" / "gsm8k" / "k2_middle"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found.Reload()
    texts = {
        name.removesuffix("/text_summary"): found.Tensors(name)[0].tensor_proto.string_val[0].decode()
        for name in found.Tags()["tensors"]
    }
    assert texts["verdict"].startswith("k2_middle is ")
    assert "simulated/block-diffusion-7b" in texts["model"]
    assert '"settings.policies"' in texts["settings"]


def test_a_killed_tracker_costs_one_warning(tracker: str, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "sweep")
    notes: list[str] = []
    with TrackerProcesses(tmp_path / "sweep", [tracker], notes.append) as children:
        ((child, _),) = children._children.values()
        while not (tmp_path / "sweep" / FOLDER / f"{tracker}.json").exists():  # the first points were sent
            assert child.poll() is None
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    (note,) = notes
    assert note.startswith(f"warning: {tracker} did not get all values: its process ended with code -9")
    assert Store(tmp_path / "sweep").rows().equals(Store(finished).rows())
    dispatch(["track", str(tmp_path / "sweep"), "--to", tracker])
    if tracker not in ("wandb", "trackio"):  # these two send in the background, and do not tell when they have
        check(tmp_path / "sweep", tracker, least=1)


def test_a_tracker_that_hangs_is_ended(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "FEED", "import time; time.sleep(3600)")
    notes: list[str] = []
    with TrackerProcesses(finished, ["tensorboard"], notes.append, timeout=0.2) as children:
        ((child, _),) = children._children.values()
    assert child.returncode == -signal.SIGKILL
    assert len(notes) == 1


def test_mistakes_are_sentences(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--to must be tensorboard, wandb, mlflow or trackio"):
        dispatch(["track", str(finished), "--to", "excel"])
    with pytest.raises(InputError, match="does not exist; pass a sweep directory"):
        dispatch(["track", str(tmp_path / "nowhere"), "--to", "tensorboard"])
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="the tracker wandb is not installed; install it with: pip install wandb"):
        dispatch(["track", str(finished), "--to", "wandb"])


@pytest.mark.slow
def test_a_sweep_with_failing_trackers_has_all_rows(tmp_path: Path) -> None:
    """MLflow's server does not exist; the other trackers are killed during the sweep."""
    flags = [*BUNDLED, *grid_flags("k1,k2_middle", limit=30, shard_size=5)]
    flags += ["--actors", "1", "--no-dashboard", "--name", "demo", "--out", str(tmp_path)]
    names = [name for name, package in TRACKER_PACKAGES.items() if find_spec(package) is not None]
    offline = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    no_server = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
    sweep = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli", "sweep", *flags, "--track", ",".join(names)],
        cwd=ROOT,
        env={**os.environ, **offline, **no_server},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    to_kill = set(names) - {"mlflow"}
    while to_kill and sweep.poll() is None:
        for name in [one for one in to_kill if (tmp_path / "demo" / FOLDER / f"{one}.json").exists()]:
            command = ["pgrep", "-P", str(sweep.pid), "-f", f"feed_tracker.* {name}$"]
            (process,) = subprocess.run(command, capture_output=True).stdout.split()
            os.kill(int(process), signal.SIGKILL)
            to_kill.remove(name)
        time.sleep(0.2)
    printed = sweep.communicate()[0]
    assert sweep.returncode == 0, printed
    assert not to_kill
    for name in names:
        assert printed.count(f"warning: {name} did not get all values") == 1, printed
    status = read_status(tmp_path / "demo")
    assert (status.state, status.documents) == ("complete", 60)
    assert Store(tmp_path / "demo").check() == []
    dispatch(["track", str(tmp_path / "demo"), "--to", "tensorboard"])
    if find_spec("tensorboard") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(tmp_path / "demo", "tensorboard", least=1)

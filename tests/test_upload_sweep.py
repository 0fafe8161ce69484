"""Real sweeps with --upload: killed and continued, continued on another machine, and a bucket that goes away."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs
from s3_server import CREDENTIALS, S3Server, s3_server
from small_sweep import write_model_and_data
from sweep_process import SweepProcess, grid_flags, stored_rows
from test_sweep_faults import gone
from test_upload import local_files, remote_files

from orchestrator.store import Store
from orchestrator.store.remote_folder import RemoteFolder

pytestmark = pytest.mark.slow
FLAGS = grid_flags(max_new_tokens=200, shard_size=3)
HERE = ("--actors", "2", "--no-dashboard")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_and_data(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def finished_in(url: str) -> set[str]:
    return {name.split("/")[1] for name in RemoteFolder(url, "s").list() if name.endswith("/trial.json")}


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_killed_sweep_continues_here_and_from_its_copy(case: Path, tmp_path: Path, s3: S3Server, kind: str) -> None:
    s3.make_bucket("bucket")
    url = f"file://{tmp_path}/remote" if kind == "file" else s3.url("bucket/copies")
    flags = (*FLAGS, *HERE, "--upload", url)
    run = SweepProcess(case, tmp_path / "results", *flags)
    run.wait_until(lambda: finished_in(url), "a copied trial")
    below = set(run.descendants())
    run.process.kill()
    run.wait(-signal.SIGKILL)
    assert gone(below), "or its folder would still be in use"

    there = SweepProcess(case, tmp_path / "elsewhere", *flags)  # another machine: its folder is empty
    there.wait_until(lambda: Store(there.folder).trial_ids(), "fetched trials")
    copied = finished_in(url)
    text = there.wait()
    assert "downloading the sweep from" in text
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in text
    assert text.splitlines()[-1] == f"{url.partition('?')[0]}/s"
    assert remote_files(url) == local_files(there.folder)
    trials = Store(there.folder).trials()
    assert copied
    assert len(trials) == 12
    assert all(len(trials[trial_id]["attempts"]) == 1 for trial_id in copied), "none of them ran again"
    assert not any(CREDENTIALS["AWS_SECRET_ACCESS_KEY"].encode() in data for data in local_files(there.folder).values())

    again = SweepProcess(case, tmp_path / "results", *flags)  # the first machine is back, with what it had
    again.wait()
    assert stored_rows(again.folder) == stored_rows(there.folder)
    assert remote_files(url) == local_files(again.folder)

    shutil.rmtree(again.folder)
    rows = stored_rows(there.folder)
    fetched = SweepProcess(case, tmp_path / "results", *flags)
    assert "nothing to do" in fetched.wait()
    assert stored_rows(fetched.folder) == rows
    assert remote_files(url) == local_files(fetched.folder)


@pytest.mark.usefixtures("credentials")
def test_a_copy_that_stays_incomplete_costs_no_row_and_ends_with_1(case: Path, tmp_path: Path, s3: S3Server) -> None:
    s3.make_bucket("bucket-gone")
    url = s3.url("bucket-gone/copies")
    run = SweepProcess(case, tmp_path / "results", *FLAGS, *HERE, "--limit", "6", "--upload", url)
    run.wait_until(lambda: "sweep.copy.json" in RemoteFolder(url, "s").list(), "the copied request")
    os.kill(run.process.pid, signal.SIGSTOP)  # so that it does not write while the bucket is emptied
    system, _ = fs.FileSystem.from_uri(url)
    system.delete_dir_contents("bucket-gone")
    s3.delete_bucket("bucket-gone")
    os.kill(run.process.pid, signal.SIGCONT)
    text = run.wait(1)
    assert "error: all rows are on disk, but the copy at s3://bucket-gone/copies/s lacks" in text
    assert "; continue with: " in text.splitlines()[-1]
    assert "Traceback" not in text
    assert len(stored_rows(run.folder)) == 18
    s3.make_bucket("bucket-gone")
    again = SweepProcess(case, tmp_path / "results", *FLAGS, *HERE, "--limit", "6", "--upload", url)
    assert "nothing to do" in again.wait()
    assert remote_files(url) == local_files(again.folder)


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--upload", "s3://no-bucket/x"), "error: --upload s3://no-bucket/x/s cannot be used: cannot write s3://"),
        (("--upload", "s3://never-shown:never-shown@b/x"), "error: --upload must not contain credentials"),
        (("--out", "s3://b/x"), "error: --out must be a local directory (got s3://…); --upload copies"),
    ],
)
def test_what_cannot_be_uploaded_to_is_refused_with_2(
    case: Path, tmp_path: Path, s3: S3Server, flags: tuple[str, str], sentence: str
) -> None:
    value = s3.url(flags[1].removeprefix("s3://")) if "no-bucket" in flags[1] else flags[1]
    run = SweepProcess(case, tmp_path / "results", *FLAGS, *HERE, flags[0], value)
    text = run.wait(2)
    (error,) = [line for line in text.splitlines() if line.startswith("error:")]
    assert error.startswith(sentence)
    assert "never-shown" not in text
    assert not run.folder.exists()

"""The copy of a sweep at a URL: complete, continued after kill -9, valid at every moment, and fetched from there."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs
from s3_server import CREDENTIALS, S3Server, s3_server
from simulated_sweep import Simulation, write_sweep
from synthetic_folder import SyntheticFolder

from orchestrator.report.write import write_report
from orchestrator.store import Store, StoreWriter
from orchestrator.store import upload as uploading
from orchestrator.store.files import hash_file
from orchestrator.store.remote_folder import RemoteFolder, UploadFailed
from orchestrator.store.upload import RemoteCopy, Uploader, UploadIncomplete, finish_upload, open_remote_copy
from sampler.errors import InputError
from tests.upload_processes import kill_upload
from tools.scale.synthetic_sweep import DiskWithoutSync

NOT_COPIED = ("lock", "quarantine", "slurm", "upload.jsonl", ".upload.jsonl")  # the last: of a killed process
KILLS = 20


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/remote/copies"
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    server: S3Server = request.getfixturevalue("s3")
    bucket = f"bucket-{tmp_path.name.replace('_', '-').lower()[:40]}"
    server.make_bucket(bucket)
    return server.url(f"{bucket}/copies")


def small_sweep(folder: Path, documents: int = 28) -> SyntheticFolder:
    """20 trials, the last of each configuration with fewer documents."""
    return SyntheticFolder(folder, documents=documents, kinds=("generate", "loglikelihood"), shard_size=6)


def run_trials(sweep: SyntheticFolder, count: int | None = None) -> None:
    with sweep.begin() as store:
        for trial in sweep.trials[:count]:
            if len(store.completed_documents(trial.trial_id)) < len(sweep.wanted(trial)):
                sweep.run(store, trial)


def opened(url: str, folder: Path) -> RemoteCopy:
    copy = open_remote_copy(url, folder, dry_run=False, note=lambda _: None)
    assert copy is not None
    return copy


def upload(url: str, folder: Path) -> None:
    assert not opened(url, folder).copy_all().missing


def local_files(folder: Path) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.split("/")[0].startswith(NOT_COPIED)}


def remote_files(url: str, name: str = "s") -> dict[str, bytes]:
    """Read without the code under test; uploader.json is in the copy only."""
    system, root = fs.FileSystem.from_uri(url)
    selected = fs.FileSelector(f"{root}/{name}", recursive=True, allow_not_found=True)
    entries = [entry for entry in system.get_file_info(selected) if entry.type == fs.FileType.File]
    entries = [entry for entry in entries if entry.base_name != "uploader.json"]
    return {entry.path.removeprefix(f"{root}/{name}/"): system.open_input_file(entry.path).read() for entry in entries}


def rows_of(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = Store(folder).rows().drop_columns(["attempt"]).to_pylist()
    return {(row["trial_id"], row["doc_id"]): row for row in rows}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files as they are written to the remote folder."""
    names: list[str] = []
    write = RemoteFolder.write

    def noted(self: RemoteFolder, name: str, data: bytes) -> None:
        write(self, name, data)
        names.append(name)

    monkeypatch.setattr(RemoteFolder, "write", noted)
    return names


def test_a_sweep_with_its_report_is_copied_byte_for_byte(url: str, tmp_path: Path, written: list[str]) -> None:
    folder = write_sweep(
        tmp_path / "s", Simulation(documents={"gsm8k": 20}, policies=("k1_first", "k2_middle"), shard_size=10)
    )
    write_report([folder])
    (folder / "slurm").mkdir()
    (folder / "slurm" / "001.sh").write_text("#!/bin/sh\n")
    finish_upload(opened(url, folder))
    assert remote_files(url) == local_files(folder)
    assert {"report.html", "results.md", "sweep.json", "documents/gsm8k.parquet"} <= local_files(folder).keys()
    written.clear()
    upload(url, folder)
    assert written == [".write-test.tmp"], "nothing has changed"
    os.utime(folder / "sweep.json")
    upload(url, folder)
    assert written == [".write-test.tmp"] * 2, "another time, the same bytes"
    summary = next(folder.glob("summaries/*/*/summary.json"))
    summary.unlink()
    (folder / "report.html").write_text("another page")
    written.clear()
    upload(url, folder)
    assert written == [".write-test.tmp", "report.html"]
    assert remote_files(url) == local_files(folder), "and what is gone here is gone there"


def test_order_of_the_files(url: str, tmp_path: Path, written: list[str]) -> None:
    """Documents before the request that promises them, rows before the trial.json that calls them finished."""
    run_trials(small_sweep(tmp_path / "s"), 4)
    upload(url, tmp_path / "s")
    position = {name: place for place, name in enumerate(written)}
    documents = [place for name, place in position.items() if name.startswith("documents/")]
    assert len(documents) == 2
    assert max(documents) < position["sweep.json"]
    for name in [name for name in position if name.endswith("/rows.parquet")]:
        assert position[name] < position[name.replace("rows.parquet", "trial.json")]


def test_trials_that_have_changed_are_copied_again(url: str, tmp_path: Path, written: list[str]) -> None:
    folder = tmp_path / "s"
    run_trials(small_sweep(folder))
    upload(url, folder)
    written.clear()
    extended = small_sweep(folder, documents=30)
    run_trials(extended)
    with StoreWriter(folder, disk=DiskWithoutSync()) as store:  # as --force does
        forced = extended.trials[0]
        store.quarantine([forced.trial_id])
        extended.run(store, forced)
    upload(url, folder)
    assert remote_files(url) == local_files(folder)
    changed = {trial.trial_id for trial in extended.trials if trial.shard == 4} | {forced.trial_id}
    assert {name.split("/")[1] for name in written if name.startswith("trials/")} == changed
    assert list((folder / "quarantine").iterdir()), "which stays here"


@contextmanager
def failing_uploads_of_trial_json(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write = RemoteFolder.write

    def write_others(self: RemoteFolder, name: str, data: bytes) -> None:
        if name.endswith("trial.json"):
            raise UploadFailed("no network")
        write(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "write", write_others)
        yield


def test_changed_rows_are_never_in_the_copy_with_the_old_trial_json(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload that ends between the two leaves a trial that is not fetched, and runs again."""
    here, there = tmp_path / "here" / "s", tmp_path / "there" / "s"
    run_trials(small_sweep(here))
    upload(url, here)
    run_trials(small_sweep(here, documents=30))
    with failing_uploads_of_trial_json(monkeypatch):
        outcome = opened(url, here).copy_all()
    assert outcome.problem == "no network"
    assert set(outcome.missing) > {"the report"}
    opened(url, there)
    gone = set(Store(here).trial_ids()) - set(Store(there).trial_ids())
    assert 1 <= len(gone) <= 4
    assert {Store(here).trials()[trial_id]["trial"]["shard"] for trial_id in gone} == {4}
    run_trials(small_sweep(there, documents=30))
    assert rows_of(there) == rows_of(here)


def test_failed_trials_are_copied_at_the_end_and_replaced_when_they_finish(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    sweep = small_sweep(folder)
    with sweep.begin() as store:
        sweep.run(store, sweep.trials[0], sweep.wanted(sweep.trials[0])[:2])
        store.fail(sweep.trials[0].trial_id, "no reason")
        sweep.run(store, sweep.trials[1])
    copy = opened(url, folder)
    assert not copy.copy_finished().missing
    assert f"trials/{sweep.trials[0].trial_id}/trial.json" not in remote_files(url)
    assert f"trials/{sweep.trials[1].trial_id}/trial.json" in remote_files(url)
    assert not copy.copy_all().missing
    assert remote_files(url) == local_files(folder)
    run_trials(sweep, 2)
    upload(url, folder)
    assert remote_files(url) == local_files(folder)
    assert not any(name.endswith(".arrows") for name in remote_files(url))


def test_a_new_machine_continues_from_the_copy(url: str, tmp_path: Path, written: list[str]) -> None:
    here, there = tmp_path / "here" / "s", tmp_path / "there" / "s"
    run_trials(small_sweep(here), 12)
    upload(url, here)
    written.clear()
    notes: list[str] = []
    assert open_remote_copy(url, there, dry_run=True, note=notes.append) is None
    assert not there.exists()
    copy = open_remote_copy(url, there, dry_run=False, note=notes.append)
    assert copy is not None
    assert ["would be downloaded first" in notes[0], notes[1]] == [True, f"downloading the sweep from {copy.url}"]
    assert local_files(there) == local_files(here)
    assert Store(there).check() == []
    assert not copy.copy_all().missing
    assert written == [".write-test.tmp", "uploader.json"], "what was fetched is not uploaded again"
    before = {path: path.read_bytes() for path in there.rglob("rows.parquet")}
    run_trials(small_sweep(there))
    assert not copy.copy_all().missing
    assert {path: path.read_bytes() for path in before} == before, "finished trials did not run again"
    assert remote_files(url) == local_files(there)
    run_trials(small_sweep(here))
    assert rows_of(here) == rows_of(there)


def test_two_machines_take_turns(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second replaces files by others of the same size, which are not in the first one's manifest."""
    here, there = tmp_path / "here" / "s", tmp_path / "there" / "s"
    run_trials(small_sweep(here), 8)
    with failing_uploads_of_trial_json(monkeypatch):
        assert opened(url, here).copy_all().missing
    copy = opened(url, there)
    assert Store(there).trial_ids() == []
    sweep = small_sweep(there)
    with sweep.begin() as store:
        for trial in sweep.trials:
            store.begin(trial.as_dict(), {})
            sweep.run(store, trial)  # a second attempt
    assert not copy.copy_all().missing
    assert remote_files(url) == local_files(there)
    run_trials(small_sweep(here))
    upload(url, here)
    assert remote_files(url) == local_files(here)
    assert {len(path.read_bytes()) for path in here.rglob("rows.parquet")} & {
        len(path.read_bytes()) for path in there.rglob("rows.parquet")
    }, "or this test shows nothing"
    upload(url, there)
    assert remote_files(url) == local_files(there)


def change(sweep: SyntheticFolder, number: int) -> SyntheticFolder:
    """What happens to a folder between two uploads: trials finish, some run again, and once the sweep is extended."""
    if number == KILLS // 2:
        sweep = small_sweep(sweep.folder, documents=30)
    run_trials(sweep, 6 + number)
    with StoreWriter(sweep.folder, disk=DiskWithoutSync()) as store:
        for trial in sweep.trials[number % 4 : 6 : 2]:
            store.quarantine([trial.trial_id])
            for _ in range(number % 2):
                store.begin(trial.as_dict(), {})  # its rows then say that they are of a later attempt
            sweep.run(store, trial)
    return sweep


def check_continues(url: str, folder: Path, expected: dict[tuple[str, str], dict[str, Any]]) -> None:
    """The copy as it is now, in an empty place, is a whole sweep that can be run to its end."""
    opened(url, folder)
    request = Store(folder).read_sweep_record()
    if request is None:
        assert not (folder / "trials").exists()
        return
    assert Store(folder).check() == []
    counts = {facts["documents"] for facts in request["tasks"].values()}
    for task in request["tasks"]:
        assert len(Store(folder).documents(task)) >= max(counts)
    for trial_id, facts in Store(folder).trials().items():
        assert facts["attempts"][-1].get("actor") == "worker-1", "as it was made"
        assert facts["sha256"] == hash_file(Store(folder).trial_folder(trial_id) / "rows.parquet"), "and of these rows"
    rows = rows_of(folder)
    assert rows.items() <= expected.items()
    with StoreWriter(folder, disk=DiskWithoutSync()) as store:
        assert store.corrupted == {}
    run_trials(small_sweep(folder, documents=30))
    assert rows_of(folder) == expected
    shutil.rmtree(folder)


@pytest.mark.slow
def test_an_upload_killed_20_times_is_complete_in_the_end(url: str, tmp_path: Path) -> None:
    complete = small_sweep(tmp_path / "complete", documents=30)
    run_trials(complete)
    expected = rows_of(complete.folder)
    sweep, chance = small_sweep(tmp_path / "s"), random.Random(0)
    killed = runs = 0
    while killed < KILLS:
        sweep, runs = change(sweep, runs), runs + 1
        killed += kill_upload(url, sweep.folder, chance, longest=8)
        check_continues(url, tmp_path / "elsewhere" / "s", expected)
        assert runs < 3 * KILLS
    upload(url, sweep.folder)
    assert remote_files(url) == local_files(sweep.folder)
    check_continues(url, tmp_path / "elsewhere" / "s", expected)


def test_a_fetch_killed_20_times_is_complete_in_the_end(url: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here" / "s", tmp_path / "there" / "s"
    run_trials(small_sweep(here))
    upload(url, here)
    chance = random.Random(1)
    killed = 0
    while killed < KILLS:
        # By its fourth access it has the lock.
        if not kill_upload(url, there, chance, shortest=4, longest=10):
            shutil.rmtree(there)  # it was done: once more
            continue
        killed += 1
        if (there / "fetching.json").exists():
            with pytest.raises(InputError, match="holds a partly downloaded sweep; repeat the"):
                StoreWriter(there)
        else:
            assert (
                not there.exists()
                or Store(there).read_sweep_record() is None
                or local_files(there) == local_files(here)
            )
    opened(url, there)
    assert local_files(there) == local_files(here)
    upload(url, there)  # also removes temporary files that killed processes left
    assert remote_files(url) == local_files(here)


def test_trials_are_copied_while_the_sweep_runs(url: str, tmp_path: Path) -> None:
    sweep = small_sweep(tmp_path / "s")
    copied: set[str] = set()
    with sweep.begin() as store, Uploader(opened(url, sweep.folder), print, poll=0.01) as _:
        for trial in sweep.trials[:6]:
            sweep.run(store, trial)
            while f"trials/{trial.trial_id}/trial.json" not in copied:  # ends, or the test's time limit ends it
                copied = RemoteFolder(url, "s").list().keys()
        running = sweep.trials[6]
        sweep.run(store, running, sweep.wanted(running)[:3])
    assert not any(name.startswith(f"trials/{running.trial_id}") for name in remote_files(url))
    assert "sweep.json" in copied


def test_an_upload_that_fails_is_reported_once_retried_and_costs_no_row(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("bucket-away")
    monkeypatch.setattr(uploading, "FINAL_PAUSES_SECONDS", (0.0,))
    monkeypatch.setattr(uploading, "MAX_PAUSE_SECONDS", 0.01)
    url, sweep, notes = s3.url("bucket-away/copies"), small_sweep(tmp_path / "s"), []
    with sweep.begin() as store:
        sweep.run(store, sweep.trials[0])
        copy = opened(url, sweep.folder)
        system, _ = fs.FileSystem.from_uri(url)
        system.delete_dir_contents("bucket-away")
        s3.delete_bucket("bucket-away")
        tries = 0
        again = copy.copy_finished

        def counted(*arguments: Any) -> Any:
            nonlocal tries
            tries += 1
            return again(*arguments)

        monkeypatch.setattr(copy, "copy_finished", counted)
        with Uploader(copy, notes.append, poll=0.01):
            while tries < 3:
                sweep.run(store, sweep.trials[1])
    (note,) = notes
    assert note.startswith("warning: upload failed (cannot write s3://bucket-away/copies/s/documents/")
    assert "NO_SUCH_BUCKET" in note
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in note
    lacks = "all rows are on disk, but the copy at s3://bucket-away/copies/s lacks sweep.json and its documents and "
    with pytest.raises(UploadIncomplete, match=f"{lacks}the report and 2 trials .*NO_SUCH_BUCKET"):
        finish_upload(copy)
    with pytest.raises(UploadIncomplete, match="3 trials failed, and the copy at"):
        finish_upload(copy, failed=3)
    s3.make_bucket("bucket-away")
    finish_upload(copy)
    assert remote_files(url) == local_files(sweep.folder)


def test_what_is_refused_before_a_run(url: str, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine" / "s", tmp_path / "other" / "s"
    run_trials(small_sweep(mine), 1)
    run_trials(small_sweep(other), 1)
    upload(url, mine)
    request = json.loads((other / "sweep.json").read_text())
    with StoreWriter(other) as store:
        store.write_sweep_record({**{key: request[key] for key in request if key != "check"}, "sweep": "another-1"})
    with pytest.raises(InputError, match=r"/copies/s holds the sweep made-01234567, but .*/other/s is another-1; use"):
        opened(url, other)
    system, root = fs.FileSystem.from_uri(url)
    with system.open_output_stream(f"{root}/s/sweep.json") as file:
        file.write(b'{"schema": 1, "check": "corrupted"}')
    with pytest.raises(InputError, match=r"its sweep.json does not match its own checksum"):
        opened(url, tmp_path / "new" / "s")
    system.delete_file(f"{root}/s/sweep.json")
    with pytest.raises(InputError, match=r"is not empty \(it holds sweep.copy.json, trials\) and has no sweep.json"):
        opened(url, tmp_path / "new" / "s")
    upload(url, mine)
    assert remote_files(url) == local_files(mine), "this folder's own copy is repaired"


def test_urls_that_cannot_be_used(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "results" / "s"
    for url, sentence in (
        (f"file://{tmp_path}/results", "is the sweep's own directory; use another URL"),
        (f"file://{tmp_path}/results/s", "is the sweep's own directory"),
        (s3.url("no-such-bucket/x"), "--upload s3://no-such-bucket/x/s cannot be used: .*NO_SUCH_BUCKET.*; check the"),
        ("s3://bucket/x?region=us-east-1&color=red", "cannot be opened: Unexpected query parameter in S3 URI: 'color'"),
        ("s3://bucket/x?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1", "NETWORK_CONNECTION"),
    ):
        with pytest.raises(InputError, match=sentence):
            opened(url, folder)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file/s cannot be used: cannot .*: Not a directory"):
        opened(f"file://{tmp_path}/file", folder)
    assert not folder.exists()


def test_a_pyarrow_without_s3_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WithoutS3:
        @staticmethod
        def from_uri(_: str) -> None:
            raise NotImplementedError("Got S3 URI but Arrow compiled without S3 support")

    monkeypatch.setattr(fs, "FileSystem", WithoutS3)
    with pytest.raises(InputError, match="this pyarrow was built without s3:// support; install the wheel from PyPI"):
        opened("s3://bucket/x", tmp_path / "s")

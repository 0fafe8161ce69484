"""Folders that a sweep cannot use are refused with one sentence and not changed."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.store import Store, StoreWriter
from orchestrator.store.files import encode_json
from orchestrator.store.schema import ROWS
from sampler.errors import InputError
from tests.crashing_disk import TRIAL, make_rows, trial_columns


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def change(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        data = encode_json({"schema": 1, "sweep": "mine", "margin": 5.0})
        assert old in data
        (folder / name).write_bytes(data.replace(old, new))

    return act


def write(name: str, data: bytes) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    return act


BAD = {
    "not a sweep's": (write("thesis.tex", b"x"), r"is not empty \(it holds thesis.tex\) and has no sweep.json"),
    "rows without a request": (write("trials/x", b""), r"is not empty \(it holds trials\) and has no sweep.json"),
    "newer": (write("sweep.json", b'{"schema": 99}'), "has schema 99, written by a newer version; .* up to 2"),
    "newer, with another checksum": (
        change("sweep.json", b'"schema": 1', b'"schema": 3'),
        r"has schema 3, written by a newer version \(or is corrupted: sweep.copy.json is a copy of it\); .* up to 2",
    ),
    "no schema": (write("sweep.json", b"{}"), "has no schema number"),
    "a strange schema": (write("sweep.json", b'{"schema": true}'), "has no schema number"),
    "no JSON": (write("sweep.json", b'{"schema": 1,'), "sweep.json is not readable JSON"),
    "not text": (write("sweep.json", b"\xff\xfe\x00"), "sweep.json is not readable JSON"),
    "a list": (write("sweep.json", b"[1]"), "is JSON, but not an object"),
    "empty": (write("sweep.json", b""), "is not readable JSON"),
    "edited": (
        change("sweep.json", b"5.0", b"9.0"),
        "does not match its own checksum: .* replace it with sweep.copy.json",
    ),
    "a folder": (lambda folder: (folder / "sweep.json").mkdir(), "is not a regular file"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_refused_and_not_changed(tmp_path: Path, case: str) -> None:
    make, sentence = BAD[case]
    make(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=sentence):
        StoreWriter(tmp_path)
    with pytest.raises(InputError, match=sentence):
        Store(tmp_path).read_sweep_record()
    assert contents(tmp_path) == before


def test_a_request_written_by_hand_is_read(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"schema": 1, "sweep": "by hand"}))
    assert Store(tmp_path).read_sweep_record() == {"schema": 1, "sweep": "by hand"}
    StoreWriter(tmp_path).close()


def test_sweep_copy_json_can_replace_sweep_json(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.write_sweep_record({"sweep": "mine"})
    (tmp_path / "sweep.json").write_bytes(b"corrupted")
    (tmp_path / "sweep.copy.json").replace(tmp_path / "sweep.json")
    assert Store(tmp_path).read_sweep_record() == {"schema": 1, "sweep": "mine"}


def test_a_sweep_abandoned_before_its_request_was_written_can_start_again(tmp_path: Path) -> None:
    StoreWriter(tmp_path / "new" / "deep").close()
    assert Store(tmp_path / "new" / "deep").read_sweep_record() is None
    StoreWriter(tmp_path / "new" / "deep").close()


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(InputError, match="is a file; a sweep needs a directory"):
            StoreWriter(place)


def test_reading_a_missing_folder(tmp_path: Path) -> None:
    reader = Store(tmp_path / "nowhere")
    assert reader.read_sweep_record() is None
    assert reader.trials() == {}
    assert len(reader.rows()) == 0
    assert reader.rows().schema.equals(ROWS)
    assert reader.completed_documents(TRIAL) == set()
    assert reader.check() == []
    with pytest.raises(InputError, match=r"gsm8k\.parquet does not exist"):
        reader.documents("gsm8k")
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_folder(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "sweep") as writer:
        writer.write_sweep_record({"sweep": "mine"})
        writer.append(TRIAL, writer.begin(trial_columns(), {}), make_rows(["d0"]))
    bind = ["mount", "--bind", "-o", "ro", tmp_path, tmp_path]
    if subprocess.run(bind, capture_output=True).returncode:
        pytest.skip("a read-only file system cannot be mounted here")
    try:
        before = contents(tmp_path)
        with pytest.raises(InputError, match="sweep cannot be written to: Read-only file system"):
            StoreWriter(tmp_path / "sweep")
        with pytest.raises(InputError, match="new cannot be written to: Read-only file system"):
            StoreWriter(tmp_path / "new")
        assert len(Store(tmp_path / "sweep").rows()) == 1
        assert contents(tmp_path) == before
    finally:
        subprocess.run(["umount", tmp_path], check=True)

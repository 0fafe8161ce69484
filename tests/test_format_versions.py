"""Sweeps written by older and newer versions of the format. docs/format.md states the rules.

The archives in tests/formats were written by the first released format and are never made again.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sweep_process import grid_flags

from orchestrator.progress.status import read_status
from orchestrator.report.exports import export_lm_eval
from orchestrator.report.write import write_report
from orchestrator.store import Store, StoreWriter, schema, trial_files, trial_writer
from orchestrator.store.files import decode_json, encode_json, encode_table
from orchestrator.store.schema import DOCUMENTS, ROWS
from orchestrator.store.trial_files import encode_segment, read_segment
from sampler.errors import InputError
from tests.crashing_disk import TRIAL, make_documents, make_rows, trial_columns

ROOT = Path(__file__).parents[1]
FORMATS = ROOT / "tests" / "formats"
Key = tuple[str, str]


def extract(name: str, folder: Path) -> Path:
    with tarfile.open(FORMATS / f"v1-{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


@pytest.fixture(params=["finished", "interrupted"])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return extract(request.param, tmp_path)


def rows_of(folder: Path, columns: list[str] | None = None) -> dict[Key, dict[str, Any]]:
    rows = Store(folder).rows(columns=columns).to_pylist()
    found = {(row["trial_id"], row["doc_id"]): row for row in rows}
    assert len(found) == len(rows), "a document has two rows"
    return found


# What version 1 wrote stays readable


def test_version_1_is_read_without_notices(old: Path) -> None:
    store = Store(old)
    assert store.check() == []
    assert len(store.rows()) > 0
    assert store.rows().schema.names == ROWS.names
    assert store.notices == []
    assert store.corrupted == {}


def test_status_report_and_export_of_version_1(old: Path, tmp_path: Path) -> None:
    status = read_status(old)
    assert status.documents == len(rows_of(old))
    assert status.state == ("complete" if old.name == "finished" else "stopped")
    assert status.corrupted == ()
    exported = export_lm_eval(old, tmp_path / "out")
    samples = [path for folder in exported for path in folder.glob("samples_*")]
    documents = {(path, json.loads(line)["doc_id"]) for path in samples for line in path.read_text().splitlines()}
    assert len(documents) == len(rows_of(old))
    if old.name == "interrupted":
        with pytest.raises(InputError, match="no rows at k=1"):  # it was killed before it had any
            write_report([old])
        return
    write_report([old])
    assert "k2_middle" in (old / "report.html").read_text()
    assert "k2_middle" in (old / "results.md").read_text()


def test_columns_since_version_1_are_nullable(tmp_path: Path) -> None:
    """Older files have no values for a new column. A required one needs the next SCHEMA_VERSION."""
    folder = extract("finished", tmp_path)
    path = next(folder.glob("trials/*/rows.parquet"))
    for found, expected in ((path, ROWS), (folder / "documents" / "gsm8k.parquet", DOCUMENTS)):
        stored = pq.read_schema(found)
        for field in stored:
            assert expected.field(field.name).type == field.type, "a column was removed or changed: new version"
        assert all(field.nullable for field in expected if field.name not in stored.names)


def continue_in_store(folder: Path) -> dict[Key, dict[str, Any]]:
    """Finishes an unfinished trial with one more document, as a run would; returns the rows before."""
    before = rows_of(folder)
    with StoreWriter(folder) as writer:
        for trial_id, record in writer.trials().items():
            if record["status"] != "finished":
                attempt = writer.begin(record["trial"], {})
                done = sorted(writer.completed_documents(trial_id))
                writer.append(trial_id, attempt, make_rows([done[0], "late"], trial_id=trial_id, attempt=attempt))
                writer.finish(trial_id, {}, [*done, "late"])
        assert writer.check() == []
    return before


def test_an_interrupted_version_1_trial_is_finished_without_loss(tmp_path: Path) -> None:
    folder = extract("interrupted", tmp_path)
    before = continue_in_store(folder)
    after = rows_of(folder)
    assert {key: after[key] for key in before} == before
    assert [doc_id for _, doc_id in after.keys() - before.keys()] == ["late"]


@pytest.mark.slow
def test_an_interrupted_version_1_sweep_is_continued_by_the_command(tmp_path: Path) -> None:
    folder = extract("interrupted", tmp_path)
    before = rows_of(folder)
    flags = [
        *grid_flags(limit=60, shard_size=20),
        "--seed",
        "3",
        "--actors",
        "1",
        "--no-dashboard",
        "--quiet",
        "--out",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "orchestrator.sweep", *flags, "--name", "interrupted"]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    after = rows_of(folder)
    assert {key: after[key] for key in before} == before
    assert len(after) == 3 * 60
    assert read_status(folder).state == "complete"
    write_report([folder])
    assert "k3_last" in (folder / "report.html").read_text()


# This version reads what a version before a new column wrote


@pytest.fixture
def new_column(monkeypatch: pytest.MonkeyPatch) -> pa.Schema:
    """This version with one more column in the rows."""
    rows = ROWS.append(pa.field("entropy", pa.float64()))
    for module in (schema, trial_files, trial_writer):
        monkeypatch.setattr(module, "ROWS", rows)
    monkeypatch.setattr("orchestrator.store.compaction.ROWS", rows)
    monkeypatch.setattr("orchestrator.store.reader.ROWS", rows)
    monkeypatch.setattr("orchestrator.store.writer.ROWS", rows)
    return rows


def with_entropy(batch: pa.RecordBatch, rows: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*batch.columns, pa.array([0.5] * len(batch))], schema=rows)


def test_a_new_column_is_null_in_old_rows(old: Path, new_column: pa.Schema) -> None:
    store = Store(old)
    rows = store.rows()
    assert rows.schema.equals(new_column)
    assert rows["entropy"].null_count == len(rows) > 0
    assert store.rows(columns=["doc_id", "entropy"]).num_rows == len(rows)
    assert store.rows(columns=["entropy"])["entropy"].null_count == len(rows)
    assert store.check() == []
    assert store.notices == []


def test_an_old_sweep_grows_by_rows_with_a_new_column(tmp_path: Path, new_column: pa.Schema) -> None:
    folder = extract("interrupted", tmp_path)
    before = rows_of(folder)
    finished = {path: path.read_bytes() for path in folder.glob("trials/*/rows.parquet")}
    with StoreWriter(folder) as writer:
        (trial_id,) = [name for name, record in writer.trials().items() if record["status"] == "running"]
        for name, record in ((trial_id, writer.trials()[trial_id]["trial"]), (TRIAL, trial_columns())):
            attempt = writer.begin(record, {})
            batch = make_rows(["late"], trial_id=name, attempt=attempt)
            assert len(writer.append(name, attempt, with_entropy(batch, new_column))) == 1
            writer.finish(name, {}, sorted(writer.completed_documents(name)))
    after = rows_of(folder)
    assert {key: after[key] for key in before} == before
    assert {key: row["entropy"] for key, row in after.items() if key not in before} == {
        (trial_id, "late"): 0.5,
        (TRIAL, "late"): 0.5,
    }
    assert all(path.read_bytes() == data for path, data in finished.items()), "finished trials stay as they are"


# This version reads what a later version wrote


def novel(table: pa.Table) -> pa.Table:
    return table.append_column(pa.field("novel", pa.int32()), pa.array(range(len(table)), pa.int32()))


def newer_sweep(folder: Path) -> dict[Key, dict[str, Any]]:
    """A sweep with a finished and an unfinished trial, as a later version with a new column would write it."""
    with StoreWriter(folder) as writer:
        writer.write_sweep_record({"sweep": "newer", "colour": "blue"})
        writer.write_documents("gsm8k", make_documents(["a", "b"]))
        for trial_id in ("aa", "bb"):
            writer.append(trial_id, writer.begin(trial_columns(trial_id), {}), make_rows(["a", "b"], trial_id=trial_id))
        writer.finish("aa", {}, ["a", "b"])
    rows = rows_of(folder)
    path = folder / "trials" / "aa" / "rows.parquet"
    newer = novel(pq.read_table(path))
    path.write_bytes(encode_table(newer))
    path = folder / "trials" / "bb" / "rows-0.arrows"
    path.write_bytes(encode_segment(novel(read_segment(path).rows)))
    path = folder / "documents" / "gsm8k.parquet"
    path.write_bytes(encode_table(pq.read_table(path).append_column("source", pa.array(["x", "y"]))))
    return rows


def test_columns_of_a_newer_version_are_ignored_with_one_notice(tmp_path: Path) -> None:
    before = newer_sweep(tmp_path)
    store = Store(tmp_path)
    assert store.check() == []
    assert store.documents("gsm8k").schema.equals(DOCUMENTS)
    assert store.rows().schema.equals(ROWS)
    assert store.rows(columns=["doc_id", "tokens"]).num_rows == 4
    assert rows_of(tmp_path) == before
    assert store.read_sweep_record() == {"schema": 1, "sweep": "newer", "colour": "blue"}
    (notice,) = store.notices
    assert "novel, source" in notice
    assert "newer version" in notice


def test_continuing_keeps_the_values_of_a_newer_versions_columns(tmp_path: Path) -> None:
    newer_sweep(tmp_path)
    before = continue_in_store(tmp_path)
    after = rows_of(tmp_path)
    assert {key: after[key] for key in before} == before
    merged = pq.read_table(tmp_path / "trials" / "bb" / "rows.parquet", columns=["doc_id", "novel"]).to_pylist()
    assert merged == [
        {"doc_id": "a", "novel": 0},
        {"doc_id": "b", "novel": 1},
        {"doc_id": "late", "novel": None},
    ]


def test_status_and_report_name_ignored_columns_once(tmp_path: Path) -> None:
    folder = extract("finished", tmp_path)
    for path in folder.glob("trials/*/rows.parquet"):
        path.write_bytes(encode_table(novel(pq.read_table(path))))
    for path in folder.glob("trials/*/trial.json"):
        path.unlink()  # so that status reads the rows
    (notice,) = read_status(folder).notices
    assert "novel" in notice
    write_report([folder])
    assert (folder / "report.html").read_text().count("written by a newer version; its columns novel") == 1


def set_version(path: Path, version: int) -> None:
    if path.suffix == ".json":
        path.write_bytes(encode_json({**decode_json(path.read_bytes()), "schema": version}))
        return
    table = read_segment(path).rows if path.suffix == ".arrows" else pq.read_table(path)
    table = novel(table).replace_schema_metadata({schema.VERSION_KEY: str(version)})
    path.write_bytes(encode_segment(table) if path.suffix == ".arrows" else encode_table(table))


@pytest.mark.parametrize("name", ["sweep.json", "trials/aa/rows.parquet", "trials/bb/rows-0.arrows"])
def test_a_newer_schema_version_is_refused_with_one_sentence(tmp_path: Path, name: str) -> None:
    newer_sweep(tmp_path)
    set_version(tmp_path / name, schema.COMPACTED_SCHEMA_VERSION + 1)
    data = (tmp_path / name).read_bytes()
    sentence = rf"{name} has schema 3, written by a newer version; this version reads up to 2: upgrade"

    def read() -> None:
        Store(tmp_path).read_sweep_record()
        Store(tmp_path).rows()

    with pytest.raises(InputError, match=sentence):
        read()
    with pytest.raises(InputError, match=sentence), StoreWriter(tmp_path) as writer:
        writer.rows()
    assert (tmp_path / name).read_bytes() == data, "it is not corrupted"
    assert not (tmp_path / "quarantine").exists()


@pytest.mark.parametrize(("column", "problem"), [("tokens", "has no column 'tokens'"), ("text", "has the type int32")])
def test_incompatible_columns_are_refused(tmp_path: Path, column: str, problem: str) -> None:
    newer_sweep(tmp_path)
    path = tmp_path / "trials" / "aa" / "rows.parquet"
    table = pq.read_table(path).drop_columns([column])
    if column == "text":
        table = table.append_column("text", pa.array(range(len(table)), pa.int32()))
    path.write_bytes(encode_table(table))
    with pytest.raises(InputError, match=problem):
        Store(tmp_path).rows()


def test_a_trial_json_of_a_newer_version_keeps_its_keys(tmp_path: Path) -> None:
    newer_sweep(tmp_path)
    path = tmp_path / "trials" / "bb" / "trial.json"
    path.write_bytes(encode_json({**decode_json(path.read_bytes()), "colour": "blue"}))
    continue_in_store(tmp_path)
    record = json.loads(path.read_text())
    assert (record["colour"], record["status"]) == ("blue", "finished")

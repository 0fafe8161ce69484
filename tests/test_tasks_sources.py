"""Directories laid out like the Hub, a small Hub on the loopback interface, and errors in bad data."""

import csv
import gzip
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tasks.sources
from sampler import InputError
from tasks.documents import TaskOptions, resolve_data
from tasks.sources import BUNDLED, choose_source
from tasks.task import open_task

ROOT = Path(__file__).parents[1]


def gsm8k_row(number: int) -> dict[str, Any]:
    return {"question": f"What is {number} + 1?", "answer": f"{number} + 1 = {number + 1}\n#### {number + 1}"}


def encoded(rows: list[dict[str, Any]], suffix: str) -> bytes:
    if suffix.startswith("jsonl"):
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        return gzip.compress(data) if suffix.endswith(".gz") else data
    if suffix == "json":
        return json.dumps(rows).encode()
    if suffix == "csv":
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, write_page_checksum=True)
    return buffer.getvalue()


def write_dataset(
    root: Path,
    name: str,
    part: str,
    splits: dict[str, list[dict[str, Any]]],
    *,
    suffix: str = "jsonl",
    readme: bool = True,
) -> Path:
    folder = root / name
    (folder / part).mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        (folder / part / f"{split}.{suffix}").write_bytes(encoded(rows, suffix))
    if readme:
        files = "".join(f"\n  - split: {split}\n    path: {part}/{split}.{suffix}" for split in splits)
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {part}\n  data_files:{files}\n---\n# x\n")
    return folder


def gsm8k_folder(root: Path, count: int = 6, **settings: Any) -> Path:
    rows = [gsm8k_row(number) for number in range(count)]
    return write_dataset(root, "openai/gsm8k", "main", {"train": rows, "test": rows}, **settings)


def opened(root: Path, **options: Any) -> Any:
    return open_task("gsm8k", TaskOptions(data=str(root), **options))


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json", "csv", "parquet"])
@pytest.mark.parametrize("readme", [True, False])
def test_every_format_gives_the_same_documents(suffix: str, readme: bool, tmp_path: Path) -> None:
    gsm8k_folder(tmp_path / "a", suffix=suffix, readme=readme)
    gsm8k_folder(tmp_path / "b")
    assert opened(tmp_path / "a").documents == opened(tmp_path / "b").documents


def test_the_revision_is_the_content(tmp_path: Path) -> None:
    for name, count in (("a", 6), ("b", 6), ("c", 7)):
        gsm8k_folder(tmp_path / name, count)
    a, b, c = (opened(tmp_path / name).provenance for name in "abc")
    assert a == b != c
    assert a.source == "folder"
    assert str(tmp_path) not in str(a)
    path = tmp_path / "a/openai/gsm8k/main/test.jsonl"
    times = path.stat()
    path.write_text(path.read_text().replace("What is 0", "What is O"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = opened(tmp_path / "a")
    assert changed.provenance != b, "a change that keeps the file's size and time is seen"
    assert "What is O" in changed.describe(changed.documents[0]).question


def test_missing_fewshot_examples_matter_only_if_requested(tmp_path: Path) -> None:
    write_dataset(tmp_path, "openai/gsm8k", "main", {"test": [gsm8k_row(1)]})
    assert len(opened(tmp_path).documents) == 1
    with pytest.raises(InputError, match=r"--fewshot must be at most 0.*gsm8k"):
        opened(tmp_path, fewshot=2)


def damage(tmp_path: Path, suffix: str, change: Any) -> str:
    path = gsm8k_folder(tmp_path, 300, suffix=suffix) / "main" / f"test.{suffix}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError) as caught:
        opened(tmp_path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_error_names_the_corrupted_row(tmp_path: Path) -> None:
    def line(number: int, text: bytes) -> Any:
        return lambda data: b"\n".join([*data.split(b"\n")[: number - 1], text, *data.split(b"\n")[number:]])

    assert "row 17 is not valid JSON" in damage(tmp_path / "1", "jsonl", line(17, b'{"question": "x", '))
    assert "row 5 is not a JSON object" in damage(tmp_path / "2", "jsonl", line(5, b"[1]"))
    assert "row 8 is not valid UTF-8" in damage(tmp_path / "3", "jsonl", line(8, b'{"question": "\xff"}'))
    assert "row 9 cannot be used: it has no field 'answer'" in damage(
        tmp_path / "4", "jsonl", line(9, b'{"question": "x"}')
    )
    bad_type = b'{"question": 5, "answer": "#### 5"}'
    assert "its field 'question' must be str (got int)" in damage(tmp_path / "5", "jsonl", line(2, bad_type))
    empty = b'{"question": null, "answer": "#### 5"}'
    assert "its field 'question' must be str (got empty)" in damage(tmp_path / "6", "jsonl", line(2, empty))
    no_number = b'{"question": "x", "answer": "5"}'
    assert "row 300 cannot be used" in damage(tmp_path / "7", "jsonl", line(300, no_number))
    assert "corrupted after row " in damage(tmp_path / "8", "jsonl.gz", lambda data: data[: len(data) // 2])
    assert "corrupted after row 0" in damage(tmp_path / "9", "jsonl.gz", lambda data: b"not gzip" + data)
    assert "row 4 does not have as many fields" in damage(
        tmp_path / "10", "csv", lambda d: d.replace(b"What is 3", b"a,b", 1)
    )
    assert "after row 0" in damage(tmp_path / "11", "parquet", lambda data: data[:-20])
    assert "Parquet after row " in damage(tmp_path / "12", "parquet", lambda d: d[:400] + bytes(40) + d[440:])
    assert "has no rows" in damage(tmp_path / "13", "jsonl", lambda _: b"")
    extra = b'{"question": "x", "answer": "#### 1", "extra": {"a": 1}}'
    both = lambda data: line(7, extra.replace(b'{"a": 1}', b'"t"'))(line(3, extra)(data))  # noqa: E731
    assert "row 7 has a 'extra' of a different type" in damage(tmp_path / "14", "jsonl", both)


def test_missing_directory_or_split_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        opened(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not a directory"):
        opened(tmp_path / "file")
    with pytest.raises(InputError, match="has no openai/gsm8k"):
        opened(tmp_path)
    folder = write_dataset(tmp_path, "openai/gsm8k", "socratic", {"test": [gsm8k_row(1)]})
    with pytest.raises(InputError, match="no configuration 'main'; it has socratic"):
        opened(tmp_path)
    (folder / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(InputError, match=r"README\.md cannot be parsed"):
        opened(tmp_path)
    gsm8k_folder(tmp_path)
    (folder / "main/test.jsonl").unlink()
    with pytest.raises(InputError, match="has no files for its split 'test'"):
        opened(tmp_path)


def test_bundled_source() -> None:
    assert resolve_data("auto", "owner/model") == "hub"
    assert resolve_data("folder", "tiny") == "folder"
    assert resolve_data("auto", "tiny") == "bundled"
    if not BUNDLED.is_dir():
        with pytest.raises(InputError, match="bundled documents are not installed"):
            choose_source("bundled")
    else:
        assert choose_source("bundled").kind == "bundled"


def test_working_directory_does_not_replace_the_hub(tmp_path: Path) -> None:
    gsm8k_folder(tmp_path)
    message = refused(["--task", "gsm8k"], cwd=tmp_path, HF_HOME=str(tmp_path / "hf"), HF_ENDPOINT=NOWHERE)
    assert "dataset openai/gsm8k is not in the Hub cache, and the Hub cannot be reached" in message


NOWHERE = "http://127.0.0.1:9"
TOKEN = "hf_" + "tokentoken" * 3


def command(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **variables}
    words = [sys.executable, "-m", "orchestrator.cli", *arguments]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def refused(arguments: list[str], **settings: Any) -> str:
    """The error message of a failed `tasks run`. The model does not exist, so the error comes before loading it."""
    done = command("tasks", "run", "--model", "/no/such/model", *arguments, **settings)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert TOKEN not in done.stderr
    return done.stderr


class FakeHub(BaseHTTPRequestHandler):
    """Answers as the Hub does for one dataset, gated or not."""

    folder: ClassVar[Path]
    name: ClassVar[str]
    gated: ClassVar[bool] = False
    commit: ClassVar[str] = "c0ffee" * 6 + "1234"
    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(self.path)
        allowed = not self.gated or self.headers.get("Authorization") == f"Bearer {TOKEN}"
        path = self.path.partition("?")[0]
        if path == f"/api/datasets/{self.name}/auth-check":
            self.reply(200 if allowed else 401, b"{}", {} if allowed else {"X-Error-Code": "GatedRepo"})
        elif path in (f"/api/datasets/{self.name}", f"/api/datasets/{self.name}/revision/{self.commit}"):
            files = [p.relative_to(self.folder).as_posix() for p in sorted(self.folder.rglob("*")) if p.is_file()]
            info = {"id": self.name, "sha": self.commit, "siblings": [{"rfilename": file} for file in files]}
            self.reply(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        elif path.startswith(f"/datasets/{self.name}/resolve/{self.commit}/"):
            file = self.folder / path.split(f"{self.commit}/")[1]
            if not allowed:
                self.reply(401, b"", {"X-Error-Code": "GatedRepo"})
            elif file.is_file():
                self.reply(
                    200, file.read_bytes(), {"ETag": f'"{hash(file.read_bytes()):x}"', "X-Repo-Commit": self.commit}
                )
            else:
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif path.startswith(f"/api/datasets/{self.name}/revision/"):
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[type[FakeHub], str]]:
    class Hub(FakeHub):
        seen: ClassVar[list[str]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Hub, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


OPEN = """
import sys
from tasks.task import open_task
from tasks.documents import TaskOptions, resolve_data
pinned = tuple(tuple(pair.split("=")) for pair in sys.argv[2:])
task = open_task(sys.argv[1], TaskOptions(fewshot=2, revisions=pinned))
print(len(task.documents), task.provenance.source, dict(task.provenance.datasets))
"""


def open_in_a_process(name: str, *pinned: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_XET": "1", **variables}
    words = [sys.executable, "-W", "ignore", "-c", OPEN, name, *pinned]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def test_the_hub_and_its_cache(hub: tuple[type[FakeHub], str], tmp_path: Path) -> None:
    handler, address = hub
    handler.folder, handler.name = gsm8k_folder(tmp_path / "hub", suffix="parquet"), "openai/gsm8k"
    (handler.folder / "big.bin").write_bytes(bytes(100))
    home = {"HF_HOME": str(tmp_path / "cache")}
    done = open_in_a_process("gsm8k", HF_ENDPOINT=address, **home)
    expected = f"6 hub {{'openai/gsm8k': '{handler.commit}'}}\n"
    assert done.stdout == expected, done.stderr
    assert not any("big.bin" in path for path in handler.seen), "only the files of the splits are fetched"
    assert open_in_a_process("gsm8k", HF_ENDPOINT=NOWHERE, **home).stdout == expected, "the cache, same revision"
    assert open_in_a_process("gsm8k", HF_HUB_OFFLINE="1", **home).stdout == expected


def test_a_dataset_at_a_given_commit(hub: tuple[type[FakeHub], str], tmp_path: Path) -> None:
    handler, address = hub
    handler.folder, handler.name = gsm8k_folder(tmp_path / "hub", suffix="parquet"), "openai/gsm8k"
    first, home = handler.commit, {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": address}
    assert first in open_in_a_process("gsm8k", f"openai/gsm8k={first}", **home).stdout
    assert any(path.startswith(f"/api/datasets/openai/gsm8k/revision/{first}") for path in handler.seen)
    handler.folder, handler.commit = gsm8k_folder(tmp_path / "newer", 9, suffix="parquet"), "d" * 40
    assert open_in_a_process("gsm8k", **home).stdout.startswith("9 hub"), "the newest"
    assert open_in_a_process("gsm8k", f"openai/gsm8k={first}", **home).stdout.startswith("6 hub"), "still in the cache"
    gone = open_in_a_process("gsm8k", f"openai/gsm8k={'e' * 40}", **home).stderr
    assert f"the Hub no longer has dataset openai/gsm8k at {'e' * 40}" in gone


def test_a_gated_dataset(hub: tuple[type[FakeHub], str], tmp_path: Path) -> None:
    from test_tasks_answers import gpqa_row

    handler, address = hub
    rows = [gpqa_row(number) for number in range(8)]
    handler.folder = write_dataset(tmp_path / "hub", "Idavidrein/gpqa", "gpqa_main", {"train": rows}, suffix="csv")
    handler.name, handler.gated = "Idavidrein/gpqa", True
    home = {"HF_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": address}
    for variables in ({}, {"HF_TOKEN": "hf_wrong"}):
        message = refused(["--task", "gpqa"], **home, **variables)
        for part in ("datasets/Idavidrein/gpqa", "HF_TOKEN", "hf auth login"):
            assert part in message
        assert "hf_wrong" not in message
    done = open_in_a_process("gpqa", HF_TOKEN=TOKEN, **home)
    assert done.stdout == f"8 hub {{'Idavidrein/gpqa': '{handler.commit}'}}\n", done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_missing_token_is_reported_without_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks.sources, "get_token", lambda: None)
    monkeypatch.setattr(tasks.sources.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(tasks.sources, "HfApi", None)
    with pytest.raises(
        InputError, match=r"gated: accept its terms at https://huggingface\.co/datasets/Idavidrein/gpqa"
    ):
        open_task("gpqa")


def test_malformed_token_is_not_printed(tmp_path: Path) -> None:
    done = open_in_a_process("gpqa", HF_HOME=str(tmp_path), HF_ENDPOINT=NOWHERE, HF_TOKEN=f"{TOKEN}\x01é")
    assert TOKEN not in done.stdout + done.stderr


BAD = [
    (["--task", "gsm8k", "--limit", "0"], "--limit must be"),
    (["--task", "gsm8k", "--fewshot", "-1"], "--fewshot must be"),
    (["--task", "gsm8k", "--sample", "-3"], "--sample must be"),
    (["--task", "gsm8k", "--limit", "3", "--sample", "3"], "exclude each other"),
    (["--task", "gsm8k", "--max-new-tokens", "0"], "--max-new-tokens must be"),
    (["--task", "gsm9k"], "did you mean gsm8k"),
    (["--task", "gsm8k", "--data", "/no/such/folder"], "/no/such/folder does not exist"),
    (["--task", "wikitext"], "loglikelihood_rolling"),
    (["--task", "humaneval"], "--allow-code-execution or HF_ALLOW_CODE_EVAL=1"),
    (["--task", "mmlu", "--fewshot", "6"], "--fewshot must be at most 5"),
    (["--task", "ifeval", "--fewshot", "1"], "--fewshot must be at most 0"),
    (["--task", "gsm8k", "--policy", "k0"], "k must be at least 1"),
    (["--task", "gsm8k", "--limit", "many"], "--limit must be a whole number"),
]


def test_bad_input_prints_one_line_and_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """In one process, because imports take seconds; the tests above ran the real command."""
    from orchestrator.cli.console import run_command
    from orchestrator.cli.tasks import tasks as tasks_command

    monkeypatch.chdir(tmp_path)
    for arguments, part in BAD:
        with pytest.raises(SystemExit) as ended:
            run_command(partial(tasks_command, ["run", "--model", "/no/such/model", *arguments]))
        out, error = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert part in error


def test_missing_package_is_reported_with_its_install_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "math_verify" else real(name))
    with pytest.raises(
        InputError, match=r'needs the package math_verify, which is missing: pip install "lm_eval\[math\]"'
    ):
        open_task("minerva_math", TaskOptions(data=str(tmp_path)))


def test_missing_punkt_data_is_reported_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nltk = pytest.importorskip("nltk", reason="ifeval's packages are not installed")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(InputError, match=r"python -m nltk\.downloader punkt_tab"):
        open_task("ifeval", TaskOptions(data=str(tmp_path)))


def test_missing_sandbox_is_an_error_unless_unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks import sandbox
    from tasks.catalog import require_sandbox

    def none() -> str:
        raise sandbox.SandboxError("bubblewrap is not installed: apt-get install bubblewrap")

    monkeypatch.setattr(sandbox, "find_sandbox", none)
    with pytest.raises(InputError, match=r"no sandbox for them .*apt-get install bubblewrap.*--unsafe-code-execution"):
        require_sandbox("humaneval", TaskOptions(allow_code_execution=True))
    assert require_sandbox("humaneval", TaskOptions(unsafe_code_execution=True)) is False
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    with pytest.raises(InputError, match="no sandbox"):
        require_sandbox("humaneval", TaskOptions())

"""A sweep as lm-eval's files, compared with what lm-eval writes itself."""

import base64
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import datasets
import lm_eval
import lm_eval.api.model
import pyarrow as pa
import pyarrow.csv
import pytest
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from simulated_sweep import QuickDisk, Simulation, write_sweep
from test_tasks_sources import gsm8k_folder

from orchestrator.cli.console import run_command
from orchestrator.cli.reports import export
from orchestrator.report.exports import export_lm_eval
from orchestrator.store import Store, StoreWriter
from orchestrator.store.schema import DOCUMENTS, ROWS
from sampler.errors import InputError
from tasks.documents import TaskOptions
from tasks.task import Task, open_task, quiet_lm_eval

ROOT = Path(__file__).parents[1]
SIMULATION = Simulation(documents={"gsm8k": 12, "mmlu": 114}, policies=("k1_first", "k2_middle"), shard_size=60)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Store, dict[str, Path]]:
    folder = write_sweep(tmp_path / "sweep", SIMULATION)
    return Store(folder), {path.name: path for path in export_lm_eval(folder, tmp_path / "out")}


def one(folder: Path, start: str) -> Path:
    found = [path for path in folder.iterdir() if path.name.startswith(start)]
    assert len(found) == 1, found
    return found[0]


def test_results_are_means_where_the_data_is_elsewhere(files: tuple[Store, dict[str, Path]]) -> None:
    store, folders = files
    assert set(folders) == {f"simulated__block-diffusion-7b__{policy}" for policy in SIMULATION.policies}
    for name, folder in folders.items():
        results = json.loads(one(folder, "results_").read_text())
        rows = store.rows(columns=["task", "policy", "correct", "subtask"]).to_pylist()
        for task, metric in (("gsm8k", "exact_match,flexible-extract"), ("mmlu", "acc,none")):
            right = [r["correct"] for r in rows if r["task"] == task and name.endswith(r["policy"])]
            assert results["results"][task][metric] == pytest.approx(sum(right) / len(right))
        assert results["groups"] == {"mmlu": results["results"]["mmlu"]}
        assert len(results["group_subtasks"]["mmlu"]) == 57
        assert results["n-samples"]["gsm8k"]["effective"] == 12
        assert "|gsm8k" in make_table(results).replace(" ", "")


def test_samples_open_as_a_dataset(files: tuple[Store, dict[str, Path]], tmp_path: Path) -> None:
    path = one(files[1]["simulated__block-diffusion-7b__k2_middle"], "samples_gsm8k_")
    table = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert table["doc_id"] == list(range(12))
    assert set(table["filter"]) == {"flexible-extract"}


class Canned:
    """Answers of one sentence, right for even documents."""

    def __init__(self, task: Task) -> None:
        golds = [task.subtasks[d.subtask].task_docs[d.index]["answer"].split()[-1] for d in task.documents]
        self.texts = [f"It is \\boxed{{{gold if n % 2 == 0 else '-1'}}}." for n, gold in enumerate(golds)]


@pytest.fixture
def opened(tmp_path: Path) -> Task:
    gsm8k_folder(tmp_path / "data")
    return open_task("gsm8k", TaskOptions(data=str(tmp_path / "data")))


def sweep_of(task: Task, folder: Path, data: Path) -> Path:
    """A sweep of this task's own documents, answered by canned texts and scored by lm-eval."""
    write_sweep(folder, Simulation(documents={"gsm8k": len(task.documents)}, policies=("k1_first",), shard_size=10_000))
    store = Store(folder)
    request = dict(store.read_sweep_record() or {})
    request["identity"] = {
        **request["identity"],
        "data": "folder",
        "datasets": {"gsm8k": dict(task.provenance.datasets)},
    }
    request["settings"] = {**request["settings"], "data": str(data)}
    rows = store.rows().to_pylist()
    described = [task.describe(document) for document in task.documents]
    texts = Canned(task).texts
    for row, document, text in zip(rows, task.documents, texts, strict=True):
        requests = task.requests(document, None)
        requests[0].resps = [text]
        metrics = task.score(document, requests)
        row |= {"text": text, "metrics": json.dumps(metrics), "correct": task.correct(metrics)}
        row |= {"doc_hash": document.doc_hash}
    for path in sorted((folder / "trials").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    documents = [
        {name: getattr(one, name, None) for name in DOCUMENTS.names} | {"shard": 0, "level": None} for one in described
    ]
    with StoreWriter(folder, disk=QuickDisk()) as writer:
        writer.write_sweep_record(request)
        writer.write_documents("gsm8k", pa.Table.from_pylist(documents, schema=DOCUMENTS))
        names = ("trial_id", "task", "policy", "threshold", "small_block", "block_cache", "repeat", "shard")
        writer.begin({name: rows[0][name] for name in names}, {})
        writer.append(rows[0]["trial_id"], 0, pa.RecordBatch.from_pylist(rows, schema=ROWS))
    return folder


def test_an_opened_task_gives_what_lm_eval_writes(opened: Task, tmp_path: Path) -> None:
    folder = sweep_of(opened, tmp_path / "sweep", tmp_path / "data")
    (exported,) = export_lm_eval(folder)
    theirs = lm_eval_files(opened, tmp_path / "theirs")
    results, expected = (json.loads(one(path, "results_").read_text()) for path in (exported, theirs))
    assert results["results"] == expected["results"]
    same = ("group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples", "task_hashes")
    for key in same:
        assert results[key] == expected[key], key
    assert results["configs"].keys() == expected["configs"].keys()
    lines, wanted = (one(path, "samples_gsm8k_").read_text().splitlines() for path in (exported, theirs))
    keyed = [{(s["doc_id"], s["filter"]): s for s in map(json.loads, side)} for side in (lines, wanted)]
    assert keyed[0] == keyed[1]


def lm_eval_files(task: Task, out: Path, answers: type[Canned] = Canned, iterations: int = 100_000) -> Path:
    """The same documents and answers through lm-eval itself."""
    texts = iter(answers(task).texts)

    class Model(lm_eval.api.model.LM):  # type: ignore[name-defined,misc]
        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            del disable_tqdm
            return [next(texts) for _ in requests]

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            raise NotImplementedError

    tracker = EvaluationTracker(output_path=str(out))
    tracker.general_config_tracker.model_name_sanitized = "canned"
    with quiet_lm_eval():
        found = lm_eval.simple_evaluate(
            model=Model(),
            tasks=task.lm_eval_tasks,
            log_samples=True,
            bootstrap_iters=iterations,
            task_manager=TaskManager(include_defaults=False),
        )
    samples = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=samples)
    for name, lines in samples.items():
        tracker.save_results_samples(task_name=name, samples=lines)
    return out / "canned"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "absent does not exist"),
        ("empty", "has no sweep.json"),
        ("waiting", "has no rows yet"),
        ("gone", "rows.parquet is missing"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    write_sweep(tmp_path / "waiting", replace(SIMULATION, trials=0))
    write_sweep(tmp_path / "gone", SIMULATION)
    next((tmp_path / "gone" / "trials").glob("*/rows.parquet")).unlink()
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: export(["--lm-eval", str(tmp_path / name), "--out", str(tmp_path / "out")]))
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_corrupted_file_is_named_the_others_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_sweep(tmp_path / "sweep", SIMULATION)
    corrupted = next((folder / "trials").glob("*/rows.parquet"))
    corrupted.write_bytes(corrupted.read_bytes()[:500])
    assert len(export_lm_eval(folder)) == 2
    assert f"{corrupted} cannot be read as Parquet" in capsys.readouterr().err


def test_rows_as_csv(files: tuple[Store, dict[str, Path]], tmp_path: Path) -> None:
    store, _ = files
    export(["--csv", str(store.folder), "--out", str(tmp_path / "rows.csv")])
    rows, several_lines = store.rows(), pa.csv.ParseOptions(newlines_in_values=True)
    table = pa.csv.read_csv(tmp_path / "rows.csv", parse_options=several_lines)
    assert table["doc_id"].to_pylist() == rows["doc_id"].to_pylist()
    assert list(map(json.loads, table["token_ids"].to_pylist())) == rows["token_ids"].to_pylist()
    assert not any(table["token_steps"].to_pylist()), "this sweep has none"
    assert table["text"].to_pylist() == [text or "" for text in rows["text"].to_pylist()]


class DatasetHub(BaseHTTPRequestHandler):
    """Accepts one dataset: creation, and a commit of files that are sent in full."""

    private = True
    created: ClassVar[list[dict[str, Any]]] = []
    pushed: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        self._answer({"id": "me/demo", "private": self.private, "sha": "1" * 40, "siblings": [], "tags": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != "Bearer hf_test":
            self._answer({"error": "no token"}, 401)
        elif self.path.endswith("/repos/create"):
            self.created.append(json.loads(body))
            self._answer({"url": f"http://{self.headers['Host']}/datasets/me/demo", "id": "me/demo"})
        elif self.path.endswith("/validate-yaml"):
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            modes = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            self._answer({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.pushed[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/datasets/me/demo/commit/1"
            self._answer({"commitUrl": url, "commitOid": "1" * 40, "hookOutput": ""})

    def _answer(self, value: object, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def test_a_sweep_on_the_hub(files: tuple[Store, dict[str, Path]], tmp_path: Path) -> None:
    """In processes of their own: the address of the Hub is read when its library is imported."""
    store, _ = files
    server = ThreadingHTTPServer(("127.0.0.1", 0), DatasetHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def push(*flags: str, token: str = "hf_test") -> subprocess.CompletedProcess[str]:
        words = ["export", "--hub", "me/demo", "--from", str(store.folder), *flags]
        here = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
        here |= {"HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "orchestrator.cli", *words]
        return subprocess.run(command, env={**os.environ, **here}, capture_output=True, text=True)

    tried = push("--dry-run")
    assert tried.returncode == 0, tried.stderr
    assert "would push to the private dataset me/demo" in tried.stdout
    assert not DatasetHub.created
    done = push()
    assert done.returncode == 0, done.stderr
    assert "/datasets/me/demo/commit/1" in done.stdout
    made = [(one["name"], one.get("visibility") == "private" or one.get("private")) for one in DatasetHub.created]
    assert made == [("demo", True)]  # which of the two keys depends on the version of huggingface_hub
    assert set(DatasetHub.pushed) == {
        *("README.md", "rows.parquet", "sweep.json", "documents/gsm8k.parquet", "documents/mmlu.parquet")
    }
    for name, content in DatasetHub.pushed.items():
        path = tmp_path / "pushed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    loaded = datasets.load_dataset(str(tmp_path / "pushed"), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["doc_id"][:] == store.rows()["doc_id"].to_pylist()
    card = DatasetHub.pushed["README.md"].decode()
    assert "gsm8k is undecided" in card
    assert 'load_dataset("me/demo", split="train")' in card
    DatasetHub.private = False
    assert "the dataset me/demo is public; add --public to push to it" in push().stderr
    refused = push("--public", token="hf_wrong")
    assert (refused.returncode, len(refused.stderr.strip().splitlines())) == (2, 1), refused.stderr
    assert not any("hf_" in run.stdout + run.stderr for run in (tried, done, refused)), "a token was printed"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "choose one of --lm-eval DIR, --csv DIR and --hub OWNER/NAME"),
        (["--csv", "a", "--lm-eval", "b"], "choose one of"),
        (["--hub", "me/demo"], "--hub OWNER/NAME and --from DIR must be used together"),
        (["--hub", "demo", "--from", "a"], "--hub must be OWNER/NAME"),
    ],
)
def test_wrong_flags_are_sentences(words: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        export(words)

"""Tasks through the real sampler, on a random model: policies act, prefixes are shared, lm-eval sees the same."""

import ctypes
import gc
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager
from random_model import write_model
from tasks_fakes import CannedDecoder, aggregate, bench
from test_tasks_sources import gsm8k_folder, write_dataset

from orchestrator.cli.console import run_command
from orchestrator.cli.tasks import tasks as tasks_command
from sampler import DecodeSettings, InputError, LoadedModel, ReusePolicy, load_model, score_pairs
from tasks import lookup
from tasks.documents import TaskOptions
from tasks.evaluate import ModelDecoder, Result, chat_renderer, evaluate, to_pairs
from tasks.lm import ReuseLM
from tasks.task import Task, open_task, quiet_lm_eval


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder))


def mmlu_row(number: int) -> dict[str, Any]:
    options = [str(number + offset) for offset in range(4)]
    return {"question": f"Which number is {number} and no other?", "choices": options, "answer": 0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    gsm8k_folder(root)
    rows = [mmlu_row(number) for number in range(20)]
    write_dataset(root, "cais/mmlu", "anatomy", {"dev": rows[:5], "test": rows[5:]}, suffix="parquet")
    return root


def sampler(model: LoadedModel, policy: str, **settings: Any) -> ModelDecoder:
    decode = DecodeSettings(threshold=0.9, max_new_tokens=40)
    return ModelDecoder(model=model, policy=ReusePolicy.parse(policy), settings=decode, **settings)


def results(task: Task, decoder: Any) -> list[Result]:
    return sorted(evaluate(task, task.documents, decoder), key=lambda result: result.document.index)


def test_generation_under_a_policy(model: LoadedModel, data: Path) -> None:
    task = open_task("gsm8k", TaskOptions(data=str(data), limit=4, max_new_tokens=40))
    exact, reused = results(task, sampler(model, "k1")), results(task, sampler(model, "k2_middle"))
    assert sum(result.counters.layers_reused for result in exact) == 0
    assert all(result.counters.layers_reused > 0 for result in reused)
    for result in exact + reused:
        assert 0 < result.tokens == len(result.token_ids) <= 40
        assert result.finish in ("stop", "length")
        assert result.seconds > 0
        assert result.prompt_tokens > 100
    together = results(task, sampler(model, "k2_middle", batch_size=4))
    assert [r.token_ids for r in together] == [r.token_ids for r in reused]


def test_stop_strings_end_generation(model: LoadedModel, data: Path) -> None:
    task = open_task("gsm8k", TaskOptions(data=str(data), limit=2, max_new_tokens=40))
    free = results(task, sampler(model, "k1"))
    until = (free[0].text or "")[4:6]
    task.subtasks["gsm8k"].set_config(key="generation_kwargs", value={"until": [until]}, update=True)
    stopped = results(task, sampler(model, "k1"))[0]
    assert stopped.text == (free[0].text or "").partition(until)[0]
    assert stopped.finish == "stop"


def test_mmlu_replays_under_k2_and_k1_is_the_single_pass(model: LoadedModel, data: Path) -> None:
    task = open_task("mmlu_anatomy", TaskOptions(data=str(data)))
    exact, reused = results(task, sampler(model, "k1")), results(task, sampler(model, "k2_all"))
    template = ReuseLM(decoder=sampler(model, "k1")).apply_chat_template
    for document, one, two in zip(task.documents, exact, reused, strict=True):
        pairs = to_pairs(task.requests(document, template), model.tokenizer)
        assert all(len(pair.target) == 1 for pair in pairs)
        settings: dict[str, Any] = {"policy": ReusePolicy.parse("k1"), "method": "reference"}
        alone = [dict(score_pairs(model, [pair], **settings))[0].score for pair in pairs]
        assert list(one.scores) == pytest.approx(alone, abs=1e-5)
        assert (one.counters.full, one.counters.replayed, one.rewound) == (1, 0, 0)
        assert (two.counters.full, two.counters.replayed) == (2, 1)
        assert two.counters.layers_reused > 0
        assert two.rewound > 0
        assert one.tokens_scored == two.tokens_scored == 4
        assert one.seconds > 0
    assert any(one.scores != two.scores for one, two in zip(exact, reused, strict=True))
    assert sum(result.tokens_prefilled for result in exact) > 0


def token_forwards(found: list[Result], model: LoadedModel) -> float:
    return sum(result.counters.layer_positions for result in found) / model.config.num_layers


def test_fewshot_examples_are_prefilled_once(model: LoadedModel) -> None:
    task = open_task("mmlu_astronomy", TaskOptions(data=str(bench()), fewshot=5, limit=50))
    found = results(task, sampler(model, "k1"))
    assert len(found) == 50
    each = sum(4 * (result.prompt_tokens + 1) for result in found)
    share = token_forwards(found, model) / each
    print(f"token-forwards: {share:.4f} of scoring each option over its whole prompt")
    assert share <= 0.25


def test_simple_evaluate_with_a_policy_gives_the_same_scores(model: LoadedModel, folder: Path, data: Path) -> None:
    for name in ("gsm8k", "mmlu_anatomy"):
        task = open_task(name, TaskOptions(data=str(data), limit=4, max_new_tokens=40))
        ours = aggregate(task, results(task, sampler(model, "k3_last")))
        settings = {"model": str(folder), "policy": "k3_last", "threshold": 0.9, "max_new_tokens": 40}
        with quiet_lm_eval():
            theirs = lm_eval.simple_evaluate(
                model="reuse-sweep",
                model_args=settings,
                tasks=task.lm_eval_tasks,
                limit=4,
                apply_chat_template=True,
                task_manager=TaskManager(include_defaults=False),
            )
        assert ours == theirs["results"]
        scores = {sample["doc_id"]: sample["resps"] for sample in theirs["samples"][name]}
        streamed = results(task, sampler(model, "k3_last"))
        for result in streamed:
            response = [[[result.text]]] if name == "gsm8k" else [[[score, None]] for score in result.scores]
            found = scores[result.document.index]
            if name == "gsm8k":
                assert [found] == response
            else:
                assert [one[0][0] for one in found] == pytest.approx([one[0][0] for one in response], abs=1e-5)


def test_rolling_and_the_response_cache_are_rejected(model: LoadedModel, tmp_path: Path, data: Path) -> None:
    lm = ReuseLM(decoder=sampler(model, "k1"))
    with pytest.raises(InputError, match="rolling log-likelihood"):
        lm.loglikelihood_rolling([])
    task = open_task("mmlu_anatomy", TaskOptions(data=str(data), limit=1))
    with quiet_lm_eval(), pytest.raises(InputError, match="response cache ignores the policy"):
        lm_eval.simple_evaluate(model=lm, tasks=task.lm_eval_tasks, use_cache=str(tmp_path / "cache"))


def lines_of(arguments: list[str], capsys: Any) -> list[dict[str, Any]]:
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: tasks_command(["run", *arguments]))
    out, error = capsys.readouterr()
    assert ended.value.code == 0, error
    return [json.loads(line) for line in out.splitlines()]


def test_the_run_command(folder: Path, data: Path, tmp_path: Path, capsys: Any) -> None:
    common = ["--model", str(folder), "--data", str(data), "--policy", "k2_middle"]
    *documents, last = lines_of(["--task", "gsm8k", "--limit", "3", "--max-new-tokens", "20", *common], capsys)
    assert [line["doc_id"] for line in documents] == ["gsm8k/0", "gsm8k/1", "gsm8k/2"]
    assert last["documents"] == 3
    assert last["policy"] == "k2_middle"
    assert "exact_match_stderr,strict-match" in last["results"]["gsm8k"]
    out = tmp_path / "rows.jsonl"
    assert lines_of(["--task", "mmlu_anatomy", "--sample", "2", "--out", str(out), *common], capsys) == []
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == 3
    assert written[0]["tokens_prefilled"] > 0
    assert written[0]["tokens_scored"] == 4


def test_a_model_without_a_chat_template(folder: Path, tmp_path: Path) -> None:
    import shutil

    bare = shutil.copytree(folder, tmp_path / "bare")
    for name in ("chat_template.jinja",):
        (bare / name).unlink(missing_ok=True)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="--no-chat-template"):
        chat_renderer(load_model(str(bare)).tokenizer)


def test_the_list_command(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL", raising=False)
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: tasks_command(["--data", str(data)]))
    out, _ = capsys.readouterr()
    assert ended.value.code == 0
    table = {line.split()[0]: line.split() for line in out.splitlines()[1:7]}
    assert table["gsm8k"][1:] == ["1319", "generate", "exact_match,flexible-extract", "yes", "yes"]
    assert table["mmlu"][1:] == ["14042", "loglikelihood", "acc", "yes", "yes"]
    assert table["humaneval"][-1] == "no"
    assert "humaneval: task humaneval runs model-generated programs" in out
    with pytest.raises(SystemExit):
        run_command(lambda: tasks_command(["--data", str(data), "--json"]))
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["task"] for entry in listed] == ["gsm8k", "minerva_math", "mmlu", "ifeval", "humaneval", "gpqa"]


def test_opening_a_catalog_task_reads_only_its_own_yaml_files(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all of lm-eval's files takes seconds."""
    real, folders = lookup.stock_tasks, []

    def record(folder: str = ".") -> Any:
        folders.append(folder)
        return real(folder)

    monkeypatch.setattr(lookup, "stock_tasks", record)
    for name in ("gsm8k", "mmlu_anatomy"):
        open_task(name, TaskOptions(data=str(data)))
    assert folders == ["gsm8k", "mmlu/default"]


def test_memory_stays_flat(tmp_path: Path) -> None:
    rows = [mmlu_row(number) for number in range(900)]
    write_dataset(tmp_path, "cais/mmlu", "anatomy", {"dev": rows[:5], "test": rows}, suffix="parquet")
    task = open_task("mmlu_anatomy", TaskOptions(data=str(tmp_path), fewshot=5))
    sizes = [resident() for place, _ in enumerate(evaluate(task, task.documents, Forgetful())) if place % 180 == 179]
    assert len(sizes) == 5
    assert sizes[-1] - sizes[0] < 8 * 2**20


class Forgetful(CannedDecoder):
    """Does not keep what it was asked, as its parent does."""

    def score(self, pairs: Any, on_failure: Any = None) -> Any:
        self.pairs = []
        return super().score(pairs, on_failure)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def sizes_over(folder: Path) -> list[tuple[int, int]]:
    """After each 2000 documents of MMLU, and at its end: objects that Python holds, and bytes that are resident."""
    task = open_task("mmlu", TaskOptions(data=str(folder), fewshot=5))
    results = enumerate(evaluate(task, task.documents, Forgetful()), start=1)
    return [held() for place, _ in results if place % 2000 == 0 or place == 14042]


def held() -> tuple[int, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else the allocator keeps the room of the longest prompts
    return sys.getallocatedblocks(), resident()


@pytest.mark.slow
def test_memory_stays_flat_over_all_of_mmlu() -> None:
    """In a process of its own: what earlier tests left behind would be given back meanwhile, or not.

    Less than one object for each second document may stay. What is resident goes up and down with the subject at hand,
    so only its growth from the first to the last subject counts.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        sizes = alone.submit(sizes_over, bench()).result()
    objects, bytes_ = zip(*sizes, strict=True)
    print(f"objects: {objects}; MB resident: {[round(size / 2**20) for size in bytes_]}")
    assert len(sizes) == 8
    assert max(objects) - min(objects) < 6000
    assert bytes_[-1] - bytes_[0] < 16 * 2**20

"""A document for which the model computes NaN or infinity fails with its place; the other documents go on."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from safetensors.torch import load_file, save_file
from small_models import shallow
from sweep_cases import context, mmlu_row, trial, worker_settings, write_case
from sweep_runs import Run, outcome
from test_tasks_sources import gsm8k_row, write_dataset

from orchestrator.running.worker import Worker
from orchestrator.store import Store
from sampler import DecodeSettings, LoadedModel, Pair, Prompt, ReusePolicy, decode_prompts, load_model, score_pairs
from sampler.decode import Step
from sampler.errors import NonFiniteError
from sampler.text import load_tokenizer

RARE = "§"  # in one question of each benchmark; its embedding is not finite
BAD_GSM8K, BAD_MMLU = 3, 4
SETTINGS = DecodeSettings(max_new_tokens=40)
BAD_TOKEN = 7


def broken_model(value: float) -> LoadedModel:
    """A golden model with a non-finite embedding of one token; a new copy, since the others are shared."""
    model = load_model(str(shallow().folder))
    model.network.embedding_VD[BAD_TOKEN] = value
    return model


def prompts() -> list[Prompt]:
    """Every third one has the bad token, at different places."""
    ids = [[(11 * n + 5 * i) % 120 + 10 for i in range(20 + 9 * n)] for n in range(7)]
    for n in (1, 4):
        ids[n][9 * n] = BAD_TOKEN
    return [Prompt(ids=tuple(row)) for row in ids]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_error_names_document_block_and_step(value: float, temperature: float) -> None:
    settings = DecodeSettings(max_new_tokens=40, temperature=temperature)
    with pytest.raises(
        NonFiniteError, match=r"document 1, block 0, step 0 \(full pass\): .* a probability of nan"
    ) as e:
        list(decode_prompts(broken_model(value), prompts()[:2], policy=ReusePolicy.parse("k1"), settings=settings))
    assert (e.value.document, e.value.block) == (1, 0)
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


def test_a_prefill_is_named() -> None:
    whole = Prompt(ids=(*range(20, 51), BAD_TOKEN))
    with pytest.raises(NonFiniteError, match="document 0, block 0, prefill: "):
        list(decode_prompts(broken_model(float("nan")), [whole], policy=ReusePolicy.parse("k1"), settings=SETTINGS))


def test_a_commit_pass_is_named() -> None:
    """The bad token is the last one that a block reveals, so that only the commit pass forwards it."""
    k1, prompt = ReusePolicy.parse("k1"), Prompt(ids=tuple(range(20, 40)))
    steps: list[Step] = []
    list(decode_prompts(shallow(), [prompt], policy=k1, settings=SETTINGS, on_step=steps.append))
    *_, before, last = [step.tokens for step in steps if step.block == 0]
    (revealed,) = [token for token, earlier in zip(last, before, strict=True) if token != earlier]
    assert last.count(revealed) == 1, "another prompt is needed"
    model = load_model(str(shallow().folder))
    model.network.embedding_VD[revealed] = float("nan")
    with pytest.raises(NonFiniteError, match="document 0, block 0, commit pass: "):
        list(decode_prompts(model, [prompt], policy=k1, settings=SETTINGS))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("policy", ["k1", "k2_middle", "adaptive=0.2_middle", "trim=0.25_all"])
def test_the_other_documents_of_the_batch_go_on(policy: str, batch_size: int) -> None:
    arguments: dict[str, Any] = {
        "policy": ReusePolicy.parse(policy),
        "settings": SETTINGS,
        "batch_size": batch_size,
        "with_text": False,
    }
    failed: dict[int, str] = {}
    found = dict(
        decode_prompts(
            broken_model(float("nan")),
            prompts(),
            on_failure=lambda index, error: failed.update({index: error.reason}),
            **arguments,
        )
    )
    expected = dict(decode_prompts(shallow(), prompts(), **arguments))
    touched = {n for n, generated in expected.items() if BAD_TOKEN in (*prompts()[n].ids, *generated.ids)}
    assert failed.keys() == touched >= {1, 4}
    assert {n: g.ids for n, g in found.items()} == {n: g.ids for n, g in expected.items() if n not in touched}
    assert failed[1].startswith("block 0, step 0 (full pass)")
    assert failed[4].startswith("block 1, step 0")


@pytest.mark.parametrize("policy", ["k1", "k2_middle"])
def test_a_question_fails_with_all_its_options(policy: str) -> None:
    shared = tuple(range(20, 60))
    pairs = [
        Pair(prefix=(*shared, 70 + question), target=(80 + option, 90 + question))
        for question in range(3)
        for option in range(4)
    ]
    model, clean, score = broken_model(float("nan")), shallow(), ReusePolicy.parse(policy)
    bad = [Pair(prefix=(*pair.prefix[:-1], BAD_TOKEN), target=pair.target) for pair in pairs[4:8]]
    pairs[4:8] = bad
    with pytest.raises(NonFiniteError, match=r"document 4, block 1, step \d \(full pass\): .* a log-likelihood of nan"):
        list(score_pairs(model, pairs, policy=score, batch_size=2))
    failed: list[int] = []
    found = dict(
        score_pairs(model, pairs, policy=score, batch_size=2, on_failure=lambda index, _: failed.append(index))
    )
    expected = dict(score_pairs(clean, pairs, policy=score, batch_size=2))
    assert sorted(failed) == [4, 5, 6, 7]
    unaffected = {n: expected[n].score for n in (*range(4), *range(8, 12))}
    assert {n: s.score for n, s in found.items()} == pytest.approx(
        unaffected, abs=1e-3
    )  # other batches, other rounding


def write_broken_case(root: Path) -> Path:
    write_case(root)
    rows = [gsm8k_row(number) for number in range(6)]
    rows[BAD_GSM8K]["question"] += RARE
    write_dataset(root / "data", "openai/gsm8k", "main", {"train": rows, "test": rows})
    questions = [mmlu_row(number) for number in range(11)]
    questions[5 + BAD_MMLU]["question"] += RARE
    splits = {"dev": questions[:5], "test": questions[5:]}
    write_dataset(root / "data", "cais/mmlu", "anatomy", splits, suffix="parquet")
    token = load_tokenizer(root / "model").encode(RARE)[-1]
    weights = load_file(root / "model" / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, root / "model" / "model.safetensors")
    return root


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_broken_case(tmp_path_factory.mktemp("broken"))


@pytest.mark.parametrize(("task", "bad"), [("gsm8k", BAD_GSM8K), ("mmlu_anatomy", BAD_MMLU)])
def test_a_worker_returns_the_other_rows_and_the_reason(case: Path, task: str, bad: int) -> None:
    worker = Worker(worker_settings(case, batch_size=2))
    documents = [f"{task}/{number}" for number in range(6)]
    rows = pa.Table.from_batches(list(worker.run(trial("k2_middle", task), documents, context())))
    assert set(rows["doc_id"].to_pylist()) == set(documents) - {f"{task}/{bad}"}
    (failure,) = worker.failed_documents.items()
    assert failure[0] == f"{task}/{bad}"
    assert "the model computed a" in failure[1]
    facts = worker.facts(trial("k2_middle", task), worker.calibrate())
    assert facts["calibration"] > 0, "the other calibration documents still give a speed"
    list(worker.run(trial("k2_middle", task), documents[:1], context()))
    assert not worker.failed_documents, "they are of the current trial"


@pytest.mark.slow
def test_a_sweep_records_the_document_and_goes_on(case: Path, tmp_path: Path) -> None:
    flags = (
        "--tasks",
        "gsm8k,mmlu_anatomy",
        "--policies",
        "k1,k2_middle",
        "--no-replicate",
        "--max-new-tokens",
        "40",
        "--limit",
        "6",
    )
    here = ("--shard-size", "3", "--batch-size", "2", "--actors", "2", "--no-dashboard")
    text = Run(case, tmp_path / "results", *flags, *here).wait(1)
    folder = tmp_path / "results" / "s"
    bad = {f"gsm8k/{BAD_GSM8K}", f"mmlu_anatomy/{BAD_MMLU}"}
    wanted = {f"{task}/{n}" for task in ("gsm8k", "mmlu_anatomy") for n in range(6)}
    assert {row["doc_id"] for row in outcome(folder).values()} == wanted - bad
    assert len(outcome(folder)) == 2 * len(wanted - bad)
    for doc_id in bad:
        assert f"failed: 1 of 3 documents failed: {doc_id} (block " in text
    assert "4 trials failed; retry with: " in text
    failures = status(folder)["failures"]
    assert {doc_id for failure in failures for doc_id in failure["documents"]} == bad
    assert len(failures) == 4
    page = (folder / "report.html").read_text()
    for doc_id in bad:
        assert f"failed, not finished: 1 of 3 documents failed: {doc_id} (block " in page

    rows = Store(folder).rows()
    text = Run(case, tmp_path / "results", *flags, *here).wait(1)  # tries the failed documents, and only those
    assert "4 trials to run" in text
    assert Store(folder).rows().sort_by("doc_id").equals(rows.sort_by("doc_id"))
    assert [failure["attempts"] for failure in status(folder)["failures"]] == [2] * 4
    assert f"failed: 1 of 1 document failed: gsm8k/{BAD_GSM8K} (block " in text


def status(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "orchestrator.cli", "status", str(folder), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def test_generate_and_score_name_the_line(case: Path) -> None:
    for command, line in (
        ("generate", {"prompt": f"a {RARE}"}),
        ("score", {"prefix": f"a {RARE}", "target": " b"}),
    ):
        lines = [{"id": 1, "prompt": "a", "prefix": "a", "target": " b"}, {"id": 2, **line}]
        ended = subprocess.run(
            [sys.executable, "-m", "orchestrator.cli", command, "--model", str(case / "model"), "--device", "cpu"],
            input="\n".join(json.dumps(entry) for entry in lines),
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 2
        assert "line 2: block 0, step 0 (full pass): the model computed a" in ended.stderr
        assert [json.loads(answer)["id"] for answer in ended.stdout.splitlines()] == [1]

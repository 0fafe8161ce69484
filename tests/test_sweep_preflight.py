"""Before a model is loaded: all problems at once, tasks left out on request, and what a prepared sweep holds."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from random_model import write_model
from test_tasks_model import mmlu_row
from test_tasks_sources import gsm8k_folder, write_dataset

import orchestrator.planning.estimate
import sampler.loading
from orchestrator.core.system import CORE
from orchestrator.planning.estimate import check_capacity, rough_pass_seconds
from orchestrator.planning.machine import Machine, Nodes
from orchestrator.planning.preflight import (
    SAMPLE_BYTES,
    WHOLE_FILE_BYTES,
    folder_revision,
    prepare,
    sweep_folder,
)
from orchestrator.planning.prepared import PreparedSweep, default_name
from orchestrator.planning.settings import SweepSettings
from orchestrator.planning.sweep_record import combine
from orchestrator.store.schema import DOCUMENTS
from sampler import InputError
from tasks.task import open_task

TWO = Machine(nodes=(Nodes(resources={"CPU": 2}),))
Prepare = Callable[..., PreparedSweep]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    gsm8k_folder(root, 30)
    rows = [mmlu_row(number) for number in range(20)]
    write_dataset(root, "cais/mmlu", "anatomy", {"dev": rows[:5], "test": rows[5:]}, suffix="parquet")
    return root


@pytest.fixture
def prepared(model: Path, data: Path, tmp_path: Path) -> Prepare:
    def prepared(machine: Machine = TWO, stored: Any = None, **changes: Any) -> PreparedSweep:
        common = {"tasks": ("gsm8k",), "model": str(model), "data": str(data), "max_new_tokens": 64, "replicate": False}
        settings = SweepSettings(**{**common, "out": str(tmp_path / "out"), **changes})
        return prepare(settings, machine, stored)

    return prepared


def sentences(prepared: Prepare, **changes: Any) -> list[str]:
    with pytest.raises(InputError) as error:
        prepared(**changes)
    return list(error.value.sentences)


def test_a_prepared_sweep(prepared: Prepare, model: Path, data: Path, tmp_path: Path) -> None:
    ready = prepared(tasks=("gsm8k", "mmlu_anatomy"), limit=12, shard_size=5, threshold=(0.9, 0.95))
    assert (ready.identity.model, ready.identity.depth, ready.identity.subset_size) == ("small", 6, 2)
    assert (ready.identity.dtype, ready.identity.data) == ("float32", "folder")
    assert ready.identity.datasets.keys() == {"gsm8k", "mmlu_anatomy"}
    assert ready.folder == tmp_path / "out" / "small" == sweep_folder(ready.requested, TWO)
    assert (ready.placement.actors, ready.notices) == (2, ())
    assert len(ready.trials) == 3 * 9 * 2 + 3 * 9, "options are scored whatever the threshold"
    assert [len(ids) for ids in ready.tasks["gsm8k"].by_shard.values()] == [4, 4, 4]
    taken = [doc_id for trial in ready.trials if trial.policy == "k1_first" for doc_id in ready.wanted.of(trial)]
    assert len(taken) == 2 * 12 + 12
    assert not (tmp_path / "out").exists(), "nothing is written"
    assert ready.model_source == str(model)
    assert ready.options.data == str(data)
    assert ready.options.limit is None
    assert ready.options.revisions == ()


def test_a_policy_that_cannot_score_is_reported_before_anything_is_loaded(prepared: Prepare) -> None:
    policies = ("k1", "mlp=2_middle", "trim=0.25_middle")
    assert len(prepared(policies=policies).trials) == 3
    [sentence] = sentences(prepared, tasks=("gsm8k", "mmlu_anatomy"), policies=policies)
    assert sentence.startswith("task mmlu_anatomy: policy trim=0.25_middle cannot score log-likelihoods: it selects")


def test_a_limit_takes_what_the_task_itself_would(prepared: Prepare) -> None:
    for limit in (1, 7, None):
        task = prepared(limit=limit).tasks["gsm8k"]
        assert list(task.wanted) == open_task("gsm8k", replace(task.task.options, limit=limit)).documents


def test_a_sample_is_what_shards_are_made_of(prepared: Prepare) -> None:
    ready = prepared(sample=11, seed=3, shard_size=4)
    task = ready.tasks["gsm8k"]
    assert [len(ids) for ids in task.by_shard.values()] == [4, 4, 3]
    assert len(task.wanted) == 11
    assert ready.identity.seed == 3


def test_a_larger_limit_keeps_the_trials(prepared: Prepare) -> None:
    small = prepared(limit=3, shard_size=2)
    large = prepared(limit=30, stored=combine(None, small.record()))
    known = {trial.trial_id: trial for trial in large.trials}
    for trial in small.trials:
        assert small.wanted.of(trial) == large.wanted.of(known[trial.trial_id])
    again = prepared(limit=3, stored=combine(None, large.record()))
    assert [trial.trial_id for trial in again.trials] == [trial.trial_id for trial in small.trials]


def test_a_sweep_of_an_older_version_keeps_its_trials(prepared: Prepare) -> None:
    """It has no cuts, and a larger limit adds documents to its last shard."""
    record = combine(None, prepared(limit=3).record())
    del record["identity"]["cuts"]
    record["identity"]["shard_size"] = 20
    small, large = prepared(limit=3, stored=record), prepared(limit=30, stored=record)
    assert small.identity.cuts is None
    known = {trial.trial_id: trial for trial in large.trials}
    for trial in small.trials:
        assert set(small.wanted.of(trial)) < set(large.wanted.of(known[trial.trial_id]))
    assert [len(ids) for ids in large.tasks["gsm8k"].by_shard.values()] == [20, 10]
    told = sentences(prepared, stored=record, shard_size=7)
    assert any("--shard-size 20 (now 7)" in line for line in told)


def test_trials_last_a_few_seconds_unless_nothing_is_timed(prepared: Prepare) -> None:
    ready = prepared(tasks=("gsm8k", "mmlu_anatomy"))
    generated, scored = ready.tasks["gsm8k"], ready.tasks["mmlu_anatomy"]
    assert generated.shard_size < scored.shard_size
    seconds = rough_pass_seconds(ready.files.config, "float32", CORE)
    assert generated.shard_size == round(CORE.trial_seconds / (generated.tokens / CORE.tokens_per_pass * seconds))
    assert prepared(batch_size=8).tasks["gsm8k"].shard_size % 8 == 0


def test_documents_tables(prepared: Prepare) -> None:
    ready = prepared(tasks=("gsm8k", "mmlu_anatomy"), limit=4, shard_size=2)
    table = ready.tasks["gsm8k"].table(4)
    assert table.schema.equals(DOCUMENTS, check_metadata=True)
    assert table.column("doc_id").to_pylist() == [f"gsm8k/{index}" for index in range(4)]
    assert table.column("shard").to_pylist() == [0, 0, 1, 1]
    assert table.column("level").null_count == 4
    assert "What is 0 + 1?" in table.column("question")[0].as_py()
    options = ready.tasks["mmlu_anatomy"].table(1).to_pylist()[0]
    assert (options["choices"], options["gold"]) == (["A", "B", "C", "D"], "A")


def test_levels_come_from_the_dataset(prepared: Prepare, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"problem": f"{n} + 1?", "solution": f"\\boxed{{{n + 1}}}", "level": f"Level {n}", "type": "Algebra"}
        for n in range(1, 4)
    ]
    write_dataset(tmp_path, "EleutherAI/hendrycks_math", "algebra", {"test": rows, "train": rows})
    table = prepared(tasks=("minerva_math_algebra",), data=str(tmp_path)).tasks["minerva_math_algebra"].table(None)
    assert table.column("level").to_pylist() == ["Level 1", "Level 2", "Level 3"]


def test_all_problems_are_reported_at_once(prepared: Prepare, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    reported = sentences(
        prepared,
        tasks=("gsm8k", "gsm8l", "humaneval", "ifeval"),
        policies=("k1", "k2_9", "k2_middle"),
        subset_size=7,
        small_block=(8, 5),
        dtype="float16",
        actors=9,
        out=str(tmp_path / "file" / "x"),
        fewshot=0,
    )
    expected = (
        "--actors must be at most 2 with 1 CPU each (got 9)",
        "--dtype float16 is not supported on a CPU",
        f"--out {tmp_path / 'file' / 'x'}: {tmp_path / 'file'} is a file, not a directory",
        "unknown task 'gsm8l': did you mean gsm8k",
        "task humaneval runs",
        "--subset-size must be between 1 and 5 for 6 layers (got 7)",
        "policy k2_9: layer 9 is outside the model's layers 0 to 5",
        "--small-block must divide the model's block size of 32 (got 5)",
    )
    for sentence in expected:
        assert any(line.startswith(sentence) for line in reported), sentence
    assert sum("ifeval" in line or "IFEval" in line for line in reported) == 1
    assert len(reported) == len(expected) + 1


def test_a_missing_model_does_not_hide_other_errors(prepared: Prepare, tmp_path: Path) -> None:
    reported = sentences(prepared, model=str(tmp_path), tasks=("nonsense_task",))
    assert any("has no config.json" in line for line in reported)
    assert any("unknown task 'nonsense_task'" in line for line in reported)


def test_a_default_model_that_cannot_be_downloaded_is_explained(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no model was given, the error names the default model and the bundled one that needs no network."""
    monkeypatch.setattr(sampler.loading, "model_info", _no_network)
    monkeypatch.setattr(sampler.loading, "snapshot_download", _no_network)
    gpu = Machine(nodes=(Nodes(resources={"CPU": 4, "GPU": 1}),), driver_gpus=1, dtype="bfloat16")
    (reported,) = sentences(prepared, machine=gpu, model="auto")
    assert reported.startswith(
        "model 'Efficient-Large-Model/Fast_dLLM_v2_7B' is not a local directory, and the Hub cannot be"
    )
    assert reported.endswith("--model tiny runs the small bundled model without a network")
    (named,) = sentences(prepared, machine=gpu, model="owner/name")
    assert "auto" not in named


def _no_network(*_: Any, **__: Any) -> None:
    raise TimeoutError


def test_tasks_that_cannot_be_had_are_left_out_on_request(prepared: Prepare) -> None:
    ready = prepared(tasks=("mmlu_virology", "gsm8k", "humaneval"), skip_unavailable=True)
    assert ready.settings.tasks == ("gsm8k",)
    assert ready.record()["settings"]["tasks"] == ["gsm8k"]
    assert {trial.task for trial in ready.trials} == {"gsm8k"}
    assert len(ready.notices) == 2
    assert all(notice.startswith("skipped: ") for notice in ready.notices)
    reported = sentences(prepared, tasks=("mmlu_virology", "humaneval"), skip_unavailable=True)
    assert len(reported) == 2, "none is left"


def test_prompts_that_do_not_fit_the_model(prepared: Prepare, model: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(model, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    prepared(model=str(short), max_new_tokens=32)
    (sentence,) = sentences(prepared, model=str(short), max_new_tokens=200)
    assert "task gsm8k, document gsm8k/0: " in sentence
    assert "exceed the model's 256 positions" in sentence
    assert len(sentences(prepared, model=str(short), max_new_tokens=32, fewshot=5)) == 1


def test_a_model_without_chat_template(prepared: Prepare, model: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(model, plain)
    (plain / "chat_template.jinja").unlink()
    assert sentences(prepared, model=str(plain)) == [
        "the model's tokenizer has no chat template; use --no-chat-template for plain-text prompts"
    ]
    assert prepared(model=str(plain), chat_template=False).identity.chat_template is False
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    (sentence,) = sentences(prepared, model=str(bare), chat_template=False)
    assert "has no tokenizer" in sentence


def test_a_folder_that_cannot_be_written(prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    (sentence,) = sentences(prepared)
    assert f"{tmp_path} is not writable" in sentence


@pytest.mark.parametrize("out", ["results", "a/b"])
def test_a_folder_that_ray_deletes_with_its_job(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """`ray job submit --working-dir .` runs the driver in a copy of that directory."""
    copy = tmp_path / "session_latest" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123456789abcdef"
    copy.mkdir(parents=True)
    (tmp_path / "elsewhere").symlink_to(copy)
    for folder in (copy, tmp_path / "elsewhere"):
        monkeypatch.chdir(folder)
        (sentence,) = sentences(prepared, out=out)
        assert sentence.startswith("--out must be outside the working directory that `ray job submit` uploads, because")
    assert prepared(out=str(tmp_path / "kept")).folder == tmp_path / "kept" / "small"


def test_a_full_disk(prepared: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = combine(None, prepared().record())
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(orchestrator.planning.estimate.shutil, "disk_usage", lambda _: usage)
    (sentence,) = sentences(prepared)
    assert "MB, but 1 kB are free" in sentence
    going_on = prepared(stored=stored)  # what it needs depends on what is left
    with pytest.raises(InputError, match="needs about 1 MB, but 1 kB are free"):
        check_capacity(going_on, TWO, going_on.trials[:1])
    check_capacity(going_on, TWO, [])


def test_a_model_that_memory_cannot_hold(prepared: Prepare) -> None:
    needed = prepared().memory
    enough = replace(TWO, memory=2 * needed)
    assert prepared(enough).placement.actors == 2
    little = replace(TWO, memory=2 * needed - 2)
    (sentence,) = sentences(prepared, machine=little)
    assert sentence.startswith("each actor needs about ")
    assert sentence.endswith(": use --dtype bfloat16 or fewer --actors")
    tight = replace(TWO, memory=needed - 2)
    assert sentences(prepared, machine=tight, batch_size=2)[0].endswith(
        ": use --dtype bfloat16 or a smaller --batch-size"
    )
    assert prepared(little, actors=1).placement.actors == 1
    assert prepared(little, policies=("k1",), limit=3).placement.actors == 2, "of which one has a trial"
    assert len(sentences(prepared, machine=little, small_block=(5,))) == 2, "next to the other problems"
    gpu = Machine(nodes=(Nodes(resources={"CPU": 2, "GPU": 2}),), memory=1)
    assert prepared(gpu).placement.gpus_per_actor == 1, "whose memory a worker is asked for"


def test_what_the_folder_says_is_compared(prepared: Prepare) -> None:
    stored = combine(None, prepared(limit=5).record())
    again = prepared(stored=stored, limit=5)
    assert combine(stored, again.record()) == stored
    assert prepared(stored=stored, policies=("k2_all",)).settings.policies == ("k2_all",)
    reported = sentences(prepared, stored=stored, batch_size=2, shard_size=7, small_block=(5,))
    assert any("was made with --batch-size 1 (now 2):" in line for line in reported)
    assert len(reported) == 2, "next to the other problems"


def test_what_auto_means_for_dtype(prepared: Prepare) -> None:
    gpu = Machine(nodes=(Nodes(resources={"CPU": 4, "GPU": 1}),), dtype="bfloat16")
    assert prepared(gpu).identity.dtype == "bfloat16"
    assert prepared(gpu, gpus_per_actor=0.0).identity.dtype == "float32"
    assert prepared(gpu, dtype="float16").identity.dtype == "float16"
    assert sentences(prepared, machine=gpu, gpus_per_actor=0.0, dtype="float16") == [
        "--dtype float16 is not supported on a CPU: use float32 or bfloat16"
    ]
    stored = prepared(gpu).record()
    assert prepared(stored=stored).identity.dtype == "bfloat16", "as the sweep began"


def test_auto_continues_with_the_model_there_was(prepared: Prepare) -> None:
    stored = combine(None, prepared().record())
    again = prepared(stored=stored, model="auto", data="auto", name="small")
    assert again.identity == prepared().identity
    assert again.notices == ()


def test_other_weights_in_the_same_folder_are_another_model(prepared: Prepare, model: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "small"
    shutil.copytree(model, moved)
    stored = prepared().record()
    assert prepared(model=str(moved), stored=stored).identity == prepared().identity, "wherever it lies"
    write_model(moved, seed=1)
    (sentence,) = sentences(prepared, model=str(moved), stored=stored)
    assert "the model's revision sha256:" in sentence


def test_a_large_file_is_sampled(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(WHOLE_FILE_BYTES + 3 * SAMPLE_BYTES))
    first = folder_revision(tmp_path)
    assert folder_revision(tmp_path) == first
    for place in (0, WHOLE_FILE_BYTES + 3 * SAMPLE_BYTES - 1):
        changed = bytearray(WHOLE_FILE_BYTES + 3 * SAMPLE_BYTES)
        changed[place] = 1
        path.write_bytes(changed)
        assert folder_revision(tmp_path) != first
    path.write_bytes(bytes(WHOLE_FILE_BYTES + 4 * SAMPLE_BYTES))
    assert folder_revision(tmp_path) != first


def test_relative_folders_are_named_in_full(
    prepared: Prepare, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    ready = prepared(model="small", data=os.path.relpath(data), out="out")
    assert ready.settings.model == str(model)
    assert ready.settings.data == str(data)
    assert ready.folder == model.parent / "out" / "small"
    assert ready.requested.model == "small"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("owner/name_7B", "name_7B"),
        ("tiny", "tiny"),
        ("a b", "a-b"),
        (".hidden", "hidden"),
        ("é", "sweep"),
        ("x" * 200, "x" * 100),
    ],
)
def test_a_sweep_is_called_like_its_model(model: str, name: str) -> None:
    assert default_name(model) == name


def test_where_a_sweep_lies() -> None:
    settings = SweepSettings(tasks=("gsm8k",), out="/x")
    assert sweep_folder(replace(settings, name="mine"), TWO) == Path("/x/mine")
    assert sweep_folder(replace(settings, model="owner/name@v2"), TWO) == Path("/x/name")
    assert sweep_folder(settings, TWO) == Path("/x/tiny")
    assert sweep_folder(settings, replace(TWO, nodes=(Nodes(resources={"CPU": 2, "GPU": 1}),))) == Path(
        "/x/Fast_dLLM_v2_7B"
    )

"""Documents, prompts and selection: fixed order, stable ids, requests as lm-eval writes them."""

import functools
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tasks_fakes import (
    CannedDecoder,
    CharacterTokenizer,
    aggregate,
    bench,
    canned_for,
    choosing,
    run,
    working_sandbox,
)
from test_tasks_answers import gpqa_row
from test_tasks_sources import write_dataset

from sampler import InputError
from tasks.catalog import CATALOG
from tasks.documents import TaskOptions
from tasks.evaluate import chat_renderer
from tasks.lookup import find_task_spec
from tasks.task import Task, open_task

TEMPLATE = chat_renderer(CharacterTokenizer())


@functools.cache
def opened(name: str, **options: Any) -> Task:
    if name == "humaneval":
        working_sandbox()
    return open_task(name, TaskOptions(data=str(bench()), **options))


def test_catalog_values() -> None:
    primary = {name: entry.primary for name, entry in CATALOG.items()}
    assert primary == {
        "gsm8k": "exact_match,flexible-extract",
        "minerva_math": "math_verify",
        "mmlu": "acc",
        "ifeval": "prompt_level_strict_acc",
        "humaneval": "pass@1",
        "gpqa": "acc",
    }
    assert {name: entry.fewshot for name, entry in CATALOG.items() if entry.fewshot} == {"gpqa": 5}
    tokens = {name: entry.max_new_tokens for name, entry in CATALOG.items() if entry.kind == "generate"}
    assert tokens == {"gsm8k": 2048, "minerva_math": 2048, "ifeval": 2048, "humaneval": 1024}
    assert len(CATALOG["mmlu"].subtasks) == 57
    assert len(CATALOG["minerva_math"].subtasks) == 7
    assert CATALOG["gpqa"].subtasks == ("gpqa_main_n_shot",)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("gms8k", "gsm8k"),
        ("mmul", "mmlu"),
        ("human_eval", "humaneval"),
        ("minerva", "minerva_math"),
        ("arc_eazy", "arc_easy"),
    ],
)
def test_unknown_name_suggests_similar_ones(name: str, nearest: str) -> None:
    with pytest.raises(InputError, match=f"unknown task '{name}'.*{nearest}"):
        find_task_spec(name)


@pytest.mark.parametrize("name", ["wikitext", "squad_completion"])
def test_unsupported_output_types_are_rejected(name: str) -> None:
    if name == "wikitext":
        with pytest.raises(InputError, match="loglikelihood_rolling"):
            open_task(name)
    else:
        with pytest.raises(InputError):
            open_task(name)


def test_prompts_ask_for_a_boxed_answer() -> None:
    ask = "Please reason step by step, and put your final answer within \\boxed{}."
    for name, opening, field in (("gsm8k", "Question: ", "question"), ("minerva_math", "Problem:\n", "problem")):
        task = opened(name, limit=1)
        (request,) = task.requests(task.documents[0], TEMPLATE)
        gap = "\n" if name == "gsm8k" else "\n\n"
        assert request.args[0] == f"<user>{opening}{request.doc[field]}{gap}{ask}</><assistant>\n"
        assert request.args[1]["max_gen_toks"] == 2048


def test_stop_strings_and_lengths_reach_the_decoder() -> None:
    for name, stop, length in (
        ("gsm8k", ("Question:", "</s>", "<|im_end|>"), 2048),
        ("minerva_math_algebra", ("Problem:",), 2048),
        ("ifeval", (), 2048),
        ("humaneval", (), 1024),
    ):
        task = opened(name, limit=2, allow_code_execution=True)
        decoder = canned_for(task, lambda _: "x")
        run(task, decoder)
        assert {(prompt.stop, prompt.max_new_tokens) for prompt in decoder.prompts} == {(stop, length)}
    task = opened("gsm8k", limit=1, max_new_tokens=77)
    decoder = canned_for(task, lambda _: "x")
    run(task, decoder)
    assert decoder.prompts[0].max_new_tokens == 77


def test_humaneval_starts_the_answer_with_the_function_header() -> None:
    task = opened("humaneval", limit=1, allow_code_execution=True)
    (request,) = task.requests(task.documents[0], TEMPLATE)
    assert request.args[0].startswith("<user>Write a solution to the following problem and make sure")
    assert request.args[0].endswith(f"<assistant>Here is the completed function:\n```python\n{request.doc['prompt']}\n")


def test_mmlu_scores_letters_after_the_template() -> None:
    task = opened("mmlu_anatomy", limit=1, fewshot=5)
    requests = task.requests(task.documents[0], TEMPLATE)
    assert [request.args[1] for request in requests] == ["A", "B", "C", "D"]
    assert requests[0].args[0].count("<user>") == 6
    assert "about anatomy" in requests[0].args[0]
    decoder = CannedDecoder()
    run(task, decoder)
    assert {len(pair.target) for pair in decoder.pairs} == {1}, "the template's line break belongs to the prompt"


def test_ids_and_hashes_do_not_depend_on_the_limit() -> None:
    few, more = opened("minerva_math", limit=2), opened("minerva_math", limit=4)
    assert len(few.documents) == 14
    assert len(more.documents) == 28
    assert set(few.documents) < set(more.documents)
    assert [d.doc_id for d in few.documents][:3] == [
        "minerva_math_algebra/0",
        "minerva_math_algebra/1",
        "minerva_math_counting_and_prob/0",
    ]
    opened.cache_clear()
    again = opened("minerva_math", limit=4)
    assert again.documents == more.documents
    assert again.provenance == more.provenance
    assert len({d.doc_hash for d in more.documents}) == 28


def test_sample_is_proportional_and_grows() -> None:
    small, large = opened("mmlu", sample=500, seed=3), opened("mmlu", sample=1000, seed=3)
    assert len(small.documents) == 500
    assert set(small.documents) < set(large.documents)
    counts = Counter(document.subtask for document in small.documents)
    sizes = {name: len(task.task_docs) for name, task in small.subtasks.items()}
    for name, size in sizes.items():
        assert abs(counts[name] - 500 * size / 14042) <= 1
    assert opened("mmlu", sample=500, seed=4).documents != small.documents
    assert small.documents == sorted(small.documents, key=lambda d: (list(sizes).index(d.subtask), d.index))
    assert len(opened("humaneval", sample=9999, allow_code_execution=True).documents) == 164


def test_score_does_not_depend_on_other_documents() -> None:
    task = opened("gsm8k", limit=100)
    decoder = canned_for(task, lambda document: document["answer"] if len(document["question"]) % 2 else "7")
    alone = {r.document.doc_id: r.metrics for document in task.documents for r in run(task, decoder, [document])}
    backwards = canned_for(
        task, lambda document: document["answer"] if len(document["question"]) % 2 else "7", backwards=True
    )
    together = run(task, backwards)
    assert {r.document.doc_id: r.metrics for r in together} == alone
    assert [r.document for r in together] != list(task.documents), "results come as they are finished"
    assert aggregate(task, together) == aggregate(task, together[::-1])


def test_results_contain_counters_and_times() -> None:
    plain = opened("mmlu_anatomy", limit=2, chat_template=False)
    result = run(plain, choosing(plain, lambda document: document["answer"]))[0]
    assert result.correct
    assert len(result.scores) == 4
    assert result.tokens_scored == 8  # " A" is two characters
    assert result.tokens_prefilled == 4 * result.prompt_tokens
    assert result.seconds == 1.0
    assert (result.tokens, result.finish) == (0, None)
    assert plain.describe(plain.documents[0]).choices == ("A", "B", "C", "D")


def gpqa_folder(tmp_path: Path, count: int = 12) -> str:
    write_dataset(
        tmp_path, "Idavidrein/gpqa", "gpqa_main", {"train": [gpqa_row(n) for n in range(count)]}, suffix="csv"
    )
    return str(tmp_path)


def test_gpqa_from_a_folder_of_invented_documents(tmp_path: Path) -> None:
    task = open_task("gpqa", TaskOptions(data=gpqa_folder(tmp_path)))
    assert len(task.documents) == 12
    assert task.fewshot == 5
    assert open_task("gpqa", TaskOptions(data=gpqa_folder(tmp_path))).documents == task.documents
    for document in task.documents:
        requests = task.requests(document, TEMPLATE)
        assert [request.args[1] for request in requests] == ["(A)", "(B)", "(C)", "(D)"]
        assert requests[0].args[0].count("Question: What is") == 6
        asked = task.describe(document).question
        assert requests[0].args[0].count(asked) == 1, "a document is not among its own examples"
        assert "right" in asked.split(task.describe(document).gold)[1].split("\n")[0]
    plain = open_task("gpqa", TaskOptions(data=gpqa_folder(tmp_path), chat_template=False))
    results = run(plain, choosing(plain, lambda document: "ABCD".index(document["answer"][1])))
    assert all(result.correct for result in results)
    assert aggregate(plain, results)["gpqa_main_n_shot"]["acc,none"] == 1.0


def test_fewshot_examples_do_not_depend_on_the_order_of_requests() -> None:
    task = opened("gsm8k", limit=4, fewshot=3)
    forwards = [task.requests(document, None)[0].args[0] for document in task.documents]
    backwards = [task.requests(document, None)[0].args[0] for document in reversed(task.documents)]
    assert forwards == backwards[::-1]


def test_opening_a_task_prints_nothing(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        opened("minerva_math", limit=1)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


@pytest.mark.parametrize("name", ["gpqa_diamond_n_shot", "gpqa_extended_n_shot"])
def test_gpqa_variants_shuffle_options_with_the_same_seed(name: str, tmp_path: Path) -> None:
    part = name.removesuffix("_n_shot")
    write_dataset(tmp_path, "Idavidrein/gpqa", part, {"train": [gpqa_row(n) for n in range(9)]}, suffix="csv")
    options = TaskOptions(data=str(tmp_path))
    assert open_task(name, options).documents == open_task(name, options).documents


@pytest.mark.parametrize("name", ["humaneval_plus", "humaneval_64", "humaneval_multi_line_infilling"])
def test_lm_evals_code_runner_needs_the_unsafe_flag(name: str, tmp_path: Path) -> None:
    working_sandbox()
    with pytest.raises(InputError, match="has no sandbox; allow it with --unsafe-code-execution"):
        open_task(name, TaskOptions(data=str(tmp_path), allow_code_execution=True))
    with pytest.raises(InputError, match="--allow-code-execution"):
        open_task(name, TaskOptions(data=str(tmp_path)))


MBPP = (
    ("Add two numbers.", "def add(a, b):\r\n  return a + b", "add", ("(1, 2) == 3", "(-1, 1) == 0", "(2, 2) == 4")),
    (
        "Count letters.",
        "from collections import Counter\ndef letters(text):\n    return Counter(text)",
        "letters",
        ("('aab') == {'a': 2, 'b': 1}", "('') == {}", "('b')['b'] == 1"),
    ),
    (
        "Area of a circle.",
        "import math\ndef area(r):\n    return math.pi * r * r",
        "area",
        ("(0) == 0", "(1) == math.pi", "(2) > 12"),
    ),
)


def mbpp_rows() -> list[dict[str, Any]]:
    common = {"test_setup_code": "", "challenge_test_list": []}
    return [
        {"task_id": n, "text": text, "code": code, "test_list": [f"assert {name}{test}" for test in tests], **common}
        for n, (text, code, name, tests) in enumerate(MBPP)
    ]


@pytest.mark.parametrize(
    ("name", "dataset", "part", "answer"),
    [
        ("mbpp", "google-research-datasets/mbpp", "full", "{}"),
        ("mbpp_instruct", "google-research-datasets/mbpp", "full", "\n{}\n```\nThat is it."),
        ("mbpp_plus", "evalplus/mbppplus", "default", "{}"),
    ],
)
def test_mbpp_runs_in_the_sandbox(name: str, dataset: str, part: str, answer: str, tmp_path: Path) -> None:
    """Two of three answers are correct; the third one compares equal to everything."""
    working_sandbox()
    write_dataset(tmp_path, dataset, part, {"test": mbpp_rows()})
    task = open_task(name, TaskOptions(data=str(tmp_path), allow_code_execution=True, chat_template=False))
    forged = "class All:\n    __eq__ = __gt__ = lambda self, other: True\ndef area(r):\n    return All()"
    decoder = canned_for(
        task, lambda document: answer.format(forged if "area" in document["code"] else document["code"])
    )
    results = run(task, decoder)
    assert [result.correct for result in results] == [True, True, False]
    assert task.requests(task.documents[0], None)[0].args[0].count("Write a") == 3, "lm-eval's examples"
    assert aggregate(task, results)[name]["pass_at_1," + task.subtasks[name]._filters[0].name] == pytest.approx(2 / 3)


def test_mbpp_rows_are_checked(tmp_path: Path) -> None:
    working_sandbox()
    write_dataset(tmp_path, "google-research-datasets/mbpp", "full", {"test": [{**mbpp_rows()[0], "test_list": []}]})
    with pytest.raises(InputError, match="test_list is empty"):
        open_task("mbpp", TaskOptions(data=str(tmp_path), allow_code_execution=True))


def test_lm_eval_task_outside_the_catalog(tmp_path: Path) -> None:
    choices = {"text": ["red", "blue", "green"], "label": ["A", "B", "C"]}
    rows = [{"id": str(n), "question": f"Colour {n}?", "choices": choices, "answerKey": "B"} for n in range(5)]
    splits = {"train": rows, "validation": rows, "test": rows}
    write_dataset(tmp_path, "allenai/ai2_arc", "ARC-Easy", splits, suffix="parquet")
    task = open_task("arc_easy", TaskOptions(data=str(tmp_path), chat_template=False))
    assert (task.kind, task.primary, len(task.documents)) == ("loglikelihood", "acc", 5)
    assert all(result.correct for result in run(task, choosing(task, lambda _: 1)))
    write_dataset(tmp_path, "allenai/ai2_arc", "ARC-Easy", {"test": [{"id": "1"}]})
    with pytest.raises(InputError, match="arc_easy cannot read its first document"):
        open_task("arc_easy", TaskOptions(data=str(tmp_path)))


def test_documents_and_lookup_do_not_import_lm_eval() -> None:
    """Planning and the command line import them."""
    code = "import sys, tasks.documents, tasks.lookup; print({'lm_eval', 'datasets', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

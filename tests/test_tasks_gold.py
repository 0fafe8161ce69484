"""Gold answers as responses, through the streaming harness and through lm_eval.simple_evaluate: the same scores."""

import random
from collections.abc import Callable
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager
from tasks_fakes import CannedDecoder, aggregate, bench, canned_for, choosing, run, working_sandbox

from tasks.documents import TaskOptions
from tasks.lm import ReuseLM
from tasks.task import Task, open_task, quiet_lm_eval


def opened(name: str, **options: Any) -> Task:
    if name == "humaneval":
        working_sandbox()
    return open_task(name, TaskOptions(data=str(bench()), chat_template=False, **options))


def lm_evals_own(task: Task, decoder: CannedDecoder) -> dict[str, dict[str, Any]]:
    with quiet_lm_eval():
        found = lm_eval.simple_evaluate(
            model=ReuseLM(decoder=decoder),
            tasks=task.lm_eval_tasks,
            limit=task.options.limit,
            log_samples=False,
            task_manager=TaskManager(include_defaults=False),
            confirm_run_unsafe_code=True,
        )
    results: dict[str, dict[str, Any]] = found["results"]
    return results


def same(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name] == theirs[name], name


def gsm8k_gold(document: dict[str, Any]) -> str:
    return str(document["answer"])


def minerva_gold(document: dict[str, Any]) -> str:
    answer = document["answer"]
    return f"{document['solution']}\nFinal Answer: The final answer is ${answer}$. I hope it is correct."


def sometimes(response: Callable[[dict[str, Any]], str], wrong: str) -> Callable[[dict[str, Any]], str]:
    """Correct for about two of three documents, depending on their content."""
    return lambda document: response(document) if random.Random(str(document)).random() < 0.66 else wrong


def test_gsm8k_gold_under_both_extractors() -> None:
    task = opened("gsm8k")
    results = run(task, canned_for(task, gsm8k_gold))
    assert len(results) == 1319
    for metric in ("exact_match,strict-match", "exact_match,flexible-extract"):
        assert sum(result.metrics[metric] for result in results) == 1319
    assert all(result.correct for result in results)


def test_gsm8k_streamed_equals_simple_evaluate() -> None:
    task = opened("gsm8k", limit=200)
    decoder = canned_for(task, sometimes(gsm8k_gold, "I think it is 7."))
    ours = aggregate(task, run(task, decoder))
    assert 0.5 < ours["gsm8k"]["exact_match,flexible-extract"] < 0.8
    same(ours, lm_evals_own(task, decoder))


def test_minerva_gold() -> None:
    task = opened("minerva_math", limit=5)
    ours = aggregate(task, run(task, canned_for(task, minerva_gold)))
    assert ours["minerva_math"]["exact_match,none"] == 1.0
    assert ours["minerva_math"]["math_verify,none"] > 0.9


def test_minerva_streamed_equals_simple_evaluate() -> None:
    task = opened("minerva_math", limit=5)
    decoder = canned_for(task, sometimes(minerva_gold, "The answer is $\\boxed{12345}$."))
    same(aggregate(task, run(task, decoder)), lm_evals_own(task, decoder))


@pytest.mark.slow
def test_minerva_gold_on_all_documents() -> None:
    task = opened("minerva_math")
    assert len(task.documents) == 5000
    ours = aggregate(task, run(task, canned_for(task, minerva_gold)))
    assert ours["minerva_math"]["exact_match,none"] == 1.0
    shares = [ours[name]["math_verify,none"] for name in task.subtasks]
    print("math_verify by subject:", [round(share, 4) for share in shares], ours["minerva_math"])
    assert (round(min(shares), 3), round(max(shares), 3)) == (0.978, 0.998), "a ceiling of the scorer"


def test_mmlu_gold_and_wrong() -> None:
    task = opened("mmlu", limit=3)
    assert len(task.documents) == 171
    assert all(result.correct for result in run(task, choosing(task, lambda document: document["answer"])))
    assert not any(result.correct for result in run(task, choosing(task, lambda document: 3 - document["answer"])))


def test_mmlu_streamed_equals_simple_evaluate() -> None:
    task = opened("mmlu", limit=8)
    decoder = choosing(task, lambda document: len(document["question"]) % 4)
    ours = aggregate(task, run(task, decoder))
    assert 0.1 < ours["mmlu"]["acc,none"] < 0.4
    same(ours, lm_evals_own(task, decoder))


@pytest.mark.slow
def test_mmlu_gold_on_all_documents() -> None:
    task = opened("mmlu")
    decoder = choosing(task, lambda document: document["answer"])
    results = run(task, decoder)
    assert len(results) == 14042
    ours = aggregate(task, results)
    assert ours["mmlu"]["acc,none"] == 1.0
    same(ours, lm_evals_own(task, decoder))


FIXED = "Sure. Here is a *short* note\n\nP.S. It has two parts, no more. <<Title>> I do not know!"


def test_ifeval_fixed_text_equals_simple_evaluate() -> None:
    pytest.importorskip("langdetect", reason="ifeval's packages are not installed")
    task = opened("ifeval")
    decoder = CannedDecoder(lambda _: FIXED)
    results = run(task, decoder)
    assert len(results) == 541
    ours = aggregate(task, results)
    assert 0 < ours["ifeval"]["prompt_level_strict_acc,none"] < 1
    same(ours, lm_evals_own(task, decoder))
    assert aggregate(task, run(task, decoder)) == ours, "language detection is seeded"


def humaneval_gold(document: dict[str, Any]) -> str:
    return str(document["canonical_solution"])


@pytest.mark.parametrize("documents", [16, pytest.param(164, marks=pytest.mark.slow)])
def test_humaneval_canonical_solutions(documents: int) -> None:
    task = opened("humaneval", limit=documents, allow_code_execution=True)
    results = run(task, canned_for(task, humaneval_gold))
    assert len(results) == documents
    assert [result.document.doc_id for result in results if not result.correct] == []


@pytest.mark.parametrize("documents", [8, pytest.param(164, marks=pytest.mark.slow)])
def test_humaneval_wrong_code(documents: int) -> None:
    task = opened("humaneval", limit=documents, allow_code_execution=True)
    assert not any(result.correct for result in run(task, canned_for(task, lambda _: "    return None\n")))


def test_humaneval_streamed_equals_simple_evaluate() -> None:
    task = opened("humaneval", limit=6, allow_code_execution=True)
    decoder = canned_for(task, sometimes(humaneval_gold, "    pass\n"))
    ours = aggregate(task, run(task, decoder))
    assert 0 < ours["humaneval"]["pass@1,create_test"] < 1
    same(ours, lm_evals_own(task, decoder))

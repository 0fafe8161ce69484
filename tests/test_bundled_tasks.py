"""The bundled sets through catalog, prompts and metrics: right answers score 1, and rendered prompts are those sent."""

from typing import Any

import pytest
from tasks_fakes import CharacterTokenizer, aggregate, canned_for, choosing, run

from tasks.documents import TaskOptions
from tasks.evaluate import chat_renderer, to_pairs
from tasks.task import Task, open_task
from tools.bundled.documents import SUBJECTS, TEST_DOCUMENTS, bundled_problems
from tools.bundled.problems import TEST
from tools.bundled.training_lines import (
    PLACEHOLDERS,
    Messages,
    PromptTemplate,
    json_chat_template,
    parse_messages,
    problem_line,
    prompt_templates,
)


def opened(name: str, **options: Any) -> Task:
    return open_task(name, TaskOptions(data="bundled", **options))


def solution(document: dict[str, Any]) -> str:
    return str(document["solution"])


def solution_and_final_answer(document: dict[str, Any]) -> str:
    """With the sentence that minerva_math's second metric looks for; the prompt does not ask for it."""
    return f"{solution(document)}\nFinal Answer: The final answer is ${document['answer']}$. I hope it is correct."


def test_gsm8k_answers_score_1_under_both_extractors() -> None:
    task = opened("gsm8k")
    found = aggregate(task, run(task, canned_for(task, lambda document: str(document["answer"]))))["gsm8k"]
    assert found["sample_len"] == 280
    assert found["exact_match,flexible-extract"] == found["exact_match,strict-match"] == 1.0


def test_gsm8k_wrong_answers_score_0() -> None:
    task = opened("gsm8k")
    found = aggregate(task, run(task, canned_for(task, lambda _: "The answer is \\boxed{61}.\n#### 61")))["gsm8k"]
    assert found["exact_match,flexible-extract"] == found["exact_match,strict-match"] == 0.0


def test_minerva_solutions_score_1() -> None:
    few = opened("minerva_math", limit=4)
    assert aggregate(few, run(few, canned_for(few, solution)))["minerva_math"]["math_verify,none"] == 1.0
    task = opened("minerva_math")
    assert len(task.documents) == 280
    found = aggregate(task, run(task, canned_for(task, solution_and_final_answer)))["minerva_math"]
    assert found["math_verify,none"] == found["exact_match,none"] == 1.0


def test_mmlu_right_and_wrong_letters() -> None:
    task = opened("mmlu", chat_template=False)
    assert len(task.documents) == 280
    assert len(task.subtasks) == 4
    assert all(result.correct for result in run(task, choosing(task, lambda document: document["answer"])))
    assert not any(result.correct for result in run(task, choosing(task, lambda document: 3 - document["answer"])))


@pytest.mark.parametrize("name", SUBJECTS)
def test_worked_examples_are_there(name: str) -> None:
    task = opened(name, fewshot=4, limit=1)
    for document in task.documents:
        assert task.requests(document, None)[0].args[0].count("Answer:" if name == "mmlu" else "boxed") >= 5


@pytest.mark.parametrize("name", SUBJECTS)
def test_rendered_prompts_are_what_the_task_sends(name: str) -> None:
    """For every test document; the rendered ones come from one opened document with marks in it."""
    task = opened(name)
    subtasks = iter(task.subtasks)
    for subject, prompt in prompt_templates(name, SUBJECTS[name]).items():
        subtask = next(subtasks)
        problems = bundled_problems(name, subject, TEST, TEST_DOCUMENTS[name])
        asked = [document for document in task.documents if document.subtask == subtask]
        assert len(asked) == len(problems)
        for document, problem in zip(asked, problems, strict=True):
            rendered = problem_line(name, subject, TEST, prompt, problem)
            requests = task.requests(document, json_chat_template)
            assert Messages(system=rendered["system"], user=rendered["prompt"]) == parse_messages(requests[0].args[0])
            if name == "mmlu":
                assert rendered["answer"] == requests[requests[0].doc["answer"]].args[1]
            else:
                assert rendered["answer"] == requests[0].doc["answer" if name == "gsm8k" else "solution"]


def test_what_mmlu_sends_and_scores() -> None:
    """The description is a system message, and the letter follows the chat template without a space."""
    task = opened("mmlu_high_school_geography", limit=1)
    requests = task.requests(task.documents[0], json_chat_template)
    system = parse_messages(requests[0].args[0]).system
    assert system is not None
    assert system.endswith("about high school geography.\n\n")
    tokenizer = CharacterTokenizer()
    pairs = to_pairs(task.requests(task.documents[0], chat_renderer(tokenizer)), tokenizer)
    assert [tokenizer.decode(pair.target) for pair in pairs] == ["A", "B", "C", "D"]


def test_a_field_that_looks_like_a_mark_stays_as_it_is() -> None:
    prompt = PromptTemplate(
        messages=Messages(system=None, user=f"{PLACEHOLDERS[0]} or {PLACEHOLDERS[1]}"), continuations=()
    )
    assert prompt.fill([PLACEHOLDERS[1], "two"]).user == f"{PLACEHOLDERS[1]} or two"

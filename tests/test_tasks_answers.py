"""Answer extraction (boxes, code blocks, shuffled options) and scoring of real documents."""

import json
import random
from typing import Any

import pytest
from tasks_fakes import bench, canned_for, run

from tasks.documents import TaskOptions
from tasks.hooks import build_program, extract_boxed, last_boxed, score_minerva_math, shuffle_gpqa_options
from tasks.task import open_task


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{18}.", "18"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{5} and \boxed{", "5"),
        (r"\boxed{5} in \boxed{}", "5"),
        ("no box", None),
        (r"\boxed{3", None),
    ],
)
def test_last_complete_box_is_the_answer(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


BOXED = (
    "The answer is \\boxed{{{}}}",
    "So she has $\\boxed{{{}}}$.",
    "$$\n\\boxed{{{}}}\n$$",
    "\\[ \\boxed{{{}}} \\]",
    "**\\boxed{{{}}}**",
    "\\boxed{{\\${}}}",
    "\\boxed{{{} \\text{{ dollars}}}}",
    "\\boxed{{{}}} which is what 2 days of 24 hours give.",
)


@pytest.mark.parametrize("form", BOXED)
def test_gsm8k_boxed_answers_on_real_documents(form: str) -> None:
    task = open_task("gsm8k", TaskOptions(data=str(bench()), sample=60))

    def final(document: dict[str, Any]) -> str:
        return str(document["answer"].rpartition("#### ")[2])

    right = run(task, canned_for(task, lambda document: f"Think: 3 + 4.\n{form.format(final(document))}"))
    assert [r.document.doc_id for r in right if not r.correct] == []
    plus_one = canned_for(task, lambda d: f"Is it {final(d)}? No: {form.format(int(final(d).replace(',', '')) + 1)}")
    assert [r.document.doc_id for r in run(task, plus_one) if r.correct] == []


@pytest.mark.parametrize("mark", [",", "{,}", ",\\!", "\\,", "\\ "])
def test_tex_thousands_separators_are_removed(mark: str) -> None:
    ((text,),) = extract_boxed([[f"So $\\boxed{{\\$1{mark}234}}$."]], [{}])
    assert text.replace(",", "").replace("\\$", "") == "1234"


def test_minerva_boxed_answers_on_real_documents() -> None:
    task = open_task("minerva_math", TaskOptions(data=str(bench()), sample=35))
    right = run(task, canned_for(task, lambda document: f"So it is $\\boxed{{{last_boxed(document['solution'])}}}$."))
    assert sum(bool(result.correct) for result in right) >= 33, "the scorer's own ceiling is near 99 %"
    wrong = run(task, canned_for(task, lambda _: "Hence the answer is $\\boxed{-98765}$."))
    assert not any(result.correct for result in wrong)


DOCUMENT = {
    "prompt": 'import math\n\n\ndef double(x: int) -> int:\n    """ Twice x. """\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(math.floor(4.5)) == 8\n",
}


@pytest.mark.parametrize(
    "answer",
    [
        "    return 2 * x\n",
        "    return 2 * x\n```\nThis doubles `x`.\n```python\nprint(double(3))\n```",
        "    def inner():\n        return x\n    return 2 * inner()\n\ndef main():\n    pass\n```",
        "```python\ndef double(x):\n    return 2 * x\n```",
        "Here:\n\n```python\ndef helper(x):\n    return x\n\ndef double(x):\n    return x + helper(x)\n```\nDone.",
        "Sure!\n```\ndef double(x: int) -> int:\n    return x + x\n```\n",
        "def double(x):\n    return 2 * x\n```",
    ],
)
def test_program_is_extracted_from_the_answer(answer: str) -> None:
    space: dict[str, Any] = {}
    exec(f"{build_program(DOCUMENT, answer)}\n{DOCUMENT['test']}\ncheck(double)", space)


def test_prose_is_not_a_valid_program() -> None:
    with pytest.raises(SyntaxError):
        compile(build_program(DOCUMENT, "I would return two times x, of course"), "x", "exec")


def gpqa_row(number: int) -> dict[str, Any]:
    wrong = {f"Incorrect Answer {i}": f"  wrong {number}.{i}" for i in (1, 2, 3)}
    return {"Question": f"What is {number}?", "Correct Answer": f"right {number} ", **wrong, "Subdomain": None}


def test_gpqa_order_depends_on_the_question_alone() -> None:
    random.seed(5)
    rows = [gpqa_row(number) for number in range(40)]
    first = [shuffle_gpqa_options(row) for row in rows]
    random.seed(6)
    assert [shuffle_gpqa_options(row) for row in reversed(rows)] == first[::-1]
    letters = [shown["answer"] for shown in first]
    assert len(set(letters)) == 4
    for shown in first:
        assert shown[f"choice{'ABCD'.index(shown['answer'][1]) + 1}"].startswith("right")
    assert json.dumps(first)


@pytest.mark.parametrize(
    "text",
    [
        "So it is $\\boxed{12}$.",
        "Final Answer: The final answer is $12$. I hope it is correct.",
        "Final Answer: The final answer is $\\frac{24}{2}$. I hope it is correct.",
        "Final Answer: The final answer is $13$. I hope it is correct. $\\boxed{13}$",
        "Final Answer: The final answer is [invalidanswer]. I hope it is correct.",
        "",
    ],
)
def test_math_scores_equal_lm_evals(text: str) -> None:
    from lm_eval.tasks.minerva_math.utils import process_results

    document = {"problem": "What is 7+5?", "solution": "It is $7+5=\\boxed{12}$.", "answer": "12"}
    assert score_minerva_math(document, [text]) == process_results(document, [text])

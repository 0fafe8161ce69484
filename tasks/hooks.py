"""Functions that catalog entries plug into lm-eval: row validation, answer extraction and scoring."""

import ast
import builtins
import random
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tasks.sandbox import CodeTests

Row = Mapping[str, Any]
CheckRow = Callable[[Row], str | None]  # returns what is wrong with a row, or None
Content = dict[str, Any]  # a document as lm-eval passes it: one row of a dataset
SHUFFLE_SEED = 42
NO_ANSWER = "[invalidanswer]"  # what lm-eval extracts from an answer without the expected phrase


def accept_any_row(row: Row) -> str | None:
    del row
    return None


# These row checks run while the data is loaded. They reject rows that lm-eval could not score, or would score
# incorrectly without an error.


def check_gsm8k_row(row: Row) -> str | None:
    problem = _check_types(row, question=str, answer=str)
    return problem or (None if "####" in row["answer"] else 'its answer has no "####" before the final number')


def check_minerva_math_row(row: Row) -> str | None:
    if problem := _check_types(row, problem=str, solution=str):
        return problem
    has_box = any(box in row["solution"] for box in ("\\boxed", "\\fbox"))
    return None if has_box else "its solution has no \\boxed answer"


def check_mmlu_row(row: Row) -> str | None:
    if problem := _check_types(row, question=str, choices=list, answer=int):
        return problem
    if len(row["choices"]) != 4:
        return f"it must have 4 choices (got {len(row['choices'])})"
    return None if 0 <= row["answer"] < 4 else f"its answer must be between 0 and 3 (got {row['answer']})"


def check_ifeval_row(row: Row) -> str | None:
    if problem := _check_types(row, key=int, prompt=str, instruction_id_list=list, kwargs=list):
        return problem
    instructions, kwargs = len(row["instruction_id_list"]), len(row["kwargs"])
    return None if instructions == kwargs else f"it has {instructions} instructions but {kwargs} kwargs"


def check_humaneval_row(row: Row) -> str | None:
    return _check_types(row, prompt=str, test=str, entry_point=str)


def check_mbpp_row(row: Row) -> str | None:
    if problem := _check_types(row, code=str, test_list=list):
        return problem
    try:
        ast.parse("\n".join(row["test_list"]))
    except (SyntaxError, TypeError):
        return "its test_list is not a list of Python statements"
    return None if row["test_list"] else "its test_list is empty"


def check_gpqa_row(row: Row) -> str | None:
    incorrect = {f"Incorrect Answer {number}": str for number in (1, 2, 3)}
    return _check_types(row, **{"Question": str, "Correct Answer": str, **incorrect})


def _check_types(row: Row, **fields: type) -> str | None:
    for name, expected in fields.items():
        if name not in row:
            return f"it has no field {name!r}"
        if not isinstance(row[name], expected) or isinstance(row[name], bool):
            actual = "empty" if row[name] is None else type(row[name]).__name__
            return f"its field {name!r} must be {expected.__name__} (got {actual})"
    return None


def last_boxed(text: str) -> str | None:
    """The content of the last complete, non-empty \\boxed{…}."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                break
        if depth == 0 and text[start:end].strip():
            return text[start:end]
    return None


def extract_boxed(responses: Iterable[Sequence[str]], documents: Sequence[Content]) -> list[list[str]]:
    """lm-eval filter: the boxed answer that the prompt asks for, or the whole response if there is none.

    Without this filter, lm-eval would take the last match of its pattern, which for "$\\boxed{18}$." is only "$.".
    """
    del documents
    return [[_strip_tex(content) if (content := last_boxed(text)) else text for text in texts] for texts in responses]


def _strip_tex(number: str) -> str:
    """Remove TeX thousands separators."""
    return re.sub(r"\\[!,;: ]|~", "", number.replace("{,}", ","))


def build_program(document: Content, answer: str) -> str:
    """The HumanEval program for an answer.

    If a code block in the answer defines the function, the program is the prompt followed by that block. Otherwise the
    answer continues the prompt, up to the end of its code block.
    """
    name = re.escape(document["entry_point"])
    for block in re.findall(r"```(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:\n```|\Z)", answer, re.DOTALL):
        if re.search(rf"^(?:async\s+)?def\s+{name}\s*\(", block, re.MULTILINE):
            return f"{document['prompt']}\n{block}"
    return f"{document['prompt']}{answer.partition('```')[0]}"


def build_programs(responses: Iterable[Sequence[str]], documents: Sequence[Content]) -> list[list[str]]:
    """lm-eval filter: turn answers into programs."""
    return [
        [build_program(document, answer) for answer in answers]
        for answers, document in zip(responses, documents, strict=True)
    ]


def humaneval_tests(document: Content, target: str) -> CodeTests:
    """The tests of a HumanEval document. The setup is the prompt, because some tests call its helper functions.

    `pass` completes the function at the end of the prompt.
    """
    return CodeTests(setup=f"{document['prompt']}\n    pass\n", tests=target, names=(document["entry_point"],))


def mbpp_tests(document: Content, target: str) -> CodeTests:
    """The tests of an MBPP document: assertions. Names that they use and do not define must come from the program."""
    del document
    nodes = list(ast.walk(ast.parse(target)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    modules = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules &= sys.stdlib_module_names
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)} | modules | vars(builtins).keys()
    setup = "".join(f"import {name}\n" for name in sorted(modules))
    return CodeTests(setup=setup, tests=target, names=tuple(sorted(names - bound)))


def shuffle_gpqa_options(document: Content) -> Content:
    """Order the four options by a seed that depends on the question alone.

    lm-eval uses one random generator for all documents, so the order would depend on which documents were loaded
    before, and few-shot sampling could not recognize and leave out the document that is being evaluated.
    """
    incorrect = [_clean_gpqa_option(document[f"Incorrect Answer {number}"]) for number in (1, 2, 3)]
    correct = _clean_gpqa_option(document["Correct Answer"])
    options = [*incorrect, correct]
    random.Random(f"{SHUFFLE_SEED}:{document['Question']}").shuffle(options)
    choices = {f"choice{number}": option for number, option in enumerate(options, start=1)}
    return {**choices, "answer": f"({'ABCD'[options.index(correct)]})"}


def shuffle_gpqa_documents(dataset: Any) -> Any:
    return dataset.map(shuffle_gpqa_options)


def _clean_gpqa_option(text: str | None) -> str:
    """The same cleaning as in lm-eval's GPQA task."""
    return " " if text is None else text.strip().replace(" [title]", ". ").replace("  ", " ")


def score_ifeval(document: Content, responses: Sequence[str]) -> dict[str, Any]:
    """lm-eval's scores, made deterministic: for documents that count "#" or "!", lm-eval picks a random letter."""
    from lm_eval.tasks.ifeval.utils import process_results  # needs an optional package

    state = random.getstate()
    random.seed(document["key"])
    try:
        scores: dict[str, Any] = process_results(document, responses)
    finally:
        random.setstate(state)
    return scores


def score_minerva_math(document: Content, responses: Sequence[str]) -> dict[str, Any]:
    """lm-eval's scores, without the symbolic comparison for answers that lack the expected phrase.

    lm-eval compares "[invalidanswer]" as a formula, which never matches and takes longer than decoding the answer.
    """
    from lm_eval.tasks.minerva_math import utils  # needs an optional package

    (text,) = responses
    answer = utils.get_unnormalized_answer(text)
    matches = answer != NO_ANSWER and utils.is_equiv(utils.normalize_final_answer(answer), document["answer"])
    verified = utils.verify(gold=utils.parse(document["solution"]), target=utils.parse(text))
    return {"exact_match": int(matches), "math_verify": int(verified)}

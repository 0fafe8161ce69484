"""What a row of each benchmark's data must hold. Says what is wrong; knows nothing of files or lm-eval.

A row that lm-eval could not score, or would score wrong without a word, is refused when the data is opened.
"""

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


def anything(row: Row) -> str | None:
    del row
    return None


def gsm8k(row: Row) -> str | None:
    problem = _typed(row, question=str, answer=str)
    return problem or (None if "####" in row["answer"] else 'its answer has no "####" before the final number')


def minerva_math(row: Row) -> str | None:
    problem = _typed(row, problem=str, solution=str)
    boxes = ("\\boxed", "\\fbox")
    return problem or (None if any(box in row["solution"] for box in boxes) else "its solution has no \\boxed answer")


def mmlu(row: Row) -> str | None:
    problem = _typed(row, question=str, choices=list, answer=int)
    if problem:
        return problem
    if len(row["choices"]) != 4:
        return f"it has {len(row['choices'])} choices instead of 4"
    return None if 0 <= row["answer"] < 4 else f"its answer is {row['answer']}; 0 to 3 are choices"


def ifeval(row: Row) -> str | None:
    problem = _typed(row, key=int, prompt=str, instruction_id_list=list, kwargs=list)
    if problem:
        return problem
    names, settings = len(row["instruction_id_list"]), len(row["kwargs"])
    return None if names == settings else f"it has {names} instructions and settings for {settings}"


def humaneval(row: Row) -> str | None:
    return _typed(row, prompt=str, test=str, entry_point=str)


def gpqa(row: Row) -> str | None:
    wrong = {f"Incorrect Answer {number}": str for number in (1, 2, 3)}
    return _typed(row, **{"Question": str, "Correct Answer": str, **wrong})


def _typed(row: Row, **fields: type) -> str | None:
    for name, kind in fields.items():
        if name not in row:
            return f"it has no field {name!r}"
        if not isinstance(row[name], kind) or isinstance(row[name], bool):
            found = "empty" if row[name] is None else type(row[name]).__name__
            return f"its field {name!r} is {found} instead of {kind.__name__}"
    return None

"""What our tasks do differently from lm-eval's: where the answer is in a text. Pure: strings and documents only."""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Document = dict[str, Any]


SHUFFLE_SEED = 42


NO_ANSWER = "[invalidanswer]"  # what lm-eval reads from an answer without its phrase


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{…} that is complete and not empty."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                break
        if depth == 0 and text[start:end].strip():
            return text[start:end]
    return None


def boxed_or_all(responses: Iterable[Sequence[str]], documents: Sequence[Document]) -> list[list[str]]:
    """An lm-eval filter: what was put into the box that the prompt asks for, else the whole answer.

    Without it the last number counts, and of "$\\boxed{18}$." lm-eval's pattern for numbers takes the "$.".
    """
    del documents
    return [[_plain(content) if (content := boxed(text)) else text for text in texts] for texts in responses]


def _plain(content: str) -> str:
    """A boxed number without the marks that TeX puts between thousands."""
    return re.sub(r"\\[!,;: ]|~", "", content.replace("{,}", ","))


def program(document: Document, answer: str) -> str:
    """The program an answer stands for: its own code block if that defines the function, else prompt and continuation.

    The prompt (imports, helpers, the function's head and description) comes first in both cases; an answer that
    continues it ends where its code block ends.
    """
    name = re.escape(document["entry_point"])
    for block in re.findall(r"```(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:\n```|\Z)", answer, re.DOTALL):
        if re.search(rf"^(?:async\s+)?def\s+{name}\s*\(", block, re.MULTILINE):
            return f"{document['prompt']}\n{block}"
    return f"{document['prompt']}{answer.partition('```')[0]}"


def programs(responses: Iterable[Sequence[str]], documents: Sequence[Document]) -> list[list[str]]:
    """An lm-eval filter: answers to programs."""
    return [
        [program(document, answer) for answer in answers]
        for answers, document in zip(responses, documents, strict=True)
    ]


def gpqa_options(document: Document) -> Document:
    """The four options in an order that depends on the question alone.

    lm-eval draws from one generator for all, so the order would depend on what was loaded before, and the worked
    examples would not be recognised as the document that is being asked.
    """
    wrong = [_tidy(document[f"Incorrect Answer {number}"]) for number in (1, 2, 3)]
    right = _tidy(document["Correct Answer"])
    options = [*wrong, right]
    random.Random(f"{SHUFFLE_SEED}:{document['Question']}").shuffle(options)
    shown = {f"choice{number}": option for number, option in enumerate(options, start=1)}
    return {**shown, "answer": f"({'ABCD'[options.index(right)]})"}


def gpqa_documents(dataset: Any) -> Any:
    return dataset.map(gpqa_options)


def _tidy(text: str | None) -> str:
    """As lm-eval prints GPQA's options."""
    return " " if text is None else text.strip().replace(" [title]", ". ").replace("  ", " ")


def ifeval_scores(document: Document, responses: Sequence[str]) -> dict[str, Any]:
    """lm-eval's, but repeatable: where a document asks to count "#" or "!", it draws a letter to count instead."""
    from lm_eval.tasks.ifeval.utils import process_results  # its packages are an extra

    state = random.getstate()
    random.seed(document["key"])
    try:
        scores: dict[str, Any] = process_results(document, responses)
    finally:
        random.setstate(state)
    return scores


def math_scores(document: Document, responses: Sequence[str]) -> dict[str, Any]:
    """lm-eval's, but where an answer lacks the phrase that its exact match reads there is nothing to compare.

    It would compare "[invalidanswer]" as a formula, which is never equal and takes longer than decoding the answer did.
    """
    from lm_eval.tasks.minerva_math import utils  # its packages are an extra

    (text,) = responses
    found = utils.get_unnormalized_answer(text)
    matches = found != NO_ANSWER and utils.is_equiv(utils.normalize_final_answer(found), document["answer"])
    verified = utils.verify(gold=utils.parse(document["solution"]), target=utils.parse(text))
    return {"exact_match": int(matches), "math_verify": int(verified)}


Row = Mapping[str, Any]


def accept_any_row(row: Row) -> str | None:
    del row
    return None


def check_gsm8k_row(row: Row) -> str | None:
    problem = _typed(row, question=str, answer=str)
    return problem or (None if "####" in row["answer"] else 'its answer has no "####" before the final number')


def check_minerva_math_row(row: Row) -> str | None:
    problem = _typed(row, problem=str, solution=str)
    boxes = ("\\boxed", "\\fbox")
    return problem or (None if any(box in row["solution"] for box in boxes) else "its solution has no \\boxed answer")


def check_mmlu_row(row: Row) -> str | None:
    problem = _typed(row, question=str, choices=list, answer=int)
    if problem:
        return problem
    if len(row["choices"]) != 4:
        return f"it has {len(row['choices'])} choices instead of 4"
    return None if 0 <= row["answer"] < 4 else f"its answer is {row['answer']}; 0 to 3 are choices"


def check_ifeval_row(row: Row) -> str | None:
    problem = _typed(row, key=int, prompt=str, instruction_id_list=list, kwargs=list)
    if problem:
        return problem
    names, settings = len(row["instruction_id_list"]), len(row["kwargs"])
    return None if names == settings else f"it has {names} instructions and settings for {settings}"


def check_humaneval_row(row: Row) -> str | None:
    return _typed(row, prompt=str, test=str, entry_point=str)


def check_gpqa_row(row: Row) -> str | None:
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

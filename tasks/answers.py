"""What our tasks do differently from lm-eval's: where the answer is in a text. Pure: strings and documents only."""

import random
import re
from collections.abc import Iterable, Sequence
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

"""Documents that k=1 answered correctly and another configuration did not: both answers, with the difference marked.

Tokens are colored by their confidence if the sweep stored it.
Texts and tokens are read from the store for these documents only.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis import Analysis
from orchestrator.analysis.accuracy import Regression
from orchestrator.report.sweeps import SweepData

MAX_EXAMPLES = 600  # in a report; the counts next to them are of all documents
MAX_COLORED = 120  # examples whose tokens are colored, which takes about ten times as many bytes
MAX_PER_CONFIGURATION, MIN_PER_CONFIGURATION = 40, 3
# Lengths in characters to which texts are shortened
HEAD, BEFORE, AFTER, TAIL, QUESTION = 160, 220, 420, 160, 700
ELLIPSIS = " […] "
CONFIDENCE_LEVELS = (0.5, 0.75, 0.9)  # a token below the first is colored most


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer: a token, if the sweep stored when it was revealed."""

    text: str
    note: str = ""  # step and confidence
    level: int | None = None  # how many of CONFIDENCE_LEVELS the confidence reaches; None: all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedText:
    """An answer in three parts; `different` is the first word that differs, empty if none does."""

    same: tuple[Piece, ...]
    different: tuple[Piece, ...]
    rest: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A stored answer. Scored questions have no tokens; `steps`, `confidences` and `ends` are empty if not stored."""

    text: str = ""
    tokens: Sequence[int] = ()
    steps: Sequence[int] = ()
    confidences: Sequence[float] = ()
    ends: Sequence[int] = ()

    def pieces(self, begin: int, end: int) -> Iterator[Piece]:
        """The text between two positions, token by token if the tokens are known."""
        after = bisect_right(self.ends, begin)
        for number in range(after, len(self.ends)) if begin < end else ():
            until = min(end, self.ends[number])
            if begin < until:
                confidence = self.confidences[number]
                note = f"step {self.steps[number]}, confidence {confidence:.2g}"
                level = next((level for level, limit in enumerate(CONFIDENCE_LEVELS) if confidence < limit), None)
                yield Piece(self.text[begin:until], note, level)
                begin = until
        if begin < end:
            yield Piece(self.text[begin:end])


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    doc_id: str
    level: str | None
    question: str
    gold: str
    baseline: MarkedText
    answer: MarkedText
    first_different_token: int | None  # counted from 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """The examples of one configuration; `lost` and `won` count all documents that changed."""

    task: str
    label: str
    lost: int
    won: int
    shown: tuple[Example, ...]

    @property
    def has_colored_tokens(self) -> bool:
        sides = [side for example in self.shown for side in (example.baseline, example.answer)]
        return any(piece.note for side in sides for piece in (*side.same, *side.different, *side.rest))


def find_examples(data: SweepData, analysis: Analysis) -> list[Examples]:
    """For each configuration, some of the documents that it lost, chosen at even intervals."""
    compared = [
        (task.task, result.label, result.comparison)
        for task in analysis.tasks
        for result in task.configurations
        if result.comparison
    ]
    limit = max(MIN_PER_CONFIGURATION, min(MAX_PER_CONFIGURATION, MAX_EXAMPLES // max(1, len(compared))))
    chosen = [
        (task, label, comparison, _evenly_chosen(comparison.regressions, limit)) for task, label, comparison in compared
    ]
    answers = _read_answers(data, [one for *_, listed in chosen for one in listed])
    documents = {}
    for name, table in data.documents.items():
        wanted = [one for task, *_, listed in chosen if task == name for one in listed]
        documents[name] = _read_documents(table, wanted)
    return [
        Examples(
            task=task,
            label=label,
            lost=comparison.difference.lost,
            won=comparison.difference.won,
            shown=tuple(
                _example(one, answers, documents.get(task, {}), colored=number * len(compared) < MAX_COLORED)
                for number, one in enumerate(listed)
            ),
        )
        for task, label, comparison, listed in chosen
    ]


def _evenly_chosen(listed: Sequence[Regression], limit: int) -> list[Regression]:
    if len(listed) <= limit:
        return list(listed)
    return [listed[i * len(listed) // limit] for i in range(limit)]


def _read_answers(data: SweepData, wanted: Sequence[Regression]) -> Mapping[tuple[str, str], Answer]:
    """The answers of both sides by trial and document; each file is opened once."""
    keys = {(trial, one.doc_id) for one in wanted for trial in (one.baseline_trial, one.trial)}
    names: dict[int, dict[str, str]] = defaultdict(dict)  # by store: id there → trial
    for trial, _ in keys:
        store, stored_id = data.origin.get(trial, (0, trial))
        names[store][stored_id] = trial
    wanted_documents = pc.field("doc_id").isin(pa.array(sorted({doc_id for _, doc_id in keys}), pa.string()))
    columns = ["trial_id", "doc_id", "text", "token_ids", "token_steps", "token_confidences", "token_ends"]
    answers: dict[tuple[str, str], Answer] = {}
    for store, trials in names.items():
        for rows in data.stores[store].tables(list(trials), columns, where=wanted_documents, verify=False):
            for row in rows.to_pylist():
                if (key := (trials[row["trial_id"]], row["doc_id"])) in keys:
                    answers[key] = _answer(row)
    return answers


def _answer(row: Mapping[str, Any]) -> Answer:
    text, tokens = row["text"] or "", row["token_ids"]
    steps, confidences, ends = (row[name] or () for name in ("token_steps", "token_confidences", "token_ends"))
    boundaries = [0, *ends, len(text)]
    if not len(steps) == len(confidences) == len(ends) == len(tokens) or boundaries != sorted(boundaries):
        return Answer(text=text, tokens=tokens)
    return Answer(text=text, tokens=tokens, steps=steps, confidences=confidences, ends=ends)


def _read_documents(table: pa.Table, wanted: Sequence[Regression]) -> Mapping[str, Mapping[str, object]]:
    rows = table.filter(pc.is_in(table["doc_id"], pa.array(sorted({one.doc_id for one in wanted}), pa.string())))
    return {row["doc_id"]: row for row in rows.to_pylist()}


def _example(
    one: Regression,
    answers: Mapping[tuple[str, str], Answer],
    documents: Mapping[str, Mapping[str, object]],
    *,
    colored: bool,
) -> Example:
    document = documents.get(one.doc_id, {})
    ours, theirs = (answers.get((trial, one.doc_id), Answer()) for trial in (one.baseline_trial, one.trial))
    baseline, answer = mark_difference(ours, theirs, colored=colored)
    token = first_difference(ours.tokens, theirs.tokens)
    return Example(
        doc_id=one.doc_id,
        level=None if document.get("level") is None else str(document["level"]),
        question=_shorten(str(document.get("question", "")), QUESTION),
        gold=_shorten(str(document.get("gold", "")), TAIL * 2),
        baseline=baseline,
        answer=answer,
        first_different_token=None if token is None else token + 1,
    )


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first index at which two sequences differ (the shorter length if one is a prefix); None if they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def mark_difference(one: Answer, other: Answer, *, colored: bool = True) -> tuple[MarkedText, MarkedText]:
    """Mark the first word that differs, and shorten both texts around it."""
    if not colored:
        one, other = Answer(text=one.text), Answer(text=other.text)
    a, b = one.text, other.text
    at = first_difference(a, b)
    if at is None:
        return _marked(one, len(a)), _marked(other, len(b))
    inside_word = any(text[at : at + 1].strip() for text in (a, b))
    start = len(re.sub(r"\S*$", "", a[:at])) if inside_word else at
    return _marked(one, start), _marked(other, start)


def _marked(answer: Answer, start: int) -> MarkedText:
    """The answer, shortened before and after the marked word. Its end is kept, because it contains the result."""
    word = re.compile(r"\s*\S+").match(answer.text, start)
    end = start if word is None else word.end()
    return MarkedText(
        same=_part(answer, 0, start, HEAD, BEFORE),
        different=_part(answer, start, end, AFTER, 0),
        rest=_part(answer, end, len(answer.text), AFTER, TAIL),
    )


def _part(answer: Answer, begin: int, end: int, head: int, tail: int) -> tuple[Piece, ...]:
    """A part of an answer; if it is too long, its first and last characters."""
    if end - begin <= head + tail + len(ELLIPSIS):
        return tuple(answer.pieces(begin, end))
    return (*answer.pieces(begin, begin + head), Piece(ELLIPSIS), *answer.pieces(end - tail, end))


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - TAIL] + ELLIPSIS + text[-TAIL:]

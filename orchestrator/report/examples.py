"""Documents that k=1 answered correctly and another configuration did not: both answers, with the difference marked.

Texts and tokens are read from the store for these documents only.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis import Analysis
from orchestrator.analysis.details import Regression
from orchestrator.report.sweeps import SweepData

MAX_EXAMPLES = 600  # in a report; the counts next to them are of all documents
MAX_PER_CONFIGURATION, MIN_PER_CONFIGURATION = 40, 3
# Lengths in characters to which texts are shortened
HEAD, BEFORE, AFTER, TAIL, QUESTION = 160, 220, 420, 160, 700
ELLIPSIS = " […] "


@dataclass(frozen=True, kw_only=True, slots=True)
class MarkedText:
    """An answer in three parts; `different` is the first word that differs, empty if none does."""

    same: str
    different: str
    rest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """As stored; scored questions have no tokens."""

    text: str
    tokens: Sequence[int]


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


def find_examples(data: SweepData, analysis: Analysis) -> list[Examples]:
    """For each configuration a few documents, evenly chosen from all that it lost."""
    compared = [
        (task.task, result.label, result.comparison)
        for task in analysis.tasks
        for result in task.configurations
        if result.comparison
    ]
    limit = max(MIN_PER_CONFIGURATION, min(MAX_PER_CONFIGURATION, MAX_EXAMPLES // max(1, len(compared))))
    chosen = [(task, label, found, _evenly_chosen(found.regressions, limit)) for task, label, found in compared]
    answers = _read_answers(data, [one for *_, listed in chosen for one in listed])
    documents = {}
    for name, table in data.documents.items():
        wanted = [one for task, *_, listed in chosen if task == name for one in listed]
        documents[name] = _read_documents(table, wanted)
    return [
        Examples(
            task=task,
            label=label,
            lost=found.difference.lost,
            won=found.difference.won,
            shown=tuple(_example(one, answers, documents.get(task, {})) for one in listed),
        )
        for task, label, found, listed in chosen
    ]


def _evenly_chosen(listed: Sequence[Regression], limit: int) -> list[Regression]:
    if len(listed) <= limit:
        return list(listed)
    return [listed[i * len(listed) // limit] for i in range(limit)]


def _read_answers(data: SweepData, wanted: Sequence[Regression]) -> Mapping[tuple[str, str], Answer]:
    """By trial and document; each file is opened once."""
    keys = {(trial, one.doc_id) for one in wanted for trial in (one.baseline_trial, one.trial)}
    names: dict[int, dict[str, str]] = defaultdict(dict)  # by store: id there → trial
    for trial, _ in keys:
        store, stored_id = data.origin.get(trial, (0, trial))
        names[store][stored_id] = trial
    these = pc.field("doc_id").isin(pa.array(sorted({doc_id for _, doc_id in keys}), pa.string()))
    columns = ["trial_id", "doc_id", "text", "token_ids"]
    found: dict[tuple[str, str], Answer] = {}
    for store, trials in names.items():
        for rows in data.stores[store].tables(list(trials), columns, where=these, verify=False):
            for row in rows.to_pylist():
                if (key := (trials[row["trial_id"]], row["doc_id"])) in keys:
                    found[key] = Answer(text=row["text"] or "", tokens=row["token_ids"])
    return found


def _read_documents(table: pa.Table, wanted: Sequence[Regression]) -> Mapping[str, Mapping[str, object]]:
    rows = table.filter(pc.is_in(table["doc_id"], pa.array(sorted({one.doc_id for one in wanted}), pa.string())))
    return {row["doc_id"]: row for row in rows.to_pylist()}


def _example(
    one: Regression, answers: Mapping[tuple[str, str], Answer], documents: Mapping[str, Mapping[str, object]]
) -> Example:
    document = documents.get(one.doc_id, {})
    unknown = Answer(text="", tokens=())
    ours, theirs = (answers.get((trial, one.doc_id), unknown) for trial in (one.baseline_trial, one.trial))
    baseline, answer = mark_difference(ours.text, theirs.text)
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


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two answers differ (the shorter length if one is a prefix), None if they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def mark_difference(one: str, other: str) -> tuple[MarkedText, MarkedText]:
    """Mark the first word that differs, and shorten both texts around it."""
    if one == other:
        return _marked(one, len(one)), _marked(other, len(other))
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    inside_word = any(text[at : at + 1].strip() for text in (one, other))
    start = len(re.sub(r"\S*$", "", one[:at])) if inside_word else at
    return _marked(one, start), _marked(other, start)


def _marked(text: str, start: int) -> MarkedText:
    """Shortened before and after the marked word; the end, which holds the result, stays."""
    same, rest = text[:start], text[start:]
    word = re.match(r"\s*\S+", rest)
    end = 0 if word is None else word.end()
    if len(same) > HEAD + BEFORE + len(ELLIPSIS):
        same = same[:HEAD] + ELLIPSIS + same[-BEFORE:]
    different, rest = rest[:end], rest[end:]
    if len(different) > AFTER:
        different = different[:AFTER] + ELLIPSIS
    if len(rest) > AFTER + TAIL + len(ELLIPSIS):
        rest = rest[:AFTER] + ELLIPSIS + rest[-TAIL:]
    return MarkedText(same=same, different=different, rest=rest)


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - TAIL] + ELLIPSIS + text[-TAIL:]

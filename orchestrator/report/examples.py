"""The documents shown where a configuration breaks: their texts, cut to size, with the first difference marked.

Texts and tokens are read from the folders for these documents only. Knows no HTML.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from orchestrator.analysis import Analysis
from orchestrator.analysis.details import Regression
from orchestrator.report.sweeps import Material

SHOWN = 600  # documents in a whole report; the statistics count all of them
MOST, LEAST = 40, 3  # of one configuration
HEAD, BEFORE, AFTER, TAIL, QUESTION = 160, 220, 420, 160, 700  # characters
CUT = " […] "


@dataclass(frozen=True, kw_only=True, slots=True)
class Marked:
    """An answer in three parts; `different` begins with the first word that differs and is empty where none does."""

    same: str
    different: str
    rest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """As it was stored; a scored question has no tokens."""

    text: str
    tokens: Sequence[int]


NOTHING = Answer(text="", tokens=())


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One document that k=1 got right and a configuration got wrong."""

    task: str
    label: str
    doc_id: str
    subtask: str
    level: str | None
    question: str
    gold: str
    baseline: Marked
    answer: Marked
    token: int | None  # number of the first token that differs, from 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """Those of one configuration, and how many there are in all."""

    task: str
    label: str
    lost: int
    won: int
    shown: tuple[Example, ...]


def examples(material: Material, analysis: Analysis) -> list[Examples]:
    """For each configuration a few documents, spread over all it lost."""
    broken = [
        (t.task, c.label, c.comparison.regressions) for t in analysis.tasks for c in t.configurations if c.comparison
    ]
    most = max(LEAST, min(MOST, SHOWN // max(1, len(broken))))
    chosen = [(task, label, breaks, _spread(breaks.listed, most)) for task, label, breaks in broken]
    answers = _answers(material, [one for *_, listed in chosen for one in listed])
    described = {
        task: _documents(material, task, [one for name, _, _, listed in chosen if name == task for one in listed])
        for task in material.documents
    }
    return [
        Examples(
            task=task,
            label=label,
            lost=breaks.lost,
            won=breaks.won,
            shown=tuple(_example(task, label, one, answers, described.get(task, {})) for one in listed),
        )
        for task, label, breaks, listed in chosen
    ]


def _spread(listed: Sequence[Regression], most: int) -> list[Regression]:
    if len(listed) <= most:
        return list(listed)
    return [listed[i * len(listed) // most] for i in range(most)]


def _answers(material: Material, wanted: Sequence[Regression]) -> Mapping[tuple[str, str], Answer]:
    """By trial and document; each trial's file is opened once."""
    by_trial: dict[str, set[str]] = defaultdict(set)
    for one in wanted:
        by_trial[one.baseline_trial].add(one.doc_id)
        by_trial[one.trial].add(one.doc_id)
    found: dict[tuple[str, str], Answer] = {}
    for trial, documents in by_trial.items():
        store, name = material.origin[trial]
        these = pc.field("doc_id").isin(pa.array(sorted(documents)))
        rows = material.stores[store].rows([name], ["doc_id", "text", "token_ids"], where=these, verify=False)
        for row in rows.to_pylist():
            found[trial, row["doc_id"]] = Answer(text=row["text"] or "", tokens=row["token_ids"])
    return found


def _documents(material: Material, task: str, wanted: Sequence[Regression]) -> Mapping[str, Mapping[str, object]]:
    table = material.documents[task]
    rows = table.filter(pc.is_in(table["doc_id"], pa.array(sorted({one.doc_id for one in wanted}), pa.string())))
    return {row["doc_id"]: row for row in rows.to_pylist()}


def _example(
    task: str,
    label: str,
    one: Regression,
    answers: Mapping[tuple[str, str], Answer],
    documents: Mapping[str, Mapping[str, object]],
) -> Example:
    document = documents.get(one.doc_id, {})
    sides = [answers.get((trial, one.doc_id), NOTHING) for trial in (one.baseline_trial, one.trial)]
    baseline, answer = compare(*(side.text for side in sides))
    differ = first_difference(*(side.tokens for side in sides))
    return Example(
        task=task,
        label=label,
        doc_id=one.doc_id,
        subtask=one.subtask,
        level=None if document.get("level") is None else str(document["level"]),
        question=_shortened(str(document.get("question", "")), QUESTION),
        gold=_shortened(str(document.get("gold", "")), TAIL * 2),
        baseline=baseline,
        answer=answer,
        token=None if differ is None else differ + 1,
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two answers differ, the shorter one's length if it begins the longer, None if equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def compare(one: str, other: str) -> tuple[Marked, Marked]:
    """Two texts with the word marked in which they part, both cut around it."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if one == other:
        return _marked(one, len(one)), _marked(other, len(other))
    inside = any(side[at : at + 1].strip() for side in (one, other))  # a word goes on, in one of them at least
    start = len(re.sub(r"\S*$", "", one[:at])) if inside else at
    return _marked(one, start), _marked(other, start)


def _marked(text: str, start: int) -> Marked:
    """Cut in the middle of what is the same and of what follows; the end, where the answer is, stays."""
    same, rest = text[:start], text[start:]
    word = re.match(r"\s*\S+", rest)
    end = 0 if word is None else word.end()
    if len(same) > HEAD + BEFORE + len(CUT):
        same = same[:HEAD] + CUT + same[-BEFORE:]
    different, rest = rest[:end], rest[end:]
    if len(different) > AFTER:
        different, rest = different[:AFTER] + CUT, rest
    if len(rest) > AFTER + TAIL + len(CUT):
        rest = rest[:AFTER] + CUT + rest[-TAIL:]
    return Marked(same=same, different=different, rest=rest)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - TAIL] + CUT + text[-TAIL:]

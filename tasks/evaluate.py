"""Documents through a decoder: one result for each, as soon as its last response is there. Loads nothing."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from lm_eval.api.instance import Instance

from sampler import Counters, Generated, InputError, Scored
from tasks.decoder import Decoder, Sampling, chat_template, pairs_of, prompt_of, sampling_of
from tasks.harness import Document, Metrics, Task

T = TypeVar("T")
CHUNK = 64  # documents whose requests exist at a time; those of one subject share worked examples, prefilled once


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One document, answered and scored."""

    document: Document
    metrics: Metrics
    correct: bool | None
    text: str | None  # the answer, or the option that scored highest
    token_ids: tuple[int, ...]
    finish: str | None  # stop or length; None for scored options
    scores: tuple[float, ...]  # log-likelihood of each option
    prompt_tokens: int
    tokens: int  # delivered, up to and including the stop token
    tokens_prefilled: int
    tokens_scored: int
    rewound: int
    counters: Counters
    seconds: float  # on the device, for this document
    wall_seconds: float  # spent waiting for the sampler since the result before; they add up to the time of all


@dataclass(kw_only=True, slots=True)
class _Open:
    """A document whose responses are coming in."""

    document: Document
    requests: list[Instance]
    missing: int
    prompt_tokens: int = 0
    generated: list[Generated] = field(default_factory=list)
    scored: list[tuple[Instance, Scored, int]] = field(default_factory=list)


def evaluate(task: Task, documents: Sequence[Document], decoder: Decoder) -> Iterator[Result]:
    """Results in order of completion. Memory is bounded by a chunk, whatever the number of documents."""
    template = chat_template(decoder.tokenizer) if task.options.chat_template else None
    remaining = iter(documents)
    while chunk := list(islice(remaining, CHUNK)):
        opened = [_open(task, document, template) for document in chunk]
        waited = 0.0
        for done, seconds in _answered(opened, decoder):
            waited += seconds
            if done is not None:
                yield _result(task, done, waited)
                waited = 0.0


def _open(task: Task, document: Document, template: object) -> _Open:
    requests = task.requests(document, template)  # type: ignore[arg-type]
    return _Open(document=document, requests=requests, missing=sum(request.repeats for request in requests))


def _answered(opened: Sequence[_Open], decoder: Decoder) -> Iterator[tuple[_Open | None, float]]:
    """Each response's document once it is complete, else None, with the seconds the sampler took for it."""
    jobs = [(owner, request, i) for owner in opened for request in owner.requests for i in range(request.repeats)]
    for owner, request, _ in jobs:
        if request.request_type not in ("generate_until", "loglikelihood"):
            raise InputError(f"{owner.document.doc_id} asks for {request.request_type}, which the sampler cannot do")
    asked = [job for job in jobs if job[1].request_type == "generate_until"]
    wanted: dict[Sampling | None, list[tuple[_Open, Instance, int]]] = {}
    for job in asked:
        wanted.setdefault(sampling_of(job[1]), []).append(job)
    for sampling, group in wanted.items():
        prompts = [prompt_of(request, decoder.tokenizer, repeat) for _, request, repeat in group]
        for index, generated, seconds in _timed(decoder.generate(prompts, sampling)):
            owner, request, _ = group[index]
            owner.prompt_tokens = len(prompts[index].ids)
            owner.generated.append(generated)
            yield _received(owner, request, generated.text or ""), seconds
    rated = [job for job in jobs if job[1].request_type == "loglikelihood"]
    pairs = pairs_of([request for _, request, _ in rated], decoder.tokenizer)
    for index, scored, seconds in _timed(decoder.score(pairs)) if pairs else ():
        owner, request, _ = rated[index]
        owner.prompt_tokens = max(owner.prompt_tokens, len(pairs[index].prefix))
        owner.scored.append((request, scored, len(pairs[index].target)))
        yield _received(owner, request, (scored.score, scored.greedy)), seconds


def _timed(results: Iterator[tuple[int, T]]) -> Iterator[tuple[int, T, float]]:
    while True:
        started = time.perf_counter()
        try:
            index, result = next(results)
        except StopIteration:
            return
        yield index, result, time.perf_counter() - started


def _received(owner: _Open, request: Instance, response: object) -> _Open | None:
    request.resps.append(response)
    owner.missing -= 1
    return owner if owner.missing == 0 else None


def _result(task: Task, done: _Open, waited: float) -> Result:
    metrics = task.score(done.document, done.requests)
    scored = sorted(done.scored, key=lambda entry: entry[0].idx)
    best = max(scored, key=lambda entry: entry[1].score)[0].args[1] if scored else None
    parts: list[Generated | Scored] = [*done.generated, *(entry[1] for entry in scored)]
    counters = sum((part.counters for part in parts), Counters())
    last = done.generated[-1] if done.generated else None
    return Result(
        document=done.document,
        metrics=metrics,
        correct=task.correct(metrics),
        text=best if last is None else last.text,
        token_ids=() if last is None else last.ids,
        finish=None if last is None else last.finish,
        scores=tuple(entry[1].score for entry in scored),
        prompt_tokens=done.prompt_tokens,
        tokens=sum(len(part.ids) for part in done.generated),
        tokens_prefilled=counters.prefill_tokens,
        tokens_scored=sum(entry[2] for entry in scored),
        rewound=max((entry[1].rewound for entry in scored), default=0),
        counters=counters,
        seconds=sum(part.seconds for part in parts),
        wall_seconds=waited,
    )

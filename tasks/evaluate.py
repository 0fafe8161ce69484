"""The border to the sampler: lm-eval's requests as prompts and pairs, and someone who answers them."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, TypeVar

from lm_eval.api.instance import Instance

from sampler import (
    Counters,
    DecodeSettings,
    Generated,
    InputError,
    LoadedModel,
    Pair,
    Prompt,
    ReusePolicy,
    Scored,
    decode_prompts,
    score_pairs,
)
from sampler.records import document_seed
from sampler.text import encode, encode_pair
from tasks.documents import Document
from tasks.task import Metrics, Task

LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How a task wants its answers drawn, where it does not want the most probable one."""

    temperature: float
    top_p: float = 1.0


class Decoder(Protocol):
    """Answers prompts and scores pairs, each as (index, result) in order of completion."""

    @property
    def tokenizer(self) -> Any: ...

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None
    ) -> Iterator[tuple[int, Generated]]: ...

    def score(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Scored]]: ...


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A loaded model with a policy and settings. Holds no state between calls."""

    model: LoadedModel
    policy: ReusePolicy
    settings: DecodeSettings
    batch_size: int = 1
    subset_size: int | None = None

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling | None = None) -> Iterator[tuple[int, Generated]]:
        settings = self.settings
        if sampling is not None:
            settings = replace(settings, temperature=sampling.temperature, top_p=sampling.top_p)
        return decode_prompts(
            self.model,
            prompts,
            policy=self.policy,
            settings=settings,
            batch_size=self.batch_size,
            subset_size=self.subset_size,
        )

    def score(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Scored]]:
        return score_pairs(
            self.model, pairs, policy=self.policy, batch_size=self.batch_size, subset_size=self.subset_size
        )


def chat_template(tokenizer: Any) -> Any:
    """A function that renders messages for this model, as lm-eval calls it."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError("the model's tokenizer has no chat template; --no-chat-template asks in plain text")

    def render(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    return render


def prompt_of(request: Instance, tokenizer: Any, repeat: int = 0) -> Prompt:
    """A generate_until request; its stop strings and its length go along."""
    context, settings = request.args
    until = settings.get("until") or []
    stop = tuple(string for string in ([until] if isinstance(until, str) else until) if string)
    limit = next((settings[key] for key in LENGTH_KEYS if settings.get(key)), None)
    return Prompt(
        ids=encode(tokenizer, context) or _opening(tokenizer),
        stop=stop,
        seed=document_seed(repeat, f"{request.task_name}/{request.doc_id}"),
        max_new_tokens=None if limit is None else int(limit),
    )


def sampling_of(request: Instance) -> Sampling | None:
    settings = request.args[1]
    temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0
    return Sampling(temperature=temperature, top_p=float(settings.get("top_p", 1.0))) if temperature else None


def pairs_of(requests: Sequence[Instance], tokenizer: Any) -> list[Pair]:
    """loglikelihood requests, each tokenised as one text; the options of a question share one prefix.

    Where the context's own tokens stand unchanged in the text, they are the prefix: a chat template's last line break
    must not become part of the answer. Otherwise its last spaces belong to the answer's first word.
    """
    pairs: list[Pair] = []
    known: str | None = None
    before: tuple[int, ...] = ()
    for request in requests:
        context, continuation = request.args
        if context != known:
            known, before = context, encode(tokenizer, context) or _opening(tokenizer)
        whole = encode(tokenizer, context + continuation)
        if whole[: len(before)] == before and len(whole) > len(before):
            pairs.append(Pair(prefix=before, target=whole[len(before) :]))
        elif context:
            prefix, target = encode_pair(tokenizer, context, continuation)
            pairs.append(Pair(prefix=prefix or _opening(tokenizer), target=target))
        else:
            pairs.append(Pair(prefix=before, target=whole))
    return pairs


def _opening(tokenizer: Any) -> tuple[int, ...]:
    """What stands before an empty context."""
    known = [getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")]
    opening = next((token for token in known if token is not None), None)
    if opening is None:
        raise InputError("the prompt is empty, and the model's tokenizer has no token to begin with")
    return (opening,)


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

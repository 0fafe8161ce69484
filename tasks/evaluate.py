"""Run a task's documents through a decoder: lm-eval requests in, one scored Result per document out."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
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
from sampler.engine import OnFailure
from sampler.errors import NonFiniteError
from sampler.records import Reveal, document_seed
from sampler.text import encode, encode_pair, thinking_mode, token_ends
from tasks.documents import Document
from tasks.task import ChatTemplate, Metrics, Task

T = TypeVar("T")
DOCUMENTS_PER_CHUNK = 64  # bounds memory; documents of one subject share few-shot examples, which are prefilled once
MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters of a task that does not decode greedily."""

    temperature: float
    top_p: float = 1.0


class Decoder(Protocol):
    """Generates from prompts and scores pairs; yields (index, result) in order of completion.

    If a prompt or pair fails, `on_failure` is called with its index and error, and it has no result. Without
    `on_failure` the error is raised.
    """

    @property
    def tokenizer(self) -> Any: ...

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, on_failure: OnFailure | None = None
    ) -> Iterator[tuple[int, Generated]]: ...

    def score(self, pairs: Sequence[Pair], on_failure: OnFailure | None = None) -> Iterator[tuple[int, Scored]]: ...


@dataclass(frozen=True, kw_only=True)
class ModelDecoder:
    """Decodes with a loaded model under a policy and decode settings."""

    model: LoadedModel
    policy: ReusePolicy
    settings: DecodeSettings
    batch_size: int = 1
    subset_size: int | None = None
    with_reveals: bool = False

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, on_failure: OnFailure | None = None
    ) -> Iterator[tuple[int, Generated]]:
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
            with_reveals=self.with_reveals,
            on_failure=on_failure,
        )

    def score(self, pairs: Sequence[Pair], on_failure: OnFailure | None = None) -> Iterator[tuple[int, Scored]]:
        return score_pairs(
            self.model,
            pairs,
            policy=self.policy,
            batch_size=self.batch_size,
            subset_size=self.subset_size,
            on_failure=on_failure,
        )


@lru_cache(maxsize=8)
def chat_renderer(tokenizer: Any, thinking: bool = False) -> ChatTemplate:
    """A function that renders messages with the tokenizer's chat template, as lm-eval calls it.

    Templates without a thinking mode ignore `thinking`. Cached, because tasks cache prompts by the function that
    rendered them.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError("the model's tokenizer has no chat template; use --no-chat-template for plain-text prompts")

    def render(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **thinking_mode(tokenizer, on=thinking),
            continue_final_message=not add_generation_prompt,
        )
        return text

    return render


def to_prompt(request: Instance, tokenizer: Any, repeat: int = 0) -> Prompt:
    """A generate_until request as a prompt with its stop strings and length limit."""
    context, settings = request.args
    until = settings.get("until") or []
    stop = tuple(string for string in ([until] if isinstance(until, str) else until) if string)
    max_tokens = next((settings[key] for key in MAX_TOKENS_KEYS if settings.get(key)), None)
    return Prompt(
        ids=encode(tokenizer, context) or _start_token(tokenizer),
        stop=stop,
        seed=document_seed(repeat, f"{request.task_name}/{request.doc_id}"),
        max_new_tokens=None if max_tokens is None else int(max_tokens),
    )


def group_by_sampling(requests: Iterable[Instance]) -> dict[Sampling | None, list[int]]:
    """Indices of generate_until requests by their sampling parameters; None for greedy decoding."""
    groups: dict[Sampling | None, list[int]] = {}
    for index, request in enumerate(requests):
        settings = request.args[1]
        temperature = float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0
        sampling = Sampling(temperature=temperature, top_p=float(settings.get("top_p", 1.0))) if temperature else None
        groups.setdefault(sampling, []).append(index)
    return groups


def to_pairs(requests: Sequence[Instance], tokenizer: Any) -> list[Pair]:
    """loglikelihood requests as pairs of a prefix and a target, tokenized together.

    If the tokens of the context are a prefix of the tokens of the whole text, they become the pair's prefix, so that
    the final line break of a chat template does not end up in the target. Otherwise trailing spaces of the context
    belong to the target's first word. All options of a question share one prefix.
    """
    pairs: list[Pair] = []
    encoded_context: str | None = None
    prefix: tuple[int, ...] = ()
    for request in requests:
        context, continuation = request.args
        if context != encoded_context:
            encoded_context, prefix = context, encode(tokenizer, context) or _start_token(tokenizer)
        whole = encode(tokenizer, context + continuation)
        if whole[: len(prefix)] == prefix and len(whole) > len(prefix):
            pairs.append(Pair(prefix=prefix, target=whole[len(prefix) :]))
        elif context:
            own_prefix, target = encode_pair(tokenizer, context, continuation)
            pairs.append(Pair(prefix=own_prefix or _start_token(tokenizer), target=target))
        else:
            pairs.append(Pair(prefix=prefix, target=whole))
    return pairs


def _start_token(tokenizer: Any) -> tuple[int, ...]:
    """The prefix for an empty context."""
    tokens = [getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")]
    token = next((token for token in tokens if token is not None), None)
    if token is None:
        raise InputError("the prompt is empty, and the model's tokenizer has no BOS, EOS or padding token")
    return (token,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A scored document."""

    document: Document
    metrics: Metrics
    correct: bool | None
    text: str | None  # the answer, or the option with the highest score
    token_ids: tuple[int, ...]
    finish: str | None  # stop or length; None for scored options
    scores: tuple[float, ...]  # log-likelihood of each option
    prompt_tokens: int
    tokens: int  # generated, including the stop token
    tokens_prefilled: int
    tokens_scored: int
    rewound: int
    counters: Counters
    seconds: float  # on the device, for this document
    wall_seconds: float  # waiting for the decoder since the previous result; the sum is the total decoding time
    reveals: tuple[Reveal, ...] | None = None  # of each token, if the decoder records them
    token_ends: tuple[int, ...] | None = None  # with reveals: characters of the text that are complete after each token


@dataclass(kw_only=True, slots=True)
class _PendingDocument:
    document: Document
    requests: list[Instance]
    missing_responses: int
    prompt_tokens: int = 0
    generated: list[Generated] = field(default_factory=list)
    scored: list[tuple[Instance, Scored, int]] = field(default_factory=list)  # request, score, tokens of the target


_Job = tuple[_PendingDocument, Instance, int]  # document, request, repeat


def evaluate(
    task: Task,
    documents: Sequence[Document],
    decoder: Decoder,
    on_failure: Callable[[Document, NonFiniteError], None] | None = None,
) -> Iterator[Result]:
    """Yield results in order of completion. Memory is bounded by a chunk of documents.

    A document for which the model computes non-finite values has no result: `on_failure` is called once for each of
    its failed requests. Without `on_failure` the error is raised.
    """
    template = chat_renderer(decoder.tokenizer, task.options.thinking) if task.options.chat_template else None
    remaining = iter(documents)
    while chunk := list(islice(remaining, DOCUMENTS_PER_CHUNK)):
        pending = []
        for document in chunk:
            requests = task.requests(document, template)
            missing = sum(request.repeats for request in requests)
            pending.append(_PendingDocument(document=document, requests=requests, missing_responses=missing))
        wall_seconds = 0.0
        for owner, seconds in _collect_responses(pending, decoder, on_failure):
            wall_seconds += seconds
            if owner.missing_responses == 0:
                yield _result(task, owner, wall_seconds, decoder.tokenizer)
                wall_seconds = 0.0


def _collect_responses(
    pending: Sequence[_PendingDocument],
    decoder: Decoder,
    on_failure: Callable[[Document, NonFiniteError], None] | None,
) -> Iterator[tuple[_PendingDocument, float]]:
    """For each response: the document that it belongs to, and the seconds until the decoder returned it."""

    def report_failures(group: Sequence[_Job]) -> OnFailure | None:
        return None if on_failure is None else lambda index, error: on_failure(group[index][0].document, error)

    jobs: dict[str, list[_Job]] = {"generate_until": [], "loglikelihood": []}
    for owner in pending:
        for request in owner.requests:
            if request.request_type not in jobs:
                raise InputError(f"{owner.document.doc_id} has the unsupported request type {request.request_type}")
            jobs[request.request_type] += [(owner, request, repeat) for repeat in range(request.repeats)]
    generate_jobs, score_jobs = jobs["generate_until"], jobs["loglikelihood"]
    for sampling, indices in group_by_sampling(request for _, request, _ in generate_jobs).items():
        group = [generate_jobs[index] for index in indices]
        prompts = [to_prompt(request, decoder.tokenizer, repeat) for _, request, repeat in group]
        for index, generated, seconds in _timed(decoder.generate(prompts, sampling, report_failures(group))):
            owner, request, _ = group[index]
            owner.prompt_tokens = len(prompts[index].ids)
            owner.generated.append(generated)
            _add_response(owner, request, generated.text or "")
            yield owner, seconds
    pairs = to_pairs([request for _, request, _ in score_jobs], decoder.tokenizer)
    for index, scored, seconds in _timed(decoder.score(pairs, report_failures(score_jobs))) if pairs else ():
        owner, request, _ = score_jobs[index]
        owner.prompt_tokens = max(owner.prompt_tokens, len(pairs[index].prefix))
        owner.scored.append((request, scored, len(pairs[index].target)))
        _add_response(owner, request, (scored.score, scored.greedy))
        yield owner, seconds


def _add_response(owner: _PendingDocument, request: Instance, response: object) -> None:
    request.resps.append(response)
    owner.missing_responses -= 1


def _timed(results: Iterator[tuple[int, T]]) -> Iterator[tuple[int, T, float]]:
    """Add to each result the seconds until it was available."""
    while True:
        started = time.perf_counter()
        try:
            index, result = next(results)
        except StopIteration:
            return
        yield index, result, time.perf_counter() - started


def _result(task: Task, done: _PendingDocument, wall_seconds: float, tokenizer: Any) -> Result:
    metrics = task.score(done.document, done.requests)
    scored = sorted(done.scored, key=lambda entry: entry[0].idx)
    best_option = max(scored, key=lambda entry: entry[1].score)[0].args[1] if scored else None
    parts: list[Generated | Scored] = [*done.generated, *(entry[1] for entry in scored)]
    counters = sum((part.counters for part in parts), Counters())
    last = done.generated[-1] if done.generated else None
    reveals = None if last is None else last.reveals
    return Result(
        document=done.document,
        metrics=metrics,
        correct=task.correct(metrics),
        text=best_option if last is None else last.text,
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
        wall_seconds=wall_seconds,
        reveals=reveals,
        token_ends=token_ends(tokenizer, last.ids, last.text or "") if last is not None and reveals else None,
    )

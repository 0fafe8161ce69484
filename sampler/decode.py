"""The block loop: denoises blocks of token ids. Knows nothing of tensors, text, tasks or Ray."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sampler.config import ModelConfig
from sampler.engine import Clock, Engine, Measured, Pass, Prefill, Row
from sampler.errors import InputError
from sampler.loading import LoadedModel
from sampler.plan import LayerPlan, PassKind, PastPass, Policy, StepContext, compute_all, resolve
from sampler.records import DecodeSettings, Generated, Prompt
from sampler.text import StopStrings, check_stop, cut, decode


@dataclass(frozen=True, slots=True)
class Prediction:
    """The token a position would take and how sure the model is of it."""

    token: int
    probability: float


def reveal(predictions: Sequence[Prediction], threshold: float) -> list[int]:
    """Indices to reveal: all strictly above the threshold, and always the most probable (ties: the lowest)."""
    best = max(range(len(predictions)), key=lambda i: predictions[i].probability)
    return [i for i, p in enumerate(predictions) if p.probability > threshold or i == best]


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """Reads predictions off logits: the argmax at temperature 0, else a draw from the nucleus.

    A draw uses the uniform number that comes with each position, so a row's tokens never depend on its batch.
    """

    mask_token_id: int
    temperature: float = 0.0
    top_p: float = 1.0

    def __call__(self, logits_NV: Tensor, uniforms: Sequence[float]) -> list[Prediction]:
        probability_N, token_N = self._drawn(logits_NV, uniforms) if self.temperature else self._greedy(logits_NV)
        # One transfer, and so one synchronisation; float64 holds every token id exactly.
        probabilities, tokens = torch.stack((probability_N.double(), token_N.double())).tolist()
        return [Prediction(int(token), p) for token, p in zip(tokens, probabilities, strict=True)]

    def _greedy(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        probability_NV = self._without_mask(torch.softmax(logits_NV, -1))
        return probability_NV.max(-1)

    def _drawn(self, logits_NV: Tensor, uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
        probability_NV = self._without_mask(torch.softmax(logits_NV / self.temperature, -1))
        sorted_NV, token_NV = probability_NV.sort(stable=True, dim=-1, descending=True)
        before_NV = sorted_NV.double().cumsum(-1) - sorted_NV
        kept_NV = torch.where(before_NV < self.top_p, sorted_NV.double(), 0.0)
        reached_NV = kept_NV.cumsum(-1)
        goal_N1 = torch.tensor(uniforms, dtype=torch.float64, device=logits_NV.device)[:, None] * reached_NV[:, -1:]
        drawn_N1 = (reached_NV > goal_N1).int().argmax(-1, keepdim=True)
        chance_N1 = kept_NV.gather(-1, drawn_N1) / reached_NV[:, -1:]
        return chance_N1[:, 0], token_NV.gather(-1, drawn_N1)[:, 0]

    def _without_mask(self, probability_NV: Tensor) -> Tensor:
        probability_NV[:, self.mask_token_id] = 0
        return probability_NV


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one denoising pass asked for, did and left behind, for those who watch."""

    document: int
    block: int
    small_block: int
    context: StepContext  # the facts before the pass
    requested: LayerPlan
    done: PastPass
    tokens: tuple[int, ...]  # the block after the step

    @property
    def kind(self) -> PassKind:
        return self.context.kind

    @property
    def executed(self) -> LayerPlan:
        return self.done.plan


class Bindable(Protocol):
    """Whatever becomes a policy when it is told a model's depth: a `ReusePolicy`, or somebody who looks on."""

    def bind(self, depth: int, subset_size: int | None = None) -> Policy: ...


def decode_prompts(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    policy: Bindable,
    settings: DecodeSettings,
    batch_size: int = 1,
    subset_size: int | None = None,
    with_text: bool = True,
    on_step: Callable[[Step], None] | None = None,
) -> Iterator[tuple[int, Generated]]:
    """Continues every prompt; yields (index of the prompt, continuation) as each is finished."""
    config = model.config
    bound = policy.bind(config.num_layers, subset_size)
    check_batch_size(batch_size)
    check_prompts(prompts, settings, config)
    limits = [prompt.max_new_tokens or settings.max_new_tokens for prompt in prompts]
    longest = max((len(p.ids) + limit for p, limit in zip(prompts, limits, strict=True)), default=0)
    predictor = Predictor(mask_token_id=config.mask_token_id, temperature=settings.temperature, top_p=settings.top_p)
    engine: Engine[_Continuation] = Engine(
        model.network,
        keeps=bound.keeps,
        slots=min(batch_size, max(1, len(prompts))),
        capacity=-(-longest // config.block_size) * config.block_size,
        reader=predictor,
    )
    rows = (
        _Sequence(
            document=document,
            prompt=prompt,
            limit=len(prompt.ids) + limit,
            config=config,
            policy=bound,
            settings=settings,
            stops=StopStrings(model.tokenizer if prompt.stop else None, prompt.stop),
            clock=engine.clock,
            on_step=on_step,
        ).denoise()
        for document, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    )
    for done in engine.run(rows):
        ids, stopped = done.result
        readable = with_text and model.has_tokenizer
        text = cut(decode(model.tokenizer, ids), prompts[done.index].stop) if readable else None
        yield (
            done.index,
            Generated(
                ids=ids,
                text=text,
                finish="stop" if stopped else "length",
                counters=done.counters,
                started=done.started,
                seconds=done.seconds,
            ),
        )


def check_prompts(prompts: Sequence[Prompt], settings: DecodeSettings, config: ModelConfig) -> None:
    if config.block_size % settings.small_block:
        raise InputError(
            f"small block {settings.small_block} does not divide the model's block of {config.block_size} tokens"
        )
    for prompt in prompts:
        check_ids(prompt.ids, config, "prompt")
        check_stop(prompt.stop)
        check_length(len(prompt.ids) + (prompt.max_new_tokens or settings.max_new_tokens), config)


def check_ids(ids: Sequence[int], config: ModelConfig, what: str) -> None:
    if not ids:
        raise InputError(f"a {what} is empty; at least one token is needed")
    wrong = [i for i in ids if not 0 <= i < config.vocab_size]
    if wrong:
        raise InputError(f"token id {wrong[0]} in a {what} is outside the vocabulary, 0 to {config.vocab_size - 1}")
    if config.mask_token_id in ids:
        raise InputError(f"a {what} contains the mask token id {config.mask_token_id}, which only decoding may place")


def check_length(length: int, config: ModelConfig) -> None:
    if length > config.max_positions:
        raise InputError(f"{length} tokens, old and new, do not fit the model's {config.max_positions} positions")


def check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"batch size {batch_size}: at least 1 is allowed")


_Continuation = tuple[tuple[int, ...], bool]  # new tokens, and whether a stop ended them


class _Sequence:
    """One row being continued. `tokens` is the truth about it: prompt, revealed tokens, masks to the block's end."""

    def __init__(
        self,
        *,
        document: int,
        prompt: Prompt,
        limit: int,
        config: ModelConfig,
        policy: Policy,
        settings: DecodeSettings,
        stops: StopStrings,
        clock: Clock,
        on_step: Callable[[Step], None] | None,
    ) -> None:
        self.document, self.config, self.policy, self.settings = document, config, policy, settings
        self.stops, self.clock, self.on_step = stops, clock, on_step
        self.tokens = list(prompt.ids)
        self.prompt_length, self.limit = len(prompt.ids), limit
        self.known = len(prompt.ids)  # every position before this one is revealed
        self.stopped = False
        self.random = torch.Generator().manual_seed(prompt.seed)

    def denoise(self) -> Row[_Continuation]:
        """Prefill, then block after block until a stop stands or the limit is reached."""
        size = self.config.block_size
        start = self.prompt_length // size * size
        if start:
            hands_over = 1 if start == self.prompt_length else 0
            self._append((yield Prefill(tokens=self.tokens[:start], asks=self._draws(hands_over))))
        while not self._finished():
            self.tokens += [self.config.mask_token_id] * (start + size - len(self.tokens))
            yield from self._denoise_block(start)
            if self._finished():
                break
            commit = Pass(
                kind=PassKind.COMMIT,
                start=start,
                tokens=self.tokens[start:],
                plan=compute_all(self.config.num_layers),
                read=(size - 1,),
                asks=self._draws(1),
            )
            self._append((yield commit))
            start += size
        return tuple(self.tokens[self.prompt_length : self.known]), self.stopped

    def _denoise_block(self, start: int) -> Row[None]:
        step = 0
        past: tuple[PastPass, ...] = ()
        revealed_at = [None if token == self.config.mask_token_id else -1 for token in self.tokens[start:]]
        small = self.settings.small_block
        for first in range(start, start + self.config.block_size, small):
            while masked := self._masked(first, first + small):
                if self._finished():
                    return
                kind = self._kind(step, first)
                begin, width = (first, small) if kind is PassKind.SMALL else (start, self.config.block_size)
                context = StepContext(
                    step=step,
                    kind=kind,
                    window=range(begin - start, begin - start + width),
                    revealed_at=tuple(revealed_at),
                    past=past,
                )
                requested = self.policy.plan(context)
                executed = resolve(requested, context, self.config.num_layers)
                predictions = yield Pass(
                    kind=kind,
                    start=begin,
                    tokens=self.tokens[begin : begin + width],
                    plan=executed,
                    opens_block=step == 0,
                    eligible=requested.replays,
                    read=tuple(position - 1 - begin for position in masked),
                    asks=self._draws(len(masked)),
                )
                done = PastPass(window=context.window, plan=executed, moved=(yield Measured()))
                past += (done,)
                for i in reveal(predictions, self.settings.threshold):
                    self.tokens[masked[i]] = predictions[i].token
                    revealed_at[masked[i] - start] = step
                self._look_ahead()
                step += 1
                if self.on_step:
                    self._report(start, first, context, requested, done)

    def _kind(self, step: int, first: int) -> PassKind:
        """A small pass needs the block's keys, and the state before its first position if that is still masked."""
        needs_block = step == 0 or self.tokens[first] == self.config.mask_token_id
        return PassKind.FULL if needs_block or not self.settings.block_cache else PassKind.SMALL

    def _masked(self, begin: int, end: int) -> list[int]:
        return [position for position in range(begin, end) if self.tokens[position] == self.config.mask_token_id]

    def _append(self, predictions: Sequence[Prediction]) -> None:
        self.tokens += [prediction.token for prediction in predictions]
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Moves `known` over what now stands revealed, up to a stop or the limit."""
        end = min(len(self.tokens), self.limit)
        while self.known < end and not self.stopped and self.tokens[self.known] != self.config.mask_token_id:
            self.stopped = self.tokens[self.known] in self.config.eos_token_ids
            self.known += 1
        if self.stops.stop:
            with self.clock.standing():
                answered = self.stops.end(self.tokens[self.prompt_length : self.known])
            if answered is not None:
                self.stopped, self.known = True, self.prompt_length + answered

    def _finished(self) -> bool:
        return self.stopped or self.known == self.limit

    def _draws(self, count: int) -> tuple[float, ...]:
        """A uniform number per position to be predicted, from this document's own generator."""
        if not self.settings.temperature:
            return (0.0,) * count
        return tuple(torch.rand(count, generator=self.random, dtype=torch.float64).tolist())

    def _report(self, start: int, first: int, context: StepContext, requested: LayerPlan, done: PastPass) -> None:
        assert self.on_step is not None
        size = self.config.block_size
        self.on_step(
            Step(
                document=self.document,
                block=start // size,
                small_block=(first - start) // self.settings.small_block,
                context=context,
                requested=requested,
                done=done,
                tokens=tuple(self.tokens[start : start + size]),
            )
        )

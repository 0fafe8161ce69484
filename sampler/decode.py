"""Decoding: denoises block after block of each prompt, and reveals tokens from the logits of each pass.

Shapes: N positions, V vocabulary. The mask id is never predicted, but its probability stays in the softmax.
"""

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sampler.config import ModelConfig
from sampler.engine import Engine, GetMeasurements, OnFailure, Pass, Prefill, Row, Stopwatch, slots_needed
from sampler.errors import InputError, NonFiniteError
from sampler.loading import LoadedModel
from sampler.plan import BoundPolicy, LayerPlan, PassKind, PastPass, StepContext, compute_all, resolve
from sampler.records import DecodeSettings, Generated, Prompt, Reveal
from sampler.reveal import Prediction, RevealRule, Signal
from sampler.text import StopStrings, check_stop, cut, decode

TINY_PROBABILITY = 1e-30  # in place of 0, whose logarithm is not finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """Predicts a token per row of logits: the argmax at temperature 0, else a sample from the nucleus.

    Each sample uses the uniform number that comes with its position, so a row's tokens never depend on its batch.
    """

    mask_token_id: int
    temperature: float = 0.0
    top_p: float = 1.0
    signal: Signal = Signal.NONE
    before_RV: Tensor | None = None  # for the divergence: the last distribution that was read for each block row

    def pack(self, queries: Sequence[float], block_rows: Sequence[int]) -> Sequence[int]:
        """The bits of the uniform numbers, then the block rows, each only if they are needed."""
        bits = struct.unpack(f"{len(queries)}q", struct.pack(f"{len(queries)}d", *queries)) if self.temperature else ()
        return (*bits, *block_rows) if self.before_RV is not None else bits

    def read(self, logits_PV: Tensor, packed: Tensor) -> Tensor:
        """Probabilities, then tokens, then signals. Every token id is exact in float32."""
        both = self.temperature and self.before_RV is not None
        uniforms, block_rows = packed.chunk(2) if both else (packed, packed)
        logits_NV = logits_PV[: len(block_rows)] if len(packed) else logits_PV
        probability_NV = torch.softmax(logits_NV / self.temperature if self.temperature else logits_NV, -1)
        probability_NV[:, self.mask_token_id] = 0
        probability_N, token_N = self._sample(probability_NV, uniforms) if self.temperature else probability_NV.max(-1)
        numbers = [probability_N, token_N.to(probability_N.dtype)]
        if self.signal is not Signal.NONE:
            numbers.append(self._signal(probability_NV, token_N, block_rows).to(probability_N.dtype))
        return torch.cat(numbers)

    def unpack(self, numbers: Sequence[float], queries: Sequence[float]) -> list[Prediction]:
        rows = len(numbers) // (2 if self.signal is Signal.NONE else 3)
        values = (numbers[at : at + len(queries)] for at in range(0, len(numbers), rows))
        return [Prediction(int(token), p, *signal) for p, token, *signal in zip(*values, strict=True)]

    def _sample(self, probability_NV: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        sorted_NV, token_NV = probability_NV.sort(stable=True, dim=-1, descending=True)
        before_NV = sorted_NV.double().cumsum(-1) - sorted_NV
        nucleus_NV = torch.where(before_NV < self.top_p, sorted_NV.double(), 0.0)
        cumulative_NV = nucleus_NV.cumsum(-1)
        total_N1 = cumulative_NV[:, -1:]
        target_N1 = uniforms.view(torch.float64)[:, None] * total_N1
        chosen_N1 = (cumulative_NV > target_N1).int().argmax(-1, keepdim=True)
        probability_N1 = nucleus_NV.gather(-1, chosen_N1) / total_N1
        return probability_N1[:, 0], token_NV.gather(-1, chosen_N1)[:, 0]

    def _signal(self, probability_NV: Tensor, token_N: Tensor, block_rows: Tensor) -> Tensor:
        """What the reveal rule needs to know about the distributions, before they are cut to the nucleus."""
        if self.signal is Signal.ENTROPY:
            entropy_N: Tensor = torch.special.entr(probability_NV).sum(-1)
            return entropy_N
        if self.signal is Signal.MARGIN:
            token_N1 = token_N[:, None]
            return probability_NV.gather(-1, token_N1)[:, 0] - probability_NV.scatter(-1, token_N1, 0.0).amax(-1)
        assert self.before_RV is not None
        log_before_NV = self.before_RV[block_rows].clamp_(min=TINY_PROBABILITY).log_()
        self.before_RV.index_copy_(0, block_rows, probability_NV)
        return torch.xlogy(probability_NV, probability_NV).sub_(probability_NV * log_before_NV).sum(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One denoising pass, as passed to the `on_step` callback."""

    document: int
    block: int
    small_block: int
    context: StepContext  # before the pass
    requested: LayerPlan
    done: PastPass
    tokens: tuple[int, ...]  # the block after the pass

    @property
    def kind(self) -> PassKind:
        return self.context.kind

    @property
    def executed(self) -> LayerPlan:
        return self.done.plan


class Bindable(Protocol):
    """Anything that becomes a policy for a model of known depth, such as a `ReusePolicy`."""

    def bind(self, depth: int, subset_size: int | None = None) -> BoundPolicy: ...


def decode_prompts(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    policy: Bindable,
    settings: DecodeSettings,
    batch_size: int = 1,
    subset_size: int | None = None,
    with_text: bool = True,
    with_reveals: bool = False,
    on_step: Callable[[Step], None] | None = None,
    on_failure: OnFailure | None = None,
) -> Iterator[tuple[int, Generated]]:
    """Continues every prompt; yields (index of the prompt, continuation) in order of completion.

    A prompt for which the model computes NaN or infinity raises NonFiniteError. With `on_failure`, that callback gets
    the error instead, and the other prompts continue.
    """
    config = model.config
    bound = policy.bind(config.num_layers, subset_size)
    check_batch_size(batch_size)
    check_prompts(prompts, settings, config)
    limits = [prompt.max_new_tokens or settings.max_new_tokens for prompt in prompts]
    longest = max((len(p.ids) + limit for p, limit in zip(prompts, limits, strict=True)), default=0)
    slots = slots_needed(model.network, batch_size, len(prompts))
    rule = settings.reveal_rule
    predictor = Predictor(
        mask_token_id=config.mask_token_id,
        temperature=settings.temperature,
        top_p=settings.top_p,
        signal=rule.signal,
        before_RV=torch.zeros((slots * config.block_size, config.vocab_size), device=model.network.device)
        if rule.signal is Signal.DIVERGENCE
        else None,
    )
    engine: Engine[_Continuation] = Engine(
        model.network,
        cache_spec=bound.cache_spec,
        slots=slots,
        capacity=longest,
        reader=predictor,
        on_failure=on_failure,
        reads=settings.small_block,
    )
    rows = (
        _Sequence(
            document=document,
            prompt=prompt,
            limit=len(prompt.ids) + limit,
            config=config,
            policy=bound,
            settings=settings,
            rule=rule,
            stop_strings=StopStrings(model.tokenizer if prompt.stop else None, prompt.stop),
            stopwatch=engine.stopwatch,
            on_step=on_step,
            reveals={} if with_reveals else None,
        ).denoise()
        for document, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    )
    for done in engine.run(rows):
        ids, stopped, reveals = done.result
        has_text = with_text and model.has_tokenizer
        text = cut(decode(model.tokenizer, ids), prompts[done.index].stop) if has_text else None
        yield (
            done.index,
            Generated(
                ids=ids,
                text=text,
                finish="stop" if stopped else "length",
                counters=done.counters,
                started=done.started,
                seconds=done.seconds,
                reveals=reveals,
            ),
        )


def check_prompts(prompts: Sequence[Prompt], settings: DecodeSettings, config: ModelConfig) -> None:
    if config.block_size % settings.small_block:
        raise InputError(
            f"--small-block must divide the model's block size of {config.block_size} (got {settings.small_block})"
        )
    for prompt in prompts:
        check_ids(prompt.ids, config, "prompt")
        check_stop(prompt.stop)
        new_tokens = prompt.max_new_tokens or settings.max_new_tokens
        check_length(len(prompt.ids) + new_tokens, config, "prompt and new tokens")


def check_ids(ids: Sequence[int], config: ModelConfig, what: str) -> None:
    if not ids:
        raise InputError(f"a {what} is empty; it needs at least one token")
    wrong = [i for i in ids if not 0 <= i < config.vocab_size]
    if wrong:
        raise InputError(f"token id {wrong[0]} in a {what} is outside the vocabulary, 0 to {config.vocab_size - 1}")
    if config.mask_token_id in ids:
        raise InputError(f"a {what} contains the mask token id {config.mask_token_id}, which is reserved for decoding")


def check_length(length: int, config: ModelConfig, what: str) -> None:
    if length > config.max_positions:
        raise InputError(f"{length} tokens ({what}) exceed the model's {config.max_positions} positions")


def check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"batch size must be at least 1 (got {batch_size})")


# New tokens, whether a stop ended them, and when each was revealed
_Continuation = tuple[tuple[int, ...], bool, tuple[Reveal, ...] | None]


@dataclass(kw_only=True)
class _Sequence:
    """One prompt being continued. `tokens` holds the prompt, revealed tokens, and masks up to the end of the block."""

    document: int
    prompt: Prompt
    limit: int  # on the length of prompt and continuation
    config: ModelConfig
    policy: BoundPolicy
    settings: DecodeSettings
    rule: RevealRule
    stop_strings: StopStrings
    stopwatch: Stopwatch
    on_step: Callable[[Step], None] | None
    reveals: dict[int, Reveal] | None  # by position; None: not recorded
    stopped: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt.ids)
        self.known = self.prompt_length = len(self.tokens)  # every position before `known` is revealed
        self.random = torch.Generator().manual_seed(self.prompt.seed)

    def denoise(self) -> Row[_Continuation]:
        """Prefills the prompt, then denoises block after block until a stop is revealed or the limit is reached."""
        size = self.config.block_size
        start = self.prompt_length // size * size
        if start:
            predictions = self.config.boundary_predictions if start == self.prompt_length else 0
            answer = yield Prefill(tokens=self.tokens[:start], queries=self._uniforms(predictions))
            self._append(self._finite(answer, start - size, "prefill"))
        while not self._finished():
            self.tokens += [self.config.mask_token_id] * (start + size - len(self.tokens))
            yield from self._denoise_block(start)
            if self._finished():
                break
            predictions = self.config.boundary_predictions
            commit = Pass(
                kind=PassKind.COMMIT,
                start=start,
                tokens=self.tokens[start:],
                plan=compute_all(self.config.num_layers),
                read=(size - 1,) * predictions,
                queries=self._uniforms(predictions),
            )
            self._append(self._finite((yield commit), start, "commit pass"))
            start += size
        new = range(self.prompt_length, self.known)
        reveals = None if self.reveals is None else tuple(self.reveals[position] for position in new)
        return tuple(self.tokens[self.prompt_length : self.known]), self.stopped, reveals

    def _denoise_block(self, start: int) -> Row[None]:
        step = 0
        past: tuple[PastPass, ...] = ()
        revealed_at = [None if token == self.config.mask_token_id else -1 for token in self.tokens[start:]]
        small = self.settings.small_block
        for first in range(start, start + self.config.block_size, small):
            traces: dict[int, list[Prediction]] = {position: [] for position in range(first, first + small)}
            while masked := self._masked(first, first + small):
                if self._finished():
                    return
                kind = self._pass_kind(step, first)
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
                    read=tuple(self.config.predicted_at(position) - begin for position in masked),
                    queries=self._uniforms(len(masked)),
                )
                done = PastPass(
                    window=context.window,
                    plan=executed,
                    measured=(yield GetMeasurements()),
                    confidence={
                        position - start: prediction.probability
                        for position, prediction in zip(masked, predictions, strict=True)
                    },
                )
                past += (done,)
                self._finite(predictions, start, f"step {step} ({kind.value} pass)")
                for position, prediction in zip(masked, predictions, strict=True):
                    traces[position].append(prediction)
                for i in self.rule.choose([traces[position] for position in masked]):
                    self.tokens[masked[i]] = predictions[i].token
                    revealed_at[masked[i] - start] = step
                    if self.reveals is not None:
                        self._record(masked[i], step, predictions[i])
                self._update_known()
                step += 1
                if self.on_step:
                    self.on_step(
                        Step(
                            document=self.document,
                            block=start // self.config.block_size,
                            small_block=(first - start) // small,
                            context=context,
                            requested=requested,
                            done=done,
                            tokens=tuple(self.tokens[start : start + self.config.block_size]),
                        )
                    )

    def _pass_kind(self, step: int, first: int) -> PassKind:
        """A full pass if the block has no keys yet, if small passes are disabled, or if a small pass lacks some logits.

        With token shift, a masked first position is predicted by the position before it, which a small pass leaves out.
        """
        masked_first = self.tokens[first] == self.config.mask_token_id
        needs_block = step == 0 or (masked_first and self.config.family.token_shift)
        return PassKind.FULL if needs_block or not self.settings.block_cache else PassKind.SMALL

    def _masked(self, begin: int, end: int) -> list[int]:
        return [position for position in range(begin, end) if self.tokens[position] == self.config.mask_token_id]

    def _finite(self, predictions: Sequence[Prediction], start: int, step: str) -> Sequence[Prediction]:
        """Returns the predictions for the block that begins at `start`; raises if a probability is not finite."""
        for prediction in predictions:
            if not math.isfinite(prediction.probability):
                value = f"a probability of {prediction.probability}"
                raise NonFiniteError(self.document, start // self.config.block_size, step, value)
        return predictions

    def _append(self, predictions: Sequence[Prediction]) -> None:
        for prediction in predictions:
            if self.reveals is not None:
                self._record(len(self.tokens), -1, prediction)
            self.tokens.append(prediction.token)
        self._update_known()

    def _record(self, position: int, step: int, prediction: Prediction) -> None:
        assert self.reveals is not None
        block, within = divmod(position, self.config.block_size)
        self.reveals[position] = Reveal(
            block=block,
            small_block=within // self.settings.small_block,
            step=step,
            confidence=prediction.probability,
        )

    def _update_known(self) -> None:
        """Moves `known` past the revealed positions, up to a stop or the limit."""
        end = min(len(self.tokens), self.limit)
        while self.known < end and not self.stopped and self.tokens[self.known] != self.config.mask_token_id:
            self.stopped = self.tokens[self.known] in self.config.eos_token_ids
            self.known += 1
        if self.stop_strings.stop:
            with self.stopwatch.paused():
                length = self.stop_strings.end(self.tokens[self.prompt_length : self.known])
            if length is not None:
                self.stopped, self.known = True, self.prompt_length + length

    def _finished(self) -> bool:
        return self.stopped or self.known == self.limit

    def _uniforms(self, count: int) -> tuple[float, ...]:
        """One uniform number per predicted position, from this document's own generator."""
        if not self.settings.temperature:
            return (0.0,) * count
        return tuple(torch.rand(count, generator=self.random, dtype=torch.float64).tolist())

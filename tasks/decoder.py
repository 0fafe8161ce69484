"""The border to the sampler: lm-eval's requests as prompts and pairs, and someone who answers them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lm_eval.api.instance import Instance

from sampler import (
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

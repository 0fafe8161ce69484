"""Between text and token ids: tokenizer, chat template, stop strings. Knows nothing of blocks or layers."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sampler.errors import InputError

WHOLE, VOCABULARY = "tokenizer.json", "vocab.json"


def has_tokenizer(folder: Path) -> bool:
    return (folder / WHOLE).is_file() or (folder / VOCABULARY).is_file()


@lru_cache(maxsize=1)  # a model's files and the model made of them ask for the same one
def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer as its files describe it, without remote code.

    AutoTokenizer would look at config.json, whose model_type it may not know, and for a Qwen2 model it puts Qwen2's
    way of splitting words in the place of the file's own.
    """
    if not has_tokenizer(folder):  # transformers would make up an empty one
        raise InputError(f"{folder} holds no tokenizer ({WHOLE} or {VOCABULARY}), so only token ids can be given")
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer  # slow to import, and not needed for decoding ids

    kind = PreTrainedTokenizerFast if (folder / WHOLE).is_file() else Qwen2Tokenizer
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises nothing more special
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{folder} holds a tokenizer that cannot be loaded ({reason}); fetch it again") from None


def tokenizer_ids(folder: Path) -> Mapping[str, int | None]:
    """The special ids a tokenizer knows; none where there is no tokenizer."""
    if not has_tokenizer(folder):
        return {}
    tokenizer = load_tokenizer(folder)
    return {name: getattr(tokenizer, name, None) for name in ("mask_token_id", "eos_token_id", "pad_token_id")}


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """Messages through the model's chat template, ready for its answer."""
    from jinja2 import TemplateError  # transformers' template engine, which only chats need

    if not tokenizer.chat_template:
        raise InputError("the model's tokenizer has no chat template; give a prompt instead of messages")
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except (TemplateError, ValueError, TypeError) as error:
        raise InputError(f"the model's chat template does not take these messages ({error})") from None
    return encode(tokenizer, text)


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def encode_pair(tokenizer: Any, prefix: str, target: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokenises prefix and target as one text, as the model would read it, and cuts it between them.

    Spaces at the prefix's end go to the target, where tokenizers keep them. Where a token would hold the end of the
    prefix and the start of the target, each is tokenised by itself: a prefix never tells of its target.
    """
    stripped = prefix.rstrip()
    target = prefix[len(stripped) :] + target
    before, whole = encode(tokenizer, stripped), encode(tokenizer, stripped + target)
    if whole[: len(before)] == before:
        return before, whole[len(before) :]
    return before, encode(tokenizer, target)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the earliest stop string in it."""
    found = [at for at in (text.find(string) for string in stop) if at >= 0]
    return text[: min(found)] if found else text


class StopStrings:
    """Says where a growing answer completes a stop string. Decodes the answer's tail only, from `start` on, which
    holds more characters than the longest stop string."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.reach = max((len(string) for string in stop), default=0) + 4  # a character's bytes may be cut
        self.seen = self.start = 0

    def end(self, ids: Sequence[int]) -> int | None:
        """How many of the ids it takes to complete a stop string; None where they hold none."""
        if len(ids) == self.seen:
            return None
        if self._within(ids[self.start :]):
            return next(n for n in range(self.seen + 1, len(ids) + 1) if self._within(ids[self.start : n]))
        self.seen = len(ids)
        while len(decode(self.tokenizer, ids[self.start + 1 :])) > self.reach:
            self.start += 1
        return None

    def _within(self, ids: Sequence[int]) -> bool:
        text = decode(self.tokenizer, ids) if self.stop else ""
        return any(string in text for string in self.stop)


def check_stop(stop: Sequence[str]) -> None:
    for string in stop:
        if not string:
            raise InputError("a stop string is empty; give one with at least one character")
        if any("\ud800" <= character <= "\udfff" for character in string):
            raise InputError(f"stop string {string!r} is not valid UTF-8; give a text")

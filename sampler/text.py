"""Between text and token ids: tokenizer, chat template, stop strings. Knows nothing of blocks or layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sampler.errors import InputError


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, without remote code."""
    from transformers import AutoTokenizer, Qwen2Config  # slow to import, and not needed for decoding ids

    try:
        # The configuration is given: config.json may name a model_type that transformers does not know.
        return AutoTokenizer.from_pretrained(
            folder, config=Qwen2Config(), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise InputError(f"{folder} holds no tokenizer that can be loaded ({first_line}); use token ids") from None


def tokenizer_ids(folder: Path) -> Mapping[str, int | None]:
    """The special ids a tokenizer knows; none where there is no tokenizer."""
    try:
        tokenizer = load_tokenizer(folder)
    except InputError:
        return {}
    return {name: getattr(tokenizer, name, None) for name in ("mask_token_id", "eos_token_id", "pad_token_id")}


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """Messages through the model's chat template, ready for its answer."""
    if tokenizer.chat_template is None:
        raise InputError("the model's tokenizer has no chat template; give a prompt instead of messages")
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return encode(tokenizer, text)


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def encode_pair(tokenizer: Any, prefix: str, target: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokenises prefix and target as one text, so that a token never spans what the model sees as one word.

    Spaces at the prefix's end go to the target, where tokenizers keep them.
    """
    stripped = prefix.rstrip()
    target = prefix[len(stripped) :] + target
    whole = encode(tokenizer, stripped + target)
    before = len(encode(tokenizer, stripped))
    return whole[:before], whole[before:]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the earliest stop string in it."""
    found = [at for at in (text.find(string) for string in stop) if at >= 0]
    return text[: min(found)] if found else text


class StopStrings:
    """Says whether a growing answer contains a stop string yet. Looks at its tail only: a string of n bytes that
    appears with new tokens begins at most n tokens before them."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        if "" in stop:
            raise InputError("a stop string is empty; give one with at least one character")
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.reach = max((len(string.encode()) for string in stop), default=0)
        self.seen = 0

    def found(self, ids: Sequence[int]) -> bool:
        if not self.stop or len(ids) == self.seen:
            return False
        tail = ids[max(0, self.seen - self.reach) :]
        self.seen = len(ids)
        text = decode(self.tokenizer, tail)
        return any(string in text for string in self.stop)

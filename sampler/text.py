"""Tokenizers, chat templates and stop strings."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from sampler.errors import InputError

INCOMPLETE = "\ufffd"  # decoded from a part of a character
MAX_BYTES_PER_CHARACTER = 4  # in UTF-8; a token has at least one
TOKENIZER_FILE, VOCABULARY_FILE = "tokenizer.json", "vocab.json"


def has_tokenizer(folder: Path) -> bool:
    return (folder / TOKENIZER_FILE).is_file() or (folder / VOCABULARY_FILE).is_file()


@lru_cache(maxsize=1)  # ModelFiles and the LoadedModel made from it share one tokenizer
def load_tokenizer(folder: Path) -> Any:
    """The tokenizer described by the files in `folder`, without remote code.

    AutoTokenizer is not used: it reads config.json, may not know the model type there, and for a Qwen2 model replaces
    the pre-tokenizer in tokenizer.json with Qwen2's own.
    """
    if not has_tokenizer(folder):  # transformers would create an empty one
        raise InputError(
            f"{folder} has no tokenizer ({TOKENIZER_FILE} or {VOCABULARY_FILE}); without one, only token ids can be "
            "decoded (--ids)"
        )
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer  # slow to import, and not needed for token ids

    kind = PreTrainedTokenizerFast if (folder / TOKENIZER_FILE).is_file() else Qwen2Tokenizer
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"the tokenizer in {folder} cannot be loaded ({reason}); download it again") from None


def tokenizer_ids(folder: Path) -> Mapping[str, int | None]:
    """The tokenizer's special token ids; empty if there is no tokenizer."""
    if not has_tokenizer(folder):
        return {}
    tokenizer = load_tokenizer(folder)
    return {name: getattr(tokenizer, name, None) for name in ("mask_token_id", "eos_token_id", "pad_token_id")}


def encode_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """Messages formatted with the model's chat template (without a thinking mode), up to the start of its answer."""
    from jinja2 import TemplateError  # comes with transformers, and only chats need it

    if not tokenizer.chat_template:
        raise InputError("the model's tokenizer has no chat template; give a prompt instead of messages")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False, **thinking_mode(tokenizer, on=False)
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise InputError(f"the model's chat template rejects these messages ({error})") from None
    return encode(tokenizer, text)


def thinking_mode(tokenizer: Any, *, on: bool) -> dict[str, bool]:
    """The argument that switches the thinking mode of a chat template (Qwen3) on or off; empty if it has none."""
    return {"enable_thinking": on} if "enable_thinking" in str(tokenizer.chat_template) else {}


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def encode_pair(tokenizer: Any, prefix: str, target: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokenizes prefix and target as one text, then splits the tokens between them.

    Spaces at the end of the prefix move to the target, because tokenizers attach spaces to the next word. If a token
    would span the boundary, the two are tokenized separately, so that the prefix reveals nothing about the target.
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


def token_ends(tokenizer: Any, ids: Sequence[int], text: str) -> tuple[int, ...]:
    """How many characters of `text`, which may be cut, are complete after each token.

    Each token is decoded together with the tokens before it, because they may encode one character together.
    """
    ends: list[int] = []
    first = complete = length = 0
    for number in range(1, len(ids) + 1):
        before, after = (decode(tokenizer, ids[first:end]) for end in (complete, number))
        if not after.endswith(INCOMPLETE) or number - complete > MAX_BYTES_PER_CHARACTER:
            length += max(0, len(after) - len(before))
            first, complete = complete, number
        ends.append(min(length, len(text)) if number < len(ids) else len(text))
    return tuple(ends)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token. A character that several tokens encode is the text of the last of them."""
    text = decode(tokenizer, ids)
    ends = token_ends(tokenizer, ids, text)
    return [text[begin:end] for begin, end in zip((0, *ends), ends, strict=False)]


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    starts = [start for start in (text.find(string) for string in stop) if start >= 0]
    return text[: min(starts)] if starts else text


class StopStrings:
    """Finds where a growing answer completes a stop string.

    Only the tail of the answer is decoded each time: the tokens from `start` on, which are longer than any stop string.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        # The decoded tail may begin with a part of a character.
        self.tail_length = max((len(string) for string in stop), default=0) + MAX_BYTES_PER_CHARACTER
        self.seen = self.start = 0

    def end(self, ids: Sequence[int]) -> int | None:
        """The number of ids up to the end of the first stop string; None if there is none."""
        if len(ids) == self.seen:
            return None
        if self._contains_stop(ids[self.start :]):
            return next(n for n in range(self.seen + 1, len(ids) + 1) if self._contains_stop(ids[self.start : n]))
        self.seen = len(ids)
        while len(decode(self.tokenizer, ids[self.start + 1 :])) > self.tail_length:
            self.start += 1
        return None

    def _contains_stop(self, ids: Sequence[int]) -> bool:
        text = decode(self.tokenizer, ids)
        return any(string in text for string in self.stop)


def check_stop(stop: Sequence[str]) -> None:
    for string in stop:
        if not string:
            raise InputError("a stop string must not be empty")
        if any("\ud800" <= character <= "\udfff" for character in string):
            raise InputError(f"stop string {string!r} is not valid UTF-8")

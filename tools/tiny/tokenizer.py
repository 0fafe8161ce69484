"""Builds the bundled model's tokenizer: byte-level BPE learned from the data, one token for each number below 100.

Words are split as Qwen2 splits them, so AutoTokenizer, which takes that splitting for every Qwen2 model, agrees with
the files. Text never seen falls back to smaller pieces and at last to bytes. Knows nothing of training.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, MASK, START, PAD = "<|im_end|>", "|<MASK>|", "<|im_start|>", "<|endoftext|>"
SPECIAL = (PAD, START, END, MASK)
ROLES = ("system", "user", "assistant")
LETTERS = "ABCD"  # each a token of its own, with and without a space before it
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('a message is from system, user or assistant, not ' ~ message.role) -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
NUMBERS = tuple(str(number) for number in range(10, 100))  # one token each; a longer number is cut into these
VOCABULARY = 1280  # at most
SEEN_AT_LEAST = 10  # a piece rarer than this is left in smaller pieces
READ = 40_000  # texts, evenly taken from all: more would teach nothing new


def build_tokenizer(texts: Sequence[str], vocabulary: int = VOCABULARY, seen: int = SEEN_AT_LEAST) -> Any:
    """A tokenizer for texts like these; the same texts give the same tokenizer."""
    texts = texts[:: max(1, len(texts) // READ)]
    merges = _useful(_learned(texts, vocabulary, seen), texts)
    return PreTrainedTokenizerFast(
        tokenizer_object=_assembled(merges),
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
        model_max_length=1 << 30,
        clean_up_tokenization_spaces=False,
    )


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(folder)


def _learned(texts: Sequence[str], vocabulary: int, seen: int) -> list[tuple[str, str]]:
    """Merges in the order of their frequency. Roles and letters are always learned, whatever the texts hold."""
    tokenizer = _bare(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL) - len(NUMBERS),
        min_frequency=seen,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    always = [*ROLES, *(f" {letter}" for letter in LETTERS)]
    tokenizer.train_from_iterator([*texts, *(always * (10 * seen))], trainer)
    return [(left, right) for left, right in _state(tokenizer)["merges"]]


def _useful(merges: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[tuple[str, str]]:
    """Without the merges that no token in these texts needs."""
    tokenizer = _assembled(merges)
    used = Counter(token for encoded in tokenizer.encode_batch(list(texts)) for token in encoded.tokens)
    wanted = {token for token, count in used.items() if count}
    wanted |= {*ROLES, *(f"Ġ{letter}" for letter in LETTERS)}
    kept = []
    for left, right in reversed(merges):
        if left + right in wanted:
            wanted |= {left, right}
            kept.append((left, right))
    return kept[::-1]


def _assembled(merges: Sequence[tuple[str, str]]) -> Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = _bare(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    # Added rather than merged: AutoTokenizer's splitting of a Qwen2 model would cut every number into digits.
    tokenizer.add_tokens([AddedToken(number, normalized=False) for number in NUMBERS])
    return tokenizer


def _bare(model: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _state(tokenizer: Tokenizer) -> Any:
    return json.loads(tokenizer.to_str())["model"]

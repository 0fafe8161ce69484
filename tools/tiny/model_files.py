"""The bundled model as a directory: tokenizer, configuration and weights.

The tokenizer is a byte-level BPE learned from the training data, with one token for each number below 100. It splits
words as Qwen2 does, so that AutoTokenizer, which uses that splitting for every Qwen2 model, agrees with the files.
Unknown text falls back to smaller pieces and finally to bytes.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sampler.config import ModelConfig
from tools.tiny.network import qwen2_tensors

END, MASK, START, PAD = "<|im_end|>", "|<MASK>|", "<|im_start|>", "<|endoftext|>"
SPECIAL = (PAD, START, END, MASK)
ROLES = ("system", "user", "assistant")
LETTERS = "ABCD"  # each is one token, with and without a leading space
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
NUMBERS = tuple(str(number) for number in range(10, 100))  # one token each; longer numbers are split into these
MAX_VOCABULARY = 1280
MIN_FREQUENCY = 10  # of a learned token; rarer pieces are split into smaller ones
MAX_TEXTS = 40_000  # taken at even intervals; more would not change the result
LAYERS = 36


def build_tokenizer(texts: Sequence[str], vocabulary: int = MAX_VOCABULARY, min_frequency: int = MIN_FREQUENCY) -> Any:
    """Learns a tokenizer; the same texts give the same tokenizer."""
    texts = texts[:: max(1, len(texts) // MAX_TEXTS)]
    merges = _used_merges(_learn_merges(texts, vocabulary, min_frequency), texts)
    return PreTrainedTokenizerFast(
        tokenizer_object=_assemble(merges),
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
        model_max_length=1 << 30,
        clean_up_tokenization_spaces=False,
    )


def _learn_merges(texts: Sequence[str], vocabulary: int, min_frequency: int) -> list[tuple[str, str]]:
    """Merges by frequency. Roles and letters are always learned, even if they are not in the texts."""
    tokenizer = _empty_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(SPECIAL) - len(NUMBERS),
        min_frequency=min_frequency,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    always = [*ROLES, *(f" {letter}" for letter in LETTERS)]
    tokenizer.train_from_iterator([*texts, *(always * (10 * min_frequency))], trainer)
    return [(left, right) for left, right in _model_state(tokenizer)["merges"]]


def _used_merges(merges: Sequence[tuple[str, str]], texts: Sequence[str]) -> list[tuple[str, str]]:
    """Removes merges that no token in these texts needs."""
    tokenizer = _assemble(merges)
    used = Counter(token for encoded in tokenizer.encode_batch(list(texts)) for token in encoded.tokens)
    needed = {token for token, count in used.items() if count}
    needed |= {*ROLES, *(f"Ġ{letter}" for letter in LETTERS)}
    kept = []
    for left, right in reversed(merges):
        if left + right in needed:
            needed |= {left, right}
            kept.append((left, right))
    return kept[::-1]


def _assemble(merges: Sequence[tuple[str, str]]) -> Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = _empty_tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    # Added rather than merged: AutoTokenizer splits every number into digits for a Qwen2 model.
    tokenizer.add_tokens([AddedToken(number, normalized=False) for number in NUMBERS])
    return tokenizer


def _empty_tokenizer(model: Any) -> Tokenizer:
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


def _model_state(tokenizer: Tokenizer) -> Any:
    return json.loads(tokenizer.to_str())["model"]


def tiny_config(tokenizer: Any, *, layers: int = LAYERS) -> ModelConfig:
    """The shape of the bundled model, with the token ids of its tokenizer."""
    return ModelConfig(
        num_layers=layers,
        hidden_size=64,
        intermediate_size=160,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=len(tokenizer),
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tied_embeddings=False,
        block_size=32,
        mask_token_id=tokenizer.mask_token_id,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
        max_positions=4096,
    )


def write_model(folder: Path, weights: Mapping[str, Tensor], config: ModelConfig, tokenizer: Any) -> None:
    """Writes a model directory. Each file is complete when it appears; the weights appear last."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as name:
        fresh = Path(name)
        tokenizer.save_pretrained(fresh)
        (fresh / "config.json").write_text(json.dumps(_as_qwen2(config), indent=2) + "\n", encoding="utf-8")
        half = {
            key: value.detach().to(torch.float16).contiguous() for key, value in qwen2_tensors(weights, config).items()
        }
        save_file(half, fresh / "model.safetensors", metadata={"format": "pt"})
        for path in sorted(fresh.iterdir(), key=lambda path: path.suffix == ".safetensors"):
            os.replace(path, folder / path.name)


def _as_qwen2(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "dtype": "float16",
        "bd_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "eos_token_id": config.eos_token_ids[0],
        "pad_token_id": config.pad_token_id,
    }

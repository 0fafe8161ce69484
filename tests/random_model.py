"""A random model folder with a byte-level tokenizer and a chat template, for tests that run for real."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sampler.config import expected_shapes, read_config

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|mask|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if not loop.last or not continue_final_message %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path) -> dict[str, int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *SPECIAL])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[1], pad_token=SPECIAL[1], mask_token=SPECIAL[2]
    )
    fast.add_special_tokens({"additional_special_tokens": [SPECIAL[0]]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return vocabulary


def write_model(folder: Path, *, layers: int = 6, seed: int = 0, **changes: Any) -> Path:
    """Shaped like Fast-dLLM v2 unless `changes` say otherwise. Six layers: first, middle and last are two each."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(folder)
    settings = {
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(vocabulary),
        "tie_word_embeddings": False,
        "bd_size": 32,
        "mask_token_id": vocabulary["<|mask|>"],
        "eos_token_id": vocabulary["<|im_end|>"],
    }
    (folder / "config.json").write_text(json.dumps(settings | changes))
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(read_config(folder, dict))
    weights = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape, generator=generator) * 0.25
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder

"""Writes the trained weights, their configuration and tokenizer as a model folder. Knows nothing of training."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sampler.config import ModelConfig
from tools.tiny.network import qwen2_tensors
from tools.tiny.tokenizer import write_tokenizer

LAYERS = 36


def tiny_config(tokenizer: Any, *, layers: int = LAYERS) -> ModelConfig:
    """The shape of the bundled model, with the tokenizer's ids."""
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
    """Each file is written under another name and renamed, the weights last."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as name:
        fresh = Path(name)
        write_tokenizer(tokenizer, fresh)
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

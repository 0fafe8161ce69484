"""Model folders as they lie on a disk, made by the tests that load them: a tiny Qwen2 and a byte-level tokenizer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 272  # 256 bytes, six merges, <eos> 262, <pad> 263, <mask> 264, <other> 265, and ids without a text
EOS, PAD, MASK, OTHER = 262, 263, 264, 265
MERGES = (("a", "b"), ("ab", "c"), ("S", "T"), ("ST", "O"), ("STO", "P"), ("x", "S"))
SPECIAL = {"eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bd_size": 32,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def qwen2(*, tied: bool = False, seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    """transformers' own model with random weights, every norm and bias among them."""
    torch.manual_seed(seed)
    shape = {key: CONFIG[key] for key in CONFIG if key not in ("architectures", "model_type", "bd_size")}
    theirs = Qwen2ForCausalLM(Qwen2Config(**shape | {"tie_word_embeddings": tied} | changes)).eval().float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.2).add_(1.0 if parameter.dim() == 1 and parameter.numel() == 32 else 0.0)
    return theirs


def tensors(model: Qwen2ForCausalLM, *, with_head: bool = True) -> dict[str, Tensor]:
    return {
        k: v.detach().clone().contiguous() for k, v in model.state_dict().items() if with_head or "lm_head" not in k
    }


def write_model(folder: Path, weights: Mapping[str, Tensor], *, shards: int = 1, **changes: Any) -> Path:
    """`changes` to config.json; None leaves a key out."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors")
        return folder
    names, weight_map = sorted(weights), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: weights[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_tokenizer(folder: Path, *, merges: Sequence[tuple[str, str]] = MERGES, **options: Any) -> Path:
    """A byte-level tokenizer; `options` go into tokenizer_config.json."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL | {"chat_template": TEMPLATE} | options)
    fast.add_special_tokens({"additional_special_tokens": ["<other>"]})
    fast.save_pretrained(folder)
    return folder


def tiny_folder(folder: Path, **changes: Any) -> Path:
    """A model that loads, with a tokenizer."""
    return write_tokenizer(write_model(folder, tensors(qwen2()), **changes))

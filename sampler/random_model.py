"""Models with seeded random weights, for benchmarks and tests. They answer nothing; they cost what a real one does."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sampler.config import HEAD, ModelConfig, expected_shapes
from sampler.loading import LoadedModel, build_transformer

TINY = ModelConfig(
    num_layers=36,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=160,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tied_embeddings=False,
    block_size=32,
    mask_token_id=159,
    eos_token_ids=(158,),
    pad_token_id=157,
)
MID = replace(
    TINY,
    num_layers=28,
    hidden_size=512,
    intermediate_size=1408,
    num_heads=8,
    head_dim=64,
    vocab_size=32_000,
    mask_token_id=31_999,
    eos_token_ids=(31_998,),
    pad_token_id=31_997,
)
SHAPES = {"tiny": TINY, "mid": MID}


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008 (a value, never changed)
) -> LoadedModel:
    """Confident enough to reveal several tokens a step, and never stopping: mask, stop and pad have zero logits."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(config)

    def read(name: str) -> Tensor:
        shape = shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        tensor = torch.randn(shape, generator=generator) * (1.6 / config.hidden_size**0.5 if len(shape) > 1 else 0.2)
        if name == HEAD:
            tensor[[config.mask_token_id, config.pad_token_id, *config.eos_token_ids]] = 0
        return tensor

    network = build_transformer(read, config, dtype=dtype, device=device)
    return LoadedModel(source="random", revision=None, folder=Path("random"), config=config, network=network)

"""Rotary positions as one complex product. Knows no caches and no layers.

A head's two halves are interleaved in the weights, so that each rotated pair lies side by side and reads as a complex
number. Queries and keys are interleaved alike, so their products, and with them the attention, stay the same.
Shapes: C positions, N rows, M = (query + key + value heads) · head size.
"""

import torch
from torch import Tensor

from sampler.config import ModelConfig


def factors(config: ModelConfig, positions: int, device: torch.device) -> Tensor:
    """The factor of each pair at each position, (C, M/2); values are not rotated, theirs are 1."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    angle_Cd = torch.outer(torch.arange(positions, device=device).float(), config.rope_theta**-half)
    rotated = torch.polar(torch.ones_like(angle_Cd), angle_Cd).repeat(1, config.num_heads + config.num_kv_heads)
    return torch.cat((rotated, rotated.new_ones(positions, config.num_kv_heads * config.head_dim // 2)), -1)


def rotate(y_NM: Tensor, factors_NM: Tensor) -> Tensor:
    """Rotates what a fused projection gave; in place where no dtype stands in the way."""
    if y_NM.dtype is torch.float32:
        y_NM.view(torch.complex64).mul_(factors_NM)
        return y_NM
    return (y_NM.float().view(torch.complex64) * factors_NM).view(torch.float32).to(y_NM.dtype)


def interleave(projection: Tensor, head_dim: int) -> Tensor:
    """Reorders the rows of a query or key projection, weight or bias, from halves to pairs."""
    halves = projection.view(-1, 2, head_dim // 2, *projection.shape[1:])
    return halves.transpose(1, 2).reshape(projection.shape)

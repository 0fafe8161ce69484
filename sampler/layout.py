"""The order of heads and head dimensions inside the fused projections, and rotary positions in that order.

Two rearrangements of the checkpoint's rows, done once at loading, spare copies in every layer of every pass:
- A head's two halves are interleaved, so that each rotated pair lies side by side and reads as a complex number.
  Queries and keys are interleaved alike, so their products stay the same.
- Query heads are ordered by their place in the group that shares a key head, then by key head. So queries and the
  attention's output are views of what the products beside them give and take, and keys are never repeated.
Shapes: C positions, N rows, M features of the fused projection, H query heads, K key/value heads, d head size.
"""

import torch
from torch import Tensor

from sampler.config import ModelConfig


def order_projection(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """A checkpoint's attention projection, weight or bias, in the order used here; other tensors as they are."""
    if "q_proj" in name:
        return _by_place_in_group(_pairs(tensor, config), config)
    if "k_proj" in name:
        return _pairs(tensor, config)
    if "o_proj" in name:
        return _by_place_in_group(tensor.t(), config).t()
    return tensor


def rotary_factors(config: ModelConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Complex factors at each position for queries, and for keys and values together; a value's factor is 1."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    angle_Cd = torch.outer(torch.arange(positions, device=device).float(), config.rope_theta**-half)
    factor_Cd = torch.polar(torch.ones_like(angle_Cd), angle_Cd)
    keys = factor_Cd.repeat(1, config.num_kv_heads)
    return factor_Cd.repeat(1, config.num_heads), torch.cat((keys, torch.ones_like(keys)), -1)


def rotate(y_NM: Tensor, factors: tuple[Tensor, Tensor], sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Splits what the fused projection gave into rotated queries, and rotated keys with values."""
    dtype = y_NM.dtype
    if dtype is not torch.float32:
        queries, keys_values = rotate(y_NM.float(), factors, sizes)
        return queries.to(dtype), keys_values.to(dtype)
    queries, keys_values = torch.split_with_sizes(y_NM.view(torch.complex64), sizes, 1)
    return (queries * factors[0]).view(dtype), (keys_values * factors[1]).view(dtype)


def _pairs(projection: Tensor, config: ModelConfig) -> Tensor:
    halves = projection.view(-1, 2, config.head_dim // 2, *projection.shape[1:])
    return halves.transpose(1, 2).reshape(projection.shape)


def _by_place_in_group(projection: Tensor, config: ModelConfig) -> Tensor:
    groups = projection.reshape(config.num_kv_heads, -1, config.head_dim, *projection.shape[1:])
    return groups.transpose(0, 1).reshape(projection.shape)

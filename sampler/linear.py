"""Matrix products with weights laid out for the machine they run on. Knows nothing of layers or models."""

from typing import Protocol

import torch
from torch import Tensor

# Below this size a weight stays in the CPU's cache and a call's overhead is what counts: plain `addmm` wins.
# Above it, reading the weight is what counts: oneDNN's blocked layout reads it 1.2 to 1.4 times faster.
PACKING_PAYS_FROM = 1 << 17


class Linear(Protocol):
    """x_NK → x Wᵀ (+ bias), or accumulated onto a residual."""

    def __call__(self, x_NK: Tensor) -> Tensor: ...

    def onto(self, residual_NM: Tensor, x_NK: Tensor) -> Tensor: ...


class PlainLinear:
    """Holds Wᵀ as a (K, M) matrix, possibly a view, for any device and dtype."""

    def __init__(self, weight_KM: Tensor, bias_M: Tensor | None = None) -> None:
        self.weight_KM = weight_KM
        self.bias_M = bias_M

    def __call__(self, x_NK: Tensor) -> Tensor:
        if self.bias_M is None:
            return torch.mm(x_NK, self.weight_KM)
        return torch.addmm(self.bias_M, x_NK, self.weight_KM)

    def onto(self, residual_NM: Tensor, x_NK: Tensor) -> Tensor:
        return torch.addmm(residual_NM, x_NK, self.weight_KM)


class PackedLinear:
    """Holds W in oneDNN's blocked layout: float32 on a CPU, where streaming the weight is the cost."""

    def __init__(self, weight_MK: Tensor, bias_M: Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight_MK, None)
        self.bias_M = bias_M

    def __call__(self, x_NK: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_NK, self.packed, self.bias_M, "none", [], "")
        return product

    def onto(self, residual_NM: Tensor, x_NK: Tensor) -> Tensor:
        total: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x_NK, residual_NM, self.packed, self.bias_M, "add")
        return total


def make_linear(weight_MK: Tensor, bias_M: Tensor | None = None, *, shared: bool = False) -> Linear:
    """The fastest layout for this weight; a `shared` weight (tied embeddings) is used where it lies."""
    on_cpu = weight_MK.device.type == "cpu"
    if shared or not on_cpu:
        return PlainLinear(weight_MK.t(), bias_M)
    packable = weight_MK.dtype is torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if packable and weight_MK.numel() >= PACKING_PAYS_FROM:
        return PackedLinear(weight_MK, bias_M)
    return PlainLinear(weight_MK.t().contiguous(), bias_M)

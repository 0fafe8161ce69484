"""Stand-ins on the CPU for what a GPU has: its attention kernels, and products whose rounding depends on their size."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sampler import LoadedModel
from sampler.attention import Backend
from sampler.model import Execution, Layer, Linear


def attend_each(
    q_TKd: Tensor, k_CKd: Tensor, v_CKd: Tensor, query_starts: Tensor, key_starts: Tensor, lengths: Tensor
) -> Tensor:
    """Attention of one sequence after the other, in float32."""
    out_TKd = torch.full_like(q_TKd, torch.nan)
    bounds = zip(query_starts.tolist(), query_starts.tolist()[1:], key_starts.tolist(), lengths.tolist(), strict=False)
    for first, end, start, length in bounds:
        q_KQd, k_KLd, v_KLd = (
            x.float().transpose(0, 1)
            for x in (q_TKd[first:end], k_CKd[start : start + length], v_CKd[start : start + length])
        )
        weights_KQL = torch.softmax(q_KQd @ k_KLd.transpose(1, 2) / q_TKd.shape[-1] ** 0.5, -1)
        out_TKd[first:end] = (weights_KQL @ v_KLd).transpose(0, 1).to(q_TKd.dtype)
    return out_TKd


@contextmanager
def attention_kernels() -> Iterator[None]:
    """Implements the GPU's attention kernels for the CPU."""
    library = torch.library.Library("aten", "IMPL")

    def flash(
        out: Tensor, q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *_: Any, **more: Any
    ) -> Tensor:
        assert more["num_splits"] == 1
        out.copy_(attend_each(q, k, v, starts_q, starts_k, more["seqused_k"]))
        return torch.empty(0)

    def efficient(
        q: Tensor, k: Tensor, v: Tensor, _: None, starts_q: Tensor, starts_k: Tensor, *__: Any, **more: Any
    ) -> Any:
        empty = torch.empty(0)
        return attend_each(q[0], k[0], v[0], starts_q, starts_k, more["seqlen_k"])[None], empty, empty, empty, 0, 0

    library.impl("_flash_attention_forward_no_dropout_inplace", flash, "CPU")
    library.impl("_efficient_attention_forward", efficient, "CPU")
    try:
        yield
    finally:
        library._destroy()


class SplitLinear:
    """A product in half precision that is summed in parts, and the number of parts depends on the number of rows."""

    def __init__(self, inner: Any) -> None:
        self.weight_KM, self.bias_M = inner.weight_KM, inner.bias_M

    def __call__(self, x_NK: Tensor) -> Tensor:
        parts = 1 + (len(x_NK) - 1).bit_length()
        total = torch.zeros(()) if self.bias_M is None else self.bias_M.float()
        for x, weight in zip(x_NK.tensor_split(parts, 1), self.weight_KM.tensor_split(parts, 0), strict=True):
            total = (total + x.float() @ weight.float()).to(x_NK.dtype).float()
        return total.to(x_NK.dtype)

    def add_to(self, residual_NM: Tensor, x_NK: Tensor) -> Tensor:
        return residual_NM + self(x_NK)


class Float32Sums:
    """A product in half precision that is summed in float32 and rounded once, as by a GPU's tensor cores."""

    def __init__(self, inner: Any) -> None:
        self.weight_KM = inner.weight_KM.float()
        self.bias_M = torch.zeros(()) if inner.bias_M is None else inner.bias_M.float()

    def __call__(self, x_NK: Tensor) -> Tensor:
        return (x_NK.float() @ self.weight_KM + self.bias_M).to(x_NK.dtype)

    def add_to(self, residual_NM: Tensor, x_NK: Tensor) -> Tensor:
        return (residual_NM.float() + x_NK.float() @ self.weight_KM).to(x_NK.dtype)


def with_execution(model: LoadedModel, backend: Backend, *, padded: bool = True, compiled: bool = False) -> LoadedModel:
    execution = Execution(backend=backend, padded=padded, compiled=compiled)
    return replace(model, network=replace(model.network, execution=execution))


def with_products(model: LoadedModel, product: Callable[[Linear], Linear]) -> LoadedModel:
    """The model with other matrix products."""

    def layer(one: Layer) -> Layer:
        return replace(
            one,
            qkv=product(one.qkv),
            attention_out=product(one.attention_out),
            gate_up=product(one.gate_up),
            down=product(one.down),
        )

    network = model.network
    layers = [layer(one) for one in network.layers]
    return replace(model, network=replace(network, layers=layers, head=product(network.head)))

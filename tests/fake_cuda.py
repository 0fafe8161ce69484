"""A fake CUDA device on a machine without one: nothing is computed, but shapes, dtypes, strides and devices matter.

`FakeTensorMode` propagates shapes and devices. Python's calls that ask for the device's properties are answered for a
given compute capability, and the attention kernels' own requirements are asserted. Values that are read back are random
numbers between 0 and 1.
"""

import ctypes
import random
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import cpp_extension

from sampler import model
from sampler.config import FULL_MODEL, KNOWN_CHECKPOINTS, ModelConfig, expected_shapes
from sampler.device import OperationCounter
from sampler.loading import LoadedModel, build_transformer

DEVICE = torch.device("cuda:0")
SEVEN_B = KNOWN_CHECKPOINTS[FULL_MODEL]
# Without a guard for the device type, indexing a fake CUDA tensor fails in a CPU build of torch.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>); }
"""
ALIGNMENT_BYTES = 16


def load_guard(folder: Path) -> None:
    """Compiles the device guard and loads it; skips the test if that is impossible or a real device is there."""
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has its own CUDA device guard")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("a fake CUDA device needs a C++ compiler")
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    flags = [f"-I{path}" for path in cpp_extension.include_paths()]
    flags += [flag for path in cpp_extension.library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    command = [compiler, "-shared", "-fPIC", "-std=c++20", *flags, str(source), "-lc10", "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    ctypes.CDLL(str(library))


@torch.library.custom_op("fake_cuda::fused_rms_norm", mutates_args=())
def fused_rms_norm(x: Tensor, weight: Tensor, eps: float, shape: list[int]) -> Tensor:
    """A CUDA build of torch has one kernel for it, which a CPU build would replace by several others."""
    raise NotImplementedError


@fused_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, shape: list[int]) -> Tensor:
    assert eps > 0
    assert x.dtype == weight.dtype
    assert x.device == weight.device
    assert list(weight.shape) == shape == list(x.shape[-1:])
    return torch.empty_like(x)


class CheckedCounter(OperationCounter):
    """Counts operations and asserts what the attention kernels of this compute capability require."""

    def __init__(self, capability: tuple[int, int]) -> None:
        super().__init__(DEVICE)
        self.capability = capability

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in ("aten::pin_memory", "aten::_pin_memory"):
            return args[0]
        if name == "torch_attn::_varlen_attn_out":
            self._check_flash(*args)
        if name == "aten::_efficient_attention_forward":
            self._check_efficient(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _check_flash(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int,
        causal: bool, scale: Any, window: Any, gqa: bool, lengths: Tensor, table: Any, splits: int,
    ) -> None:  # fmt: skip
        del scale, window, table
        assert self.capability >= (8, 0)
        assert q.dtype in (torch.float16, torch.bfloat16)
        assert not causal
        assert not gqa
        assert splits == 1
        assert out.shape == q.shape
        assert q.shape[-1] % 8 == 0
        assert q.shape[-1] <= 256
        self._check_sequences(q, k, v, starts_q, starts_k, lengths, max_q, max_k)

    def _check_efficient(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, starts_q: Tensor, starts_k: Tensor, max_q: int, max_k: int,
        dropout: float, mask: int, log_sum: bool = False, *, seqlen_k: Tensor,
    ) -> None:  # fmt: skip
        assert q.dtype is not torch.bfloat16 or self.capability >= (8, 0)
        assert (bias, dropout, mask, log_sum) == (None, 0.0, 0, False)
        assert len(q) == len(k) == len(v) == 1
        self._check_sequences(q[0], k[0], v[0], starts_q, starts_k, seqlen_k, max_q, max_k)

    def _check_sequences(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts_q: Tensor,
        starts_k: Tensor,
        lengths: Tensor,
        max_q: int,
        max_k: int,
    ) -> None:
        assert q.dtype == k.dtype == v.dtype
        assert q.shape[1:] == k.shape[1:] == v.shape[1:]
        for tensor in (q, k, v):
            assert tensor.stride(-1) == 1
            steps = (*tensor.stride()[:-1], tensor.storage_offset())
            assert all(step * tensor.element_size() % ALIGNMENT_BYTES == 0 for step in steps)
        for numbers in (starts_q, starts_k, lengths):
            assert numbers.device == q.device
            assert numbers.dtype is torch.int32
            assert numbers.is_contiguous()
        assert len(starts_q) == len(starts_k) == len(lengths) + 1
        assert 0 < max_q <= len(q)
        assert 0 < max_k <= len(k)


@contextmanager
def fake_cuda(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckedCounter]:
    """Tensors that are created meanwhile are fake. `load_guard` must have been called."""
    numbers = random.Random(0)
    real_tolist = Tensor.tolist

    def build(shape: Sequence[int]) -> Any:
        return numbers.random() if not shape else [build(shape[1:]) for _ in range(shape[0])]

    def tolist(tensor: Tensor) -> Any:
        if not isinstance(tensor, FakeTensor):
            return real_tolist(tensor)
        assert tensor.device.type == "cpu", "reading a tensor on the device would be a hidden transfer"
        return build(tuple(tensor.shape))

    counter = CheckedCounter(capability)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(model, "rms_norm", lambda x, shape, weight, eps: fused_rms_norm(x, weight, eps, list(shape)))
        patch.setattr(Tensor, "tolist", tolist)
        patch.setattr(FakeTensor, "tolist", tolist)
        with FakeTensorMode(allow_non_fake_inputs=True), counter:
            yield counter


def fake_model(config: ModelConfig, dtype: torch.dtype) -> LoadedModel:
    """A model on the fake device; to be called within `fake_cuda`."""
    shapes = expected_shapes(config)
    network = build_transformer(
        lambda name: torch.empty(shapes[name], dtype=torch.bfloat16), config, dtype=dtype, device=DEVICE
    )
    return LoadedModel(source="fake", revision=None, folder=Path("fake"), config=config, network=network)

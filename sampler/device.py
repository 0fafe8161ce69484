"""The device that a model runs on: which one, its dtypes, torch's numeric flags, and the operations it runs."""

import re
import subprocess
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sampler.errors import InputError, counted

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BFLOAT16_CAPABILITY = (8, 0)  # the first compute capability with bfloat16 arithmetic
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
NVIDIA_SMI_TIMEOUT_SECONDS = 20.0


def cuda_devices() -> int:
    """The number of CUDA devices; InputError if the driver finds devices that torch cannot use.

    `device_count` asks the driver's management library, `is_available` the CUDA runtime. They disagree if the driver is
    too old for the CUDA version that torch was built for.
    """
    count = torch.cuda.device_count()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about what the error says
        usable = count > 0 and torch.cuda.is_available()
    if count and not usable:
        raise InputError(
            f"this machine has {counted(count, 'CUDA device')} that torch cannot use: torch "
            f"{torch.__version__} was built for CUDA {torch.version.cuda}, and {_describe_driver()}; update the "
            "driver, install a torch for an older CUDA, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    return count


def _describe_driver() -> str:
    version = _smi_driver_version() or _module_driver_version()
    number: int = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    supports = f" supports up to CUDA {number // 1000}.{number % 1000 // 10}" if number else " does not work with it"
    return f"the driver {version or 'of unknown version'}{supports}"


def _smi_driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip().partition("\n")[0] or None


def _module_driver_version() -> str | None:
    with suppress(OSError):
        match = re.search(r"Kernel Module\s+([0-9.]+)", KERNEL_MODULE.read_text(encoding="utf-8", errors="replace"))
        return match[1] if match else None
    return None


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if cuda_devices() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", name):
        raise InputError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N")
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= cuda_devices():
        raise InputError(
            f"device {name!r} does not exist: this machine has {counted(torch.cuda.device_count(), 'CUDA device')}"
        )
    return torch.device(kind, int(index)) if index else torch.device(kind)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 from compute capability 8 on, float16 on 7.x, float32 otherwise."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if name == "auto":
        if capability >= BFLOAT16_CAPABILITY:
            return torch.bfloat16
        return torch.float16 if capability[0] == 7 else torch.float32
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}")
    if name == "float16" and device.type == "cpu":
        raise InputError("dtype float16 is not supported on a CPU: use float32 or bfloat16")
    if name == "bfloat16" and device.type == "cuda" and capability < BFLOAT16_CAPABILITY:
        raise InputError(bfloat16_problem(torch.cuda.get_device_name(device), capability))
    return DTYPES[name]


def bfloat16_problem(device: str, capability: tuple[int, int]) -> str:
    """The error message for bfloat16 on a CUDA device that does not support it."""
    needed, available = (".".join(map(str, version)) for version in (BFLOAT16_CAPABILITY, capability))
    return (
        f"dtype bfloat16 needs compute capability {needed}, and {device} has {available}, which would emulate it "
        "slowly: use float16 or float32"
    )


def _flag(backend: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(backend, name), lambda value: setattr(backend, name, value)


def _legacy_precision() -> str | None:
    """The value of torch's older precision setting; None if the newer settings have values that it cannot express."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


_MATMUL = torch.backends.cuda.matmul
_, _set_float16_sums = _flag(_MATMUL, "allow_fp16_reduced_precision_reduction")
_, _set_bfloat16_sums = _flag(_MATMUL, "allow_bf16_reduced_precision_reduction")
# For each flag: how to read it, how to set it, and its value while a model computes. By default torch may add up
# products of half precision in half precision, and may use cuDNN attention, which builds a plan for each new shape (20
# to 40 ms on an H100). Other code in the process may have allowed TF32, which rounds float32 to 10 bits. The two values
# of the sums: whether they may be in half precision, and whether the summed dimension may be split (split-K).
_FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], object]] = {
    "float32_matmul_precision": (_legacy_precision, torch.set_float32_matmul_precision, "highest"),
    "cuda_float32_matmul": (*_flag(_MATMUL, "fp32_precision"), "ieee"),
    "cpu_float32_matmul": (*_flag(torch.backends.mkldnn.matmul, "fp32_precision"), "ieee"),  # type: ignore[attr-defined]
    "float16_sums": (torch._C._get_cublas_allow_fp16_reduced_precision_reduction, _set_float16_sums, (False, True)),
    "bfloat16_sums": (torch._C._get_cublas_allow_bf16_reduced_precision_reduction, _set_bfloat16_sums, (False, True)),
    "float16_accumulation": (*_flag(_MATMUL, "allow_fp16_accumulation"), False),
    "cudnn_attention": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
}


@contextmanager
def numeric_flags() -> Iterator[dict[str, Any]]:
    """Sets the flags that every pass of a model needs, and restores the caller's at the end; yields their values."""
    before = {name: value for name, (read, _, _) in _FLAGS.items() if (value := read()) is not None}
    try:
        for name in before:
            _, write, value = _FLAGS[name]
            write(value)
        values = {name: _FLAGS[name][0]() for name in before}
        yield {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    finally:
        for name, value in before.items():
            _FLAGS[name][1](value)


ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "detach", "lift_fresh", "_pin_memory", "pin_memory"}


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of a device while active: kernels by name, and transfers in both directions.

    An operation that does not only view or allocate counts as one kernel.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device.type
        self.reset()

    def reset(self) -> None:
        self.kernels: Counter[str] = Counter()
        self.to_device = self.to_host = self.views = 0

    @property
    def attention(self) -> dict[str, int]:
        """Attention kernels by name."""
        return {name: count for name, count in self.kernels.items() if "attention" in name or "attn" in name}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ == "scaled_dot_product_attention":  # see which kernel torch chooses
            with self:
                return func.decompose(*args, **kwargs or {})
        result = func(*args, **(kwargs or {}))
        self._count(func, (args, kwargs), result)
        return result

    def _count(self, func: Any, arguments: Any, result: Any) -> None:
        namespace, name = func._schema.name.split("::")
        before, after = (
            {leaf.device.type for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
            for values in (arguments, result)
        )
        if name in ("_to_copy", "copy_", "to") and len(before | after) > 1:
            if self.device_type in after:
                self.to_device += 1
            else:
                self.to_host += 1
        elif self.device_type not in before | after or name in ALLOCATIONS or namespace == "prim":
            return
        elif func.is_view or name == "_unsafe_view":
            self.views += 1
        else:
            self.kernels[name] += 1


def synchronise(device: torch.device) -> None:
    """Waits until the device has finished all its work, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Functions and operations that make the host wait for the device.
WAITING_FUNCTIONS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"}
WAITING_OPERATIONS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}


class SynchronisationError(RuntimeError):
    """The host waited for the device inside a pass or a decision."""


class _FunctionGuard(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in WAITING_FUNCTIONS:
            raise SynchronisationError(f"it calls Tensor.{func.__name__}, which waits for the device")
        return func(*args, **kwargs or {})


class _OperationGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITING_OPERATIONS:
            raise SynchronisationError(f"it runs {func.overloadpacket.__name__}, which waits for the device")
        return func(*args, **kwargs or {})


@contextmanager
def forbid_synchronisation(device: torch.device) -> Iterator[None]:
    """Raises where the host would wait for the device; on a CPU, where it would wait if it were another device."""
    before = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _FunctionGuard(), _OperationGuard():  # type: ignore[no-untyped-call]
            yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode(before)

"""The devices that actors may run on: what torch says about them, and the dtype that suits all."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from orchestrator.running.provenance import all_memory
from orchestrator.running.provenance import device as described
from sampler.loading import pick_dtype

DTYPES = ("float32", "float16", "bfloat16")  # a device that supports one supports those before it as well


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """One device of one node."""

    kind: str  # cuda or cpu
    name: str
    dtype: str  # the best that it supports
    free: int  # bytes
    total: int
    node: str = "this machine"

    @property
    def label(self) -> str:
        return f"{self.name} on {self.node}"


def visible_devices(*, gpus: bool = True) -> list[DeviceFacts]:
    """Those that torch finds in this process: all GPUs, or the processor."""
    count = torch.cuda.device_count() if gpus and torch.cuda.is_available() else 0
    return [_cuda(index) for index in range(count)] or [_cpu()]


def _cuda(index: int) -> DeviceFacts:
    device = torch.device("cuda", index)
    free, total = torch.cuda.mem_get_info(device)
    return DeviceFacts(
        kind="cuda", name=torch.cuda.get_device_name(device), dtype=_dtype(device), free=free, total=total
    )


def _cpu() -> DeviceFacts:
    device = torch.device("cpu")
    name = str(described("cpu")["name"])
    return DeviceFacts(kind="cpu", name=name, dtype=_dtype(device), free=free_memory(), total=all_memory())


def _dtype(device: torch.device) -> str:
    return str(pick_dtype("auto", device)).removeprefix("torch.")


def free_memory() -> int:
    """Bytes that programs of this machine may still take; where the kernel does not say, all it has."""
    try:
        told = Path("/proc/meminfo").read_text(encoding="ascii")
    except FileNotFoundError:
        return all_memory()
    fields = dict(line.split(":") for line in told.splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def common_dtype(devices: Sequence[DeviceFacts]) -> tuple[str, str | None]:
    """The best dtype that all of them support, and a sentence if some support a better one."""
    best = {device.dtype: device for device in reversed(devices)}  # the first device of each
    chosen, *others = sorted(best, key=DTYPES.index)
    if not others:
        return chosen, None
    better = others[-1]
    return chosen, (
        f"--dtype auto is {chosen} for the whole sweep: {best[chosen].label} does not support {better}, "
        f"which {best[better].label} does"
    )

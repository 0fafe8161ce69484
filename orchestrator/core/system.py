"""The system that results are produced on: packages, commit, cores, memory, devices and estimates of their speed.

Imports torch only when called. The facts that are stored contain no paths and no secrets.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sampler.errors import InputError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "ray", "lm_eval", "datasets", "pyarrow", "numpy")
PROJECT = "reuse-sweep"
TRACKER_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
SOURCE_FOLDERS = ("orchestrator", "sampler", "tasks")  # a change elsewhere, such as in docs, cannot change a row
COMMAND_TIMEOUT_SECONDS = 10
DTYPES = ("float32", "float16", "bfloat16")  # a device that supports one also supports those before it
NVIDIA_SMI_FIELDS = {
    "driver": "driver_version",
    "clock_mhz": "clocks.sm",
    "clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
}
PROBE_TIMEOUT_SECONDS = 300.0  # importing torch and starting CUDA on every GPU
PROBE = "from orchestrator.core.system import print_devices; print_devices()"


def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that results may depend on."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        if (installed := _installed_version(name)) is not None:
            versions[name] = installed
    return versions


def code_version() -> dict[str, Any]:
    """Installed version, and in a git checkout the commit and whether source files differ from it."""
    root = Path(__file__).resolve().parents[2]
    known: dict[str, Any] = {"version": _installed_version(PROJECT), "commit": None, "dirty": None}
    top = command_output(["git", "-C", str(root), "rev-parse", "--show-toplevel"])
    if top is None or Path(top) != root:  # installed, perhaps inside another project's repository
        return known
    status = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", *SOURCE_FOLDERS]
    commit = command_output(["git", "-C", str(root), "rev-parse", "HEAD"])
    return known | {"commit": commit, "dirty": bool(command_output(status))}


def command_output(command: list[str]) -> str | None:
    """Output of a command; None if it is missing, fails or does not end in time."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device of one node. Created by `visible_devices` on that node; read before a sweep starts its workers."""

    name: str
    dtype: str  # the best that it supports
    free: int  # bytes
    total: int  # bytes
    node: str = "this machine"
    capability: tuple[int, int] | None = None  # compute capability of a CUDA device

    @property
    def label(self) -> str:
        return f"{self.name} on {self.node}"


# Estimates of speed on a GPU are fitted to two speeds of Fast_dLLM_v2_7B on GSM8K at threshold 0.9: 49.6 tokens/s on a
# Quadro RTX 6000 (measured, see docs/scale.md) and 101.7 on an A100 (published).
BANDWIDTH_SHARE = 0.9  # of a GPU's published bandwidth, at which a pass reads the weights
FREE_SHARE = 0.97  # of a GPU's memory; the driver and the CUDA context take the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProfile:
    """A device that trials run on, as far as estimates depend on it."""

    name: str
    label: str
    bytes_per_second: float  # at which a pass reads the weights
    layer_seconds: float = 0.3e-3  # fixed cost of a layer in a pass
    tokens_per_pass: float = 1.67
    trial_seconds: float = 30.0
    memory: int = 0  # bytes for actors; 0: not known
    capability: tuple[int, int] | None = None


def _gpu(name: str, label: str, gigabytes: int, bandwidth: int, capability: tuple[int, int]) -> DeviceProfile:
    """`bandwidth` is the published one in GB/s."""
    return DeviceProfile(
        name=name,
        label=f"{label} with {gigabytes} GB, {bandwidth:,} GB/s",
        bytes_per_second=BANDWIDTH_SHARE * bandwidth * 1e9,
        memory=round(FREE_SHARE * gigabytes * 10**9),
        capability=capability,
    )


CORE = DeviceProfile(
    name="cpu",
    label="one CPU core",
    bytes_per_second=8e9,
    layer_seconds=0.25e-3,
    tokens_per_pass=2.0,
    trial_seconds=3.0,
)
GPU_PROFILES = {  # for --device-profile
    gpu.name: gpu
    for gpu in (
        _gpu("a100-40", "A100", 40, 1_555, (8, 0)),
        _gpu("a100-80", "A100", 80, 2_039, (8, 0)),
        _gpu("h100", "H100 SXM", 80, 3_350, (9, 0)),
        _gpu("h200", "H200", 141, 4_800, (9, 0)),
        _gpu("l4", "L4", 24, 300, (8, 9)),
        _gpu("l40s", "L40S", 48, 864, (8, 9)),
        _gpu("rtx4090", "GeForce RTX 4090", 24, 1_008, (8, 9)),
        _gpu("rtx6000", "Quadro RTX 6000 (Turing)", 24, 672, (7, 5)),
        _gpu("t4", "T4", 16, 320, (7, 5)),
        _gpu("v100-32", "V100", 32, 900, (7, 0)),
    )
}
# A GPU without a profile is assumed to be as fast as the slower of the two GPUs with known speeds.
ANY_GPU = replace(GPU_PROFILES["rtx6000"], name="gpu", label="a GPU as fast as a Quadro RTX 6000", memory=0)


def devices_here() -> list[Device]:
    """The devices of this machine. GPUs are queried in a child process, since CUDA reserves memory on each of them."""
    from sampler.device import cuda_devices

    if not cuda_devices():
        return visible_devices(gpus=False)
    try:
        found = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"the GPUs of this machine have not answered in {PROBE_TIMEOUT_SECONDS:.0f} s; check nvidia-smi"
        ) from None
    if found.returncode:
        reason = (found.stderr.strip().splitlines() or [f"exit code {found.returncode}"])[-1]
        raise InputError(f"the GPUs of this machine cannot be used: {reason}")
    devices = json.loads(found.stdout.strip().splitlines()[-1])
    return [Device(**device | {"capability": tuple(device["capability"])}) for device in devices]


def print_devices() -> None:
    """Prints the devices as JSON, which `devices_here` reads from the last line of the output."""
    print(json.dumps([asdict(device) for device in visible_devices()]))


def visible_devices(*, gpus: bool = True) -> list[Device]:
    """The GPUs that torch finds in this process; without GPUs, the CPU. Leaves a CUDA context on each GPU."""
    import torch

    from sampler.device import cuda_devices

    count = cuda_devices() if gpus else 0
    if count == 0:
        name = str(describe_device("cpu")["name"])
        return [Device(name=name, dtype=_best_dtype("cpu"), free=free_memory(), total=total_memory())]
    devices = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name, dtype = torch.cuda.get_device_name(index), _best_dtype(f"cuda:{index}")
        capability = torch.cuda.get_device_capability(index)
        devices.append(Device(name=name, dtype=dtype, free=free, total=total, capability=capability))
    return devices


def _best_dtype(device: str) -> str:
    import torch

    from sampler.device import pick_dtype

    return str(pick_dtype("auto", torch.device(device))).removeprefix("torch.")


def common_dtype(devices: Sequence[Device]) -> tuple[str, str | None]:
    """The best dtype that all devices support, and a notice if some of them support a better one."""
    example = {device.dtype: device for device in reversed(devices)}  # the first device of each dtype
    chosen, *others = sorted(example, key=DTYPES.index)
    if not others:
        return chosen, None
    better = others[-1]
    return chosen, (
        f"--dtype auto is {chosen} for the whole sweep: {example[chosen].label} does not support {better}, "
        f"which {example[better].label} does"
    )


def describe_device(kind: str, index: int | None = None) -> dict[str, Any]:
    """Name, memory and clocks of a torch device, as stored in trial.json."""
    return _describe_gpu(index or 0) if kind == "cuda" else _describe_cpu()


def _describe_gpu(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    known = {"name": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}
    uuid = getattr(properties, "uuid", None)
    query = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA_SMI_FIELDS.values())}", "--format=csv,noheader,nounits"]
    output = command_output([*query, f"--id=GPU-{uuid}" if uuid else f"--id={index}"])
    values = [value.strip() for value in (output or "").split(",")]
    return known | dict(zip(NVIDIA_SMI_FIELDS, values, strict=True)) if len(values) == len(NVIDIA_SMI_FIELDS) else known


def _describe_cpu() -> dict[str, Any]:
    fields = _first_processor()
    clock = fields.get("cpu MHz")
    return {
        "name": fields.get("model name") or platform.machine(),
        "memory": total_memory(),
        "cores": usable_cores(),
        "clock_mhz": None if clock is None else float(clock),
    }


def _first_processor() -> Mapping[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    return {key.strip(): value.strip() for key, _, value in pairs}


def total_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Bytes of memory available to new processes; the total where the kernel does not report it (macOS)."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except FileNotFoundError:
        return total_memory()
    fields = dict(line.split(":") for line in text.splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def usable_cores() -> int:
    """Cores that this process may use; all of them where the system has no CPU affinity (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def format_bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.1f} {unit}" if unit == "GB" else f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"

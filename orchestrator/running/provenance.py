"""What a result was made with: packages, code, device. Never an environment variable, never a path or a token."""

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "ray", "lm_eval", "datasets", "pyarrow", "numpy")
PROJECT = "reuse-sweep"
PARTS = ("orchestrator", "sampler", "tasks")  # what can change a row; a page of text cannot
SECONDS_TO_ANSWER = 10
SMI_FIELDS = {
    "driver": "driver_version",
    "clock_mhz": "clocks.sm",
    "clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
}


def packages() -> dict[str, str]:
    """Versions of what results may depend on; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        if (installed := _version(name)) is not None:
            found[name] = installed
    return found


def code() -> dict[str, Any]:
    """The commit this code lies at and whether its files differ from it; without git, the installed version."""
    folder = Path(__file__).resolve().parents[2]
    known: dict[str, Any] = {"version": _version(PROJECT), "commit": None, "dirty": None}
    top = _output(["git", "-C", str(folder), "rev-parse", "--show-toplevel"])
    if top is None or Path(top) != folder:  # installed elsewhere, perhaps inside somebody else's repository
        return known
    changed = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no", "--", *PARTS])
    return known | {"commit": _output(["git", "-C", str(folder), "rev-parse", "HEAD"]), "dirty": bool(changed)}


def device(kind: str, index: int | None = None) -> dict[str, Any]:
    """Name, memory, driver and clocks of the device that a torch device of this kind stands for."""
    return _cuda(index or 0) if kind == "cuda" else _cpu()


def _cuda(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    known = {"name": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}
    uuid = getattr(properties, "uuid", None)
    query = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS.values())}", "--format=csv,noheader,nounits"]
    answer = _output([*query, f"--id=GPU-{uuid}" if uuid else f"--id={index}"])
    values = [value.strip() for value in (answer or "").split(",")]
    return known | dict(zip(SMI_FIELDS, values, strict=True)) if len(values) == len(SMI_FIELDS) else known


def _cpu() -> dict[str, Any]:
    fields = _cpu_fields()
    clock = fields.get("cpu MHz")
    return {
        "name": fields.get("model name") or platform.machine(),
        "memory": all_memory(),
        "cores": cores(),
        "clock_mhz": None if clock is None else float(clock),
    }


def all_memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cores() -> int:
    """Those this process may use; where the system (macOS) keeps nobody to some of them, all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_fields() -> Mapping[str, str]:
    """Those of the first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    return {key.strip(): value.strip() for key, _, value in pairs}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_ANSWER, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

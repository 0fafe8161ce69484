"""Devices that disagree with themselves or lack a dtype are refused; numeric flags hold during passes only.

The fakes are torch.cuda's functions: what lies behind them is the driver.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import shallow, shallow_folder
from small_sweep import trial, worker_settings, write_model_and_data
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.core import system
from orchestrator.core.system import devices_here, visible_devices
from orchestrator.planning.machine import Machine
from orchestrator.planning.preflight import prepare
from orchestrator.planning.settings import SweepSettings
from orchestrator.running.worker import Worker
from sampler import DecodeSettings, InputError, Prompt, ReusePolicy, decode_prompts
from sampler.config import read_config
from sampler.decode import Step
from sampler.device import numeric_flags, pick_device, pick_dtype
from sampler.loading import build_transformer, open_checkpoint

CUDA = torch.device("cuda")
# What a child process runs before everything else: a machine with one GPU, whose memory costs a CUDA context to read.
FAKE_GPU = """
import sys, torch
torch.cuda.device_count = lambda: 1
torch.cuda.is_available = lambda: True
torch.cuda.mem_get_info = lambda index: (30 << 30, 40 << 30)
torch.cuda.get_device_name = lambda index: "Fake A100"
torch.cuda.get_device_capability = lambda device: {capability}
"""


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One GPU, and a driver that is too old for torch's CUDA."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 11040, raising=False)
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\necho 470.82.01\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent), prepend=os.pathsep)


SENTENCE = (
    r"has 1 CUDA device that torch cannot use: torch \S+ was built for CUDA 13\.0, and the driver 470\.82\.01 "
    r"supports up to CUDA 11\.4; update the driver"
)


@pytest.mark.usefixtures("old_driver")
def test_a_driver_that_is_too_old_is_refused_in_planning_and_in_a_worker(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=SENTENCE):
        Machine.here()
    with pytest.raises(InputError, match=SENTENCE):
        visible_devices()
    for name in ("auto", "cuda", "cuda:0"):
        with pytest.raises(InputError, match=SENTENCE):
            pick_device(name)
    with pytest.raises(InputError, match=SENTENCE):
        Worker(worker_settings(write_model_and_data(tmp_path), device="auto"))
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.usefixtures("old_driver")
def test_the_driver_is_unknown_without_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delattr(torch._C, "_cuda_getDriverVersion")
    with pytest.raises(InputError, match=r"CUDA 13\.0, and the driver of unknown version does not work with it"):
        pick_device("auto")


@pytest.mark.parametrize("capability", [(7, 5), (6, 1)])
def test_bfloat16_is_refused_before_ampere(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    version = rf"{capability[0]}\.{capability[1]}"
    with pytest.raises(InputError, match=rf"bfloat16 needs compute capability 8\.0, and Old GPU has {version}"):
        pick_dtype("bfloat16", CUDA)
    assert pick_dtype("float16", CUDA) is torch.float16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert pick_dtype("bfloat16", CUDA) is torch.bfloat16


def machine(*capabilities: tuple[int, int] | None) -> Machine:
    devices = tuple(
        system.Device(name=f"GPU {n}", dtype="float32", free=1 << 40, total=1 << 40, capability=capability)
        for n, capability in enumerate(capabilities)
    )
    nodes = tuple(replace(node, resources={"CPU": 2, "GPU": len(devices)}) for node in Machine.here().nodes)
    return Machine(nodes=nodes, devices=devices)


@pytest.mark.parametrize(
    ("capabilities", "refused"), [(((7, 5),), True), (((7, 5), (7, 0)), True), (((7, 5), (8, 0)), False), ((), False)]
)
def test_planning_refuses_bfloat16_if_no_gpu_supports_it(
    capabilities: tuple[tuple[int, int], ...], refused: bool, tmp_path: Path
) -> None:
    case = write_model_and_data(tmp_path)
    settings = SweepSettings(
        model=str(case / "model"), data=str(case / "data"), tasks=("gsm8k",), dtype="bfloat16", out=str(tmp_path)
    )
    chosen = replace(settings, gpus_per_actor=1.0 if capabilities else 0.0)
    if refused:
        with pytest.raises(InputError, match=r"--dtype bfloat16 needs compute capability 8\.0, and GPU 0 on this mach"):
            prepare(chosen, machine(*capabilities))
    else:
        assert prepare(chosen, machine(*capabilities)).identity.dtype == "bfloat16"


def fake_gpu_in_child(folder: Path, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the child has the GPU's functions: the parent would fail if it asked for them."""
    (folder / "sitecustomize.py").write_text(FAKE_GPU.format(capability=capability))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(Path(system.__file__).parents[2]))))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_gpus_are_probed_in_a_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their contexts end with it. On this machine, asking for a GPU's memory in this process would raise."""
    fake_gpu_in_child(tmp_path, (7, 5), monkeypatch)
    (device,) = devices_here()
    assert (device.name, device.dtype, device.free, device.capability) == ("Fake A100", "float16", 30 << 30, (7, 5))
    here = Machine.here()
    assert (here.driver_gpus, here.present("GPU"), here.dtype) == (1, 1, "float16")
    assert not torch.cuda.is_initialized()
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('CUDA error: all devices are busy')")
    with pytest.raises(
        InputError, match=r"the GPUs of this machine cannot be used: .*CUDA error: all devices are busy"
    ):
        Machine.here()


def flags() -> tuple[Any, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        matmul.allow_tf32,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        matmul.allow_fp16_accumulation,
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.mkldnn.matmul.fp32_precision,
    )


EXACT = ("highest", False, (False, True), (False, True), False, False, "ieee")


@pytest.fixture
def careless() -> Iterator[tuple[Any, ...]]:
    """A library user's flags, all of which lose precision."""
    before, matmul = flags(), torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("medium")
    matmul.allow_fp16_reduced_precision_reduction = (True, True)
    matmul.allow_fp16_accumulation = True
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield flags()
    torch.set_float32_matmul_precision(before[0])
    matmul.allow_fp16_reduced_precision_reduction = before[2]
    matmul.allow_fp16_accumulation = before[4]
    torch.backends.cuda.enable_cudnn_sdp(before[5])


def test_the_flags_hold_during_passes_and_are_the_callers_again_with_each_result(careless: tuple[Any, ...]) -> None:
    prompts = [Prompt(ids=tuple(range(20 + n, 40))) for n in range(3)]
    settings = DecodeSettings(max_new_tokens=40)
    seen: set[tuple[Any, ...]] = set()

    def look(_: Step) -> None:
        seen.add(flags())

    results = decode_prompts(shallow(), prompts, policy=ReusePolicy.parse("k1"), settings=settings, on_step=look)
    for _ in results:
        assert flags() == careless
    assert seen == {EXACT}
    with pytest.raises(ZeroDivisionError), numeric_flags():
        _ = 1 / 0
    assert flags() == careless, "also after an error"


def test_a_trial_records_the_flags(tmp_path: Path) -> None:
    worker = Worker(worker_settings(write_model_and_data(tmp_path)))
    recorded = worker.facts(trial("k1"), worker.calibrate())["numeric_flags"]
    assert recorded["cuda_float32_matmul"] == recorded["cpu_float32_matmul"] == "ieee"
    assert recorded["float16_sums"][0] is recorded["bfloat16_sums"][0] is recorded["cudnn_attention"] is False


class Conversions(TorchDispatchMode):
    """Records operations on real (CPU) tensors that convert, reorder or concatenate."""

    def __init__(self) -> None:
        super().__init__()
        self.on_cpu: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if isinstance(made, torch.Tensor) and made.device.type == "cpu" and made.numel() > 1:
            self.on_cpu.append(str(func))
        return made


def test_weights_are_moved_before_they_are_converted() -> None:
    """The meta device takes the GPU's place; reading and viewing are all that happens on the CPU."""
    folder = shallow_folder()
    config = read_config(folder, dict)
    read = open_checkpoint(folder, config)
    with Conversions() as seen:
        network = build_transformer(read, config, dtype=torch.float16, device=torch.device("meta"))
    assert (network.dtype, network.device.type) == (torch.float16, "meta")
    changing = [name for name in seen.on_cpu if any(part in name for part in ("_to_copy", "clone", "cat", "copy_"))]
    assert not changing, changing


def test_the_command_reports_the_old_driver(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\ntorch.cuda.device_count = lambda: 1\ntorch.cuda.is_available = lambda: False\n"
        "torch.version.cuda = '13.0'\n"
    )
    root = str(Path(system.__file__).parents[2])
    command = [sys.executable, "-m", "orchestrator.cli", "sweep", "--dry-run", "--tasks", "gsm8k", "--out", "out"]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), root))},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert "error: this machine has 1 CUDA device that torch cannot use" in ended.stderr

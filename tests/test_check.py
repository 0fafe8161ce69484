"""`reuse-sweep check`: passes on this machine, and fails in the right line when something is wrong.

The stand-ins are a model's tensors, a policy's decisions, and torch functions at the device's edge.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import GOLDEN
from safetensors.torch import load_file, save_file

from orchestrator.cli.__main__ import dispatch
from sampler import LoadedModel, ReusePolicy, check, load_model
from sampler.check import (
    CheckResult,
    Memory,
    check_attention,
    check_batches,
    check_golden_cases,
    check_layers,
    check_policies,
    check_speed,
    check_synchronisation,
    run_checks,
)
from sampler.loading import BUNDLED_FOLDER, random_model
from sampler.measure import TINY
from sampler.plan import LayerPlan, StepContext
from sampler.policies import RULES
from sampler.policies.periodic import PeriodicRule
from sampler.policy import policy_examples

ENOUGH = Memory(free=2, needed=1)
WRONG_TENSOR = "model.layers.20.mlp.down_proj.weight"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny", device="cpu")


@pytest.fixture(scope="module")
def small() -> LoadedModel:
    """Random weights in four layers: quick where the answers do not matter."""
    return random_model(replace(TINY, num_layers=4))


def changed_copy(folder: Path, change: Callable[[torch.Tensor], None]) -> Path:
    shutil.copytree(BUNDLED_FOLDER, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights[WRONG_TENSOR])
    save_file(weights, folder / "model.safetensors")
    return folder


def by_name(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.name: result for result in results}


@pytest.mark.slow
def test_the_command_passes_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    dispatch(["check", "--device", "cpu", "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"all checks passed; {out} has the details for a bug report"
    assert [line.split()[0] for line in lines[1:-1]] == ["pass"] * 8
    found = json.loads(out.read_text())
    assert found["passed"] is True
    assert found["numeric_flags"]["cudnn_attention"] is False
    assert {entry["check"]: entry for entry in found["checks"]}["speed"]["operations_per_pass"] > 36


def test_the_golden_cases_are_those_of_the_bundled_model(tiny: LoadedModel) -> None:
    passed, detail, _ = check_golden_cases(tiny)
    assert passed, detail


@pytest.mark.slow
def test_the_shipped_golden_cases_are_the_reference_decoders() -> None:
    from bundled_golden import golden

    shipped = json.loads((BUNDLED_FOLDER / check.GOLDEN_FILE).read_text())
    computed = json.loads(json.dumps(golden()))
    assert shipped["generated"] == computed["generated"]
    for one, other in zip(shipped["scored"], computed["scored"], strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=1e-9)


def test_a_wrong_weight_fails_the_golden_cases(tmp_path: Path) -> None:
    """A copy of the bundled model is held against the bundled model's answers."""
    folder = changed_copy(tmp_path / "model", lambda weight: weight.mul_(-1))
    passed, detail, _ = check_golden_cases(load_model(str(folder), device="cpu"))
    assert passed is False
    assert detail.startswith("this copy of the bundled model does not give the reference's answers in float32: case 0")


def test_a_wrong_weight_in_memory_fails_at_its_layer() -> None:
    model = load_model("tiny", device="cpu")
    model.network.layers[20].qkv.bias_M[3] += 1.0  # type: ignore[attr-defined]
    passed, detail, values = check_layers(model)
    assert passed is False
    assert detail.startswith("layer 20 differs from float32 by ")
    assert max(values["relative_errors"][:20]) < 1e-5 < values["relative_errors"][20]


@pytest.mark.parametrize("value", [float("inf"), pytest.param(float("nan"), marks=pytest.mark.slow)])
def test_an_injected_infinity_fails_at_its_layer_and_in_every_line_that_decodes(tmp_path: Path, value: float) -> None:
    folder = changed_copy(tmp_path / "model", lambda weight: weight[5, 7].fill_(value))
    model = load_model(str(folder), device="cpu")
    found = by_name(list(run_checks(model, ENOUGH)))
    assert found["layers"].passed is False
    assert found["layers"].detail.startswith("layer 20 computes ")
    for name in ("golden cases", "batch 1 and 8", "policies"):
        assert found[name].passed is False
        assert "the model computed a probability of nan" in found[name].detail
    assert found["memory"].passed is True


def test_activations_beyond_the_range_of_the_dtype_are_reported(tiny: LoadedModel) -> None:
    passed, detail, values = check_layers(tiny)
    assert passed, detail
    share = values["largest_activation"] / torch.finfo(torch.float16).max
    assert 0 < share < 0.5, "the bundled model also runs in float16"
    model = load_model("tiny", device="cpu", dtype="bfloat16")
    passed, detail, values = check_layers(model)
    assert passed, detail
    assert 1e-4 < max(values["relative_errors"]) < 0.15


def test_a_model_of_another_family_passes() -> None:
    """Norms of heads, no bias, no token shift, blocks of four."""
    model = load_model(str(GOLDEN / "noshift" / "q12b4"), device="cpu")
    for run in (check_layers, check_batches, check_policies, check_attention):
        passed, detail, _ = run(model)
        assert passed, detail


class SynchronisingRule(PeriodicRule):
    """Looks at a tensor to decide, as a policy with a signal on the device would."""

    read = "tolist"

    def plan(self, context: StepContext) -> LayerPlan:
        getattr(torch.zeros(1), self.read)()
        return super().plan(context)

    def bind(self, layers: tuple[int, ...], depth: int) -> Any:
        bound = super().bind(layers, depth)
        return _Planned(bound, self)


class _Planned:
    def __init__(self, bound: Any, rule: SynchronisingRule) -> None:
        self.bound, self.rule = bound, rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bound, name)

    def plan(self, context: StepContext) -> LayerPlan:
        getattr(torch.zeros(1), self.rule.read)()
        plan: LayerPlan = self.bound.plan(context)
        return plan


@pytest.mark.parametrize("read", ["tolist", "item", "__bool__"])
def test_a_policy_that_synchronises_fails_by_name(
    read: str, small: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_synchronisation(small)[0] is True
    monkeypatch.setattr(SynchronisingRule, "read", read)
    monkeypatch.setitem(RULES, "waiting", lambda *_: SynchronisingRule(k=2))
    monkeypatch.setattr(SynchronisingRule, "__str__", lambda _: "waiting=2")
    assert "waiting=2_middle" in policy_examples()
    assert check_policies(small)[0] is True, "it decodes"
    passed, detail, _ = check_synchronisation(small)
    assert passed is False
    assert detail.startswith(f"waiting=2_middle: it calls Tensor.{read}, which waits for the device")


def test_a_pass_that_synchronises_fails(small: LoadedModel) -> None:
    """The guard also sees what torch does inside, such as counting the elements that a mask selects."""
    layer = small.network.layers[2]

    class Waiting:
        def __getattr__(self, name: str) -> Any:
            return getattr(layer, name)

        def run(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            torch.masked_select(x, x > 0)
            return layer.run(x, *rest)

    network = replace(small.network, layers=[*small.network.layers[:2], Waiting(), *small.network.layers[3:]])
    passed, detail, _ = check_synchronisation(replace(small, network=network))
    assert passed is False
    assert detail.startswith("k1: it runs masked_select")


def test_on_cuda_torch_itself_forbids_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    with check.forbid_synchronisation(torch.device("cuda")):
        assert modes == ["error"]
    assert modes == ["error", 1], "the caller's mode is back"


@pytest.mark.slow
def test_a_slow_device_fails(small: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TIMED_PASSES", 3)
    monkeypatch.setitem(check.MIN_COPY_BYTES_PER_SECOND, "cpu", 0.08e9)  # this machine may be slow
    monkeypatch.setitem(check.MAX_OPERATION_SECONDS, "cpu", 1.0)
    passed, detail, values = check_speed(small)
    assert passed, detail
    layer = small.network.layers[0]

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(layer, name)

        def run(self, *arguments: Any) -> torch.Tensor:
            time.sleep(0.5 + 50 * values["pass_ms"] / 1e3)
            return layer.run(*arguments)

    slow = replace(small, network=replace(small.network, layers=[Slow(), *small.network.layers[1:]]))
    passed, detail, _ = check_speed(slow)
    assert passed is False
    assert "times as long as expected, more than 10" in detail
    copy = torch.Tensor.copy_

    def slowly(target: torch.Tensor, source: torch.Tensor, *rest: Any) -> torch.Tensor:
        time.sleep(1.0 if source.numel() >= check.COPIED_BYTES["cpu"] else 0.0)
        return copy(target, source, *rest)

    monkeypatch.setattr(torch.Tensor, "copy_", slowly)
    monkeypatch.setattr(check, "TIMED_PASSES", 1)
    passed, detail, _ = check_speed(small)
    assert passed is False
    assert detail.startswith("the device copies only 0.0")


def test_documents_that_depend_on_their_batch_fail(small: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_batches(small)[0] is True
    forward = type(small.network).forward

    def by_size(network: Any, ids_N: torch.Tensor, *rest: Any) -> Any:
        states, work = forward(network, ids_N, *rest)
        return states + (len(ids_N) > 100) * torch.linspace(-9, 9, states.shape[1]), work

    monkeypatch.setattr(type(small.network), "forward", by_size)
    passed, detail, _ = check_batches(small)
    assert passed is False
    assert "documents differ, document " in detail


def test_attention_kernels_are_named(small: LoadedModel) -> None:
    passed, _, values = check_attention(small)
    assert passed
    assert len(values["attention"]) == 6
    assert all("attention" in name for name in values["attention"].values())


def test_too_little_memory_and_an_error_fail_without_ending_the_others(
    small: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("golden_cases", "layers", "batches", "policies", "synchronisation", "attention"):
        monkeypatch.setattr(check, f"check_{name}", lambda _: (True, "", {}))

    def broken(_: LoadedModel) -> Any:
        raise RuntimeError("CUDA error: an illegal\nmemory access")

    monkeypatch.setattr(check, "check_speed", broken)
    found = by_name(list(run_checks(small, Memory(free=2 * 10**9, needed=3 * 10**9))))
    assert found["speed"].as_json() == {
        "check": "speed",
        "state": "failed",
        "detail": "RuntimeError: CUDA error: an illegal memory access",
    }
    assert found["memory"].passed is False
    assert found["memory"].detail == "about 3 GB are needed at batch 8, and 2 GB were free"


def test_the_command_ends_with_one_if_a_check_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [CheckResult(name="layers", passed=False, detail="layer 3 computes NaN")]
    monkeypatch.setattr(check, "run_checks", lambda *_: iter(results))
    out = tmp_path / "check.json"
    torch.set_num_threads(2)
    with pytest.raises(SystemExit) as ended:
        dispatch(["check", "--device", "cpu", "--out", str(out)])
    assert ended.value.code == 1
    assert torch.get_num_threads() == 1, "threads that wait for each other would make it last for minutes"
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "FAIL  layers           layer 3 computes NaN"
    assert lines[-1].startswith("1 of 1 check failed: layers")
    assert json.loads(out.read_text())["passed"] is False


def test_every_rule_has_an_example() -> None:
    rules = {type(ReusePolicy.parse(name).rule) for name in policy_examples()}
    assert len(policy_examples()) == len(set(policy_examples())) >= len(RULES) + 3
    assert len(rules) == 11

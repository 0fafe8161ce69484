"""The benchmark runs for real on a very small model: every figure is present and plausible."""

import json
from dataclasses import replace

import pytest
import torch

from orchestrator.cli.bench import POLICIES, bench, measure_passes, passes_table
from orchestrator.cli.console import run_command
from sampler.loading import random_model
from sampler.measure import TINY, Bench, PassTimes, narrowing_alone
from sampler.plan import PassKind, compute_all
from sampler.policy import ReusePolicy

torch.set_num_threads(1)


def test_every_figure_is_measured_and_printed() -> None:
    model = random_model(replace(TINY, num_layers=6))
    figures = measure_passes(Bench(model, rounds=2, new_tokens=12, questions=3), [1, 2])
    assert json.loads(json.dumps(figures)) == figures
    for batch in ("1", "2"):
        for kind in ("full", "small"):
            times = figures["passes"][batch][kind]
            assert times["ratio"] == pytest.approx(times["computed"] / times["floor"])
            assert times["floor"] > 0
        assert figures["tokens_per_s"][batch] > 0
    assert set(figures["policies"]) == set(POLICIES)
    assert figures["policies"]["k2_first.output"]["share"] == 0
    assert figures["policies"]["k2_first"]["share"] == pytest.approx(2 / 3)
    assert figures["prefill_tokens_per_s"] > 0
    assert figures["scoring"]["token_forwards_ratio"] < 0.2
    assert figures["scoring"]["largest_difference"] < 1e-4
    printed = passes_table({"where": "here", **figures})
    assert "k3_last.output" in printed
    assert max(len(line) for line in printed.splitlines()) <= 100


@pytest.mark.parametrize("policy", ["es=0.5_4-35", "dllm=0.25_2-20", "focus=0.5_2-35", "es=0.5_4-35.2"])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_checkpoints_cost_is_the_difference_of_two_plans(policy: str, batch: int) -> None:
    bench = Bench(random_model(TINY), rounds=1, new_tokens=8, questions=1)
    context = bench.context(PassKind.FULL)
    plan = ReusePolicy.parse(policy).bind(TINY.num_layers).plan(context)
    both = narrowing_alone(plan, context.window)
    assert both["with checkpoints"].checkpoints == plan.checkpoints
    assert both["with checkpoints"].steps == both["without checkpoints"].steps
    assert both["without checkpoints"].checkpoints == ()
    assert len(both["without checkpoints"].selected) == plan.checkpoints[-1].keep
    for kind in (PassKind.FULL, PassKind.SMALL):
        assert bench.pass_times(kind, batch, policy).selecting >= 0
    assert narrowing_alone(compute_all(TINY.num_layers), context.window) == {}


def test_an_ideal_reuse_pass_has_ratio_one() -> None:
    times = PassTimes(computed=10.0, replayed=7.0, floor=5.0, head=1.0)
    assert times.reuse_ratio(2 / 3) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--batch", "1,x"], "--batch must be a whole number (got x)"),
        (["--batch", "0"], "--batch must be at least 1 (got 0)"),
        (["--threads", "0"], "--threads must be at least 1 (got 0)"),
        (["--shape", "no/such/model"], "no/such/model"),
    ],
)
def test_wrong_flags_are_explained(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: bench(flags))
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert complaint in shown.err
    assert shown.err.count("\n") == 1

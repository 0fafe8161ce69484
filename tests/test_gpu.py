"""The sampler on a fake CUDA device: kernels, transfers and attention backends of passes at the shape of a 7B model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_cuda import SEVEN_B, CheckedCounter, fake_cuda, fake_model, load_guard

from sampler import DecodeSettings, Prompt, ReusePolicy, decode_prompts, score_pairs
from sampler.decode import Predictor
from sampler.passes import PassRunner, PassSegment
from sampler.plan import (
    WATCHED_INPUT,
    CheckpointSignal,
    LayerPlan,
    PassKind,
    PastPass,
    StepContext,
    compute_all,
)
from sampler.records import Pair

SHALLOW = replace(SEVEN_B, num_layers=3)
DEVICES = {
    "turing": ((7, 5), torch.float16, "_efficient_attention_forward"),
    "ampere": ((8, 0), torch.bfloat16, "_varlen_attn_out"),
    "hopper": ((9, 0), torch.bfloat16, "_varlen_attn_out"),
}
POLICIES = (
    *("k1", "k2_middle", "k3_first.output", "k2_last.small", "adaptive=0.2_middle", "trim=0.25_middle"),
    *("trim=0.5_all.random", "mlp=2_middle", "attn=2_middle", "skip_middle", "stale=2"),
    *("delayed=1_all", "dllm=0.25_middle", "elastic=0.5_all", "es=0.5_1-2.2", "focus=0.5_middle"),
)
MAX_KERNELS_PER_LAYER = 16
Device = tuple[CheckedCounter, torch.dtype, str]  # with the name of its attention kernel


@pytest.fixture(scope="session", autouse=True)
def guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    load_guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    capability, dtype, attention = DEVICES[request.param]
    with fake_cuda(capability, monkeypatch) as counter:
        yield counter, dtype, attention


class Recorder:
    """What each pass of a decoder cost, by wrapping `PassRunner.run`."""

    def __init__(self, counter: CheckedCounter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[dict[str, Any]] = []
        real = PassRunner.run

        def run(runner: PassRunner, segments: Any, plan: LayerPlan, kind: PassKind, *, reuse: bool) -> Any:
            counter.reset()
            result = real(runner, segments, plan, kind, reuse=reuse)
            self.passes.append(
                {
                    "kind": kind,
                    "rows": len(segments),
                    "plan": plan,
                    "kernels": sum(counter.kernels.values()),
                    "transfers": (counter.to_device, counter.to_host),
                    "attention": dict(counter.attention),
                    "names": dict(counter.kernels),
                }
            )
            return result

        monkeypatch.setattr(PassRunner, "run", run)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_decodes(device: Device, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counter, dtype, attention = device
    recorder = Recorder(counter, monkeypatch)
    model = fake_model(SHALLOW, dtype)
    prompts = [Prompt(ids=(7,) * length) for length in (60, 64, 300)]
    settings = DecodeSettings(threshold=0.5, max_new_tokens=10)
    decoded = decode_prompts(
        model, prompts, policy=ReusePolicy.parse(policy), settings=settings, batch_size=3, with_text=False
    )
    assert sorted(index for index, _ in decoded) == [0, 1, 2]
    for one in recorder.passes:
        running = 0 if one["plan"].stale else sum(step.runs_attention for step in one["plan"].steps)
        assert one["attention"] == ({attention: running} if running else {})
        forbidden = {"bmm", "baddbmm", "index_put_", "nonzero"}
        if any(checkpoint.signal is CheckpointSignal.ATTENTION for checkpoint in one["plan"].checkpoints):
            forbidden -= {"bmm"}  # it weighs the pass's positions among each other, not against all keys
        assert not forbidden & set(one["names"])
        sent, received = one["transfers"]
        assert sent == 1
        assert received <= 1
    assert {one["kind"] for one in recorder.passes} == set(PassKind)
    assert max(one["rows"] for one in recorder.passes if one["kind"] is PassKind.PREFILL) > 1


@pytest.mark.parametrize("reveal", ["margin=0.5", "entropy=0.5", "klass=0.9", "credit=0.9", "topk=2", "factor=1"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_reveal_rule_is_decided_from_one_transfer(
    device: Device, reveal: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter, dtype, _ = device
    recorder = Recorder(counter, monkeypatch)
    settings = DecodeSettings(reveal=reveal, temperature=temperature, max_new_tokens=10)
    prompts = [Prompt(ids=(7,) * length) for length in (60, 64)]
    k1 = ReusePolicy.parse("k1")
    list(
        decode_prompts(fake_model(SHALLOW, dtype), prompts, policy=k1, settings=settings, batch_size=2, with_text=False)
    )
    assert all(sent == 1 and received <= 1 for sent, received in (one["transfers"] for one in recorder.passes))


@pytest.mark.parametrize(
    ("policy", "method"),
    [
        ("k1", "reference"),
        *((p, "chain") for p in ("k2_middle", "mlp=2_middle", "attn=3_last", "skip_middle", "stale=2")),
    ],
)
def test_every_policy_scores(device: Device, policy: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counter, dtype, _ = device
    recorder = Recorder(counter, monkeypatch)
    model = fake_model(SHALLOW, dtype)
    pairs = [Pair(prefix=(5,) * 100 + (9,) * (60 + q), target=(o,)) for q in range(2) for o in range(2)]
    pairs += [Pair(prefix=(5,) * 62, target=(1, 4, 3))] if method == "chain" else []
    scored = score_pairs(model, pairs, policy=ReusePolicy.parse(policy), method=method, batch_size=4)
    assert sorted(index for index, _ in scored) == list(range(len(pairs)))
    assert all(sent == 1 and received <= 1 for sent, received in (one["transfers"] for one in recorder.passes))
    if policy == "k1":
        assert {one["kind"] for one in recorder.passes} == {PassKind.PREFILL}  # it takes the scored block along


@pytest.mark.parametrize(
    ("policy", "batch"),
    [
        *((policy, batch) for policy in ("k1", "trim=0.5_all") for batch in (1, 8, 32)),
        *(("k2_middle", 8), ("adaptive=0.2_middle", 32), ("trim=0.25_middle", 8), ("mlp=2_all", 1)),
        *(("es=0.5_4-27.2", 8), ("dllm=0.25_all", 32), ("focus=0.5_2-27", 1)),
    ],
)
def test_kernels_do_not_grow_with_the_batch(device: Device, policy: str, batch: int) -> None:
    """All rows of a batch cost as many kernels as one; a batch of 8 takes two full passes, see `BUCKET_POSITIONS`."""
    counter, dtype, attention = device
    bound = ReusePolicy.parse(policy).bind(SEVEN_B.num_layers)
    model = fake_model(SEVEN_B, dtype)
    predictor = Predictor(mask_token_id=SEVEN_B.mask_token_id)
    runner = PassRunner(model.network, bound.cache_spec, slots=batch, capacity=1024, reader=predictor, reads=8)
    norms = [(1.0, 10.0)] * 32
    past = PastPass(window=range(32), plan=compute_all(28), measured={WATCHED_INPUT: norms})
    revealed = (*(-1,) * 12, 0, *(None,) * 19)
    for kind, window in ((PassKind.FULL, range(32)), (PassKind.SMALL, range(8, 16)), (PassKind.COMMIT, range(32))):
        context = StepContext(step=1, kind=kind, window=window, revealed_at=revealed, past=(past,))
        for plan in {compute_all(28)} if kind is PassKind.COMMIT else {compute_all(28), bound.plan(context)}:
            segments = [
                PassSegment(
                    slot=slot,
                    start=320 + window.start,
                    tokens=[5] * len(window),
                    read=(3, 4, 5),
                    queries=(0.0,) * 3,
                    selected=plan.selected,
                    priors=plan.priors,
                )
                for slot in range(min(batch, runner.sequences(kind, len(window))))
            ]
            assert len(segments) == (4 if batch == 8 and kind is not PassKind.SMALL else batch)
            runner.reuse.valid = [[-1] * len(bits) for bits in runner.reuse.valid]
            counter.reset()
            runner.run(segments, plan, kind, reuse=bool(runner.reuse.row_of) and kind is not PassKind.COMMIT)
            assert (counter.to_device, counter.to_host) == (1, 1)
            assert sum(counter.kernels.values()) <= MAX_KERNELS_PER_LAYER * SEVEN_B.num_layers
            assert counter.attention == {attention: sum(step.runs_attention for step in plan.steps)}

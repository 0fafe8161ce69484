"""The fast decoder against the golden vectors, the oracle, and itself in batches."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from golden_cases import GoldenRow, batch_rows, single_rows
from golden_cases import Step as GoldenStep
from oracle.decoder import ReferenceGenerated, reference_generate
from small_models import DEPTH, golden_model, shallow, shallow_oracle

from sampler import DecodeSettings, Generated, InputError, LoadedModel, Prompt, ReusePolicy, decode_prompts
from sampler.decode import Predictor, Step
from sampler.engine import Engine, Pass
from sampler.plan import REPLAY_ATTENTION, REPLAY_MLP, SKIP, CacheSpec, PassKind, compute_all
from sampler.reveal import Prediction

torch.set_num_threads(1)

MASK, STOP = 159, 158
TIE = 1e-4  # decisions closer than this may fall either way
GRID = [f"k{k}_{subset}{mode}" for k in (2, 3) for subset in ("first", "middle", "last") for mode in ("", ".output")]
BEYOND = [
    *("adaptive=0.3_middle", "adaptive=0.8_first.5", "adaptive=inf_0-3.1", "skip_middle", "skip_all", "stale=3"),
    *("trim=0_middle", "trim=0.1_first", "trim=0.5_all", "trim=0.25_2+5-6", "trim=0.25_middle.random"),
    *("mlp=2_middle", "mlp=3_all", "attn=2_last", "attn=4_0+3-5"),
]
NAMES = ["k1", *GRID, "k2_middle.small", "k3_first.output.small", "k2_all", "k2_1-3+6", "k4_last", "k2_0", *BEYOND]
POLICIES = [pytest.param(name, marks=pytest.mark.slow if name in BEYOND[1::2] else ()) for name in NAMES]
BLOCK = 32
LENGTHS = (1, 7, 31, 32, 33, 50, 64, 70)


def prompt(length: int, seed: int = 0, **options: Any) -> Prompt:
    generator = random.Random(1000 * length + seed)
    return Prompt(ids=tuple(generator.randrange(157) for _ in range(length)), **options)


def decode(
    policy: str,
    prompts: Sequence[Prompt],
    settings: DecodeSettings,
    *,
    model: LoadedModel | None = None,
    **options: Any,
) -> list[Generated]:
    found = dict(
        decode_prompts(model or shallow(), prompts, policy=ReusePolicy.parse(policy), settings=settings, **options)
    )
    return [found[index] for index in range(len(prompts))]


def oracle(policy: str, one: Prompt, settings: DecodeSettings) -> ReferenceGenerated:
    return reference_generate(
        shallow_oracle(), one.ids, policy=ReusePolicy.parse(policy), settings=settings, seed=one.seed
    )


# The reference implementation's answers


@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in single_rows()])
def test_single_prompts_match_the_reference(row: GoldenRow) -> None:
    steps: list[Step] = []
    model = golden_model(row.model)
    [got] = decode("k1", [Prompt(ids=row.prompt)], row.settings, model=model, on_step=steps.append)
    assert got.ids == row.ids
    assert got.finish == ("stop" if row.stopped else "length")
    if not row.stopped:
        assert {kind: getattr(got.counters, kind) for kind in row.passes} == row.passes
    if row.trace is not None:
        seen = [GoldenStep(block=s.block, small=s.small_block, kind=s.kind.value, tokens=s.tokens) for s in steps]
        assert tuple(seen) == row.trace[: len(seen)]  # the reference denoises the block of a stop to its end
        assert row.stopped or len(seen) == len(row.trace)


@pytest.mark.parametrize(("every", "wanted"), [(4, 25), pytest.param(1, 115, marks=pytest.mark.slow)])
def test_ragged_batches_match_the_reference(every: int, wanted: int) -> None:
    compared = 0
    for settings, model in list(dict.fromkeys((row.settings, row.model) for row in batch_rows()))[::every]:
        rows = [row for row in batch_rows() if (row.settings, row.model) == (settings, model)]
        got = decode("k1", [Prompt(ids=row.prompt) for row in rows], settings, model=golden_model(model), batch_size=4)
        assert [g.ids for g in got] == [row.ids for row in rows]
        compared += len(rows)
    assert compared == wanted


def test_k1_is_the_same_under_every_name() -> None:
    prompts = [prompt(length) for length in LENGTHS]
    plain = decode("k1", prompts, DecodeSettings(max_new_tokens=40))
    for name in ("k1_first", "k1_last.output", "k1_middle.small"):
        named = decode(name, prompts, DecodeSettings(max_new_tokens=40))
        assert [(g.ids, g.counters) for g in named] == [(g.ids, g.counters) for g in plain]


# The oracle


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_equals_the_oracle(policy: str) -> None:
    generator = random.Random(policy)
    for length in LENGTHS:
        settings = DecodeSettings(
            threshold=generator.choice((0.3, 0.5, 0.9, 1.0)),
            small_block=generator.choice((4, 8, 16, 32)),
            block_cache=generator.random() < 0.7,
            max_new_tokens=generator.randrange(1, 70),
        )
        one = prompt(length)
        [got], want = decode(policy, [one], settings, with_reveals=True), oracle(policy, one, settings)
        if want.margin < TIE and got.ids != want.ids:
            continue
        assert (got.ids, got.finish) == (want.ids, want.finish)
        printed = got.counters.as_json()
        assert (printed["passes"], printed["layers"]) == (want.passes, want.layers)
        assert got.reveals is not None
        assert [(each.block, each.step) for each in got.reveals] == [(block, step) for block, step, _ in want.reveals]
        assert [each.confidence for each in got.reveals] == pytest.approx([each[2] for each in want.reveals], abs=1e-4)
        within = [position % BLOCK for position in range(length, length + len(got.ids))]
        assert [each.small_block for each in got.reveals] == [place // settings.small_block for place in within]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_recording_reveals_changes_nothing(temperature: float) -> None:
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    settings = DecodeSettings(threshold=0.5, max_new_tokens=40, temperature=temperature)
    plain = decode("k2_middle", prompts, settings, batch_size=3)
    recorded = decode("k2_middle", prompts, settings, batch_size=3, with_reveals=True)
    assert [(g.ids, g.counters) for g in recorded] == [(g.ids, g.counters) for g in plain]
    assert all(g.reveals is None for g in plain)
    assert all(g.reveals is not None and len(g.reveals) == len(g.ids) for g in recorded)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_sampling_equals_the_oracle_for_any_batch(top_p: float) -> None:
    settings = DecodeSettings(threshold=0.4, max_new_tokens=45, temperature=0.7, top_p=top_p)
    prompts = [prompt(length, seed=index) for index, length in enumerate(LENGTHS)]
    alone = decode("k2_middle", prompts, settings)
    together = decode("k2_middle", prompts, settings, batch_size=3)
    compared = 0
    for one, single, batched in zip(prompts, alone, together, strict=True):
        want = oracle("k2_middle", one, settings)
        if want.margin > TIE:
            assert single.ids == batched.ids == want.ids
            compared += 1
    assert compared >= 4
    other = [replace(one, seed=one.seed + 1) for one in prompts]
    assert [g.ids for g in decode("k2_middle", other, settings)] != [g.ids for g in alone]


# Batches


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch_size", [3, 8])
def test_batches_equal_single_runs(policy: str, batch_size: int) -> None:
    generator = random.Random(f"{policy} {batch_size}")
    prompts = [prompt(length, max_new_tokens=generator.randrange(1, 90)) for length in (*LENGTHS, 3, 40, 65)]
    settings = DecodeSettings(threshold=0.5, max_new_tokens=90)
    alone = [decode(policy, [one], settings)[0] for one in prompts]
    together = decode(policy, prompts, settings, batch_size=batch_size)
    for one, single, batched in zip(prompts, alone, together, strict=True):
        limited = replace(settings, max_new_tokens=one.max_new_tokens)
        if single.ids != batched.ids and oracle(policy, one, limited).margin < TIE:
            continue
        assert batched.ids == single.ids
        assert batched.counters == single.counters


# Reuse


def test_output_mode_is_the_same_for_every_subset() -> None:
    prompts = [prompt(length) for length in LENGTHS]
    settings = DecodeSettings(threshold=0.5, max_new_tokens=64)
    for k in (2, 3):
        first, *others = (decode(f"k{k}_{s}.output", prompts, settings) for s in ("first", "middle", "last", "2+5"))
        for other in others:
            assert [(g.ids, g.counters) for g in other] == [(g.ids, g.counters) for g in first]


def test_residual_subsets_differ() -> None:
    prompts = [prompt(length) for length in LENGTHS]
    settings = DecodeSettings(threshold=0.5, max_new_tokens=64)
    first, middle, last = (decode(f"k2_{s}", prompts, settings) for s in ("first", "middle", "last"))
    for one, other in ((first, middle), (middle, last), (first, last)):
        assert [g.ids for g in one] != [g.ids for g in other]


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_execute_the_plan(policy: str) -> None:
    ran: Counter[str] = Counter()
    attention, mlp = shallow().config.layer_weights
    halves = {REPLAY_MLP: attention / (attention + mlp), REPLAY_ATTENTION: mlp / (attention + mlp)}

    class Counted:
        """A layer that counts its executions, in place of the layer."""

        def __init__(self, layer: Any) -> None:
            self.layer = layer

        def run(self, x_ND: torch.Tensor, *arguments: Any) -> torch.Tensor:
            ran["computed"] += 1
            ran["positions"] += len(x_ND)
            return self.layer.run(x_ND, *arguments)

        def run_half(self, step: Any, x_ND: torch.Tensor, *arguments: Any) -> torch.Tensor:
            ran["computed"] += 1
            ran["positions"] += halves[step] * len(x_ND)  # type: ignore[assignment]
            return self.layer.run_half(step, x_ND, *arguments)

        def run_selected(self, x_ND: torch.Tensor, selection: Any, *arguments: Any) -> torch.Tensor:
            ran["computed"] += 1
            ran["positions"] += len(selection.rows)
            return self.layer.run_selected(x_ND, selection, *arguments)

        def replay(self, *arguments: Any) -> torch.Tensor:
            ran["reused"] += 1
            return self.layer.replay(*arguments)

    network = replace(shallow().network, layers=[Counted(layer) for layer in shallow().network.layers])
    steps: list[Step] = []
    [got] = decode(
        policy,
        [prompt(40)],
        DecodeSettings(threshold=0.9, max_new_tokens=60),
        model=replace(shallow(), network=network),
        on_step=steps.append,
    )
    counters = got.counters
    in_half = [step for step in steps if {REPLAY_MLP, REPLAY_ATTENTION} & set(step.executed.steps)]
    assert counters.layers_computed == ran["computed"]
    assert counters.layer_positions == pytest.approx(ran["positions"], abs=len(in_half) / 2)
    stale = [step for step in steps if step.executed.stale]
    running = [do for step in steps if not step.executed.stale for do in step.executed.steps]
    planned = sum(do.runs_attention or do.runs_mlp for do in running)
    assert ran["computed"] == planned + DEPTH * (counters.prefill + counters.commit)
    assert counters.layers_reused == ran["reused"] + running.count(SKIP) + DEPTH * len(stale)
    passes = counters.prefill + counters.full + counters.small + counters.commit
    assert counters.layers_computed + counters.layers_reused == DEPTH * passes
    assert counters.eligible == counters.replayed == sum(step.executed.replays for step in steps)
    assert (counters.eligible > 0) == (policy != "k1")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_kind_of_a_pass_does_not_depend_on_the_policy(policy: str) -> None:
    steps: list[Step] = []
    decode(policy, [prompt(33)], DecodeSettings(threshold=0.5, max_new_tokens=90), on_step=steps.append)
    before: tuple[int, ...] = ()
    block = None
    for step in steps:
        needs_block = step.block != block or before[8 * step.small_block] == MASK
        assert step.kind is (PassKind.FULL if needs_block else PassKind.SMALL)
        block, before = step.block, step.tokens


def test_the_first_pass_of_a_block_replays_nothing() -> None:
    steps: list[Step] = []
    decode("k2_all", [prompt(20)], DecodeSettings(threshold=0.5, max_new_tokens=100), on_step=steps.append)
    firsts = [
        now for before, now in zip([None, *steps], steps, strict=False) if not before or now.block != before.block
    ]
    assert len(firsts) >= 3
    assert not any(step.executed.replays for step in firsts)


def test_eligible_passes_without_a_replay_are_an_error() -> None:
    def row() -> Any:
        yield Pass(
            kind=PassKind.FULL,
            start=0,
            tokens=[1] * 32,
            plan=compute_all(DEPTH),
            opens_block=True,
            eligible=True,
            read=(0,),
            queries=(0.0,),
        )

    engine: Engine[None] = Engine(
        shallow().network, cache_spec=CacheSpec(), slots=1, capacity=32, reader=Predictor(mask_token_id=MASK), reads=1
    )
    with pytest.raises(RuntimeError, match="1 passes should have replayed"):
        list(engine.run([row()]))


# One call does not see another


def test_after_an_exception_the_next_call_equals_a_fresh_one() -> None:
    settings = DecodeSettings(threshold=0.5, max_new_tokens=60)
    prompts = [prompt(length) for length in LENGTHS]
    fresh = decode("k2_middle", prompts, settings, batch_size=3)

    def fail(step: Step) -> None:
        if step.block == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode("k3_first", prompts, settings, batch_size=3, on_step=fail)
    again = decode("k2_middle", prompts, settings, batch_size=3)
    assert [(g.ids, g.counters) for g in again] == [(g.ids, g.counters) for g in fresh]


def test_consecutive_calls_do_not_affect_each_other() -> None:
    settings = DecodeSettings(threshold=0.5, max_new_tokens=60)
    prompts = [prompt(length) for length in LENGTHS]
    first, _, again = (decode(policy, prompts, settings) for policy in ("k2_first", "k3_last.output", "k2_first"))
    assert [(g.ids, g.counters) for g in first] == [(g.ids, g.counters) for g in again]


# Where a sequence ends


@pytest.mark.parametrize("limit", [1, 5, 24, 25, 31, 32, 33, 64, 70])
def test_the_limit_is_exact(limit: int) -> None:
    [long] = decode("k1", [prompt(39, seed=4)], DecodeSettings(threshold=0.5, max_new_tokens=100))
    [short] = decode("k1", [prompt(39, seed=4)], DecodeSettings(threshold=0.5, max_new_tokens=limit))
    assert len(long.ids) > limit
    assert short.ids == long.ids[:limit]
    assert short.finish == "length"


def test_nothing_runs_after_a_stop() -> None:
    """The step that reveals the stop is the last one, and its block is not committed."""
    denoised = 0
    for seed in range(20):
        steps: list[Step] = []
        [got] = decode("k1", [prompt(20, seed)], DecodeSettings(threshold=0.3, max_new_tokens=90), on_step=steps.append)
        assert MASK not in got.ids
        assert STOP not in got.ids[:-1]
        if got.finish == "stop":
            block, place = divmod(20 + len(got.ids) - 1, 32)
            assert got.ids[-1] == STOP
            assert got.counters.commit == block
            up_to_the_stop = [step.tokens[: place + 1] for step in steps if step.block == block]
            assert all(MASK in tokens for tokens in up_to_the_stop[:-1])
            assert all(MASK not in tokens for tokens in up_to_the_stop[-1:])
            denoised += bool(up_to_the_stop)
    assert denoised >= 3


def test_prompts_are_not_modified() -> None:
    prompts = [prompt(length) for length in LENGTHS]
    copies = [Prompt(ids=tuple(one.ids)) for one in prompts]
    decode("k2_middle", prompts, DecodeSettings(max_new_tokens=33), batch_size=4)
    assert prompts == copies


def test_bad_requests_are_rejected_before_anything_runs() -> None:
    settings = DecodeSettings()
    for ids, complaint in (((), "empty"), ((160,), "outside the vocabulary"), ((-1,), "outside"), ((MASK,), "mask")):
        with pytest.raises(InputError, match=complaint):
            decode("k1", [Prompt(ids=ids)], settings)
    with pytest.raises(InputError, match="must divide"):
        decode("k1", [prompt(3)], DecodeSettings(small_block=5))
    with pytest.raises(InputError, match="batch size must be"):
        decode("k1", [prompt(3)], settings, batch_size=0)
    for wrong in ({"threshold": 0.0}, {"threshold": float("nan")}, {"max_new_tokens": 0}, {"temperature": -1.0}):
        with pytest.raises(InputError, match=rf"\(got {next(iter(wrong.values())):g}\)"):
            DecodeSettings(**wrong)  # type: ignore[arg-type]


# Revealing


def test_the_mask_is_never_predicted_but_stays_in_the_softmax() -> None:
    def predict(predictor: Predictor, logits: torch.Tensor, uniforms: Sequence[float]) -> list[Prediction]:
        packed = torch.tensor(predictor.pack(uniforms, range(len(uniforms))), dtype=torch.int64)
        return predictor.unpack(predictor.read(logits, packed).tolist(), uniforms)

    [greedy] = predict(Predictor(mask_token_id=2), torch.tensor([[1.0, 2.0, 9.0]]), [0.0])
    assert greedy.token == 1
    assert greedy.probability == pytest.approx(float(torch.tensor([1.0, 2.0, 9.0]).softmax(-1)[1]))
    sampler = Predictor(mask_token_id=2, temperature=1.0)
    drawn = predict(sampler, torch.tensor([[1.0, 2.0, 9.0]] * 50), [i / 50 for i in range(50)])
    assert {p.token for p in drawn} == {0, 1}

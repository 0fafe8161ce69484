"""Padded passes on the CPU: they give the tokens of exact ones, and a row's tokens do not depend on its batch."""

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from emulated_gpu import SplitLinear, attention_kernels, with_execution, with_products
from small_models import shallow, shallow_folder

from sampler import DecodeSettings, LoadedModel, Prompt, ReusePolicy, decode_prompts, load_model, score_pairs
from sampler.attention import Backend
from sampler.passes import PassRunner
from sampler.records import Pair

torch.set_num_threads(1)

LENGTHS = (3, 31, 32, 50, 64, 70, 300, 5, 33)
POLICIES = ("k1", "k2_middle", "k3_first.output", "trim=0.25_middle", "trim=0.6_all", "mlp=2_last", "attn=2_middle")
SETTINGS = DecodeSettings(threshold=0.5, max_new_tokens=40)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    with attention_kernels():
        yield


@cache
def prompts() -> list[Prompt]:
    numbers = random.Random(0)
    return [Prompt(ids=tuple(numbers.randrange(157) for _ in range(length))) for length in LENGTHS]


def tokens(model: LoadedModel, policy: str, batch_size: int = 1, chosen: Sequence[int] | None = None) -> list[object]:
    documents = [prompts()[i] for i in (range(len(prompts())) if chosen is None else chosen)]
    found = dict(
        decode_prompts(
            model,
            documents,
            policy=ReusePolicy.parse(policy),
            settings=SETTINGS,
            batch_size=batch_size,
            with_text=False,
        )
    )
    return [(found[i].ids, found[i].counters) for i in range(len(documents))]


@cache
def exact_tokens(policy: str) -> list[object]:
    return tokens(shallow(), policy)


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("policy", POLICIES)
def test_padded_passes_give_the_same_tokens(policy: str, backend: Backend) -> None:
    assert tokens(with_execution(shallow(), backend), policy, batch_size=5) == exact_tokens(policy)


@pytest.mark.parametrize("backend", [Backend.VARLEN, Backend.EFFICIENT])
@pytest.mark.parametrize("policy", ["k1", "k2_middle"])
def test_padded_passes_give_the_same_scores(policy: str, backend: Backend) -> None:
    numbers = random.Random(1)
    shared = tuple(numbers.randrange(157) for _ in range(70))
    ends = [tuple(numbers.randrange(157) for _ in range(length)) for length in (1, 26, 30, 60)]
    pairs = [Pair(prefix=shared + end, target=target) for end in ends for target in ((5,), (9,), (3, 4))]
    scores, prefilled = [], []
    for model, batch in ((shallow(), 1), (with_execution(shallow(), backend), 3)):
        found = dict(score_pairs(model, pairs, policy=ReusePolicy.parse(policy), batch_size=batch))
        scores.append([found[i].score for i in range(len(pairs))])
        prefilled.append(sum(scored.counters.prefill_tokens for scored in found.values()))
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    assert prefilled[1] == prefilled[0]


# Products whose rounding depends on the number of rows


@cache
def rounding_model() -> LoadedModel:
    """In bfloat16, with products that are summed in another order for another number of rows."""
    model = with_products(load_model(str(shallow_folder()), dtype="bfloat16", device="cpu"), SplitLinear)
    assert model.network.execution.padded
    return with_execution(model, Backend.VARLEN)


@pytest.mark.parametrize("policy", ["k1", "k2_middle", "trim=0.25_middle", "adaptive=0.3_middle"])
def test_batch_mates_do_not_change_a_row(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rounding_model()
    alone = tokens(model, policy)
    assert tokens(model, policy, batch_size=8) == alone
    # A resumed run: other documents are left, so that each has other batch mates.
    assert tokens(model, policy, batch_size=8, chosen=range(3, 9)) == alone[3:]
    assert tokens(model, policy, batch_size=16, chosen=range(3, 9)) == tokens(model, policy, batch_size=16)[3:]
    if policy != "k1":
        return
    # With as many rows as the batch has, the same products give other tokens: the test above can fail.
    monkeypatch.setattr(PassRunner, "sequences", lambda runner, kind, width: runner.batch_size)  # noqa: ARG005
    shrunk = [tokens(model, policy, batch_size=size) for size in (1, 8)]
    assert shrunk[0] != shrunk[1]


# torch.compile


class Graphs:
    """A compiler that runs graphs as they are, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        compile_real = torch.compile

        def compiler(graph: torch.fx.GraphModule, _inputs: object) -> Any:
            self.count += 1
            return graph.forward

        def compile_with(function: Any, **options: Any) -> Any:
            return compile_real(function, **{**options, "mode": None, "backend": compiler})

        monkeypatch.setattr(torch, "compile", compile_with)


@pytest.mark.parametrize("backend", [Backend.DENSE, Backend.VARLEN])
def test_one_graph_per_plan_and_bucket(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    graphs = Graphs(monkeypatch)
    model = with_execution(shallow(), backend, compiled=True)
    assert tokens(model, "k2_middle", batch_size=3) == exact_tokens("k2_middle")
    # Full and small passes that compute or replay, and commit passes. On a GPU prefills too, with and without a logit.
    assert graphs.count == (5 if backend is Backend.DENSE else 7)
    others = [Prompt(ids=(length % 150,) * length) for length in (2, 90, 32, 500)]
    k2 = ReusePolicy.parse("k2_middle")
    assert len(list(decode_prompts(model, others, policy=k2, settings=SETTINGS, batch_size=3))) == 4
    assert graphs.count == (5 if backend is Backend.DENSE else 7)
    torch.compiler.reset()


@pytest.mark.slow  # compiles for minutes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own code
@pytest.mark.parametrize(("source", "policy"), [("tiny", "k1"), ("shallow", "k2_middle")])
def test_inductor_gives_the_same_tokens(source: str, policy: str) -> None:
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        decoded = decode_prompts(
            load_model(str(shallow_folder()) if source == "shallow" else source, device="cpu", compiled=compiled),
            [Prompt(ids=(5, 17, 80, 3, 29)), Prompt(ids=(7,) * 40)],
            policy=ReusePolicy.parse(policy),
            settings=DecodeSettings(threshold=0.7, max_new_tokens=40),
            batch_size=2,
            with_text=False,
        )
        found.append({index: (one.ids, one.counters) for index, one in decoded})
    assert found[0] == found[1]
    torch.compiler.reset()

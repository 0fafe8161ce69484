"""Half precision: our error against float64 is that of transformers, and the bundled model gives the same answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_gpu import Float32Sums, attention_kernels, with_execution, with_products
from golden_cases import model_folder
from qwen2_folders import qwen2, tensors, write_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from sampler import DecodeSettings, LoadedModel, Prompt, ReusePolicy, decode_prompts, load_model
from sampler.attention import Backend
from sampler.loading import BUNDLED_FOLDER, build_transformer, find_model
from sampler.passes import PassRunner, PassSegment
from sampler.plan import CacheSpec, PassKind, compute_all
from sampler.text import encode
from tasks.documents import TaskOptions
from tasks.evaluate import chat_renderer
from tasks.task import open_task

torch.set_num_threads(1)

HALF = (torch.float16, torch.bfloat16)
MAX_ERROR_RATIO = 1.2
KEY_BIAS, ACTIVATION = 150.0, 9000.0  # the largest in Qwen2.5-7B are of this size


def load(folder: Path, dtype: torch.dtype, backend: Backend = Backend.VARLEN) -> LoadedModel:
    """On the CPU, as a GPU would compute it: with padding, and the stand-ins for its attention kernels."""
    files = find_model(str(folder))
    weights = load_file(folder / "model.safetensors")
    network = build_transformer(weights.__getitem__, files.config, dtype=dtype, device=torch.device("cpu"))
    model = LoadedModel(source=files.source, revision=None, folder=files.folder, config=files.config, network=network)
    return with_execution(model, backend)


class Logits:
    """A reader that returns the logits."""

    def pack(self, queries: Sequence[Any], block_rows: Sequence[int]) -> Sequence[int]:
        del queries, block_rows
        return ()

    def read(self, logits_PV: Tensor, packed: Tensor) -> Tensor:
        del packed
        return logits_PV.flatten()

    def unpack(self, numbers: Sequence[float], queries: Sequence[Any]) -> list[Tensor]:
        rows = torch.tensor(numbers, dtype=torch.float64).view(-1, len(numbers) // 64)
        return list(rows[: len(queries)])


@torch.inference_mode()
def our_logits(model: LoadedModel, ids: list[int]) -> Tensor:
    """Of the second of two blocks, which sees the first."""
    runner = PassRunner(model.network, CacheSpec(), slots=1, capacity=64, reader=Logits(), reads=16)
    plan = compute_all(model.config.num_layers)
    runner.run([PassSegment(slot=0, start=0, tokens=ids[:32])], plan, PassKind.PREFILL, reuse=False)
    found = []
    for first in (0, 16):
        read = tuple(range(first, first + 16))
        segment = PassSegment(slot=0, start=32, tokens=ids[32:], read=read, queries=(None,) * 16)
        found += runner.run([segment], plan, PassKind.FULL, reuse=False).answers[0]
    return torch.stack(found)


@torch.inference_mode()
def their_logits(folder: Path, dtype: torch.dtype, ids: list[int]) -> Tensor:
    config = Qwen2Config(**json.loads((folder / "config.json").read_text()), attn_implementation="sdpa")
    model = Qwen2ForCausalLM(config).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    block = torch.arange(64) // 32
    mask = torch.zeros(1, 1, 64, 64, dtype=dtype).masked_fill_(block[:, None] < block, float("-inf"))
    logits: Tensor = model.to(dtype)(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).logits
    return logits[0, 32:].double()


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few key features and one feature of the residual stream are far larger than all others, as in Qwen2.5."""
    theirs = qwen2()
    with torch.no_grad():
        theirs.model.embed_tokens.weight[:, 7] = ACTIVATION
        for layer in theirs.model.layers:
            layer.self_attn.k_proj.bias[::5] = KEY_BIAS
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight *= 300.0
                norm.weight[7] = 0.01
        theirs.model.norm.weight *= 300.0
        theirs.model.norm.weight[7] = 0.01
    return write_model(tmp_path_factory.mktemp("outliers") / "model", tensors(theirs))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", ["m28", "m36", "tiny", "outliers"])
def test_logits_are_as_close_to_float64_as_those_of_transformers(name: str, dtype: torch.dtype, outliers: Path) -> None:
    folder = {"tiny": BUNDLED_FOLDER, "outliers": outliers}.get(name) or model_folder(name)
    model = load(folder, dtype)
    numbers = torch.Generator().manual_seed(0)
    ours, theirs = [], []
    with attention_kernels():
        for _ in range(4):
            ids = torch.randint(0, 140, (64,), generator=numbers).tolist()
            exact = their_logits(folder, torch.float64, ids)
            ours.append((our_logits(model, ids) - exact).abs().mean())
            theirs.append((their_logits(folder, dtype, ids) - exact).abs().mean())
    mean = float(sum(theirs)) / 4
    assert 0 < float(sum(ours)) / 4 <= MAX_ERROR_RATIO * mean
    assert mean < float(exact.abs().mean())  # the comparison means something


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_the_bundled_model_gives_the_same_answers_in_float16(count: int) -> None:
    exact = load_model("tiny", device="cpu")
    rounded = with_products(load(BUNDLED_FOLDER, torch.float16, Backend.REFERENCE), Float32Sums)
    task = open_task("gsm8k", TaskOptions(data="bundled"))
    template = chat_renderer(exact.tokenizer)
    texts = [task.requests(document, template)[0].args[0] for document in task.documents[:count]]
    prompts = [Prompt(ids=encode(exact.tokenizer, text)) for text in texts]
    answers = []
    for model in (exact, rounded):
        settings = DecodeSettings(max_new_tokens=128)
        k1 = ReusePolicy.parse("k1")
        decoded = dict(decode_prompts(model, prompts, policy=k1, settings=settings, batch_size=8, with_text=False))
        answers.append([decoded[index].ids for index in range(len(prompts))])
    assert len(prompts) == count
    assert sum(a == b for a, b in zip(*answers, strict=True)) >= 0.95 * count

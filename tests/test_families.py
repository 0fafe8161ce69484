"""Every model family: golden cases, transformers' logits, and the oracle for each block size and policy."""

import json
import random
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.decoder import ReferenceModel, reference_generate, reference_score
from random_model import write_model
from sweep_process import SweepProcess
from test_loading import two_blocks
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from orchestrator.store import Store
from sampler import DecodeSettings, InputError, LoadedModel, Pair, Prompt, ReusePolicy, decode_prompts, load_model
from sampler.config import FAMILIES, FAMILY_NAMES, ModelConfig, read_config
from sampler.loading import find_model
from sampler.scoring import score_pairs

torch.set_num_threads(1)

GOLDEN = Path(__file__).parent / "golden" / "noshift"
CASES = [case for case in json.loads((GOLDEN / "noshift_cases.json").read_text()) if case["robust"]]
SLOW = pytest.mark.slow  # the oracle is slow for long blocks
TIE = 1e-4  # decisions closer than this may fall either way
VOCABULARY, MASK, STOP = 160, 159, 158
POLICIES = (
    *("k1", "k2_first", "k3_last", "k2_middle.output", "k2_middle.small", "k3_first.output.small", "k4_all"),
    *("adaptive=0.3_middle", "skip_middle", "stale=3", "trim=0.25_middle", "trim=0.5_all.random", "mlp=2_middle"),
    "attn=2_last",
)
SCORING = ("k1", "k2_middle", "k3_last", "k2_middle.small", "k3_middle.output", "mlp=2_middle", "attn=3_all")
BACKBONES = {"sdar": (Qwen3ForCausalLM, Qwen3Config), "llama": (LlamaForCausalLM, LlamaConfig)}


def write_random(folder: Path, model_type: str, *, block: int = 8, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model made and saved by transformers, with the keys of a block-diffusion checkpoint added."""
    torch.manual_seed(seed)
    kind, config = BACKBONES[model_type]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "eos_token_id": STOP,
        "pad_token_id": STOP,
    }
    theirs = kind(config(**shape | changes)).eval().float()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.25).add_(1.0 if parameter.dim() == 1 else 0.0)
    theirs.save_pretrained(folder)
    path = folder / "config.json"
    own = {"model_type": model_type, "block_size": block, "mask_token_id": MASK}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    return theirs


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("families")
    for model_type in BACKBONES:
        for block in (4, 8, 16, 32):
            write_random(root / f"{model_type}{block}", model_type, block=block)
    return root


@cache
def golden(name: str) -> LoadedModel:
    return load_model(str(GOLDEN / name), device="cpu")


def decode_one(model: LoadedModel, ids: tuple[int, ...], policy: str, settings: DecodeSettings) -> Any:
    [(_, got)] = decode_prompts(model, [Prompt(ids=ids)], policy=ReusePolicy.parse(policy), settings=settings)
    return got


def tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = random.Random(1000 * count + seed)
    return tuple(generator.randrange(STOP) for _ in range(count))


# Golden cases


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in CASES])
def test_golden_cases_are_decoded_token_for_token(case: dict[str, Any]) -> None:
    model = golden(case["model"])
    settings = DecodeSettings(
        threshold=case["threshold"], small_block=model.config.block_size, max_new_tokens=case["max_new_tokens"]
    )
    got = decode_one(model, tuple(case["prompt"]), "k1", settings)
    assert list(got.ids) == case["ids"]
    assert got.counters.full + got.counters.small == case["steps"]


@pytest.mark.parametrize("probe", json.loads((GOLDEN / "noshift_logits.json").read_text()), ids=lambda p: p["model"])
def test_golden_logits(probe: dict[str, Any]) -> None:
    model = golden(probe["model"])
    with torch.inference_mode():
        got = two_blocks(model, torch.tensor(probe["ids"]))[-1]
    assert torch.allclose(got, torch.tensor(probe["logits_last"]), atol=1e-4)


# transformers' own models


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("sdar", {}),
        ("sdar", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("sdar", {"head_dim": 32, "num_key_value_heads": 4}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 8}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10_000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
        ),
        (
            "sdar",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
        ),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    theirs = write_random(tmp_path, model_type, block=16, **changes)
    ids = torch.arange(64) * 3 % VOCABULARY
    block = torch.arange(64) // 16
    mask = torch.zeros(1, 1, 64, 64).masked_fill_(block[:, None] < block, float("-inf"))
    with torch.inference_mode():
        want: Tensor = theirs(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0]
        got = two_blocks(load_model(str(tmp_path), device="cpu"), ids)
    assert torch.allclose(got, want, atol=1e-4)


# The oracle


@pytest.mark.parametrize("block", [4, *(pytest.param(block, marks=SLOW) for block in (8, 16, 32))])
@pytest.mark.parametrize("model_type", BACKBONES)
def test_decoding_equals_the_oracle_for_any_batch(folders: Path, model_type: str, block: int) -> None:
    folder = folders / f"{model_type}{block}"
    model, oracle = load_model(str(folder), device="cpu"), ReferenceModel.load(folder)
    compared = 0
    for policy in POLICIES:
        generator = random.Random(f"{policy} {block}")
        prompts = [tokens(length, block) for length in (1, block - 1, block, 2 * block + 3)]
        settings = DecodeSettings(
            threshold=generator.choice((0.2, 0.4, 1.0)),
            small_block=generator.choice((block, block, block // 2)),
            block_cache=generator.random() < 0.7,
            max_new_tokens=generator.randrange(1, 2 * block + 8),
        )
        parsed = ReusePolicy.parse(policy)
        together = dict(
            decode_prompts(model, [Prompt(ids=ids) for ids in prompts], policy=parsed, settings=settings, batch_size=3)
        )
        for index, ids in enumerate(prompts):
            want = reference_generate(oracle, ids, policy=parsed, settings=settings)
            got = decode_one(model, ids, policy, settings)
            if want.margin < TIE:
                continue
            compared += 1
            assert (got.ids, got.finish) == (want.ids, want.finish)
            printed = got.counters.as_json()
            assert (printed["passes"], printed["layers"]) == (want.passes, want.layers)
            assert (together[index].ids, together[index].counters) == (got.ids, got.counters)
    assert compared > 2 * len(POLICIES)


@pytest.mark.parametrize("block", [4, pytest.param(32, marks=SLOW)])
@pytest.mark.parametrize("model_type", BACKBONES)
def test_scoring_equals_the_oracle(folders: Path, model_type: str, block: int) -> None:
    folder = folders / f"{model_type}{block}"
    model, oracle = load_model(str(folder), device="cpu"), ReferenceModel.load(folder)
    lengths = ((1, 1), (block - 1, 3), (block, 1), (block, block + 2), (2 * block + 1, 2), (block + 2, 2 * block))
    pairs = [Pair(prefix=tokens(prefix, 1), target=tokens(target, 2)) for prefix, target in lengths]
    pairs += [Pair(prefix=pairs[-1].prefix, target=(*pairs[-1].target[:-2], 3, 4))]  # shares a prefix and most tokens
    for policy in SCORING:
        for method in ("chain", "reference"):
            parsed = ReusePolicy.parse(policy)
            batched = dict(score_pairs(model, pairs, policy=parsed, method=method, batch_size=3))
            for index, pair in enumerate(pairs):
                want = reference_score(oracle, pair.prefix, pair.target, policy=parsed, method=method)
                [(_, got)] = score_pairs(model, [pair], policy=parsed, method=method)
                assert got.score == pytest.approx(want.score, abs=1e-3)
                assert (got.greedy, got.rewound) == (want.greedy, want.rewound)
                printed = got.counters.as_json()
                assert (printed["passes"], printed["layers"]) == (want.passes, want.layers)
                assert batched[index].score == pytest.approx(want.score, abs=1e-3)


# Families in config.json


def config_of(folder: Path, **raw: Any) -> ModelConfig:
    shape = json.loads((GOLDEN / "q12b4" / "config.json").read_text())
    plain = {key: value for key, value in shape.items() if key not in ("architectures", "model_type", "block_size")}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(plain | raw))
    return read_config(folder, dict)


@pytest.mark.parametrize(
    ("raw", "family", "block"),
    [
        ({"architectures": ["SDARForCausalLM"]}, "sdar", 4),
        ({"model_type": "sdar", "block_length": 16}, "sdar", 16),
        ({"architectures": ["Fast_dLLM_QwenForCausalLM"]}, "fast-dllm-v2", 32),
        ({"model_type": "qwen2", "bd_size": 8}, "fast-dllm-v2", 8),
        ({"architectures": ["EfficientDLMForCausalLM"]}, "efficient-dlm", 32),
        ({"architectures": ["Qwen3ForCausalLM"], "block_size": 32}, "a2d", 32),
        ({"model_type": "a2d-qwen3", "block_size": 8}, "a2d", 8),
        ({"architectures": ["LlamaForCausalLM"], "block_size": 4}, "stable-diffcoder", 4),
    ],
)
def test_family_and_block_size_follow_config_json(tmp_path: Path, raw: dict[str, Any], family: str, block: int) -> None:
    config = config_of(tmp_path, **raw)
    assert (config.family.name, config.block_size) == (family, block)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architecture MistralForCausalLM is not supported; supported fam"),
        ({}, "architecture none is not supported"),
        ({"model_type": "llama"}, "has no block size"),
        ({"model_type": "sdar", "block_size": 0}, "block_size must be a positive whole number"),
        ({"model_type": "qwen3", "block_size": 4, "mask_token_id": None}, "has no mask_token_id"),
        ({"architectures": ["SDARMoeForCausalLM"]}, "mixture-of-experts"),
        ({"model_type": "sdar", "use_sliding_window": True}, "use_sliding_window"),
        ({"model_type": "sdar", "attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "block_size": 4, "mlp_bias": True}, "mlp_bias"),
    ],
)
def test_unsupported_checkpoints_are_refused(tmp_path: Path, raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        config_of(tmp_path, **raw)


def test_family_and_block_size_can_be_overridden(folders: Path) -> None:
    folder = str(folders / "sdar8")
    config = find_model(folder, family="efficient-dlm", block_size=16).config
    assert (config.family.name, config.block_size, config.mask_token_id) == ("efficient-dlm", 16, MASK)
    with pytest.raises(InputError, match=f"unknown model family 'x': use {FAMILY_NAMES[0]}"):
        find_model(folder, family="x")
    with pytest.raises(InputError, match=r"proj\.bias is missing .* check --family"):
        load_model(find_model(folder, family="fast-dllm-v2"), device="cpu")
    with pytest.raises(InputError, match=r"_norm\.weight .* is not part of a model of this family"):
        load_model(find_model(folder, family="stable-diffcoder"), device="cpu")


def test_a_checkpoint_states_its_own_token_shift(tmp_path: Path) -> None:
    shifted = config_of(tmp_path, model_type="qwen3", block_size=4, token_shift=True)
    assert shifted.predicted_at(7) == 6
    assert config_of(tmp_path, model_type="qwen3", block_size=4).predicted_at(7) == 7


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_default_small_block_divides_every_block(family: Any) -> None:
    for block in (1, 4, 12, 16, 32, 64):
        assert block % family.default_small_block(block) == 0


@SLOW
def test_a_sweep_over_a_model_without_token_shift(tmp_path: Path) -> None:
    """The whole command on an SDAR-shaped model: family defaults, layer subsets, gates and report."""
    write_model(tmp_path / "model", model_type="sdar", architectures=["SDARForCausalLM"], bd_size=None, block_size=4)
    policies = [f"k{k}_{subset}" for k in (1, 2) for subset in ("first", "middle", "last")]
    flags = ("--tasks", "gsm8k,mmlu", "--limit", "6", "--max-new-tokens", "24", "--policies", ",".join(policies))
    run = SweepProcess(tmp_path, tmp_path / "out", *flags, "--data", "bundled", "--no-dashboard")
    run.wait()
    rows = Store(run.folder).rows().to_pylist()
    assert {(row["task"], row["policy"]) for row in rows} == set(product(("gsm8k", "mmlu"), policies))
    layers = {"first": [1, 2], "middle": [2, 3], "last": [4, 5]}
    for row in rows:
        assert row["layers"] == layers[row["policy"].partition("_")[2]]
        assert (row["layers_reused"] > 0) == (row["policy"].startswith("k2") and row["eligible"] > 0)
        if row["task"] == "gsm8k":
            assert (row["threshold"], row["small_block"]) == (0.85, 4)
    assert any(row["layers_reused"] for row in rows)
    assert "Validity checks failed" not in (run.folder / "results.md").read_text()

"""`reuse-sweep parity`: a checkpoint folder that ships its own modelling file, equal to ours or different."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from golden_cases import GOLDEN
from random_model import write_model

from sampler import InputError, load_model
from sampler.parity import (
    CHILD,
    KEPT_VARIABLES,
    _revealed,
    child_environment,
    code_files,
    compare,
    decoding_states,
    own_logits,
    parity_prompts,
)

ROOT = Path(__file__).parents[1]
CONFIGURATION = """
from transformers import PretrainedConfig

class BlockConfig(PretrainedConfig):
    model_type = "fast_dllm_block"
"""
# A plain Qwen2 with block-causal attention, written for this test: one forward over the whole sequence, no cache.
MODELLING = """
import os
import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_block import BlockConfig

for name in os.environ:
    assert not any(word in name for word in ("TOKEN", "SECRET", "AWS_", "KEY")), name
    assert "hf_a-secret" not in os.environ[name], name

class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size = config.hidden_size // config.num_attention_heads
        keys = config.num_key_value_heads * self.size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, keys)
        self.v_proj = nn.Linear(config.hidden_size, keys)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, cos, sin, mask):
        def heads(y):
            return y.unflatten(-1, (-1, self.size)).transpose(1, 2)

        def rotate(y):
            left, right = y.chunk(2, -1)
            return y * cos + torch.cat((-right, left), -1) * sin

        q, k, v = rotate(heads(self.q_proj(x))), rotate(heads(self.k_proj(x))), heads(self.v_proj(x))
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = Norm(config.hidden_size, 1e-6)
        self.post_attention_layernorm = Norm(config.hidden_size, 1e-6)

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))

class Body(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, 1e-6)

class FastDLLMForCausalLM(PreTrainedModel):
    config_class = BlockConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, **_):
        count, size = input_ids.shape[1], self.config.hidden_size // self.config.num_attention_heads
        position = torch.arange(count)
        angle = torch.outer(position.float(), {theta} ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
        block = position // self.config.bd_size
        mask = {mask}
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x, angle.cos(), angle.sin(), mask)
        return CausalLMOutput(logits=self.lm_head(self.model.norm(x)))
"""
BLOCK_CAUSAL, CAUSAL = "block[:, None] >= block", "position[:, None] >= position"


def write_checkpoint(folder: Path, *, theta: str = "10000.0", mask: str = BLOCK_CAUSAL) -> Path:
    write_model(folder, layers=3)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "fast_dllm_block",
        "architectures": ["FastDLLMForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_block.BlockConfig",
            "AutoModelForCausalLM": "modeling_block.FastDLLMForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_block.py").write_text(CONFIGURATION)
    (folder / "modeling_block.py").write_text(MODELLING.replace("{theta}", theta).replace("{mask}", mask))
    return folder


def run(folder: Path, *flags: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator.cli", "parity", "--model", str(folder), "--python", python, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_checkpoints_own_code_agrees_and_sees_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modelling file raises if it finds a secret in its environment."""
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "SOMETHING"):
        monkeypatch.setenv(name, "hf_a-secret-that-nobody-may-see")
    ended = run(write_checkpoint(tmp_path / "model"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "running configuration_block.py (sha256 " in ended.stderr, "what will run is printed before it runs"
    assert f"with {sys.executable}" in ended.stderr
    assert ended.stdout.splitlines()[-1] == "all logits and tokens agree"
    assert "class FastDLLMForCausalLM" in ended.stdout


@pytest.mark.parametrize(
    "change", [{"mask": CAUSAL}, pytest.param({"theta": "10050.0"}, marks=pytest.mark.slow)], ids=["mask", "theta"]
)
def test_a_different_implementation_is_caught_and_explained(change: dict[str, str], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", **change)
    found = compare(load_model(str(folder), dtype="float32", device="cpu"), Path(sys.executable))
    assert found.differences
    assert found.largest > 2e-4
    first = found.differences[0]
    assert first.startswith("prompt 0, block ")
    for part in ("step ", "position ", "the logit of token ", "in the checkpoint's code; the prediction is token "):
        assert part in first


@pytest.mark.slow
def test_errors_of_the_other_environment_are_reported(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    ended = run(folder, python=str(tmp_path / "missing"))
    assert ended.returncode == 2
    assert "is not an interpreter; give a path such as ENV/bin/python" in ended.stderr
    (folder / "modeling_block.py").write_text("import a_package_that_is_missing")
    with pytest.raises(InputError, match=r"the checkpoint's code failed with .*a_package_that_is_missing"):
        compare(load_model(str(folder), dtype="float32", device="cpu"), Path(sys.executable))


@pytest.mark.parametrize("name", ["m28", "noshift/q12b4"])
def test_own_logits_reveal_what_was_decoded(name: str) -> None:
    """With and without token shift; the passes are those of decoding, so nothing may differ."""
    model = load_model(str(GOLDEN / name), device="cpu")
    settings = model.config.decode_settings({}, max_new_tokens=20, block_cache=False)
    states = list(decoding_states(model, parity_prompts(model), settings))
    assert len({(state.prompt, state.block) for state in states}) > 3
    for state, rows in zip(states, own_logits(model, states), strict=True):
        predictions = [row.prediction(model.config.mask_token_id) for row in rows]
        assert _revealed(state, predictions, settings.reveal_rule) == dict(state.revealed)


def test_a_checkpoint_without_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no modelling code of its own"):
        code_files(write_model(tmp_path / "model"))


def test_the_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    found = child_environment("/empty")
    added = {"HOME", "TMPDIR", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"}
    assert found.keys() <= {*KEPT_VARIABLES} | added
    assert "trust_remote_code=True" in CHILD

"""Loading: config.json, safetensors, special ids, dtype and device, the Hub. Each error names its cause."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from qwen2_folders import CONFIG, EOS, MASK, PAD, qwen2, tensors, tiny_folder, write_model, write_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2ForCausalLM

from sampler import loading
from sampler.attention import Rows
from sampler.cache import KeyValueCache
from sampler.config import ModelConfig
from sampler.decode import decode_prompts
from sampler.device import pick_device, pick_dtype
from sampler.errors import InputError
from sampler.loading import LoadedModel, find_model, load_model
from sampler.plan import compute_all
from sampler.policy import ReusePolicy
from sampler.records import DecodeSettings, Prompt

torch.set_num_threads(1)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHA = "0123456789abcdef0123456789abcdef01234567"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SILENT = {"mask_token_id": None, "eos_token_id": None, "pad_token_id": None}  # config.json says nothing of these


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return tensors(qwen2())


@pytest.fixture
def folder(tmp_path: Path, weights: dict[str, Tensor]) -> Path:
    return write_model(tmp_path / "model", weights)


def refused(source: Path | str, *parts: str) -> None:
    """Loading fails with one sentence that contains all of `parts`."""
    with pytest.raises(InputError) as caught:
        load_model(str(source), device="cpu")
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert all(part in sentence for part in parts), sentence


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    write_model(folder, {}, **changes)
    return find_model(str(folder)).config


# The weights


def two_blocks(model: LoadedModel, ids: Tensor) -> Tensor:
    """Our logits of clean blocks; each sees those before it."""
    network = model.network
    cache = KeyValueCache(model.config, 1, len(ids), dtype=network.dtype, device=network.device)
    window = cache.view(Rows([0], [range(len(ids))]))
    states, _ = network.forward(ids, window, compute_all(model.config.num_layers))
    return network.logits(states)


def their_two_blocks(model: Qwen2ForCausalLM, ids: Tensor) -> Tensor:
    block = torch.arange(64) // 32
    mask = torch.zeros(1, 1, 64, 64).masked_fill_(block[:, None] < block, float("-inf"))
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids[None], attention_mask=mask, use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(tmp_path: Path, tied: bool, shards: int) -> None:
    theirs = qwen2(tied=tied)
    stored = tensors(theirs, with_head=not tied)
    ours = load_model(str(write_model(tmp_path, stored, shards=shards, tie_word_embeddings=tied)), device="cpu")
    ids = torch.arange(64) * 3 % 250
    with torch.inference_mode():
        assert torch.allclose(two_blocks(ours, ids), their_two_blocks(theirs, ids), atol=1e-4)


def test_what_transformers_itself_saves_is_read(tmp_path: Path) -> None:
    """Its config.json has rope_parameters instead of rope_theta, and no bd_size or mask."""
    theirs = qwen2(rope_theta=50.0)
    theirs.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(saved | {"bd_size": 32, "mask_token_id": MASK}))
    ids = torch.arange(64) + 100
    with torch.inference_mode():
        ours = two_blocks(load_model(str(tmp_path), device="cpu"), ids)
        assert torch.allclose(ours, their_two_blocks(theirs, ids), atol=1e-4)


def test_bfloat16_on_a_cpu_loads_and_decodes(folder: Path) -> None:
    model = load_model(str(folder), dtype="bfloat16", device="cpu")
    assert model.dtype is torch.bfloat16
    settings, prompts = DecodeSettings(max_new_tokens=9), [Prompt(ids=tuple(range(40)))]
    [(_, generated)] = decode_prompts(model, prompts, policy=ReusePolicy.parse("k2_middle"), settings=settings)
    assert len(generated.ids) == 9 or generated.finish == "stop"


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtype_does_not_matter(tmp_path: Path, weights: dict[str, Tensor], stored: torch.dtype) -> None:
    model = load_model(str(write_model(tmp_path, {k: v.to(stored) for k, v in weights.items()})), device="cpu")
    assert model.dtype is torch.float32


def test_tied_embeddings_with_an_equal_head_stored(tmp_path: Path) -> None:
    stored = tensors(qwen2(tied=True))
    assert "lm_head.weight" in stored
    load_model(str(write_model(tmp_path, stored, tie_word_embeddings=True)), device="cpu")


def test_tied_embeddings_with_another_head_stored(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    refused(write_model(tmp_path, weights, tie_word_embeddings=True), "lm_head.weight", "model.embed_tokens.weight")


def test_missing_tensor_is_named(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    del weights["model.layers.1.self_attn.k_proj.bias"]
    refused(write_model(tmp_path, weights), "model.layers.1.self_attn.k_proj.bias", "missing")


def test_untied_head_that_is_missing_is_named(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    del weights["lm_head.weight"]
    refused(write_model(tmp_path, weights), "lm_head.weight", "missing")


def test_unexpected_tensor_is_named(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)
    refused(write_model(tmp_path, weights), "model.layers.2.mlp.up_proj.weight", "not part of a model of this family")


def test_tensor_of_another_shape_is_named(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(48, 32)
    refused(write_model(tmp_path, weights), "model.layers.0.mlp.down_proj.weight", "(48, 32)", "(32, 48)")


def test_tensor_of_whole_numbers_is_named(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    refused(write_model(tmp_path, weights), "model.norm.weight", "I8", "F32")


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_truncated_file(folder: Path, kept: float) -> None:
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[: int(len(whole) * kept) if isinstance(kept, float) else kept])
    refused(folder, SINGLE, "corrupted or truncated")


def test_garbage_file(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"<html>404</html>" * 100)
    refused(folder, SINGLE, "corrupted or truncated")


def test_missing_shard(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write_model(tmp_path, weights, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, "model-00002-of-00003.safetensors", "missing")


def test_tensor_in_two_shards(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    write_model(tmp_path, weights, shards=2)
    first, second = (tmp_path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    name, tensor = next(iter(load_file(second).items()))
    save_file(load_file(first) | {name: tensor}, first)
    refused(tmp_path, name, first.name, second.name)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/secret.safetensors", "a/b.safetensors", "x.bin", "", 7])
def test_index_that_points_elsewhere(tmp_path: Path, weights: dict[str, Tensor], name: object) -> None:
    folder = write_model(tmp_path / "model", {})
    (folder / SINGLE).unlink()
    save_file(weights, tmp_path / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, name)}))
    refused(folder, INDEX, repr(name), "not a safetensors file in this directory")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}', "\ud800"])
def test_broken_index(tmp_path: Path, text: str) -> None:
    write_model(tmp_path, {})
    (tmp_path / SINGLE).unlink()
    (tmp_path / INDEX).write_bytes(text.encode(errors="surrogatepass"))
    refused(tmp_path, INDEX, "not a safetensors index")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was opened",))


def test_pickles_are_rejected_unopened(tmp_path: Path) -> None:
    write_model(tmp_path, {})
    (tmp_path / SINGLE).unlink()
    torch.save(Bomb(), tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pytorch_model.bin", "pickle", "safetensors")


def test_folder_without_weights(tmp_path: Path) -> None:
    write_model(tmp_path, {})
    (tmp_path / SINGLE).unlink()
    refused(tmp_path, str(tmp_path), "no weights", SINGLE)


# config.json


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b'{"vocab_size": ' + b"9" * 5000 + b"}", b"[" * 100_000])
def test_broken_config(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    refused(folder, "config.json", "not valid JSON")


@pytest.mark.parametrize("text", ["[]", "null", "3", '"qwen2"'])
def test_config_that_is_not_an_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refused(folder, "config.json", "not a JSON object")


def test_no_config(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "no config.json")


def test_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, "config.json", "cannot be read")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("hidden_size", 33),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 2.0),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", [2]),
        ("head_dim", 7),
        ("vocab_size", -1),
        ("vocab_size", 100),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", 0),
        ("rope_theta", 10**400),
        ("rope_theta", float("nan")),
        ("rope_theta", True),
        ("rope_parameters", [1]),
        ("tie_word_embeddings", "false"),
        ("bd_size", 0),
        ("bd_size", [32]),
        ("mask_token_id", [MASK]),
        ("mask_token_id", "<mask>"),
        ("mask_token_id", -1),
        ("mask_token_id", EOS),
        ("eos_token_id", []),
        ("eos_token_id", [EOS, None]),
        ("eos_token_id", 272),
        ("pad_token_id", True),
        ("max_position_embeddings", "many"),
    ],
)
def test_mistyped_config(folder: Path, key: str, value: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {key: value}))
    refused(folder, "config.json")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "bd_size"])
def test_key_that_is_missing_is_named(tmp_path: Path, key: str) -> None:
    with pytest.raises(InputError, match=key):
        config_of(tmp_path, **{key: None})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"type": "yarn"}}, "yarn rope factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}}, "llama3 rope factor"),
        ({"model_type": "llada2_moe"}, "mixture-of-experts"),
        ({"num_experts": 128}, "mixture-of-experts"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_unsupported_features_are_rejected(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        config_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_theta": None}, 1e4),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 3, "rope_scaling": {"type": "default"}}, 3.0),
    ],
)
def test_rotary_base_in_either_spelling(tmp_path: Path, changes: dict[str, Any], theta: float) -> None:
    assert config_of(tmp_path, **changes).rope_theta == theta


def test_unknown_model_type_is_read_and_its_code_is_never_run(folder: Path) -> None:
    code = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
    for name in ("modeling.py", "configuration.py", "tokenization.py"):
        (folder / name).write_text(code)
    changed = CONFIG | SILENT | {
        "model_type": "Fast_dLLM_Qwen",
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "auto_map": {"AutoConfig": "configuration.Config", "AutoModelForCausalLM": "modeling.Model"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(changed))
    write_tokenizer(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["tokenization.T", "tokenization.T"]}, "tokenizer_class": "T"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = load_model(str(folder), device="cpu")
    assert model.tokenizer.encode("ab") == [256]
    assert model.config.mask_token_id == MASK
    assert not (folder / "ran").exists()


# Special ids


def special(config: ModelConfig) -> tuple[int, int, tuple[int, ...], int]:
    return config.block_size, config.mask_token_id, config.eos_token_ids, config.pad_token_id


def test_special_ids_of_config_come_first(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = config_of(tmp_path, bd_size=16, mask_token_id=1, eos_token_id=[2, 3], pad_token_id=4)
    assert special(config) == (16, 1, (2, 3), 4)


def test_special_ids_of_the_tokenizer_come_second(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert special(config_of(tmp_path, **SILENT, model_type="Fast_dLLM_Qwen")) == (32, MASK, (EOS,), PAD)


@pytest.mark.parametrize("sign", [{"model_type": "Fast_dLLM_Qwen"}, {"architectures": ["Fast_dLLM_QwenForCausalLM"]}])
def test_special_ids_of_fast_dllm_v2_come_last(tmp_path: Path, sign: dict[str, Any]) -> None:
    config = config_of(tmp_path, **SILENT, **sign, bd_size=None, vocab_size=152064)
    assert special(config) == (32, 151665, (151645,), 151645)


def test_other_checkpoints_must_state_their_mask(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mask_token_id"):
        config_of(tmp_path, mask_token_id=None)


def test_pad_defaults_to_the_stop_token(tmp_path: Path) -> None:
    assert config_of(tmp_path, pad_token_id=None, eos_token_id=[7, 8]).pad_token_id == 7


def test_mask_that_only_the_tokenizer_settings_add(tmp_path: Path) -> None:
    """As a fine-tuned checkpoint may add it: not in tokenizer.json."""
    write_tokenizer(tmp_path, mask_token=None)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    added = {"content": "|<MASK>|", "special": True}
    settings |= {"mask_token": "|<MASK>|", "added_tokens_decoder": {"265": added}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert config_of(tmp_path, mask_token_id=None).mask_token_id == 265


def test_broken_tokenizer_is_named_where_its_ids_are_needed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("garbage")
    assert config_of(tmp_path).mask_token_id == MASK
    with pytest.raises(InputError, match=r"tokenizer in .* cannot be loaded"):
        config_of(tmp_path, mask_token_id=None)


# dtype and device


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ((12, 0), torch.bfloat16),
        ((8, 0), torch.bfloat16),
        ((7, 5), torch.float16),
        ((7, 0), torch.float16),
        ((6, 1), torch.float32),
    ],
)
def test_dtype_follows_the_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)  # noqa: ARG005
    assert pick_dtype("auto", CUDA) is dtype
    assert pick_dtype("float32", CUDA) is torch.float32
    assert pick_dtype("float16", CUDA) is torch.float16


def test_dtype_on_a_cpu() -> None:
    assert pick_dtype("auto", CPU) is torch.float32
    assert pick_dtype("bfloat16", CPU) is torch.bfloat16
    with pytest.raises(InputError, match="float16 is not supported on a CPU: use float32 or bfloat16"):
        pick_dtype("float16", CPU)


@pytest.mark.parametrize("name", ["", "fp16", "int8", "Float32", "float64"])
def test_unknown_dtype(name: str) -> None:
    with pytest.raises(InputError, match=f"unknown dtype '{name}': use auto, float32, float16, bfloat16"):
        pick_dtype(name, CPU)


def test_device_is_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == CUDA
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    assert pick_device("cpu") == CPU
    with pytest.raises(InputError, match="'cuda:2' does not exist: this machine has 2 CUDA devices"):
        pick_device("cuda:2")


def test_device_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto") == CPU
    with pytest.raises(InputError, match="'cuda' does not exist: this machine has 0 CUDA devices"):
        pick_device("cuda")


@pytest.mark.parametrize("name", ["", "gpu", "CPU", "cuda:", "cuda:-1", "cuda:200", "cuda:x", "cpu:3", "meta", "mps"])
def test_unknown_device(name: str) -> None:
    with pytest.raises(InputError, match=f"unknown device '{name}': use auto, cpu, cuda or cuda:N"):
        pick_device(name)


# The Hub


class FakeHub:
    """Fakes the functions of huggingface_hub; `calls` records the requests."""

    def __init__(self, snapshot: Path) -> None:
        self.snapshot, self.cached, self.calls = snapshot, False, []
        self.refusal: Exception | None = None

    def model_info(self, repo: str, *, revision: str | None, timeout: float) -> None:
        assert repo
        assert revision != ""
        assert 0 < timeout <= 10
        if self.refusal is not None:
            raise self.refusal

    def snapshot_download(self, repo: str, *, revision: str | None, local_files_only: bool, **patterns: Any) -> str:
        self.calls.append({"repo": repo, "revision": revision, **patterns})
        if local_files_only and not self.cached:
            raise LocalEntryNotFoundError("nothing cached")
        return str(self.snapshot)


@pytest.fixture
def hub(tmp_path: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(write_model(tmp_path / "hub" / "snapshots" / SHA, weights))
    monkeypatch.setattr(loading, "model_info", fake.model_info)
    monkeypatch.setattr(loading, "snapshot_download", fake.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.mark.parametrize(("source", "revision"), [("owner/name", None), ("owner/name@v2", "v2"), (f"name@{SHA}", SHA)])
def test_revision_is_passed_on_and_the_commit_is_kept(hub: FakeHub, source: str, revision: str | None) -> None:
    model = load_model(source, device="cpu")
    assert (model.source, model.revision, model.folder) == (source, SHA, hub.snapshot)
    assert (hub.calls[0]["repo"], hub.calls[0]["revision"]) == (source.partition("@")[0], revision)


def test_neither_code_nor_pickles_nor_subfolders_are_downloaded(hub: FakeHub) -> None:
    find_model("owner/name")
    assert not [p for p in hub.calls[0]["allow_patterns"] if re.search(r"py|bin|pt|^\*$", p)]
    assert hub.calls[0]["ignore_patterns"] == ["*/*"]


def test_a_local_folder_has_priority(hub: FakeHub, tmp_path: Path) -> None:
    tiny_folder(tmp_path / "owner" / "name")
    tiny_folder(tmp_path / "owner" / "odd@name")
    assert find_model("owner/name").revision is None
    assert find_model("owner/odd@name").folder == tmp_path / "owner" / "odd@name"
    assert not hub.calls
    refused("owner/name@v2", "'owner/name@v2'", "only Hub ids")


def test_an_earlier_download_is_used_offline(hub: FakeHub) -> None:
    hub.refusal, hub.cached = OfflineModeIsEnabled(), True
    assert find_model("owner/name").revision == SHA


class Answer:
    """What the Hub's errors ask of a response."""

    headers: dict[str, str] = {}  # noqa: RUF012
    request, status_code = None, 404


@pytest.mark.parametrize(
    ("refusal", "part"),
    [
        (GatedRepoError("no", response=Answer()), "gated"),  # type: ignore[arg-type]
        (RepositoryNotFoundError("no", response=Answer()), "nor a Hub repository that you can read"),  # type: ignore[arg-type]
        (RevisionNotFoundError("no", response=Answer()), "has a revision that does not exist on the Hub"),  # type: ignore[arg-type]
        (HTTPError("no route"), "the Hub cannot be reached"),
        (TimeoutError("slow"), "the Hub cannot be reached"),
        (OfflineModeIsEnabled("offline"), "the Hub cannot be reached"),
        (PermissionError(13, "Permission denied"), "cannot be written (Permission denied)"),
    ],
)
def test_hub_errors_are_one_sentence(hub: FakeHub, refusal: Exception, part: str) -> None:
    hub.refusal = refusal
    refused("owner/name@v2", "'owner/name@v2'", part)


def test_disk_that_is_full_while_downloading(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loading, "snapshot_download", full)
    assert hub.refusal is None
    refused("owner/name", "No space left on device", "HF_HOME")


def test_a_model_can_be_found_without_its_weights(hub: FakeHub) -> None:
    assert find_model("owner/name", weights=False).config.num_layers == 2
    assert "*.safetensors" not in hub.calls[0]["allow_patterns"]
    assert "*.json" in hub.calls[0]["allow_patterns"]


@pytest.mark.parametrize(
    "source", ["", "a/b/c", "a b", "/no/such/folder", "https://x.y/z", "@main", "a--b", "x" * 5000]
)
def test_neither_folder_nor_hub_id(source: str) -> None:
    refused(source, repr(source), "neither a local directory nor a Hub id such as owner/name")


def test_empty_revision() -> None:
    refused("owner/name@", "'owner/name@'", "empty revision")


def test_file_instead_of_a_folder(folder: Path) -> None:
    refused(folder / SINGLE, SINGLE, "is a file")

"""Finds a model (bundled, folder or Hub id), picks dtype and device, loads it. Never runs remote code or pickles."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import model_info, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HFValidationError,
    HTTPError,  # of the HTTP library that this version of the Hub's client uses
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sampler.config import EMBEDDING, FINAL_NORM, HEAD, ModelConfig, Shapes, expected_shapes, read_config
from sampler.errors import InputError, UnavailableError
from sampler.hub import REQUEST_TIMEOUT_SECONDS, UNREACHABLE, Clock, HubGaveUp, hub_problem, retry_hub
from sampler.model import Layer, Norm, Transformer, make_linear
from sampler.text import has_tokenizer, load_tokenizer, tokenizer_ids
from sampler.tiny import BUNDLED_MODEL

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DESCRIPTION = ["*.json", "*.txt", "*.jinja"]
FILES = [*DESCRIPTION, "*.safetensors"]  # no Python, no pickles
BUNDLED_FOLDER = Path(__file__).resolve().parent / "tiny"


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model that was found but not loaded. `revision` is the resolved commit of a Hub model, or a short hash of the
    bundled model's weights: trained anew, it is another model."""

    source: str
    revision: str | None
    folder: Path
    config: ModelConfig

    @cached_property
    def has_tokenizer(self) -> bool:
        return has_tokenizer(self.folder)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.folder)


@dataclass(frozen=True, kw_only=True)
class LoadedModel(ModelFiles):
    """A model ready to decode."""

    network: Transformer

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype


def load_model(source: str | ModelFiles, *, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """`source` is "tiny", a folder or a Hub id with an optional @revision, or what `find_model` made of it."""
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    files = source if isinstance(source, ModelFiles) else find_model(source)
    network = load_weights(files.folder, files.config, dtype=chosen_dtype, device=chosen_device)
    return LoadedModel(
        source=files.source, revision=files.revision, folder=files.folder, config=files.config, network=network
    )


def find_model(source: str, *, weights: bool = True, clock: Clock = time) -> ModelFiles:
    """The model's files, downloaded if needed, and its configuration. Without `weights` only the small files."""
    folder, revision = _find_folder(source, FILES if weights else DESCRIPTION, clock)
    config = read_config(folder, cache(lambda: tokenizer_ids(folder)))
    return ModelFiles(source=source, revision=revision, folder=folder, config=config)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,2})?", name):
        raise InputError(f"unknown device {name!r}: auto, cpu, cuda or cuda:N are allowed")
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device(kind, int(index)) if index else torch.device(kind)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """bfloat16 from compute capability 8 on, float16 on 7.x, else float32."""
    if name == "auto":
        capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
        return torch.bfloat16 if capability >= 8 else torch.float16 if capability == 7 else torch.float32
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}: auto, {', '.join(DTYPES)} are allowed")
    if name == "float16" and device.type == "cpu":
        raise InputError("dtype float16 is not supported on a CPU: use float32 or bfloat16")
    return DTYPES[name]


def _find_folder(source: str, files: list[str], clock: Clock) -> tuple[Path, str | None]:
    """A folder here wins over a Hub repository of the same name; `tiny` is the bundled model, `./tiny` a folder."""
    if source == BUNDLED_MODEL:
        return BUNDLED_FOLDER, _weights_hash(BUNDLED_FOLDER / SINGLE)
    repo, at, revision = source.partition("@")
    if source and os.path.isdir(source):
        return Path(source).resolve(), None
    if os.path.exists(source):
        raise InputError(f"model {source!r} is a file; a folder or a Hub id is allowed")
    if at and not revision:
        raise InputError(f"model {source!r} ends in an empty revision; a branch, tag or commit is allowed after @")
    if os.path.isdir(repo):
        raise InputError(f"model {source!r}: {repo!r} is a folder here, and only Hub ids have an @revision")
    path = _download(source, repo, revision or None, files, clock)
    return path, path.name


def _weights_hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        raise InputError(
            f"the bundled model {BUNDLED_MODEL!r} is not there ({path}); make train-tiny makes it"
        ) from None


def _download(source: str, repo: str, revision: str | None, files: list[str], clock: Clock) -> Path:
    """The snapshot's folder. If the Hub does not answer, an earlier download in the cache is used."""
    fetch = partial(snapshot_download, repo, revision=revision, allow_patterns=files, ignore_patterns=["*/*"])
    try:
        try:  # model_info first: snapshot_download would try an unreachable Hub for half a minute
            retry_hub(lambda: model_info(repo, revision=revision, timeout=REQUEST_TIMEOUT_SECONDS), clock=clock)
            return Path(retry_hub(lambda: fetch(local_files_only=False), clock=clock))
        except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: from Xet downloads
            refusal = error
        return Path(fetch(local_files_only=True))
    except HFValidationError:
        raise InputError(f"model {source!r} is neither a local folder nor a Hub id such as owner/name") from None
    except (HTTPError, OSError):
        raise _refused(source, refusal) from None


def _refused(source: str, error: Exception) -> InputError:
    model = f"model {source!r}"
    if isinstance(error, GatedRepoError):
        return InputError(
            f"{model} is gated: accept its terms on its Hub page, then set HF_TOKEN or log in with `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return InputError(f"{model} is neither a local folder nor a Hub repository that you can read")
    if isinstance(error, RevisionNotFoundError):
        return InputError(
            f"{model} has a revision that does not exist on the Hub; write a branch, tag or commit after @"
        )
    problem = hub_problem(error)
    if isinstance(error, HubGaveUp):
        return UnavailableError(f"{model} cannot be downloaded: {problem}; try again later or use a local folder")
    if problem == UNREACHABLE:
        return UnavailableError(
            f"{model} is not a local folder, and {problem}: use a local folder or connect to the network"
        )
    return InputError(f"{model} cannot be downloaded: {problem}")


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
READ_DTYPES = ("F32", "BF16", "F16", "F64")


def load_weights(folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Each tensor is read once, straight into the fused matrix it belongs to, in the wanted dtype."""
    return build_transformer(_open_checkpoint(folder, config), config, dtype=dtype, device=device)


def build_transformer(
    read: Callable[[str], Tensor], config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> Transformer:
    """A transformer from anything that reads tensors by their Qwen2 names."""
    fold = dtype is torch.float32 and device.type == "cpu"  # in half precision folding would round the weights again

    def fused(names: Iterable[str], norm: Tensor | None = None) -> Tensor:
        whole = torch.cat([order_projection(name, read(name), config).to(device=device, dtype=dtype) for name in names])
        return whole.mul_(norm * config.hidden_size**0.5) if fold and norm is not None else whole

    def norm(weight: Tensor, folded: bool = fold) -> Norm:
        return Norm(config.hidden_size, config.rms_norm_eps, None if folded else weight)

    def layer(index: int) -> Layer:
        block = f"model.layers.{index}."
        before_attention = fused([block + "input_layernorm.weight"])
        before_mlp = fused([block + "post_attention_layernorm.weight"])
        qkv = [f"{block}self_attn.{name}_proj" for name in "qkv"]
        return Layer(
            index=index,
            attention_norm=norm(before_attention),
            qkv=make_linear(
                fused([f"{name}.weight" for name in qkv], before_attention),
                fused([f"{name}.bias" for name in qkv]),
            ),
            qkv_pairs=(config.num_heads * config.head_dim // 2, config.num_kv_heads * config.head_dim),
            attention_out=make_linear(fused([block + "self_attn.o_proj.weight"])),
            mlp_norm=norm(before_mlp),
            gate_up=make_linear(fused([block + "mlp.gate_proj.weight", block + "mlp.up_proj.weight"], before_mlp)),
            gate_up_sizes=(config.intermediate_size, config.intermediate_size),
            down=make_linear(fused([block + "mlp.down_proj.weight"])),
        )

    tied = config.tied_embeddings
    embedding, final_norm = fused([EMBEDDING]), fused([FINAL_NORM])
    return Transformer(
        config=config,
        embedding_VD=embedding,
        layers=[layer(index) for index in range(config.num_layers)],
        final_norm=norm(final_norm, folded=fold and not tied),
        head=make_linear(embedding, shared=True) if tied else make_linear(fused([HEAD], final_norm)),
    )


def _open_checkpoint(folder: Path, config: ModelConfig) -> Callable[[str], Tensor]:
    """A reader of tensors by name. Names and shapes of all files are checked before a single tensor is read."""
    paths = [folder / SINGLE] if (folder / SINGLE).is_file() else _shards(folder)
    files: dict[str, Path] = {}
    found: Shapes = {}
    for path in paths:
        for name, shape in _header(path).items():
            if name in files:
                raise InputError(f"{folder}: tensor {name} is in both {files[name].name} and {path.name}")
            files[name], found[name] = path, shape
    expected = expected_shapes(config)
    if config.tied_embeddings and HEAD in found:
        expected[HEAD] = expected[EMBEDDING]
    _compare(folder, expected, found)

    def read(name: str) -> Tensor:
        with safe_open(files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    if config.tied_embeddings and HEAD in found and not torch.equal(read(HEAD), read(EMBEDDING)):
        raise InputError(f"{folder}: config.json ties the embeddings, but {HEAD} differs from {EMBEDDING}")
    return read


def _compare(folder: Path, expected: Shapes, found: Shapes) -> None:
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise InputError(f"{folder}: tensor {missing[0]} is missing ({len(missing)} in all); fetch the weights again")
    if unexpected:
        raise InputError(f"{folder}: tensor {unexpected[0]} ({len(unexpected)} in all) has no place in a Qwen2 model")
    for name, shape in expected.items():
        if found[name] != shape:
            raise InputError(f"{folder}: tensor {name} has shape {found[name]}, config.json asks for {shape}")


def _shards(folder: Path) -> list[Path]:
    try:
        named = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        raise InputError(_no_weights(folder)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{folder / INDEX} is not a safetensors index; fetch the file again") from None
    for name in sorted(named, key=str):
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{folder / INDEX} names {name!r}, which is no safetensors file of this folder")
        if not (folder / name).is_file():
            raise InputError(f"{folder}: weight file {name} is missing; fetch the weights again")
    return [folder / name for name in sorted(named)]


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        return f"{folder} holds the pickle checkpoint {pickles[0]}, which is never opened; only *.safetensors are read"
    return f"{folder} holds no weights; expected {SINGLE}, or {INDEX} with its files"


def _header(path: Path) -> Shapes:
    shapes: Shapes = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                shapes[name] = tuple(tensor.get_shape())
                if tensor.get_dtype() not in READ_DTYPES:
                    raise InputError(
                        f"{path}: tensor {name} is stored as {tensor.get_dtype()}; {', '.join(READ_DTYPES)} are read"
                    )
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged or cut short ({error}); fetch the file again") from None
    return shapes


def order_projection(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """A checkpoint's attention projection, weight or bias, in the order used here; other tensors as they are."""
    if "q_proj" in name:
        return _by_place_in_group(_pairs(tensor, config), config)
    if "k_proj" in name:
        return _pairs(tensor, config)
    if "o_proj" in name:
        return _by_place_in_group(tensor.t(), config).t()
    return tensor


def _pairs(projection: Tensor, config: ModelConfig) -> Tensor:
    halves = projection.view(-1, 2, config.head_dim // 2, *projection.shape[1:])
    return halves.transpose(1, 2).reshape(projection.shape)


def _by_place_in_group(projection: Tensor, config: ModelConfig) -> Tensor:
    groups = projection.reshape(config.num_kv_heads, -1, config.head_dim, *projection.shape[1:])
    return groups.transpose(0, 1).reshape(projection.shape)

"""Finds a model (bundled, local folder or Hub id), and builds a `Transformer` from its safetensors or random weights.

Remote code and pickles are never loaded.
"""

import hashlib
import json
import os
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
    HTTPError,  # of the HTTP library that the installed huggingface_hub uses
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from sampler.attention import pick_backend
from sampler.config import BUNDLED_MODEL, EMBEDDING, FINAL_NORM, HEAD, ModelConfig, Shapes, expected_shapes, read_config
from sampler.device import pick_device, pick_dtype
from sampler.errors import InputError, UnavailableError
from sampler.hub import REQUEST_TIMEOUT_SECONDS, UNREACHABLE, Clock, HubGaveUp, hub_problem, retry_hub
from sampler.model import Execution, HeadNorm, Layer, Norm, Transformer, make_linear
from sampler.text import has_tokenizer, load_tokenizer, tokenizer_ids

PROGRESS_BAR: Any = {"unit": "layer", "delay": 2, "leave": False, "disable": None}  # None: only at a terminal
STORED_DTYPES = ("F32", "BF16", "F16", "F64")
METADATA_FILES = ["*.json", "*.txt", "*.jinja"]
FILES = [*METADATA_FILES, "*.safetensors"]  # no Python, no pickles
BUNDLED_FOLDER = Path(__file__).resolve().parent / "tiny"
WEIGHTS_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model that was found but not loaded.

    `revision` is the commit of a Hub model, or a short hash of the bundled model's weights.
    """

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
    """A model that is ready to decode."""

    network: Transformer

    @property
    def device(self) -> torch.device:
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.dtype


def load_model(
    source: str | ModelFiles, *, dtype: str = "auto", device: str = "auto", compiled: bool = False
) -> LoadedModel:
    """`source` is "tiny", a folder, a Hub id with an optional @revision, or the result of `find_model`.

    With `compiled`, passes run through `torch.compile`; each new kind of pass is compiled when it first runs.
    """
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    files = source if isinstance(source, ModelFiles) else find_model(source)
    read_tensor = open_checkpoint(files.folder, files.config)
    network = build_transformer(read_tensor, files.config, dtype=chosen_dtype, device=chosen_device, compiled=compiled)
    return LoadedModel(
        source=files.source, revision=files.revision, folder=files.folder, config=files.config, network=network
    )


def find_model(
    source: str,
    *,
    family: str | None = None,
    block_size: int | None = None,
    weights: bool = True,
    code: bool = False,
    clock: Clock = time,
) -> ModelFiles:
    """Locates the model's files, downloading them if needed, and reads its configuration.

    `family` and `block_size` override what config.json states or implies. With `code`, its Python files are located
    too, which this package never runs: see `sampler.parity`.
    """
    files = [*(FILES if weights else METADATA_FILES), *(["*.py"] if code else [])]
    folder, revision = _find_folder(source, files, clock)
    ids = cache(lambda: tokenizer_ids(folder))
    config = read_config(folder, ids, family=family, block_size=block_size)
    return ModelFiles(source=source, revision=revision, folder=folder, config=config)


def _find_folder(source: str, files: list[str], clock: Clock) -> tuple[Path, str | None]:
    """A local folder has priority over a Hub repository of the same name; `tiny` is the bundled model."""
    if source == BUNDLED_MODEL:
        return BUNDLED_FOLDER, _short_hash(BUNDLED_FOLDER / WEIGHTS_FILE)
    repo, at, revision = source.partition("@")
    if source and os.path.isdir(source):
        return Path(source).resolve(), None
    if os.path.exists(source):
        raise InputError(f"model {source!r} is a file; give a directory or a Hub id")
    if at and not revision:
        raise InputError(f"model {source!r} has an empty revision; write a branch, tag or commit after @")
    if os.path.isdir(repo):
        raise InputError(f"model {source!r}: {repo!r} is a local directory, and only Hub ids can have an @revision")
    path = _download(source, repo, revision or None, files, clock)
    return path, path.name


def _short_hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        raise InputError(
            f"the bundled model {BUNDLED_MODEL!r} is missing ({path}); create it with make train-tiny"
        ) from None


def _download(source: str, repo: str, revision: str | None, files: list[str], clock: Clock) -> Path:
    """The folder of the downloaded snapshot. If the Hub does not answer, an earlier download is used."""
    fetch = partial(snapshot_download, repo, revision=revision, allow_patterns=files, ignore_patterns=["*/*"])
    try:
        try:  # model_info first: snapshot_download would try an unreachable Hub for half a minute
            retry_hub(lambda: model_info(repo, revision=revision, timeout=REQUEST_TIMEOUT_SECONDS), clock=clock)
            return Path(retry_hub(lambda: fetch(local_files_only=False), clock=clock))
        except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: from Xet downloads
            failure = error
        return Path(fetch(local_files_only=True))
    except HFValidationError:
        raise InputError(f"model {source!r} is neither a local directory nor a Hub id such as owner/name") from None
    except (HTTPError, OSError):
        raise _download_error(source, failure) from None


def _download_error(source: str, error: Exception) -> InputError:
    model = f"model {source!r}"
    if isinstance(error, GatedRepoError):
        return InputError(
            f"{model} is gated: accept its terms on its Hub page, then set HF_TOKEN or log in with `hf auth login`"
        )
    if isinstance(error, RepositoryNotFoundError):
        return InputError(f"{model} is neither a local directory nor a Hub repository that you can read")
    if isinstance(error, RevisionNotFoundError):
        return InputError(
            f"{model} has a revision that does not exist on the Hub; write a branch, tag or commit after @"
        )
    problem = hub_problem(error)
    if isinstance(error, HubGaveUp):
        return UnavailableError(f"{model} cannot be downloaded: {problem}; try again later or use a local directory")
    if problem == UNREACHABLE:
        return UnavailableError(
            f"{model} is not a local directory, and {problem}: use a local directory or connect to the network"
        )
    return InputError(f"{model} cannot be downloaded: {problem}")


def build_transformer(
    read_tensor: Callable[[str], Tensor],
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    compiled: bool = False,
) -> Transformer:
    """Reads each tensor once, by its name in transformers, straight into the fused matrix it belongs to."""
    in_float32_on_cpu = dtype is torch.float32 and device.type == "cpu"
    fold = in_float32_on_cpu  # norm weights into the next matrix; in half precision this would round again
    linear = partial(make_linear, packed=not compiled)  # a packed weight cannot be part of a compiled graph

    def fused(names: Iterable[str], norm: Tensor | None = None) -> Tensor:
        moved = ((name, read_tensor(name).to(device)) for name in names)  # first: a GPU converts and reorders faster
        parts = [_reorder(name, tensor.to(dtype), config) for name, tensor in moved]
        whole = torch.cat(parts)
        return whole.mul_(norm * config.hidden_size**0.5) if fold and norm is not None else whole

    def norm(weight: Tensor, folded: bool = fold) -> Norm:
        return Norm(config.hidden_size, config.rms_norm_eps, None if folded else weight)

    def head_norm(prefix: str) -> HeadNorm:
        query_d, key_d = (fused([f"{prefix}self_attn.{name}_norm.weight"]) for name in "qk")
        weight_Hd = torch.cat((query_d.expand(config.num_heads, -1), key_d.expand(config.num_kv_heads, -1)))
        return HeadNorm(weight_Hd, config.rms_norm_eps)

    def layer(index: int) -> Layer:
        prefix = f"model.layers.{index}."
        before_attention = fused([prefix + "input_layernorm.weight"])
        before_mlp = fused([prefix + "post_attention_layernorm.weight"])
        qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        return Layer(
            index=index,
            attention_norm=norm(before_attention),
            qkv=linear(
                fused([f"{name}.weight" for name in qkv], before_attention),
                fused([f"{name}.bias" for name in qkv]) if config.family.qkv_bias else None,
            ),
            qk_norm=head_norm(prefix) if config.family.qk_norm else None,
            qkv_pairs=(config.num_heads * config.head_dim // 2, config.num_kv_heads * config.head_dim),
            attention_out=linear(fused([prefix + "self_attn.o_proj.weight"])),
            mlp_norm=norm(before_mlp),
            gate_up=linear(fused([prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"], before_mlp)),
            gate_up_sizes=(config.intermediate_size, config.intermediate_size),
            down=linear(fused([prefix + "mlp.down_proj.weight"])),
        )

    tied = config.tied_embeddings
    embedding, final_norm = fused([EMBEDDING]), fused([FINAL_NORM])
    return Transformer(
        config=config,
        embedding_VD=embedding,
        layers=[layer(index) for index in tqdm(range(config.num_layers), "loading layers", **PROGRESS_BAR)],
        final_norm=norm(final_norm, folded=fold and not tied),
        head=linear(embedding, shared=True) if tied else linear(fused([HEAD], final_norm)),
        execution=Execution(
            backend=pick_backend(config, dtype=dtype, device=device, compiled=compiled),
            padded=not in_float32_on_cpu or compiled,  # kernels, hence rounding, depend on the number of positions
            compiled=compiled,
        ),
    )


def _reorder(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """Reorders the rows of an attention projection (weight, bias or norm), so that no pass has to copy them.

    The two halves of each query and key head are interleaved: a rotated pair is adjacent and can be viewed as a complex
    number, and the products of queries and keys do not change. Query heads are ordered by their position in the group
    that shares a key head, then by key head: queries and attention output are views, and keys are never repeated.
    """

    def interleave_halves(projection: Tensor) -> Tensor:
        halves = projection.view(-1, 2, config.head_dim // 2, *projection.shape[1:])
        return halves.transpose(1, 2).reshape(projection.shape)

    def group_heads(projection: Tensor) -> Tensor:
        groups = projection.reshape(config.num_kv_heads, -1, config.head_dim, *projection.shape[1:])
        return groups.transpose(0, 1).reshape(projection.shape)

    if "q_proj" in name:
        return group_heads(interleave_halves(tensor))
    if "k_proj" in name or "q_norm" in name or "k_norm" in name:
        return interleave_halves(tensor)
    if "o_proj" in name:
        return group_heads(tensor.t()).t()
    return tensor


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
    compiled: bool = False,
) -> LoadedModel:
    """A model with seeded random weights, which is as fast as a real one of this shape.

    It is confident enough to reveal several tokens per step, and never stops: mask, stop and pad have zero logits.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(config)

    def read(name: str) -> Tensor:
        shape = shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        tensor = torch.randn(shape, generator=generator) * (1.6 / config.hidden_size**0.5 if len(shape) > 1 else 0.2)
        if name == HEAD:
            tensor[[config.mask_token_id, config.pad_token_id, *config.eos_token_ids]] = 0
        return tensor

    network = build_transformer(read, config, dtype=dtype, device=device, compiled=compiled)
    return LoadedModel(source="random", revision=None, folder=Path("random"), config=config, network=network)


def open_checkpoint(folder: Path, config: ModelConfig) -> Callable[[str], Tensor]:
    """A function that reads a tensor by name. Names and shapes in all files are checked before any tensor is read."""
    paths = [folder / WEIGHTS_FILE] if (folder / WEIGHTS_FILE).is_file() else _shards(folder)
    files: dict[str, Path] = {}
    found: Shapes = {}
    for path in paths:
        for name, shape in _shapes_in(path).items():
            if name in files:
                raise InputError(f"{folder}: tensor {name} is in both {files[name].name} and {path.name}")
            files[name], found[name] = path, shape
    expected = expected_shapes(config)
    if config.tied_embeddings and HEAD in found:
        expected[HEAD] = expected[EMBEDDING]
    _check_shapes(folder, expected, found)

    def read(name: str) -> Tensor:
        with safe_open(files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    if config.tied_embeddings and HEAD in found and not torch.equal(read(HEAD), read(EMBEDDING)):
        raise InputError(f"{folder}: config.json ties the embeddings, but {HEAD} differs from {EMBEDDING}")
    return read


def _check_shapes(folder: Path, expected: Shapes, found: Shapes) -> None:
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        raise InputError(
            f"{folder}: tensor {missing[0]} is missing ({len(missing)} in all); download it again, or check --family"
        )
    if unexpected:
        raise InputError(
            f"{folder}: tensor {unexpected[0]} ({len(unexpected)} in all) is not part of a model of this family; "
            f"check config.json and --family"
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise InputError(f"{folder}: tensor {name} has shape {found[name]}, but config.json requires {shape}")


def _shards(folder: Path) -> list[Path]:
    index = folder / WEIGHTS_INDEX
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        raise InputError(_no_weights(folder)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{index} is not a safetensors index; download it again") from None
    for name in sorted(names, key=str):
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(f"{index} lists {name!r}, which is not a safetensors file in this directory")
        if not (folder / name).is_file():
            raise InputError(f"{folder}: weight file {name} is missing; download the weights again")
    return [folder / name for name in sorted(names)]


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return f"{folder} has a pickle checkpoint, {pickles[0]}, which is not safe to open; only *.safetensors are read"
    return f"{folder} has no weights; expected {WEIGHTS_FILE}, or {WEIGHTS_INDEX} with the files it lists"


def _shapes_in(path: Path) -> Shapes:
    shapes: Shapes = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                shapes[name] = tuple(tensor.get_shape())
                if tensor.get_dtype() not in STORED_DTYPES:
                    raise InputError(
                        f"{path}: tensor {name} has dtype {tensor.get_dtype()}; supported: {', '.join(STORED_DTYPES)}"
                    )
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is corrupted or truncated ({error}); download it again") from None
    return shapes

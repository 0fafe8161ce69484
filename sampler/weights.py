"""Safetensors under plain Qwen2 names → a `Transformer` with fused projections, strictly. Knows no Hub, no text."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sampler.config import ModelConfig
from sampler.errors import InputError
from sampler.layout import order_projection
from sampler.linear import make_linear
from sampler.model import Layer, Norm, Transformer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
READ_DTYPES = ("F32", "BF16", "F16", "F64")
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


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


def expected_shapes(config: ModelConfig) -> Shapes:
    """Every tensor a checkpoint of this configuration must hold, and no other."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        block = f"model.layers.{index}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{block}self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[f"{block}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{block}self_attn.o_proj.weight"] = (hidden, queries)
        shapes[f"{block}mlp.gate_proj.weight"] = shapes[f"{block}mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{block}mlp.down_proj.weight"] = (hidden, ffn)
        shapes[f"{block}input_layernorm.weight"] = shapes[f"{block}post_attention_layernorm.weight"] = (hidden,)
    return shapes


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

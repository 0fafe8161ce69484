"""Model families, and the configuration of a model, read from its config.json. Does not import torch."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sampler.errors import InputError
from sampler.records import DecodeSettings
from sampler.reveal import THRESHOLD

BUNDLED_MODEL = "tiny"  # its files are in sampler/tiny; tools/tiny trains it
FULL_MODEL = "Efficient-Large-Model/Fast_dLLM_v2_7B"
SMALL_MODEL = "Efficient-Large-Model/Fast_dLLM_v2_1.5B"
BLOCK_SIZE_KEYS = ("bd_size", "block_size", "block_length")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
ROPE_TYPES = {  # with the parameters that each needs
    "default": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """What differs between families: facts that config.json never states, and defaults for those that it may omit.

    To add a family, add an entry to `FAMILIES` and a row to docs/models.md.
    """

    name: str  # as in --family
    aliases: tuple[str, ...]  # parts of its architectures or model_type, in lower case without separators
    plain_type: str | None = None  # the model_type of transformers that this family may use unchanged
    qkv_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before the rotation
    token_shift: bool = False  # the logits at position i - 1 predict position i; otherwise those at i do
    block_size: int | None = None
    small_block: int | None = None  # the usual size; None: the whole block
    threshold: float = 0.9
    mask_token_id: int | None = None
    stop_token_id: int | None = None  # None: that of the tokenizer, in addition to those in config.json

    def default_small_block(self, block_size: int) -> int:
        return math.gcd(self.small_block or block_size, block_size)


FAST_DLLM_BLOCK_SIZE, FAST_DLLM_MASK, FAST_DLLM_STOP = 32, 151_665, 151_645
FAST_DLLM_V2 = ModelFamily(
    name="fast-dllm-v2",
    aliases=("fastdllm",),
    plain_type="qwen2",
    qkv_bias=True,
    token_shift=True,
    block_size=FAST_DLLM_BLOCK_SIZE,
    small_block=8,
    threshold=0.95,
    mask_token_id=FAST_DLLM_MASK,
    stop_token_id=FAST_DLLM_STOP,
)
SDAR = ModelFamily(name="sdar", aliases=("sdar",), qk_norm=True, block_size=4, threshold=0.85, mask_token_id=151669)
FAMILIES = (
    FAST_DLLM_V2,
    SDAR,
    ModelFamily(name="efficient-dlm", aliases=("efficientdlm",), qk_norm=True, block_size=32, mask_token_id=151662),
    ModelFamily(name="a2d", aliases=("a2d",), plain_type="qwen3", qk_norm=True),
    ModelFamily(name="stable-diffcoder", aliases=("diffcoder",), plain_type="llama"),
)
FAMILY_NAMES = tuple(family.name for family in FAMILIES)


def find_family(requested: str | None, architectures: Sequence[str], model_type: str | None) -> ModelFamily:
    """The requested family, or the one that config.json names. Raises InputError if there is none.

    A checkpoint that is only recognised by its backbone (`Qwen2ForCausalLM`) must state its own block size and mask.
    """
    if requested is not None:
        for family in FAMILIES:
            if family.name == requested:
                return family
        raise InputError(f"unknown model family {requested!r}: use {', '.join(FAMILY_NAMES)}")
    names = [_normalise(name) for name in (*architectures, model_type or "")]
    for family in FAMILIES:
        if any(alias in name for alias in family.aliases for name in names):
            return family
    for family in FAMILIES:
        if family.plain_type and any(name in (family.plain_type, f"{family.plain_type}forcausallm") for name in names):
            return replace(family, block_size=None, mask_token_id=None)
    shown = " / ".join(name for name in (*architectures, model_type) if name) or "none"
    raise InputError(
        f"architecture {shown} is not supported; supported families are {', '.join(FAMILY_NAMES)}. If the checkpoint "
        f"is one of them under another name, give --family"
    )


def _normalise(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a dense block-diffusion model, its family and its special token ids."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    block_size: int
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    max_positions: int = 32_768  # the longest sequence
    family: ModelFamily = FAST_DLLM_V2
    rope_scaling: tuple[tuple[str, Any], ...] = ()  # rope_parameters other than the default's, sorted

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"config.json: the number of attention heads ({self.num_heads}) must be a multiple of the number of "
                f"key/value heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise InputError(f"config.json: the head size must be even for rotary positions (got {self.head_dim})")
        for token in (self.mask_token_id, self.pad_token_id, *self.eos_token_ids):
            if token >= self.vocab_size:
                raise InputError(f"config.json: token id {token} is outside the vocabulary of {self.vocab_size}")
        if self.mask_token_id in self.eos_token_ids:
            raise InputError(f"config.json: token id {self.mask_token_id} is both the mask and a stop token")

    def predicted_at(self, position: int) -> int:
        """The position whose logits predict this one."""
        return position - self.family.token_shift

    @property
    def boundary_predictions(self) -> int:
        """How many tokens of a block are predicted by the position before the block: 1 with token shift, else 0."""
        return int(self.family.token_shift)

    @property
    def decode_defaults(self) -> dict[str, Any]:
        """The decode settings whose defaults depend on the model."""
        return {
            "threshold": self.family.threshold,
            "small_block": self.family.default_small_block(self.block_size),
        }

    def decode_settings(self, values: Mapping[str, Any], **overrides: Any) -> DecodeSettings:
        """Decode settings from `values`, then `overrides`; a missing or None value stands for the model's default."""
        if values.get("threshold") is not None and values.get("reveal", THRESHOLD) != THRESHOLD:
            raise InputError(
                f"threshold {values['threshold']:g} and reveal {values['reveal']} must not be used together: "
                f"a threshold is the reveal rule threshold={values['threshold']:g}"
            )
        present = {name: value for name, value in values.items() if value is not None}
        return DecodeSettings(**self.decode_defaults | present | overrides)

    @property
    def layer_weights(self) -> tuple[int, int]:
        """Number of matrix weights in one layer: of its attention, and of its MLP."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        return attention, 3 * self.hidden_size * self.intermediate_size


_FULL_CONFIG = ModelConfig(
    num_layers=28,
    hidden_size=3584,
    intermediate_size=18944,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=152_064,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tied_embeddings=False,
    block_size=FAST_DLLM_BLOCK_SIZE,
    mask_token_id=FAST_DLLM_MASK,
    eos_token_ids=(FAST_DLLM_STOP,),
    pad_token_id=FAST_DLLM_STOP,
)
# Shapes by Hub id (those of Qwen2.5, which the checkpoints were trained from): sweeps can be planned without the files.
KNOWN_CHECKPOINTS: Mapping[str, ModelConfig] = {
    FULL_MODEL: _FULL_CONFIG,
    SMALL_MODEL: replace(
        _FULL_CONFIG,
        hidden_size=1536,
        intermediate_size=8960,
        num_heads=12,
        num_kv_heads=2,
        vocab_size=151_936,
        tied_embeddings=True,
    ),
}


def expected_shapes(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor that a checkpoint with this configuration must have."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Shapes = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, hidden)
            if config.family.qkv_bias:
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        if config.family.qk_norm:
            shapes[f"{layer}self_attn.q_norm.weight"] = shapes[f"{layer}self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, queries)
        shapes[f"{layer}mlp.gate_proj.weight"] = shapes[f"{layer}mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, ffn)
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
    return shapes


def read_config(
    folder: Path,
    tokenizer_ids: Callable[[], Mapping[str, int | None]],
    *,
    family: str | None = None,
    block_size: int | None = None,
) -> ModelConfig:
    """The configuration; `family` and `block_size` override what config.json states or implies.

    `tokenizer_ids` loads the tokenizer, so it is only called for ids that config.json does not give.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder} has no config.json; a model needs config.json and *.safetensors") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} is not a JSON object; download it again")
    names = " ".join([*_names(raw.get("architectures")), str(raw.get("model_type"))])
    if "moe" in names.lower() or any(raw.get(key) for key in EXPERT_KEYS):
        raise InputError(f"{path}: mixture-of-experts models ({names}) are not supported; use a dense checkpoint")
    try:
        model_family = find_family(family, _names(raw.get("architectures")), raw.get("model_type"))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return _Fields(path, raw, tokenizer_ids, model_family).config(block_size)


def _names(value: object) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


@dataclass(frozen=True, slots=True)
class _Fields:
    """The validated fields of a config.json."""

    path: Path
    raw: dict[str, Any]
    tokenizer_ids: Callable[[], Mapping[str, int | None]]
    family: ModelFamily

    def config(self, block_size: int | None) -> ModelConfig:
        self._check_supported()
        hidden, heads = self._positive_int("hidden_size"), self._positive_int("num_attention_heads")
        if self.raw.get("head_dim") is None and hidden % heads:
            raise InputError(f"{self.path}: hidden size {hidden} is not a multiple of {heads} attention heads")
        eos = self._stop_ids()
        return ModelConfig(
            num_layers=self._positive_int("num_hidden_layers"),
            hidden_size=hidden,
            intermediate_size=self._positive_int("intermediate_size"),
            num_heads=heads,
            num_kv_heads=self._positive_int("num_key_value_heads", heads),
            head_dim=self._positive_int("head_dim", hidden // heads),
            vocab_size=self._positive_int("vocab_size"),
            rms_norm_eps=self._positive_float("rms_norm_eps", self.raw.get("rms_norm_eps", 1e-6)),
            rope_theta=self._positive_float("rope_theta", self._rope().get("rope_theta", 10000.0)),
            tied_embeddings=self._flag("tie_word_embeddings"),
            block_size=block_size or self._block_size(),
            mask_token_id=self._token_id("mask_token_id", self.family.mask_token_id),
            eos_token_ids=eos,
            pad_token_id=self._token_id("pad_token_id", eos[0]),
            max_positions=self._positive_int("max_position_embeddings", 32_768),
            family=self._family_of_checkpoint(),
            rope_scaling=self._rope_scaling(),
        )

    def _check_supported(self) -> None:
        layers = self.raw.get("layer_types") or []
        supported = {
            "hidden_act": (self.raw.get("hidden_act", "silu"), "silu"),
            "use_sliding_window": (self._flag("use_sliding_window"), False),
            "layer_types": (layers, ["full_attention"] * len(layers) if isinstance(layers, list) else []),
            "quantization_config": (self.raw.get("quantization_config"), None),
            "attention_bias": (self._flag("attention_bias") and not self.family.qkv_bias, False),
            "mlp_bias": (self._flag("mlp_bias"), False),
        }
        for key, (value, supported_value) in supported.items():
            if value != supported_value:
                raise InputError(f"{self.path}: {key} {value!r} is not supported")
        rope = self._rope()
        if (kind := rope.get("rope_type", "default")) not in ROPE_TYPES:
            raise InputError(f"{self.path}: rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        for key in ROPE_TYPES[kind]:
            self._positive_float(f"{kind} rope {key}", rope.get(key))

    def _family_of_checkpoint(self) -> ModelFamily:
        """The family, with its own block size and mask, and the checkpoint's token shift if config.json states it."""
        family = next(family for family in FAMILIES if family.name == self.family.name)
        shift = family.token_shift if self.raw.get("token_shift") is None else self._flag("token_shift")
        return replace(family, token_shift=shift)

    def _block_size(self) -> int:
        for key in BLOCK_SIZE_KEYS:
            if self.raw.get(key) is not None:
                return self._positive_int(key)
        if self.family.block_size is None:
            raise InputError(
                f"{self.path} has no block size ({', '.join(BLOCK_SIZE_KEYS)}): not a block-diffusion checkpoint? "
                "If it is one, give --block-size"
            )
        return self.family.block_size

    def _stop_ids(self) -> tuple[int, ...]:
        """The ids in config.json and that of the tokenizer, which for a chat model marks the end of a turn."""
        family_stop = self.family.stop_token_id
        if family_stop is not None:
            return self._token_ids("eos_token_id", self._value_or_fallback("eos_token_id", family_stop))
        stated = self.raw.get("eos_token_id")
        ids = [self.tokenizer_ids().get("eos_token_id"), *(stated if isinstance(stated, list) else [stated])]
        distinct = list(dict.fromkeys(token for token in ids if token is not None))
        return self._token_ids("eos_token_id", distinct or self._value_or_fallback("eos_token_id", None))

    def _rope_scaling(self) -> tuple[tuple[str, Any], ...]:
        rope = self._rope()
        return () if rope.get("rope_type", "default") == "default" else tuple(sorted(rope.items()))

    def _rope(self) -> dict[str, Any]:
        """Rotary settings: rope_theta and rope_scaling, or rope_parameters as written by transformers 5."""
        rope = {} if self.raw.get("rope_theta") is None else {"rope_theta": self.raw["rope_theta"]}
        for key in ("rope_scaling", "rope_parameters"):
            settings = self.raw.get(key) or {}
            if not isinstance(settings, dict):
                raise InputError(f"{self.path}: {key} must be an object (got {settings!r})")
            rope |= ({"rope_type": settings["type"]} if "type" in settings else {}) | settings
        return rope

    def _positive_int(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{self.path}: {key} must be a positive whole number (got {value!r})")
        return value

    def _positive_float(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise InputError(f"{self.path}: {key} must be a positive number (got {value!r})")
        return float(value)

    def _flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise InputError(f"{self.path}: {key} must be true or false (got {value!r})")
        return bool(value)

    def _value_or_fallback(self, key: str, default: int | None) -> Any:
        """From config.json, else from the tokenizer, else the default."""
        value = self.raw.get(key)
        if value is None:
            value = self.tokenizer_ids().get(key)
        value = default if value is None else value
        if value is None:
            raise InputError(f"{self.path} has no {key}, and neither has the tokenizer; add it to config.json")
        return value

    def _token_ids(self, key: str, value: object) -> tuple[int, ...]:
        """One token id or a list of them."""
        ids = tuple(value) if isinstance(value, list) else (value,)
        if not ids:
            raise InputError(f"{self.path}: {key} must not be an empty list")
        return tuple(self._check_id(key, i) for i in ids)

    def _token_id(self, key: str, default: int | None) -> int:
        return self._check_id(key, self._value_or_fallback(key, default))

    def _check_id(self, key: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{self.path}: {key} must be a token id (got {value!r})")
        return value

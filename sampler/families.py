"""Model families: the facts in which block-diffusion checkpoints differ. Does not import torch.

To add a family, add an entry to `FAMILIES` and a row to docs/models.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sampler.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """What a checkpoint's config.json never states, and the values for what it may omit."""

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


FAST_DLLM_V2 = ModelFamily(
    name="fast-dllm-v2",
    aliases=("fastdllm",),
    plain_type="qwen2",
    qkv_bias=True,
    token_shift=True,
    block_size=32,
    small_block=8,
    threshold=0.95,
    mask_token_id=151665,
    stop_token_id=151645,
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
    given = [_normalise(name) for name in (*architectures, model_type or "")]
    for family in FAMILIES:
        if any(alias in name for alias in family.aliases for name in given):
            return family
    for family in FAMILIES:
        if family.plain_type and any(name in (family.plain_type, f"{family.plain_type}forcausallm") for name in given):
            return replace(family, block_size=None, mask_token_id=None)
    named = " / ".join(name for name in (*architectures, model_type) if name) or "none"
    raise InputError(
        f"architecture {named} is not supported; supported families are {', '.join(FAMILY_NAMES)}. If the checkpoint "
        f"is one of them under another name, give --family"
    )


def _normalise(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())

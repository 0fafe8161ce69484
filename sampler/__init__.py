"""Exact block-diffusion decoding and scoring under a layer-reuse policy. Knows torch; never Ray, lm-eval or Arrow."""

from sampler.decode import decode_prompts
from sampler.errors import InputError
from sampler.loading import LoadedModel, load_model
from sampler.policy import ReusePolicy
from sampler.records import Counters, DecodeSettings, Generated, Pair, Prompt, Scored
from sampler.scoring import score_pairs

__all__ = [
    "Counters",
    "DecodeSettings",
    "Generated",
    "InputError",
    "LoadedModel",
    "Pair",
    "Prompt",
    "ReusePolicy",
    "Scored",
    "decode_prompts",
    "load_model",
    "score_pairs",
]

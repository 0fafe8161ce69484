"""Block-diffusion decoding and scoring under a layer-reuse policy.

The names below are imported on first use, so that programs that only need InputError or a policy do not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

if not TYPE_CHECKING:  # type checkers would accept any attribute of a module with __getattr__
    _MODULES = {
        "decode": ("decode_prompts",),
        "errors": ("InputError",),
        "loading": ("LoadedModel", "load_model"),
        "policy": ("ReusePolicy",),
        "records": ("Counters", "DecodeSettings", "Generated", "Pair", "Prompt", "Scored"),
        "scoring": ("score_pairs",),
    }

    def __getattr__(name):
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"sampler.{module}"), name)
        raise AttributeError(f"module 'sampler' has no attribute {name!r}")

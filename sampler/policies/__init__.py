"""The rules that a policy name can start with, one file per family. A new rule is a file and an entry in `RULES`."""

from collections.abc import Callable

from sampler.policies.adaptive import AdaptiveRule, TrimRule
from sampler.policies.base import Rule
from sampler.policies.delayed import DelayedRule
from sampler.policies.dllm import DllmRule
from sampler.policies.elastic import ElasticRule
from sampler.policies.es import EarlySkipRule
from sampler.policies.focus import FocusRule
from sampler.policies.periodic import HalfRule, PeriodicRule, SkipRule, StaleRule

RULES: dict[str, Callable[[str, list[str]], Rule]] = {  # each parses the value and the options of a name
    "k": PeriodicRule.parse,
    "adaptive": AdaptiveRule.parse,
    "trim": TrimRule.parse,
    "mlp": HalfRule.parser("mlp"),
    "attn": HalfRule.parser("attn"),
    "skip": SkipRule.parse,
    "stale": StaleRule.parse,
    "delayed": DelayedRule.parse,
    "dllm": DllmRule.parse,
    "elastic": ElasticRule.parse,
    "es": EarlySkipRule.parse,
    "focus": FocusRule.parse,
}

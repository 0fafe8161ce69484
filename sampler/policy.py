"""Reuse policies and their names: `rule_layers[.option]`, safe in a shell and as a folder. Knows no tensors.

k1                       every pass computes every layer
k2_middle                every second pass replays the middle layers' cached residuals
k3_last.output           every pass but each third repeats the last logits; no layer runs
k2_4-9+20.small          layers 4 to 9 and 20; only small passes replay
adaptive=0.2_middle.3    replays until the middle layers' input has drifted by 0.2, three times in a row at most
trim=0.25_middle         the middle layers run for changed positions and a quarter of the others; .random: by lot
mlp=2_middle             every second pass replays the MLPs of the middle layers; attn=2_middle: their attention
skip_middle              every pass but a block's first leaves the middle layers out
stale=2                  every second pass repeats the last logits
"""

import re
from dataclasses import dataclass

from sampler.errors import InputError
from sampler.plan import Policy
from sampler.policies import RULES
from sampler.policies.base import Rule
from sampler.policies.periodic import PeriodicRule

SUBSET_SIZE = 12
SUBSETS = ("first", "middle", "last", "all")
GRAMMAR = (
    "a policy is rule_layers[.option], such as k1, k2_middle, k3_last.output, k2_4-9+20.small, adaptive=0.2_middle.3, "
    "trim=0.25_middle, trim=0.25_middle.random, mlp=2_middle, attn=2_middle, skip_middle or stale=2; "
    f"layers are {', '.join(SUBSETS)} or indices"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReusePolicy:
    """A policy by name, not yet tied to a model. `str` and `parse` are inverse."""

    rule: Rule
    layers: str | None = None

    def __post_init__(self) -> None:
        if self.layers is None and self.rule.needs_layers:
            raise InputError(f"policy {self.rule} needs layers, such as {self.rule}_middle; {GRAMMAR}")
        if self.layers is not None and self.layers not in SUBSETS:
            object.__setattr__(self, "layers", print_indices(parse_indices(self.layers)))
        if self.layers is not None and not self.rule.takes_layers:
            raise InputError(f"policy {self}: {self.rule} runs no layer on a reuse step and names none")

    @classmethod
    def grid(cls, *, k: int, layers: str | None = None, mode: str = "residual") -> "ReusePolicy":
        """One of the fixed grid's policies, from its parts."""
        try:
            rule = PeriodicRule(k=k, output=mode == "output")
        except InputError as error:
            raise InputError(f"policy k{k}: {error}") from None
        return cls(rule=rule, layers=layers)

    @classmethod
    def parse(cls, name: str) -> "ReusePolicy":
        """The policy called `name`; an unknown name is an error that says what is allowed."""
        head, underscore, tail = name.partition("_")
        layers, *options = tail.split(".")
        if not underscore and "=" not in head:  # a number behind = may have a decimal point
            head, *options = head.split(".")
        period = re.fullmatch(r"k(0|[1-9][0-9]{0,5})", head)
        word, _, value = ("k", "", period[1]) if period else head.partition("=")
        if word not in RULES or (word == "k" and not period) or (underscore and not layers):
            raise InputError(f"unknown policy {name!r}: {GRAMMAR}")
        try:
            rule = RULES[word](value, options)
        except InputError as error:
            raise InputError(f"unknown policy {name!r}: {error}") from None
        return cls(rule=rule, layers=layers or None)

    def __str__(self) -> str:
        layers = "" if self.layers is None else f"_{self.layers}"
        return f"{self.rule}{layers}{''.join(f'.{option}' for option in self.rule.options)}"

    @property
    def k(self) -> int | None:
        """The period of the fixed grid; None for policies beyond it."""
        return self.rule.grid_period

    @property
    def mode(self) -> str:
        return self.rule.mode

    def bind(self, depth: int, subset_size: int | None = None) -> Policy:
        """This policy on a model of `depth` layers."""
        return self.rule.bind(self.layer_indices(depth, subset_size), depth)

    def check_scoring(self) -> None:
        """Refuses what log-likelihoods cannot be scored under, and says why."""
        if self.rule.unscored is not None:
            raise InputError(
                f"policy {self} cannot score log-likelihoods: {self.rule.unscored}; "
                "k1, k2_middle, mlp=2_middle, attn=2_middle, skip_middle, stale=2 and their like are allowed"
            )

    def layer_indices(self, depth: int, subset_size: int | None = None) -> tuple[int, ...]:
        """The layers this policy names in a model of `depth` layers; every subset has the same size."""
        if self.layers is None:
            return ()
        if self.layers in SUBSETS:
            return tuple(subset(self.layers, depth, checked_subset_size(depth, subset_size)))
        indices = parse_indices(self.layers)
        if indices[-1] >= depth:
            raise InputError(
                f"policy {self}: layer {indices[-1]} is outside the model, whose layers are 0 to {depth - 1}"
            )
        return indices


def subset(name: str, depth: int, size: int) -> range:
    """Layer 0 is never in `first`: it turns embeddings into states and has no earlier state to stand on."""
    start = {"first": 1, "middle": (depth - size) // 2, "last": depth - size}
    return range(depth) if name == "all" else range(start[name], start[name] + size)


def checked_subset_size(depth: int, requested: int | None = None) -> int:
    """Layers in each of first, middle, last: as requested, else 12, else a third of a stack too shallow for 12."""
    if requested is None:
        return SUBSET_SIZE if depth > SUBSET_SIZE else max(1, depth // 3)
    if not 1 <= requested < depth:
        raise InputError(
            f"subset size {requested} does not fit a model of {depth} layers; 1 to {depth - 1} are allowed"
        )
    return requested


def parse_indices(text: str) -> tuple[int, ...]:
    indices: list[int] = []
    for part in text.split("+"):
        matched = re.fullmatch(r"(0|[1-9][0-9]{0,5})(?:-(0|[1-9][0-9]{0,5}))?", part)
        if not matched:
            raise InputError(f"unknown layers {text!r}: {', '.join(SUBSETS)} or indices such as 4-9+20 are allowed")
        low, high = int(matched[1]), int(matched[2] or matched[1])
        if high < low:
            raise InputError(f"layers {text!r}: the range {part} runs backwards; write {high}-{low}")
        indices.extend(range(low, high + 1))
    if len(set(indices)) < len(indices):
        raise InputError(f"layers {text!r}: a layer is named twice; name each layer once, as in 4-9+20")
    return tuple(sorted(indices))


def print_indices(indices: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

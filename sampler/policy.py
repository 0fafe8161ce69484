"""Reuse policies by name: `rule_layers[.option]`, safe in a shell and as a directory name. Does not import torch.

k1                       every pass computes every layer
k2_middle                every second pass replays the cached contributions of the middle layers
k3_last.output           two of three passes repeat the last logits; no layer runs
k2_4-9+20.small          layers 4 to 9 and 20; only small passes replay
adaptive=0.2_middle.3    replays until the middle layers' input has drifted by 0.2, at most three times in a row
trim=0.25_middle         the middle layers run for changed positions and a quarter of the others; .random: at random
mlp=2_middle             every second pass replays the MLPs of the middle layers; attn=2_middle: their attention
skip_middle              every pass of a block except the first skips the middle layers
                         skip_middle.every: the first pass too
stale=2                  every second pass repeats the last logits
delayed=1_all            masked positions, and those revealed by the last step
dllm=0.25_middle.8       the quarter of positions whose values changed most; every eighth pass computes all
elastic=0.1_all.3        replays the layers before the first that drifted by 0.1, at most three times in a row
es=0.5_middle.2          halves the positions at two checkpoints, by confidence and change
focus=0.5_middle         the half of the positions that receives most attention, among those that may be decoded
"""

import re
from dataclasses import dataclass

from sampler.errors import InputError, did_you_mean
from sampler.plan import BoundPolicy
from sampler.policies import RULES
from sampler.policies.base import Rule
from sampler.policies.periodic import PeriodicRule

DEFAULT_SUBSET_SIZE = 12
SUBSETS = ("first", "middle", "last", "all")
GRAMMAR = (
    "a policy is rule_layers[.option], such as k1, k2_middle, k3_last.output, k2_4-9+20.small, adaptive=0.2_middle.3, "
    "trim=0.25_middle, trim=0.25_middle.random, mlp=2_middle, attn=2_middle, skip_middle, stale=2, "
    "delayed=1_all, dllm=0.25_middle, elastic=0.1_all, es=0.5_middle or focus=0.5_middle; "
    f"layers are {', '.join(SUBSETS)} or indices"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReusePolicy:
    """A policy that is not yet bound to a model. `str` prints the name that `parse` reads."""

    rule: Rule
    layers: str | None = None

    def __post_init__(self) -> None:
        if self.layers is None and self.rule.needs_layers:
            raise InputError(f"policy {self.rule} needs layers, such as {self.rule}_middle; {GRAMMAR}")
        if self.layers is not None and self.layers not in SUBSETS:
            object.__setattr__(self, "layers", format_indices(parse_indices(self.layers)))
        if self.layers is not None and not self.rule.takes_layers:
            raise InputError(f"policy {self}: {self.rule} takes no layers, because no layer runs on a reuse step")

    @classmethod
    def grid(cls, *, k: int, layers: str | None = None, mode: str = "residual") -> "ReusePolicy":
        """The policy `kK_layers` with period `k`, in the mode "residual" or "output"."""
        try:
            rule = PeriodicRule(k=k, output=mode == "output")
        except InputError as error:
            raise InputError(f"policy k{k}: {error}") from None
        return cls(rule=rule, layers=layers)

    @classmethod
    def parse(cls, name: str, *, suggest: bool = True) -> "ReusePolicy":
        """The policy with this name; InputError if there is none, with a similar name if `suggest` is set."""
        if "," in name:
            raise InputError(f"{name!r} lists several policies where one is expected")
        head, underscore, tail = name.partition("_")
        layers, *options = tail.split(".")
        if not underscore and "=" not in head:  # a number after = may have a decimal point
            head, *options = head.split(".")
        period = re.fullmatch(r"k(0|[1-9][0-9]{0,5})", head)
        word, _, value = ("k", "", period[1]) if period else head.partition("=")
        if word not in RULES or (word == "k" and not period) or (underscore and not layers):
            raise InputError(f"unknown policy {name!r}: {(suggest and _suggestion(name)) or GRAMMAR}")
        try:
            rule = RULES[word](value, options)
        except ValueError as error:  # InputError, or an error of a rule that a user added
            raise InputError(f"unknown policy {name!r}: {error}") from None
        if options and not rule.options and _ignores_options(word, value):
            raise InputError(f"unknown policy {name!r}: {word} takes no options (got .{options[0]})")
        return cls(rule=rule, layers=layers or None)

    def __str__(self) -> str:
        layers = "" if self.layers is None else f"_{self.layers}"
        return f"{self.rule}{layers}{''.join(f'.{option}' for option in self.rule.options)}"

    @property
    def k(self) -> int | None:
        """The period of a policy of the fixed grid; None for other policies."""
        return self.rule.grid_period

    @property
    def mode(self) -> str:
        return self.rule.mode

    def bind(self, depth: int, subset_size: int | None = None) -> BoundPolicy:
        """This policy for a model with `depth` layers."""
        return self.rule.bind(self.layer_indices(depth, subset_size), depth)

    def check_scoring(self) -> None:
        """Raises InputError if log-likelihoods cannot be scored under this policy."""
        if self.rule.no_scoring_reason is not None:
            raise InputError(
                f"policy {self} cannot score log-likelihoods: {self.rule.no_scoring_reason}; "
                "use a kK, mlp=K, attn=K, skip or stale=K policy"
            )

    def layer_indices(self, depth: int, subset_size: int | None = None) -> tuple[int, ...]:
        """The layers that this policy names in a model with `depth` layers."""
        if self.layers is None:
            return ()
        if self.layers in SUBSETS:
            return tuple(_subset_layers(self.layers, depth, resolve_subset_size(depth, subset_size)))
        indices = parse_indices(self.layers)
        if indices[-1] >= depth:
            raise InputError(f"policy {self}: layer {indices[-1]} is outside the model's layers 0 to {depth - 1}")
        return indices


def _suggestion(name: str) -> str:
    """A "did you mean" question for an unknown name; empty if no known policy is similar."""
    word, rest = re.fullmatch(r"([a-z]*)(.*)", name.lower(), re.DOTALL).groups()  # type: ignore[union-attr]
    for rule in (word, *(rule for rule in RULES if did_you_mean(word, [rule]))):
        try:
            return f"did you mean {ReusePolicy.parse(rule + rest, suggest=False)}?"
        except InputError:
            continue
    known = [*(f"k{k}_{layers}" for k in (2, 3) for layers in SUBSETS), *policy_examples()]
    same_numbers = [other for other in known if re.findall("[0-9]", other) == re.findall("[0-9]", name)]
    return did_you_mean(name, same_numbers, cutoff=0.7)


def _ignores_options(word: str, value: str) -> bool:
    """Whether a rule (for instance one that a user added) accepts any option, even one that does not exist."""
    try:
        RULES[word](value, ["no-such-option"])
    except ValueError:
        return False
    return True


def policy_examples() -> list[str]:
    """A policy of every rule, including rules that were added to this package."""
    names = ["k1", "k2_middle", "k3_last.output", "k2_first.small"]
    for word in RULES:
        for name in (f"{word}=0.2_middle", f"{word}=2_middle", f"{word}_middle", f"{word}=2"):
            try:
                names.append(str(ReusePolicy.parse(name, suggest=False)))
                break
            except InputError:
                continue
    return names


def _subset_layers(name: str, depth: int, size: int) -> range:
    """`first` starts at layer 1: layer 0 turns embeddings into states, so there is no earlier state to reuse."""
    start = {"first": 1, "middle": (depth - size) // 2, "last": depth - size}
    return range(depth) if name == "all" else range(start[name], start[name] + size)


def resolve_subset_size(depth: int, requested: int | None = None) -> int:
    """Number of layers in each of first, middle and last: as requested, else 12, or a third of a shallow model."""
    if requested is None:
        return DEFAULT_SUBSET_SIZE if depth > DEFAULT_SUBSET_SIZE else max(1, depth // 3)
    if not 1 <= requested < depth:
        raise InputError(f"--subset-size must be between 1 and {depth - 1} for {depth} layers (got {requested})")
    return requested


def parse_indices(text: str) -> tuple[int, ...]:
    """The layer indices in a text such as 4-9+20; the inverse of `format_indices`."""
    indices: list[int] = []
    for part in text.split("+"):
        matched = re.fullmatch(r"(0|[1-9][0-9]{0,5})(?:-(0|[1-9][0-9]{0,5}))?", part)
        if not matched:
            use = f"use {', '.join(SUBSETS)} or indices such as 4-9+20"
            raise InputError(f"unknown layers {text!r}: {did_you_mean(text, SUBSETS, otherwise=use)}")
        low, high = int(matched[1]), int(matched[2] or matched[1])
        if high < low:
            raise InputError(f"layers {text!r}: the range {part} is reversed; write {high}-{low}")
        indices.extend(range(low, high + 1))
    if len(set(indices)) < len(indices):
        raise InputError(f"layers {text!r}: a layer is repeated; list each layer once, as in 4-9+20")
    return tuple(sorted(indices))


def format_indices(indices: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

"""Which layers a name such as `first` or `4-9+20` means in a model of a given depth. Knows no policies."""

import re

from sampler.errors import InputError

SUBSET_SIZE = 12
SUBSETS = ("first", "middle", "last", "all")


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

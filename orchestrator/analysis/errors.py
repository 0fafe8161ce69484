"""Refuses what a person gave, with the project's one error for that."""

from typing import NoReturn


def refuse(sentence: str) -> NoReturn:
    """Raises the sampler's InputError. Imported here and not above: with the sampler comes torch, a few hundred
    megabytes that an analysis has no use for."""
    from sampler.errors import InputError

    raise InputError(sentence) from None

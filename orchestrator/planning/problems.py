"""Collects what is wrong, so that all of it is told at once."""

from collections.abc import Iterator
from contextlib import contextmanager

from sampler.errors import InputError, InputErrors


class Problems:
    """Sentences for a person, until someone has to know."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """An InputError inside ends the block, and is kept for later."""
        try:
            yield
        except InputError as error:
            self.sentences += error.sentences

    def check(self) -> None:
        if self.sentences:
            raise InputErrors(self.sentences)

"""Collects user errors, so that one run of a command reports all of them.

`InputError`, a single user error, is defined in `sampler.errors`: the sampler raises it too.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from sampler.errors import InputError


class InputErrors(InputError):
    """Several user errors at once, without duplicates."""

    def __init__(self, sentences: Iterable[str]) -> None:
        self._sentences = tuple(dict.fromkeys(sentences))
        assert self._sentences
        super().__init__("; ".join(self._sentences))

    @property
    def sentences(self) -> tuple[str, ...]:
        return self._sentences


class Problems:
    """Collects the sentences of InputErrors; `check` raises them together."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """An InputError raised inside ends the block and is kept."""
        try:
            yield
        except InputError as error:
            self.sentences += error.sentences

    def check(self) -> None:
        if self.sentences:
            raise InputErrors(self.sentences)

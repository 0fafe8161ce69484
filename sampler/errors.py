"""Errors that a user can fix, and words for messages. Any other exception is a bug."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """A wrong value given by the user; the message says what is wrong and what would be right."""

    @property
    def sentences(self) -> tuple[str, ...]:
        return (str(self),)


class UnavailableError(InputError):
    """The Hub cannot be reached or is overloaded; the same request may succeed later."""


class NonFiniteError(InputError):
    """The model computed NaN or infinity for a document, at a `step` of a `block`."""

    def __init__(self, document: int, block: int, step: str, value: str) -> None:
        super().__init__(document, block, step, value)
        self.document, self.block, self.step, self.value = document, block, step, value

    @property
    def reason(self) -> str:
        """The message without the document's index, for callers that identify the document in their own way."""
        return (
            f"block {self.block}, {self.step}: the model computed {self.value}; its weights are corrupted, or its "
            "numbers exceed the range of its dtype (try --dtype float32, and run `reuse-sweep check`)"
        )

    def __str__(self) -> str:
        return f"document {self.document}, {self.reason}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A count with its noun: 1 trial, 1,200 trials, 2 policies."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def listed(values: Iterable[object], conjunction: str = "or") -> str:
    """The values as words: a, b or c."""
    *most, last = map(str, values)
    return f"{', '.join(most)} {conjunction} {last}" if most else last


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str = "", cutoff: float = 0.5) -> str:
    """A question that suggests the most similar known word, ignoring case; `otherwise` if no word is similar."""
    lower = {name.lower(): name for name in known}
    similar = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=cutoff)
    return f"did you mean {lower[similar[0]]}?" if similar else otherwise


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
        """A context manager that suppresses an InputError and keeps its sentences."""
        try:
            yield
        except InputError as error:
            self.sentences += error.sentences

    def check(self) -> None:
        """Raises all collected errors as one, if there are any."""
        if self.sentences:
            raise InputErrors(self.sentences)

"""The one error a person can cause. Anything else that is raised is a fault of this project."""

from collections.abc import Iterable


class InputError(ValueError):
    """What was typed or given is wrong; the message is one sentence that names the value and what is allowed."""

    @property
    def sentences(self) -> tuple[str, ...]:
        return (str(self),)


class UnavailableError(InputError):
    """Nothing given is wrong: the Hub is overloaded or cannot be reached, and may answer later."""


class InputErrors(InputError):
    """Several of them, each once, told together: nobody should have to start again to hear the next."""

    def __init__(self, sentences: Iterable[str]) -> None:
        self._sentences = tuple(dict.fromkeys(sentences))
        assert self._sentences
        super().__init__("; ".join(self._sentences))

    @property
    def sentences(self) -> tuple[str, ...]:
        return self._sentences

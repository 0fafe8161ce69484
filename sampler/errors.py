"""User errors. Any other exception is a bug in this project."""


class InputError(ValueError):
    """The user gave a wrong value; the message says what is wrong and what would be right."""

    @property
    def sentences(self) -> tuple[str, ...]:
        return (str(self),)


class UnavailableError(InputError):
    """The Hub cannot be reached or is overloaded; the same request may succeed later."""

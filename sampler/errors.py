"""Errors that a user can fix. Any other exception is a bug."""


class InputError(ValueError):
    """A wrong value given by the user; the message says what is wrong and what would be right."""

    @property
    def sentences(self) -> tuple[str, ...]:
        return (str(self),)


class UnavailableError(InputError):
    """The Hub cannot be reached or is overloaded; the same request may succeed later."""

"""Errors that a user can fix. Any other exception is a bug."""


class InputError(ValueError):
    """A wrong value given by the user; the message says what is wrong and what would be right."""

    @property
    def sentences(self) -> tuple[str, ...]:
        return (str(self),)


class UnavailableError(InputError):
    """The Hub cannot be reached or is overloaded; the same request may succeed later."""


class NonFiniteError(InputError):
    """The model computed NaN or infinity for a document; its place is the block and the step within the block."""

    def __init__(self, document: int, block: int, step: str, value: str) -> None:
        super().__init__(document, block, step, value)
        self.document, self.block, self.step, self.value = document, block, step, value

    @property
    def reason(self) -> str:
        """The message without the document, which callers know by other names."""
        return (
            f"block {self.block}, {self.step}: the model computed {self.value}; its weights are corrupted, or its "
            "numbers exceed the range of its dtype (try --dtype float32, and run `reuse-sweep check`)"
        )

    def __str__(self) -> str:
        return f"document {self.document}, {self.reason}"

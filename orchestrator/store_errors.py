"""What can go wrong with a sweep's folder. Knows no files."""


class StoreError(RuntimeError):
    """The disk did not do what was asked; the message is a sentence for the person at the terminal."""


class Damaged(Exception):
    """A file is not what was written; the message says in what way, without naming the file."""

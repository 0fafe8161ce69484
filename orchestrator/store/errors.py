"""What can go wrong with a sweep's folder. Knows no files."""

OTHER_COLUMNS = "is undamaged, but has other columns than this version writes"


class StoreError(RuntimeError):
    """The disk did not do what was asked; the message is a sentence for the person at the terminal."""


class RowsLost(StoreError):
    """Rows that had been acknowledged were damaged on disk: their documents are to be run again."""


class Damaged(Exception):
    """A file is not what was written; the message says in what way, without naming the file."""

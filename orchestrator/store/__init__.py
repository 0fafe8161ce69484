"""The sweep folder: rows are on disk before they are acknowledged, and every corruption is detected."""

from orchestrator.store.files import RowsLost, StoreError
from orchestrator.store.reader import Store
from orchestrator.store.writer import StoreWriter

__all__ = ["RowsLost", "Store", "StoreError", "StoreWriter"]

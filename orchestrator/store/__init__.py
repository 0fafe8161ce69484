"""A sweep's folder: rows on disk before they are acknowledged, and every damage noticed. Knows no Ray and no grids."""

from orchestrator.store.reader import Store

__all__ = ["Store"]

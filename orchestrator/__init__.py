"""Runs sweeps of policies over tasks on Ray, stores their rows and analyses them.

`from orchestrator import load_sweep, run_sweep` is the interface for notebooks, see docs/python.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.notebook import Sweep, load_sweep, run_sweep

__all__ = ["Sweep", "load_sweep", "run_sweep"]


def __getattr__(name: str) -> Any:
    """Imports the interface when it is used: commands that do not need it start faster."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from orchestrator import notebook

    return getattr(notebook, name)

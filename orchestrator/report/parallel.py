"""Maps functions over items in several processes, for large reports.

Reading thousands of small files and drawing figures hold the GIL most of the time, so threads would not help. Starting
processes takes about a second: a small report is written faster without them.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Protocol, TypeVar

from sampler.errors import InputError

A = TypeVar("A")
B = TypeVar("B")
MAX_PROCESSES = 4  # each one needs memory


class Map(Protocol):
    """The signature of `map`; results come in the order of the items."""

    def __call__(self, function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]: ...


def sequential_map(function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]:
    return map(function, items)


@contextmanager
def process_pool_map() -> Iterator[Map]:
    """A `map` that runs in one process per core. Functions and items must be picklable."""
    processes = min(MAX_PROCESSES, os.cpu_count() or 1)
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_start_child)

    def pool_map(function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]:
        return pool.map(function, items)

    try:
        yield pool_map
    except BrokenProcessPool:
        raise InputError(
            "a report process was killed, probably because memory ran out: "
            "pass fewer sweep directories, or leave out the figures (--no-figures)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_child() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the parent shuts the pool down
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Without this, children of a killed parent would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

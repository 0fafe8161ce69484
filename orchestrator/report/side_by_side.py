"""Work on several cores, for the parts of a report that are many and independent. Knows no rows and no pictures.

Reading thousands of small files and drawing hold Python's lock most of the time, so that only processes help. They take
a second to start: a small sweep's report is written sooner without them.
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
MOST = 4  # each takes memory of its own


class Mapped(Protocol):
    """`map`, wherever it is carried out: results in the order of the items."""

    def __call__(self, function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]: ...


def one_by_one(function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]:
    return map(function, items)


@contextmanager
def side_by_side() -> Iterator[Mapped]:
    """In as many processes as there are cores. Functions and items must be such as can be sent to them."""
    processes = min(MOST, os.cpu_count() or 1)
    pool = ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_begin)

    def mapped(function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]:
        return pool.map(function, items)

    try:
        yield mapped
    except BrokenProcessPool:
        raise InputError(
            "a process that helped to write the report was ended, perhaps for the memory it took: name fewer folders, "
            "or leave the figures out (--no-figures)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the report's own process ends them
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Killed, it could not end them: they would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

"""Starts a garbage collection where a certain new object is made: until Python 3.12 it runs there and then, later
between two instructions. So a finalizer runs at a known point in the middle of a call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Garbage:
    """In a cycle of references: only a collection frees it."""

    def __init__(self, finalizer: Callable[[], object]) -> None:
        self.itself, self.finalizer = self, finalizer

    def __del__(self) -> None:
        self.finalizer()


@contextmanager
def collected_at(made: int, finalizer: Callable[[], object]) -> Iterator[None]:
    """The new object number `made` inside starts a collection that calls `finalizer`, once. What was there before is
    left alone."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    try:
        _Garbage(finalizer)
        gc.set_threshold(made, 1, 1)
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

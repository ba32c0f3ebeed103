"""A set of objects for as long as they live, in which any thread may look at any moment.

A loop over a `weakref.WeakSet` raises if another thread, or a finalizer that Python's garbage collector calls, adds an
object meanwhile. And a lock around both would be waited for by its own thread, where the finalizer runs inside.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """No lock: each step that matters is one call of C."""

    def __init__(self) -> None:
        self._known: set[weakref.ref[T]] = set()

    def add(self, one: T) -> None:
        """From now on it is in the set, until it is freed. `one`: hashable."""
        self._known.add(weakref.ref(one, self._known.discard))

    def all(self) -> list[T]:
        """Those that live now, in no order."""
        return [one for known in self._known.copy() if (one := known()) is not None]

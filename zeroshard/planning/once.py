"""What is equal is traced and planned once, in a block in which the user changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

Known = dict[Any, tuple[Any, Any]]
"""What was computed, with the objects that it is of: while they live, no other object has their id."""
_SCOPE: ContextVar[Known | None] = ContextVar("known", default=None)


@contextmanager
def traced_once(known: Known | None = None) -> Iterator[Known]:
    """A block in which the model, its inputs and its loss do not change, and what is equal is traced and planned once.
    (Between two calls of `plan` the user may change them, or switch on checkpointing.) `known`: of an earlier block."""
    outer = _SCOPE.get()
    found = known if known is not None else Known() if outer is None else outer
    token = _SCOPE.set(found)
    try:
        yield found
    finally:
        _SCOPE.reset(token)


def once(key: Hashable, of: Sequence[object], make: Callable[[], T]) -> T:
    """What `make` returns. In `traced_once` it is called once for each key and these objects."""
    known = Known() if (scope := _SCOPE.get()) is None else scope
    full_key = key, tuple(map(id, of))
    if full_key not in known:
        known[full_key] = make(), of
    found: T = known[full_key][0]
    return found

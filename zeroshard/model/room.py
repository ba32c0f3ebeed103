"""Room for Python's frames, so that no call maps memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

SLOTS = 140_000
"""Of 8 bytes. The chunk has the next power of two, 2 MB, with 0.9 MB for others. The frame does not touch its own."""


def with_room(function: F) -> F:
    """Decorator of a function: all calls inside of it have room for their frames.

    CPython keeps frames in chunks of 16 kB, and unmaps a chunk when the last frame in it has returned. Where calls
    cross the end of one, each maps and unmaps the next. Whether a program meets that depends on how deep in the stack
    it calls the model, and a step may then take half as long again on the host. A frame that does not fit in a chunk
    gets a larger one, whose rest is used by all calls from there.
    """
    one: Any = function
    one.__code__ = one.__code__.replace(co_stacksize=SLOTS)
    return function

"""Room for Python's frames, so that no call maps memory.

CPython keeps frames in chunks of 16 kB, and unmaps a chunk when the last frame in it has returned. Where a loop calls
functions at the end of a chunk, each call maps and unmaps the next one. Whether that happens depends on how deep in the
stack a test runs: one test took 15 s of CPU under pytest-xdist and 7 without it. A frame that does not fit in a chunk
gets a larger one, whose rest all calls from there use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_SLOTS = 140_000
"""Of 8 bytes. The chunk has the next power of two, 2 MB, with 0.9 MB for others. This frame does not touch its own."""


def with_room(function: Callable[[], T]) -> T:
    """Call the function where there is room for the frames of its calls, also in forked processes."""
    return function()


with_room.__code__ = with_room.__code__.replace(co_stacksize=_SLOTS)

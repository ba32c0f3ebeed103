"""The streams on which the user's program computes. It may change them, and the engine follows.

[Note: several streams] What the engine does has one order: it gathers into a pool buffer when the unit before is done
with it, and reduces a bucket when it has all gradients. A wait for a collective, and the kernels of a module, belong to
the stream that is current then, and another stream knows nothing of them. So where the current stream differs from that
of the engine's last action, it first waits for that one:

    stream of the user  | hook, kernels of block 0 ....... |
    another one                            wait for it ... | hook: gather block 2 over block 0 | kernels of block 1

Blocks on two streams then run one after the other. Kernels inside of one call, between two hooks, may overlap: the
stream of the call has to wait for them before the call returns, as for its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Stream(Protocol):
    """What is asked of a stream. Simulated streams have the same methods."""

    def wait_stream(self, stream: Any, /) -> object: ...


class UserStreams:
    """Which stream was current at the engine's last action. See [Note: several streams]."""

    def __init__(self, current: Callable[[], Stream]) -> None:
        """`current`: returns the current stream."""
        self._current = current
        self._last: Stream | None = None

    def come(self) -> None:
        """The engine is about to do something on the current stream."""
        now = self._current()
        if now == self._last or is_captured():  # a capture has waited for all streams, and may wait for none
            return
        if self._last is not None:
            now.wait_stream(self._last)
        self._last = now


def is_captured() -> bool:
    """Whether the current stream records a CUDA graph."""
    # In a build without CUDA the second call raises.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]

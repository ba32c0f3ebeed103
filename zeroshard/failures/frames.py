"""Looks at another thread while it runs: its calls, the variables of one of them, and the error that it handles.

Until Python 3.12 a garbage collection may run wherever an object is made, also in the middle of `sys._current_frames()`
or of `frame.f_back`. A finalizer that it calls may let the other thread go on, which then ends the very call that is
being looked at: the interpreter reads freed memory and crashes. Or the other thread waits for a lock that the function
holds, which waits for the other thread (python/cpython#106883). So each look is one piece: see `_in_one_piece`.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, chain, repeat, takewhile
from operator import attrgetter, call, is_not, methodcaller
from types import CodeType, FrameType
from typing import Any


def calls_of(thread: int | None) -> list[tuple[CodeType, int | None]]:
    """The functions that a thread is in, each with its line; the innermost first. Holds none of their variables.

    Without the GIL (free-threaded Python) only of the current thread, else empty: to read what another thread changes
    at that moment may end the interpreter (python/cpython#118680)."""
    found: list[tuple[CodeType, int | None]] = _in_one_piece(partial(list, map(_CODE_AND_LINE, _frames(thread))))
    return found


def frames_of(thread: int | None) -> list[FrameType]:
    """The frames of these functions. As long as they are held they keep all variables of the calls, also of those that
    have returned: a loss and its graph, a model."""
    found: list[FrameType] = _in_one_piece(partial(list, _frames(thread)))
    return found


def variables_of(frame: FrameType) -> Any:
    """The variables of a call. It keeps the names that are added here (PEP 667) until it ends."""
    return _in_one_piece(partial(getattr, frame, "f_locals"))


def current_error(thread: int | None) -> BaseException | None:
    """The error that a thread handles."""
    found = _in_one_piece(sys._current_exceptions).get(thread or 0)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # a tuple in Python 3.11
    return error


_CODE_AND_LINE = attrgetter("f_code", "f_lineno")
_SWITCH: Callable[[bool], Any] = (gc.disable, gc.enable).__getitem__


def _frames(thread: int | None) -> Iterator[Any]:
    """The frames of a thread, from the innermost one; nothing is looked at before the first of them is asked for."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)() and thread != threading.get_ident():  # from Python 3.13 on
        return iter(())
    innermost = map(methodcaller("get", thread), map(call, (sys._current_frames,)))
    outwards: Iterator[Any] = accumulate(chain(innermost, repeat("f_back")), getattr)
    return takewhile(partial(is_not, None), outwards)


def _in_one_piece(look: Callable[[], Any]) -> Any:
    """Call a function that is written in C, without a garbage collection, and while no other thread runs Python.

    The collector is off for the whole process meanwhile. That no other thread sees it so (and maybe sets it back to
    "off" for ever), all steps are called from C: only between two instructions of Python does a thread let others run.
    """
    was_enabled: list[bool] = []
    as_it_was: Iterator[Any] = map(call, map(_SWITCH, was_enabled))
    note: Callable[[], Any] = partial(was_enabled.extend, map(call, (gc.isenabled,)))
    steps: tuple[Callable[[], Any], ...] = (note, gc.disable, look, partial(next, as_it_was))
    try:
        return list(map(call, steps))[2]
    finally:
        next(as_it_was, None)  # if the look has raised

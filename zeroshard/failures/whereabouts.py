"""Says where a thread is: the line of the user's program, and the call of this engine in which it waits."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from zeroshard.failures.blame import GIVING_UP, OUTSIDE

P = ParamSpec("P")
R = TypeVar("R")

_HERE = os.path.dirname(os.path.dirname(__file__)) + os.sep  # the package
_LIBRARIES = (_HERE, os.path.dirname(str(dist.__file__)).removesuffix("distributed"), "<frozen")
_CALLED = {
    *("handle.py", "optimizer.py", "shard.py"),
    *map(os.path.normpath, ("step/torch_optimizer.py", "checkpoint/save.py", "checkpoint/load.py")),
}
_STANDARD = os.path.dirname(os.__file__) + os.sep
SAVES = "zeroshard save"
"""How the names of the threads begin that save in the background."""
_waiting_in_vain: dict[int, CodeType] = {}  # by id: code that torch.compile generates may have no hash
_asking: dict[int, CodeType] = {}


def waits_in_vain(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a thread in this function is reported as giving up, not at the line that called it."""
    _waiting_in_vain[id(function.__code__)] = function.__code__
    return function


def asks(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a thread in this function writes a message, and does not wait in it."""
    _asking[id(function.__code__)] = function.__code__
    return function


def frame_of(thread: int | None) -> FrameType | None:
    """The innermost frame of a thread. Without the GIL (free-threaded Python) only of the current one: to read what
    another thread changes at that moment may end the interpreter (python/cpython#118680)."""
    is_safe = getattr(sys, "_is_gil_enabled", lambda: True)() or thread == threading.get_ident()  # from 3.13 on
    return sys._current_frames().get(thread or 0) if is_safe else None


def where(thread: int | None) -> str:
    """The innermost line of a thread that belongs to neither this engine nor torch nor Python's standard library."""
    frame, is_other = frame_of(thread), thread != threading.get_ident()
    inner, call = "", ""
    while frame is not None:
        code = frame.f_code
        if id(code) in _waiting_in_vain:
            return GIVING_UP
        if id(code) in _asking:
            inner, is_other = "", False
        if not _is_library(code.co_filename):
            return f"at {os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}{call or inner}"
        if _is_public(code):
            call = f" (in {_name(frame)})"
        if is_other:  # this one asks, and does not wait
            inner = inner or f" (waiting in {os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name})"
        frame = frame.f_back
    return OUTSIDE


def only_saves() -> bool:
    """Whether the program of this process is over, and the interpreter waits for saves in the background only."""
    others = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    is_over = not threading.main_thread().is_alive()  # from the moment at which it waits for the other threads
    return is_over and bool(others) and all(one.name.startswith(SAVES) for one in others)


def saves_in_background() -> bool:
    """Whether this process has a save that is not done."""
    return any(one.name.startswith(SAVES) for one in threading.enumerate())


def came_from_program(error: BaseException) -> bool:
    """Whether an error came through a line that belongs to neither this engine nor torch nor the standard library,
    between where it was raised and where it was caught."""
    trace = error.__traceback__
    while trace is not None and _is_library(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace is not None


def _is_public(code: CodeType) -> bool:
    """Whether it is a function of this engine that users call."""
    here = code.co_filename.removeprefix(_HERE)
    return here in _CALLED and not any(part.startswith(("_", "<")) for part in code.co_qualname.split("."))


def _name(frame: FrameType) -> str:
    """The name as users write it: a method gets the class of its object, which may have inherited it."""
    code = frame.f_code
    owner = frame.f_locals.get("self")
    return code.co_qualname if owner is None else f"{type(owner).__name__}.{code.co_name}"


def _is_library(path: str) -> bool:
    standard = path.startswith(_STANDARD) and "-packages" not in path
    return (standard or path.startswith(_LIBRARIES)) and not path.startswith(_HERE + "train")

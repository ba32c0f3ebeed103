"""Says where a thread is: the line of the user's program, and the call of this engine in which it waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import CodeType
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from zeroshard.failures.blame import GIVING_UP, OUTSIDE
from zeroshard.failures.frames import calls_of

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


def where(thread: int | None) -> str:
    """The innermost line of a thread that belongs to neither this engine nor torch nor Python's standard library."""
    is_other = thread != threading.get_ident()
    inner, public = "", ""
    for code, line in calls_of(thread):
        if id(code) in _waiting_in_vain:
            return GIVING_UP
        if id(code) in _asking:
            inner, is_other = "", False
        if not _is_library(code.co_filename):
            return f"at {os.path.basename(code.co_filename)}:{line} in {code.co_name}{public or inner}"
        if _is_public(code):
            public = f" (in {_name(code)})"
        if is_other:  # this one asks, and does not wait
            inner = inner or f" (waiting in {os.path.basename(code.co_filename)}:{line} {code.co_name})"
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


def _name(code: CodeType) -> str:
    """The name as users write it."""
    return code.co_qualname.replace("TorchOptimizer.", "ShardedOptimizer.")  # which inherits it


def _is_library(path: str) -> bool:
    standard = path.startswith(_STANDARD) and "-packages" not in path
    return (standard or path.startswith(_LIBRARIES)) and not path.startswith(_HERE + "train")

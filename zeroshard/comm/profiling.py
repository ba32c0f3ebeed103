"""Named ranges: for torch's profiler if one runs, and for the timeline that is being recorded (`Handle.timeline`).

    zeroshard::gather(blocks.3)                  a phase: from when a module needs the unit until its weights are there
        zeroshard::all_gather(blocks.3)          a collective: only its start on this rank
        zeroshard::wait: all_gather(blocks.3)    this rank waits for it, and copies or sums what the peers have sent
    zeroshard::reduce(blocks.3)
        zeroshard::wait: reduce_scatter(blocks.5)    an earlier reduction, whose memory is needed now
    zeroshard::step: agree

| of                | phases                                                                                          |
|-------------------|-------------------------------------------------------------------------------------------------|
| forward           | before forward, gather                                                                          |
| backward          | begin of backward, gather, reduce, end of backward                                              |
| a step            | step: agree, update, batch, updated, read from peers; of whole parameters: gradients to owners, |
|                   | main to owners, whole parameters, main to holders                                               |
| between steps     | unshard, read in full, full state, load full state, state_dict, load_state_dict, park, unpark   |
| a join            | join: gather, backward, open, reduce, end, agree, step (orders that this rank carries out)      |
| checkpoints       | save: collect, plan, write, commit; load: find, compare, preflight, restore; verify             |

A timeline also has the forward and the backward of each unit (`running.py`), and each collective from its start until
its result is there (`comm_log.py`). Torch's profiler has not: its ranges begin and end in one call.

While neither runs, a range costs two tests (less than a microsecond). Else it costs some microseconds, so there are
ranges per unit and per step, never per parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.profiler import record_function

from zeroshard.comm.recording import Kind, Range, Recording, open_range

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING = nullcontext()


def label(name: str, unit: str) -> str:
    return f"{name}({unit})" if unit else name


def profiled(name: str, unit: str = "") -> AbstractContextManager[Any]:
    """A range for torch's profiler only."""
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return record_function(f"zeroshard::{label(name, unit)}")


def span(name: str, unit: str = "", kind: Kind = "phase", phase: str = "") -> AbstractContextManager[Any]:
    """A range, for as long as the block runs."""
    if Recording.now is None and not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return _Span(name, unit, kind, phase)


def phase(name: str, *, of_unit: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: each call is a range. `of_unit`: on a method whose first argument is a unit: of that unit."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if Recording.now is None and not torch._C._autograd._profiler_enabled():
                return function(*args, **kwargs)
            unit: Any = args[1] if of_unit else None
            with _Span(name, unit.name if of_unit else "", "phase", ""):
                return function(*args, **kwargs)

        return wrapper

    return decorate


class _Span:
    def __init__(self, name: str, unit: str, kind: Kind, phase: str) -> None:
        self._described = kind, name, unit, phase
        shown = f"{kind}: {name}" if kind == "wait" else name
        self._profiled = profiled(shown, unit)
        self._range: Range | None = None

    def __enter__(self) -> None:
        self._profiled.__enter__()
        self._range = open_range(*self._described)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._range is not None:
            self._range.close()
        self._profiled.__exit__(kind, error, trace)

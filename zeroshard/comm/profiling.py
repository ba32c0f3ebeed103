"""Named ranges in the trace of torch's profiler: the trace reads as the source does.

    zeroshard::gather(blocks.3)              a phase: from when a module needs the unit until it is shown
        zeroshard::all_gather(blocks.3)      a collective: what this rank does to start it
    zeroshard::reduce(blocks.3)
        zeroshard::wait: reduce(blocks.5)    for a reduction that was started earlier, and whose memory is needed now
    zeroshard::step: agree

| of                | phases                                                                                          |
|-------------------|-------------------------------------------------------------------------------------------------|
| forward           | before forward, gather                                                                          |
| backward          | begin of backward, gather, reduce, end of backward; wait: reduce, wait: peers have read         |
| a step            | step: agree, update, updated, read from peers; of whole parameters: gradients to owners,        |
|                   | main to owners, main to holders                                                                 |
| between steps     | unshard, read in full, full state, load full state, state_dict, load_state_dict, park, unpark   |
| a join            | join: gather, backward, open, reduce, end, agree, step (what this rank is told to do)           |
| checkpoints       | save: collect, plan, write, commit; load: find, compare, preflight, restore; verify             |

Every call costs one test of a flag (less than a microsecond) while no profiler runs. With one, a range costs some
microseconds, so it is asked for per unit or per step, never per parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.profiler import record_function

P = ParamSpec("P")
R = TypeVar("R")


def span(name: str) -> AbstractContextManager[Any]:
    """A range `zeroshard::<name>`, where a profiler is on."""
    return record_function(f"zeroshard::{name}") if torch._C._autograd._profiler_enabled() else nullcontext()


def phase(name: str | Callable[..., str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Each call of a function is a range of that name; or of the name that is made of its arguments."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch._C._autograd._profiler_enabled():
                return function(*args, **kwargs)
            with record_function(f"zeroshard::{name if isinstance(name, str) else name(*args, **kwargs)}"):
                return function(*args, **kwargs)

        return wrapper

    return decorate


def of_unit(name: str) -> Callable[..., str]:
    """For a method whose first argument is a unit: `name(unit)`."""
    return lambda owner, unit, *_, **__: f"{name}({unit.name})"

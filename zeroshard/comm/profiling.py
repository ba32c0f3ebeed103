"""Named ranges for torch's profiler, one per phase and collective.

    zeroshard::gather(blocks.3)              a phase: from when a module needs the unit until its weights are there
        zeroshard::all_gather(blocks.3)      a collective: only its start on this rank
    zeroshard::reduce(blocks.3)
        zeroshard::wait: reduce(blocks.5)    wait for an earlier reduction whose memory is needed now
    zeroshard::step: agree

| of                | phases                                                                                          |
|-------------------|-------------------------------------------------------------------------------------------------|
| forward           | before forward, gather                                                                          |
| backward          | begin of backward, gather, reduce, end of backward; wait: reduce, wait: peers have read         |
| a step            | step: agree, update, updated, read from peers; of whole parameters: gradients to owners,        |
|                   | main to owners, main to holders                                                                 |
| between steps     | unshard, read in full, full state, load full state, state_dict, load_state_dict, park, unpark   |
| a join            | join: gather, backward, open, reduce, end, agree, step (orders that this rank carries out)      |
| checkpoints       | save: collect, plan, write, commit; load: find, compare, preflight, restore; verify             |

While no profiler runs, a range costs one test of a flag (less than a microsecond). With a profiler it costs some
microseconds, so there are ranges per unit and per step, never per parameter.
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
    """A context manager: the range `zeroshard::<name>` if a profiler runs, else nothing."""
    return record_function(f"zeroshard::{name}") if torch._C._autograd._profiler_enabled() else nullcontext()


def phase(name: str | Callable[..., str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: each call is a range. `name`: of the range, or a function of the call's arguments that returns it."""

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
    """For `phase`, on a method whose first argument is a unit: the range is called `name(unit)`."""
    return lambda owner, unit, *_, **__: f"{name}({unit.name})"

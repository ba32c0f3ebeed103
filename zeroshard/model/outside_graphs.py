"""What torch.compile neither traces nor compiles, because it moves data and communicates.

Three things call it from a compiled function: modules call hooks, the function itself calls methods of the optimizer,
and the engine of autograd calls hooks on tensors, as a compiled function runs its backward between two graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar

import torch

from zeroshard.model.absent import NotCopied

P = ParamSpec("P")
R = TypeVar("R")


class OutsideGraphs(NotCopied, partial[Any]):
    """A hook of a module. A `partial`, because torch.compile would compile a Python `__call__` again for every class of
    modules."""

    def __new__(cls, hook: Callable[..., Any]) -> Self:
        return super().__new__(cls, _disable()(hook))

    def __getattr__(self, name: str) -> Any:
        text = f"a hook of zeroshard has no attribute {name!r}"
        if name == "__name__":  # for which torch.jit.script asks
            text += (
                ": torch.jit.script cannot compile a sharded model. Build a plain model, load handle.full_state_dict() "
                "into it, and compile that one"
            )
        raise AttributeError(text, name=name, obj=self)


@functools.cache
def _disable() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The decorator of all hooks, made once: a module has two hooks, and to make it takes longer than to use it."""
    import torch._dynamo  # slow to import, so not at the top; torch's optimizers import it as well

    # Without `disable`, Dynamo compiles the hook once for each class of modules, up to its limit of 8, with many
    # warnings (torch._dynamo.config.recompile_limit).
    return torch._dynamo.disable(wrapping=False)  # type: ignore[no-any-return, no-untyped-call]


def outside_graphs(method: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a method that a compiled function may call. (torch marks the methods of its optimizers so. It
    imports the compiler at the first call.)"""
    return torch._disable_dynamo(method)  # type: ignore[attr-defined]


def called_by_torch(hook: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a function that only the engine of autograd calls: at no cost for a call, as there is one for each
    gradient, the function has a mark that the compiler reads before it compiles a call."""
    return hook if _mark(hook, calls_too=True) else outside_graphs(hook)


def between_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a function that is not compiled itself, while what it calls is."""
    _mark(function, calls_too=False)
    return function


def _mark(function: Callable[..., Any], *, calls_too: bool) -> bool:
    """Let the compiler skip the function, and what it calls. Returns whether it does: torch may have changed these
    private names."""
    try:
        from torch._C._dynamo import eval_frame

        skip, usual = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        strategy = eval_frame._FrameExecStrategy(skip, skip if calls_too else usual)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    except (ImportError, AttributeError, TypeError):
        return False
    return True

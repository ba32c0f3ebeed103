"""Support for calls of a model inside `torch.func` transforms (`grad`, `vmap`, `jvp`, ...), and by `functional_call`.

Inside a transform, torch wraps the result of every operation. The engine moves data that belong to no transform, so its
hooks leave the transforms while they run.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.autograd import forward_ad


def under_transform() -> bool:
    """Whether a transform is active on this thread."""
    return peek_interpreter_stack() is not None


def with_tangents(tensors: list[Tensor]) -> list[Tensor]:
    """These, and their forward derivatives (`torch.autograd.forward_ad`), which have graphs of their own."""
    if forward_ad._current_level < 0 or under_transform():
        return tensors
    tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in tensors]  # type: ignore[no-untyped-call]
    return [*tensors, *(one for one in tangents if one is not None and one.grad_fn is not None)]


def in_plain_torch() -> AbstractContextManager[Any]:
    """A scope for the engine's own operations: outside of all transforms, else outside of modes of the user's. (A
    `TorchFunctionMode`, as those of nncf, which puts masked weights in the place of weights, is for the model's
    operations: `parameter.data = ...` would go to another tensor.)"""
    if not under_transform():
        return torch._C.DisableTorchFunction() if torch._C._len_torch_function_stack() else nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # slow to import

    return temporarily_clear_interpreter_stack()


def given_tensors(modules: Iterable[nn.Module]) -> list[tuple[str, Tensor]]:
    """(name, tensor), unwrapped, that `functional_call` has put in place of one of these modules' own parameters. (Only
    during such a call does a module hold tensors that are no `nn.Parameter`.)"""
    held = [module._parameters for module in modules]
    # This must be fast: it runs before each call of each unit.
    if all(issubclass(one, _USUAL) for one in {*map(type, chain.from_iterable([one.values() for one in held]))}):
        return []
    of_all: Iterable[tuple[str, Any]] = chain.from_iterable([one.items() for one in held])
    return [(name, _plain(value)) for name, value in of_all if not isinstance(value, _USUAL)]


def in_functional_call() -> bool:
    """Whether this is called inside of one."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.utils.stateless":
            return True
        frame = frame.f_back
    return False


_USUAL = (nn.Parameter, type(None))


def _plain(tensor: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor

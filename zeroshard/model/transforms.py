"""Support for calls of a model inside `torch.func` transforms (`grad`, `vmap`, `jvp`, ...), and by `functional_call`.

Inside a transform, torch wraps the result of every operation. The engine moves data that belong to no transform, so its
hooks leave the transforms while they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack


def under_transform() -> bool:
    """Whether a transform is active on this thread."""
    return peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """A scope outside of all transforms."""
    if not under_transform():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # slow to import

    return temporarily_clear_interpreter_stack()


def given_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor, unwrapped, that `functional_call` has put in place of one of the module's own parameters. (Only
    during such a call does a module hold tensors that are no `nn.Parameter`.)"""
    given: dict[str, Tensor] = {}
    held: Mapping[str, Tensor | None] = module._parameters
    for name, value in held.items():  # must be fast: runs before each call of each module
        if value is not None and type(value) is not nn.Parameter and not isinstance(value, nn.Parameter):
            given[name] = _plain(value)
    return given


def _plain(tensor: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor

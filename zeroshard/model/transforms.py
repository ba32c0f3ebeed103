"""Calls of a model from inside `torch.func` transforms (`grad`, `vmap`, `jvp`, ...), and by `functional_call`.

Inside a transform torch wraps what every operation returns. The engine moves data that belong to no transform, so its
hooks step outside for as long as they run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack


def under_transform() -> bool:
    """Whether a transform is under way on this thread."""
    return peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """Inside, operations are plain ones."""
    if not under_transform():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # slow to import, and there already

    return temporarily_clear_interpreter_stack()


def given_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Name -> what `functional_call` has put in the place of the module's own parameters, without any wrapping. A
    module can hold tensors that are no `nn.Parameter` for the time of such a call only."""
    given: dict[str, Tensor] = {}
    held: Mapping[str, Tensor | None] = module._parameters
    for name, value in held.items():  # before each call of each module
        if value is not None and type(value) is not nn.Parameter and not isinstance(value, nn.Parameter):
            given[name] = _plain(value)
    return given


def _plain(tensor: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor

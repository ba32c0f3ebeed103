"""What the user's hooks on the modules inside of a call are given.

A forward hook may keep the output of an inner module (features for a loss of their own), and a backward may begin
there: it comes to no output of the unit, whose weights would not be gathered. So these tensors are noted while the call
runs, and hooked as its outputs are. Code that torch.compile runs is not seen: there, autograd raises
([Note: versions of weights that are gone] in `storage/versions.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.utils.hooks import RemovableHandle

from zeroshard.model.trees import differentiable


class SeenByHooks:
    """Of the calls of one module."""

    def __init__(self, inside: Sequence[nn.Module] = ()) -> None:
        """`inside`: the modules whose calls belong to those of the module."""
        self._inside = inside
        self._handles: list[RemovableHandle] = []
        self._tensors: list[Tensor] = []

    def begin(self) -> None:
        """A call begins. The hooks of the engine on the modules inside have been taken off."""
        for module in self._inside:
            # In front of those hooks: one of them may return another output.
            if module._forward_hooks or _module._global_forward_hooks:
                self._handles.append(module.register_forward_hook(self._note_output, prepend=True))
            if module._forward_pre_hooks or _module._global_forward_pre_hooks:
                self._handles.append(
                    module.register_forward_pre_hook(self._note_inputs, prepend=True, with_kwargs=True)
                )

    def end(self) -> list[Tensor]:
        """The call is over. What the hooks were given."""
        while self._handles:
            self._handles.pop().remove()
        found, self._tensors = self._tensors, []
        return found

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._tensors += differentiable((args, kwargs))

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._tensors += differentiable(output)

"""What the user's hooks on the modules of a call are given.

A forward hook may keep the output of an inner module (features for a loss of their own), and a backward may begin
there: it comes to no output of the unit, whose weights would not be gathered. So these tensors are noted while the call
runs, and hooked as its outputs are; views of weights are replaced by copies. Code that torch.compile runs is not seen:
there, autograd raises ([Note: versions of weights that are gone] in `storage/versions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.utils.hooks import RemovableHandle

from zeroshard.model.trees import differentiable
from zeroshard.runtime.weight_views import shown_without_views
from zeroshard.storage.unit import Unit


class SeenByHooks:
    """Of the calls of one module."""

    def __init__(self, modules: Sequence[nn.Module] = (), own: range = range(0)) -> None:
        """
        Args:
            modules: the module, and those inside whose calls belong to its calls.
            own: the ids of the engine's hooks.
        """
        self._modules, self._own = modules, own
        self._calls = {id(module) for module in modules}
        self._handles: list[RemovableHandle] = []
        self._tensors: list[Tensor] = []
        self._running: Callable[[], Iterable[Unit]] = tuple

    def begin(self, running: Callable[[], Iterable[Unit]]) -> None:
        """A call begins. The hooks of the engine on the modules inside have been taken off. `running`: the units of
        the running calls."""
        self._running = running
        for number, module in enumerate(self._modules):
            # In front of those hooks: one of them may return another output.
            if module._forward_hooks and self._has_others(module._forward_hooks):
                self._handles.append(module.register_forward_hook(self._note_output, prepend=True))
            # What the module itself is given is not its own.
            if number and module._forward_pre_hooks and self._has_others(module._forward_pre_hooks):
                self._handles.append(
                    module.register_forward_pre_hook(self._note_inputs, prepend=True, with_kwargs=True)
                )
        if _module._global_forward_hooks or _module._global_forward_pre_hooks:
            _active.append(self)
            for hooks, note in _GLOBAL:
                if hooks and _KEY not in hooks:
                    hooks[_KEY] = note
                    hooks.move_to_end(_KEY, last=False)

    def _has_others(self, hooks: Iterable[int]) -> bool:
        return any(number not in self._own for number in hooks)

    def end(self) -> list[Tensor]:
        """The call is over. What the hooks were given."""
        while self._handles:
            self._handles.pop().remove()
        if self in _active:
            _active.remove(self)
            for hooks, _ in _GLOBAL if not _active else ():
                hooks.pop(_KEY, None)
        found, self._tensors = self._tensors, []
        return found

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if torch.compiler.is_compiling() else self._note((args, kwargs))

    def _note_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return None if torch.compiler.is_compiling() else self._note(output)

    def _note(self, tree: Any) -> Any:
        """Returns what takes its place; None: nothing."""
        replaced = shown_without_views(tree, self._running())
        self._tensors += differentiable(replaced)
        return None if replaced is tree else replaced

    def of_call(self, module: nn.Module, tree: Any, *, is_output: bool) -> Any:
        """A global hook is given this."""
        return self._note(tree) if id(module) in self._calls and (is_output or module is not self._modules[0]) else None


def _note_any_inputs(module: nn.Module, args: Any) -> Any:
    return None if torch.compiler.is_compiling() else _note_of_call(module, args, is_output=False)


def _note_any_output(module: nn.Module, args: Any, output: Any) -> Any:
    return None if torch.compiler.is_compiling() else _note_of_call(module, output, is_output=True)


def _note_of_call(module: nn.Module, tree: Any, *, is_output: bool) -> Any:
    for seen in reversed(_active):
        if (replaced := seen.of_call(module, tree, is_output=is_output)) is not None:
            return replaced
    return None


_KEY: Any = "zeroshard"
"""Always the same: torch.compile compiles anew where the keys of global hooks are others."""

_GLOBAL: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (_module._global_forward_hooks, _note_any_output),
    (_module._global_forward_pre_hooks, _note_any_inputs),
)
"""torch's ordered dicts of global hooks, and the hook that is put first there."""

_active: list[SeenByHooks] = []
"""Of running calls, while there are global hooks."""

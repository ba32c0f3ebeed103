"""For timelines: the ranges of calls of modules, and the stretches of a backward that belong to one unit each.

A stretch is from the gradient of an output of the unit's module to the gradient of an input, which is where backward
returns to the call around it:

    forward    root [ embed | u0 [ ..... ] | u1 [ ..... ] | head ]
    backward        [ root  | u1 ......... | u0 ......... | root ]
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.hooks import RemovableHandle

from zeroshard.comm.ranges import Kind, Range, Recording, open_range
from zeroshard.model.outside_graphs import called_by_torch
from zeroshard.model.trees import tensors_in
from zeroshard.storage.unit import Unit


class Stretches:
    """Of the backwards of one model, while a timeline is recorded."""

    def __init__(self) -> None:
        self._at: tuple[Sequence[Unit], Range | None] = (), None  # the units that backward is at
        self._returned: set[tuple[int, int]] = set()  # thread and number of the graph nodes of recorded outputs
        self._on_leaves: list[RemovableHandle] = []

    def begin(self, units: Sequence[Unit], around: Sequence[Unit], inputs: Any) -> None:
        """A call of a module that needs these units begins; `around`: those of the call around it."""
        for tensor in _requiring_grad(inputs) if Recording.now is not None else ():
            hook = tensor.register_hook(partial(self._go_on, units, around))  # type: ignore[no-untyped-call]
            if tensor.is_leaf:  # it may outlive the graph
                self._on_leaves.append(hook)

    def end(self, units: Sequence[Unit], output: Any) -> None:
        """A module that needs these units has returned."""
        for tensor in _requiring_grad(output) if Recording.now is not None else ():
            if tensor.grad_fn is None:
                continue
            node = threading.get_ident(), tensor.grad_fn._sequence_nr()
            if node not in self._returned:  # a module that is skipped returns its input: another one has made it
                self._returned.add(node)
                tensor.register_hook(partial(self._go_to, units))  # type: ignore[no-untyped-call]

    @called_by_torch
    def _go_to(self, units: Sequence[Unit], grad: Tensor | None = None) -> None:
        """Backward has the gradient of an output of these units."""
        before, backward = self._at
        if backward is None or list(before) != list(units):
            close(backward)
            self._at = units, opened("backward", units)

    @called_by_torch
    def _go_on(self, units: Sequence[Unit], around: Sequence[Unit], grad: Tensor) -> None:
        """Backward has the gradient of an input of these units; `around`: of the call around theirs."""
        if list(self._at[0]) == list(units):  # else that input is an output of the next units, and they are reached
            self._go_to(around)

    def end_backward(self) -> None:
        """Backward is over."""
        close(self._at[1])
        self._at = (), None
        self._returned.clear()
        while self._on_leaves:
            self._on_leaves.pop().remove()


def _requiring_grad(values: Any) -> list[Tensor]:
    """The activations in inputs or outputs that get a gradient. Not those that torch.func has wrapped."""
    tensors = tensors_in(values) if torch.is_grad_enabled() else ()
    return [
        tensor
        for tensor in tensors
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter) and not is_functorch_wrapped_tensor(tensor)
    ]


def opened(kind: Kind, units: Sequence[Unit]) -> Range | None:
    """A range of these units that begins now; None: no timeline is recorded, or there are no units."""
    if Recording.now is None or not units:
        return None
    named = [unit for unit in units if not unit.spec.is_part] or units  # not those that the call only keeps
    return open_range(kind, kind, ", ".join(unit.name for unit in named))


def close(one: Range | None) -> None:
    if one is not None:
        one.close()

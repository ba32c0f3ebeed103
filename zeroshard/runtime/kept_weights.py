"""Weights that are used in a block of `handle.unsharded()` inside of a forward, for a backward after the block.

Autograd saves a parameter as it is, not its values, and when backward reads it, they may be gone. So while such a block
is open, hooks on what autograd saves keep the values: those that the block has gathered lie in memory of their own,
which then lives as long as the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zeroshard.errors import InvalidState
from zeroshard.model.absent import as_tensors
from zeroshard.model.transforms import under_transform
from zeroshard.storage.unit import Unit


def keeping(units: Iterable[Unit], every: Sequence[Unit]) -> AbstractContextManager[Any]:
    """A scope inside of which autograd keeps the weights that it saves. Outside of grad mode, and where all weights
    rest in full, it does nothing.

    Args:
        units: those that the block shows.
        every: of the model.
    """
    allowed = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if not torch.is_grad_enabled() or under_transform() or not allowed:
        return nullcontext()
    # Those of units that a running forward needs lie in pool buffers.
    apart = {unit for unit in units if unit.weights.is_between_forwards}
    if not apart:
        return nullcontext()
    known = {
        id(parameter): (unit, index)
        for unit in every
        if unit.weights.buffer.borrows
        for index, parameter in enumerate(unit.parameters)
    }

    def pack(tensor: Tensor) -> _Values | _Place:
        place = known.get(id(tensor))
        if place is None:
            return _Values(tensor, tensor._version)
        unit, index = place
        with as_tensors():
            return _Values(tensor.detach(), None) if unit in apart else _Place(weakref.ref(unit), index)

    return saved_tensors_hooks(pack, _unpacked)


@dataclass(frozen=True)
class _Values:
    """A tensor, and its version when it was saved: autograd does not compare it where there are hooks. (None: it is not
    written to.)"""

    tensor: Tensor
    version: int | None

    def get(self) -> Tensor:
        if self.version not in (None, self.tensor._version):
            raise InvalidState(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self.tensor.shape)} is at version {self.tensor._version}; expected version "
                f"{self.version} instead"
            )
        return self.tensor


@dataclass(frozen=True)
class _Place:
    """A parameter of a unit that a running forward needs. A hook gathers it for backward, if that comes to the forward
    first."""

    unit: weakref.ref[Unit]
    index: int

    def get(self) -> Tensor:
        unit = self.unit()
        if unit is None or not unit.weights.shown:
            name = "a parameter" if unit is None else f"parameter {unit.layout.slots[self.index].name}"
            raise InvalidState(
                f"backward: the values of {name} are not here. It was used inside of `with handle.unsharded():` in a "
                "forward, and backward comes to that use when its unit is done: open the block around forward and "
                "backward, or use the weight in a forward of its own module"
            )
        with as_tensors():
            return unit.parameters[self.index].detach()


def _unpacked(packed: _Values | _Place) -> Tensor:
    return packed.get()

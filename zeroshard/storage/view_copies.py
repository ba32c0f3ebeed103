"""Copies that have been put in place of views of borrowed weights (`weight_views.py`).

A module may look at its weight once, keep the view, and use it in every forward. A view has the new values after a
step. So the copy in its place gets them, too, when they are here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NumberOf = Callable[[int], int]
"""The version of the parameter of a slot."""


@dataclass
class _Copy:
    """Of which elements of a parameter; `number`: the version of the parameter that it has the values of."""

    tensor: weakref.ref[Tensor]
    slot: int
    strides: tuple[int, ...]
    offset: int
    number: int


class ViewCopies:
    """Those of one unit that are alive."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def add(self, view: Tensor, copy: Tensor, parameters: Sequence[nn.Parameter], number_of: NumberOf) -> None:
        """The parameters are here."""
        slot = next((index for index, parameter in enumerate(parameters) if _begins_in(view, parameter)), None)
        if slot is not None and view.dtype is parameters[slot].dtype:
            offset = int(view.storage_offset() - parameters[slot].storage_offset())
            self._copies.append(_Copy(weakref.ref(copy), slot, view.stride(), offset, number_of(slot)))

    def renew(self, parameters: Sequence[nn.Parameter], number_of: NumberOf) -> None:
        """The parameters are here again."""
        if not self._copies:
            return
        alive = [(copy, tensor) for copy in self._copies if (tensor := copy.tensor()) is not None]
        self._copies = [copy for copy, _ in alive]
        for copy, tensor in alive:
            if (number := number_of(copy.slot)) != copy.number:
                copy.number, parameter = number, parameters[copy.slot].detach()
                first = parameter.storage_offset() + copy.offset
                with torch.no_grad():
                    tensor.copy_(parameter.as_strided(tensor.size(), copy.strides, first))


def _begins_in(view: Tensor, parameter: Tensor) -> bool:
    first = parameter.data_ptr()  # autograd knows no base of `p.detach()`
    return first <= view.data_ptr() < first + parameter.nbytes
